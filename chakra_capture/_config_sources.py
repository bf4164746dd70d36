"""Where settings stand: finds the section in what the caller gave, and what in the same job rules it out.

OmegaConf is never imported here: whoever holds a DictConfig has imported it, and the offline half, which reads the
same settings module, must not depend on it.
"""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from chakra_capture._config_values import abridged, boolean, check_known, nearest, shown
from chakra_capture.errors import SettingsError

NSYS_SECTION = "nsys_profile"
_MISSING = "???"
# Set by nsys and by Nsight Compute in the processes they start; the other three may be set by anyone, so there
# the value must look like theirs.
_TOOL_VARIABLES = ("NSYS_PROFILING_SESSION_ID", "NV_NSIGHT_INJECTION_TRANSPORT_TYPE")
_INJECTION_VARIABLES = ("CUDA_INJECTION64_PATH", "NVTX_INJECTION64_PATH", "LD_PRELOAD")
_INJECTION_MARKS = ("nsys", "nsight", "toolsinjection", "cupti")


@dataclass(frozen=True, kw_only=True, slots=True)
class Holder:
    """A mapping around the section; ``prefix`` is its own full key, with a dot, or empty at the root."""

    prefix: str
    content: Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    """What stands where the settings should be, and the mappings around it, nearest first."""

    value: object
    holders: tuple[Holder, ...]


def find_section(source: object, name: str) -> Section:
    """Find the section in itself, or in a whole configuration that holds it.

    Raises:
        SettingsError: the section is mandatory and missing, or an interpolation that leads nowhere.
    """
    omegaconf = _omegaconf_of(source)
    if omegaconf is None:
        if isinstance(source, Mapping) and name in source:
            # A plain dictionary may hold a DictConfig.
            value = source[name]
            inner = _holders(value) if _omegaconf_of(value) else ()
            return Section(value=value, holders=(Holder(prefix="", content=source), *inner))
        return Section(value=source, holders=())
    raw = omegaconf.OmegaConf.to_container(source, resolve=False)
    holders = _holders(source)
    if isinstance(raw, Mapping) and name in raw:
        around = (Holder(prefix=_prefix(source), content=source), *holders)
        return Section(value=_section_node(source, name, raw[name]), holders=around)
    return Section(value=source if isinstance(raw, Mapping) else raw, holders=holders)


def check_not_both(source: object, section: Section, name: str) -> None:
    """Refuse a section that holds another section: either could be meant.

    Raises:
        SettingsError: ``enabled`` stands beside the section.
    """
    if section.value is not source and isinstance(source, Mapping) and "enabled" in source.keys():  # noqa: SIM118
        raise SettingsError(
            f"enabled stands beside {name}, so it is not clear which of the two are the settings; expected the section "
            f"itself, or a configuration that holds it. Remove {name} from the section, or enabled beside it."
        )


def is_whole_config(source: object, name: str, known: list[str]) -> bool:
    """Say whether ``source`` is the configuration of a job that has no section of ours, rather than a section.

    It is the root of a DictConfig, or has sections of its own; none of its keys is a setting or a misspelt one, and
    none of its sections holds ours.
    """
    if not isinstance(source, Mapping) or not source:
        return False
    omegaconf = _omegaconf_of(source)
    content: Any = source if omegaconf is None else omegaconf.OmegaConf.to_container(source, resolve=False)
    is_root = omegaconf is not None and not _holders(source)
    sections = [value for value in content.values() if isinstance(value, Mapping)]
    is_setting = any(str(key) in known or nearest(str(key), known, likeness=0.85) for key in content)
    return bool(is_root or sections) and not is_setting and not any(name in section for section in sections)


def _omegaconf_of(value: object) -> Any:
    """Return the module omegaconf if ``value`` is one of its containers."""
    module: Any = sys.modules.get("omegaconf")
    if module is not None and isinstance(value, module.DictConfig | module.ListConfig):
        return module
    return None


def _section_node(source: Any, name: str, raw: object) -> object:
    if not isinstance(raw, str):
        return source[name]
    if raw == _MISSING:
        raise SettingsError(
            f"{name} is mandatory (???) and was given no value; expected a section of settings. "
            f"Choose a preset, for example {name}=one_step, or null."
        )
    try:
        return source[name]
    except sys.modules["omegaconf"].errors.OmegaConfBaseException as error:
        raise _unresolved(name, raw, error) from error


def _holders(node: Any) -> tuple[Holder, ...]:
    found = []
    node = node._get_parent()
    while node is not None:
        if isinstance(node, Mapping):
            found.append(Holder(prefix=_prefix(node), content=node))
        node = node._get_parent()
    return tuple(found)


def _prefix(node: Any) -> str:
    full = node._get_full_key(None)
    return f"{full}." if full else ""


