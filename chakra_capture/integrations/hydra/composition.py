"""What Hydra composes from a configuration, its defaults list and overrides, source by source."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hydra import compose, initialize, initialize_config_dir
from hydra.core.default_element import ResultDefault
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError  # type: ignore[import-untyped]

from chakra_capture.config import SECTION
from chakra_capture.errors import SettingsError
from chakra_capture.integrations.hydra.layers import COMMAND_LINE, Composition, Layer, nested, one_line, plain

_VERSION_BASE = "1.3"
_SCHEMA = f"{SECTION}/schema"
_OWN_PROVIDER = "chakra-capture"


def composed(path: Path | None, overrides: list[str]) -> Composition:
    """Compose as ``python app.py`` does whose configuration is ``path``; without one, of an empty application.

    Raises:
        SettingsError: Hydra cannot compose it.
    """
    name = path.stem if path is not None else None
    start = (
        initialize(None, version_base=_VERSION_BASE)
        if path is None
        else initialize_config_dir(str(path.parent.absolute()), version_base=_VERSION_BASE)
    )
    try:
        with start:
            config = compose(name, overrides)
            loader: Any = GlobalHydra.instance().config_loader()
            plan = loader.compute_defaults_list(name, overrides, RunMode.RUN)
            layers = [layer for default in plan.defaults for layer in _layer(loader.repository, default)]
            for override in plan.config_overrides:
                if not override.is_delete():
                    content = nested(override.key_or_group, _mapping_or_value(override.value()))
                    layers.append(Layer(COMMAND_LINE, content))
    except YAMLError as fault:
        raise SettingsError(f"A file is no YAML: {one_line(fault)} Mend it where it says.") from fault
    except (HydraException, OmegaConfBaseException) as fault:
        causes = [one_line(fault)] + ([one_line(fault.__cause__)] if fault.__cause__ else [])
        raise SettingsError(f"Hydra cannot compose {path or 'that'}: {' '.join(dict.fromkeys(causes))}") from fault
    return Composition(config, layers)


def _mapping_or_value(value: object) -> object:
    return {str(key): _mapping_or_value(item) for key, item in value.items()} if isinstance(value, dict) else value


def _layer(repository: Any, default: ResultDefault) -> Iterator[Layer]:
    path, package = default.config_path, default.package or ""
    if path is None or path == _SCHEMA or package.split(".")[0] == "hydra":
        return
    loaded = repository.load_config(path)
    if loaded is None:
        return
    if OmegaConf.is_dict(loaded.config):
        yield Layer(_origin(path, loaded.provider), nested(package.removeprefix("_global_"), plain(loaded.config)))


def _origin(path: str, provider: str) -> str:
    group, _, name = path.rpartition("/")
    if group != SECTION:
        return f"{path}.yaml"
    return f"preset {name}" if provider == _OWN_PROVIDER else f"preset {name} of the application"
