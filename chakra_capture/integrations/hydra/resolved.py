"""The settings of one section with the source of each, as the section will be read when the job starts."""

import copy
from dataclasses import asdict, dataclass, field
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from chakra_capture.config import SECTION, ChakraProfileConfig, settings_from, settings_table
from chakra_capture.integrations.hydra.layers import DEFAULT, Composition, plain
from chakra_capture.recording.manifest import settings_in_effect
from chakra_capture.recording.notices import heard
from chakra_capture.recording.run import planned_paths
from chakra_capture.recording.window import StepPlan

_LATER = "later"
_MOST_CYCLES = 6


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting: its value, and who has given it; where it is not resolved the value is as written."""

    key: str
    value: object
    origin: str
    is_resolved: bool = True


@dataclass(slots=True)
class Resolved:
    """One section: its full key, what stands in it, and what is to be said of it."""

    key: str
    settings: list[Setting] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, object]:
        """Return it as plain JSON values."""
        return asdict(self)


def resolved(composition: Composition, at: tuple[str, ...]) -> Resolved:
    """Read the section at a key of the configuration; an empty key is a section that is the whole of it.

    Raises:
        SettingsError: a setting is unknown or cannot work.
    """
    config = copy.deepcopy(composition.config)
    OmegaConf.set_struct(config, False)
    OmegaConf.set_readonly(config, False)
    unresolved = _replace_what_is_known_later(config, at)
    found = Resolved(".".join(at) or SECTION)
    with heard() as found.notes:
        settings = settings_from(OmegaConf.select(config, ".".join(at[:-1])) if at[:-1] else config)
    values = settings_in_effect(settings)
    for row in settings_table():
        origin = composition.origin([*at, *row.key.split(".")])
        if row.key in unresolved:
            found.settings.append(Setting(row.key, unresolved[row.key], origin, is_resolved=False))
        else:
            found.settings.append(Setting(row.key, _value(values, row.key), origin))
    found.notes += _plan(settings, unresolved)
    return found


def defaults() -> Resolved:
    """The settings of a configuration that has no section."""
    values = settings_in_effect(ChakraProfileConfig())
    return Resolved(SECTION, [Setting(row.key, _value(values, row.key), DEFAULT) for row in settings_table()])


def _value(values: Any, key: str) -> object:
    for part in key.split("."):
        values = values[part]
    return values


def _replace_what_is_known_later(config: Any, at: tuple[str, ...]) -> dict[str, object]:
    """Put a stand-in where an interpolation has no value before the job runs; return what is written there."""
    section = OmegaConf.select(config, ".".join(at)) if at else config
    if not OmegaConf.is_dict(section):
        return {}
    in_effect = settings_in_effect(ChakraProfileConfig())
    found: dict[str, object] = {}
    for key, text in plain(section).items():
        try:
            section[key]
        except OmegaConfBaseException:
            if not OmegaConf.is_interpolation(section, key):
                continue  # whoever reads the settings says what is wrong
            found[key] = text
            section[key] = _LATER if key in ("trace_dir", "job_id") else in_effect.get(key)
    return found


def _plan(settings: ChakraProfileConfig, unresolved: dict[str, object]) -> list[str]:
    """What will be recorded, and where."""
    if not settings.enabled:
        return ["Recording is off: enabled is false."]
    cycles = StepPlan(settings.step_windows).cycles
    spans = [f"{c.first_step}-{c.last_step}" if c.last_step > c.first_step else f"{c.first_step}" for c in cycles]
    more = f" and {len(spans) - _MOST_CYCLES} more times" if len(spans) > _MOST_CYCLES else ""
    notes = [f"Steps recorded: {', '.join(spans[:_MOST_CYCLES]) or 'none'}{more}."]
    if not unresolved.keys() & {"trace_dir", "job_id"}:
        paths = planned_paths(settings)
        notes.append(f"Files go to {paths.host_dir} and its siblings, unless the names are taken.")
    return notes