def section_values(value: object, name: str, known: list[str]) -> dict[str, Any]:
    """Turn the section into plain values; null is an empty section.

    A recording that is off must not stop a job, so what only matters to a recording is left out then: a mandatory
    value, an interpolation whose variable is not set on this machine, and NeMo's documented ``trace_dir: None``.

    Raises:
        SettingsError: the section is no section, a key is unknown, or a value of an enabled one cannot be resolved.
    """
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise _no_section(name, value)
    omegaconf = _omegaconf_of(value)
    raw = dict(value) if omegaconf is None else omegaconf.OmegaConf.to_container(value, resolve=False)
    check_known(name, raw, known)
    values, unresolved = (raw, {}) if omegaconf is None else _resolve(value, raw, omegaconf)
    if "enabled" in unresolved:
        raise _unresolved(f"{name}.enabled", raw["enabled"], unresolved["enabled"])
    enabled = values.get("enabled", False)
    if enabled == _MISSING or boolean(f"{name}.enabled", enabled):
        for key, error in unresolved.items():
            raise _unresolved(f"{name}.{key}", raw[key], error) from error
        return values
    return {key: item for key, item in values.items() if not _idle(key, item)}


def _idle(key: str, value: object) -> bool:
    return isinstance(value, str) and (value == _MISSING or (key == "trace_dir" and value.lower() in {"none", ""}))


def _resolve(node: Any, raw: dict[str, Any], omegaconf: Any) -> tuple[dict[str, Any], dict[str, Exception]]:
    values: dict[str, Any] = {}
    unresolved: dict[str, Exception] = {}
    for key in raw:
        try:
            item = node[key]
            is_container = _omegaconf_of(item) is not None
            values[key] = omegaconf.OmegaConf.to_container(item, resolve=True) if is_container else item
        except omegaconf.errors.MissingMandatoryValue:
            values[key] = _MISSING
        except omegaconf.errors.OmegaConfBaseException as error:
            unresolved[key] = error
    return values, unresolved


def _unresolved(key: str, raw: object, error: Exception) -> SettingsError:
    reason = (str(error).splitlines() or [type(error).__name__])[0]
    return SettingsError(
        f"{key} is {abridged(raw)}, which cannot be resolved: {reason}; expected a value that is known when "
        f"training starts. Define what it refers to, or write the value itself: {key}=..."
    )


def _no_section(name: str, value: object) -> SettingsError:
    if isinstance(value, str):
        return SettingsError(
            f"{name} is {shown(value)}: Hydra did not find the group; expected a section of settings. Check that "
            f"chakra-capture is installed in the environment of this program, that {name} is not also a plain key of "
            f"your configuration, and choose a preset with +{name}={value}."
        )
    return SettingsError(
        f"{name} is {shown(value)}; expected a section of settings: a mapping, a DictConfig or a "
        f"ChakraProfileConfig. Write its keys below it, for example {name}.enabled=true."
    )


def check_no_other_profiler(name: str, holders: tuple[Holder, ...]) -> None:
    """Refuse to record beside Nsight: CUPTI serves one tool per process, and the other one records nothing.

    Raises:
        SettingsError: ``nsys_profile`` is enabled beside or above the section, or this process runs under Nsight.
    """
    for holder in holders:
        if _nsys_enabled(holder.content):
            prefix = holder.prefix
            raise SettingsError(
                f"{holders[0].prefix}{name}.enabled and {prefix}{NSYS_SECTION}.enabled are both true; expected at most "
                f"one, because nsys and chakra cannot run together: one process has one CUPTI client. "
                f"Set {prefix}{NSYS_SECTION}.enabled=false, or {holders[0].prefix}{name}.enabled=false."
            )
    variable = injected_by()
    if variable:
        raise SettingsError(
            f"{name}.enabled is true, but this process runs under another profiler ({variable}="
            f"{abridged(os.environ[variable])}); expected none, because one process has one CUPTI client. "
            f"Start the program without nsys/ncu, or set {name}.enabled=false."
        )


def _nsys_enabled(holder: Any) -> bool:
    module: Any = sys.modules.get("omegaconf")
    unreadable = (module.errors.OmegaConfBaseException,) if module is not None else ()
    try:
        section = holder.get(NSYS_SECTION)
        value = section.get("enabled") if isinstance(section, Mapping) else None
    except unreadable:  # Not our section: whoever reads it says what is wrong with it.
        return False
    try:
        return value is not None and boolean(NSYS_SECTION, value)
    except SettingsError:
        return bool(value)


def injected_by() -> str | None:
    """Name the variable that shows that Nsight has put itself into this process."""
    for variable in _TOOL_VARIABLES:
        if os.environ.get(variable):
            return variable
    for variable in _INJECTION_VARIABLES:
        value = os.environ.get(variable, "").lower()
        if any(mark in value for mark in _INJECTION_MARKS):
            return variable
    return None
