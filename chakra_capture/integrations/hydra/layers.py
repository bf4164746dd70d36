"""A configuration as it was put together: what each source says, the one that wins last."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError  # type: ignore[import-untyped]

from chakra_capture.config import SECTION
from chakra_capture.errors import SettingsError

COMMAND_LINE = "command line"
DEFAULT = "default"


@dataclass(frozen=True, slots=True)
class Layer:
    """What one source says, from the root of the configuration on."""

    origin: str
    content: Mapping[str, Any]

    def sets(self, path: list[str]) -> bool:
        """Say whether it gives a value to the setting at ``path``."""
        found: Any = self.content
        for key in path:
            if not isinstance(found, Mapping) or key not in found:
                return False
            found = found[key]
        return True


@dataclass(frozen=True, slots=True)
class Composition:
    """A configuration and its layers."""

    config: DictConfig
    layers: list[Layer] = field(default_factory=list)

    def origin(self, path: list[str]) -> str:
        """Name the source that has the last word on the setting at ``path``."""
        if not Layer("", plain(self.config)).sets(path):  # taken out on the command line, or never in
            return DEFAULT
        return next((layer.origin for layer in reversed(self.layers) if layer.sets(path)), DEFAULT)


def nested(key: str, value: object) -> dict[str, Any]:
    """Put ``value`` where the dotted ``key`` leads to; an empty key is the root."""
    for part in reversed(key.split(".") if key else []):
        value = {part: value}
    assert isinstance(value, dict)
    return value


def sections_in(content: Mapping[str, Any], above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Find where sections of ours stand in a plain configuration, at any depth."""
    for key, value in content.items():
        at = (*above, str(key))
        if key == SECTION:
            yield at
        elif isinstance(value, dict):
            yield from sections_in(value, at)


def from_file(path: Path, overrides: list[str]) -> Composition:
    """Read a mapping, with ``key=value`` on top.

    Raises:
        SettingsError: it cannot be read, or an override cannot.
    """
    try:
        base = OmegaConf.load(path)
        if not isinstance(base, DictConfig):
            raise SettingsError(f"{path} holds no mapping; expected settings, or a configuration that holds {SECTION}.")
        if "defaults" in base:
            raise SettingsError(
                f"{path} has a defaults list, which Hydra composes, and Hydra is not installed, or the file does not "
                'end in .yaml. Run: pip install "chakra-capture[hydra]"'
            )
        given = [override.lstrip("+") for override in overrides]
        on_top = OmegaConf.from_dotlist(given)
        merged = OmegaConf.merge(base, on_top)
    except YAMLError as fault:
        raise SettingsError(f"{path} is no YAML: {one_line(fault)} Mend it where it says.") from fault
    except (OSError, UnicodeDecodeError, OmegaConfBaseException) as fault:
        raise SettingsError(f"{path} cannot be read: {one_line(fault)} Give YAML or JSON, and key=value.") from fault
    assert isinstance(merged, DictConfig)
    layers = [Layer(path.name, plain(base)), Layer(COMMAND_LINE, plain(on_top))]
    return Composition(merged, layers)


def plain(config: Any) -> dict[str, Any]:
    """Turn a mapping of OmegaConf into a plain one, interpolations as they are written."""
    found = OmegaConf.to_container(config, resolve=False)
    assert isinstance(found, dict)
    return {str(key): value for key, value in found.items()}


def one_line(fault: BaseException) -> str:
    """What an error says, as one sentence."""
    text = " ".join(str(fault).split()) or type(fault).__name__
    return text if text.endswith(".") else f"{text}."
