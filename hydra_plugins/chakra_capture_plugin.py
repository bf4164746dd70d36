"""Hydra plugin: makes the group ``chakra_profile`` (presets and schema) available to every application."""

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, OmegaConf

from chakra_capture.config import SECTION, ChakraProfileConfig


def _writable_schema() -> DictConfig:
    # OmegaConf makes every node of a frozen dataclass read-only; presets and overrides must be able to change them.
    schema = OmegaConf.structured(ChakraProfileConfig)
    nodes = [schema, *(schema._get_node(key) for key in schema)]
    for node in nodes:
        if isinstance(node, DictConfig):
            OmegaConf.set_readonly(node, None)
    assert isinstance(schema, DictConfig)
    return schema


class ChakraCaptureSearchPathPlugin(SearchPathPlugin):
    """Adds the presets to the search path and the schema, ``chakra_profile/schema``, to the ConfigStore."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Append the presets, so that a group of the same name in the application comes first."""
        search_path.append(provider="chakra-capture", path="pkg://chakra_capture.presets")
        # Here, not when the module is imported: Hydra imports every plugin, also where no search path is built.
        ConfigStore.instance().store(group=SECTION, name="schema", node=_writable_schema(), provider="chakra-capture")
