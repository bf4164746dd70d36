"""Settings of a recording (Hydra group ``chakra_profile``): one frozen dataclass, checked before training starts.

Each setting stands here once: its default, its reader (``_config_values``) and its meaning, from which the documented
table is made. Where settings may stand, and what else in a job rules them out, is in ``_config_sources``.
"""

# _setting declares a field; it runs once, when the class is made.
# ruff: noqa: RUF009

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import Enum
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

from chakra_capture._config_sources import (
    check_no_other_profiler,
    check_not_both,
    find_section,
    is_whole_config,
    section_values,
)
from chakra_capture._config_values import (
    Reader,
    boolean,
    job_name,
    list_of,
    member,
    number_above,
    optional,
    path,
    rank_list,
    read_fields,
    section_of,
    signal_name,
    whole,
)
from chakra_capture.errors import SettingsError
from chakra_capture.layout import DEFAULT_TRACE_DIR

SECTION = "chakra_profile"
DISABLED_VARIABLE = "CHAKRA_CAPTURE_DISABLED"

_log = logging.getLogger(__name__)
T = TypeVar("T")

_STEP = whole(0, "a step number")
_COUNT = whole(0)
_AT_LEAST_ONE = whole(1)


def _setting(default: T, reader: Reader[object], meaning: str) -> T:
    """Declare a setting; OmegaConf ignores the metadata, ``__post_init__`` and ``settings_table`` use it."""
    declared: T = field(default=default, metadata={"read": reader, "meaning": meaning})
    return declared


class Validation(Enum):
    """What happens to validation that runs inside the window."""

    keep = "keep"
    exclude = "exclude"


class IfExists(Enum):
    """What to do when a final file name already belongs to another run."""

    new = "new"
    overwrite = "overwrite"
    error = "error"


# ``raise`` is a keyword, and OmegaConf reads an enum by the name of its member.
OnFault = Enum("OnFault", {"warn": "warn", "raise": "raise"})


@dataclass(frozen=True, kw_only=True, slots=True)
class WindowConfig:
    """One window of global steps; checked by ``ChakraProfileConfig``, which knows its full key."""

    start_step: int = _setting(2, _STEP, "first step of the window, 0-based")
    end_step: int = _setting(2, _STEP, "last step of the window, inclusive")
    warmup_steps: int = _setting(0, _COUNT, "steps at the start of each cycle that warm up the profiler")
    active_steps: int = _setting(1, _AT_LEAST_ONE, "steps recorded in each cycle")


@dataclass(frozen=True, kw_only=True, slots=True)
class TriggerConfig:
    """Windows on demand; checked by ``ChakraProfileConfig``, which knows its full key."""

    file: bool = _setting(True, boolean, "a file that `chakra-capture trigger` writes opens a window")
    signal: str | None = _setting(None, optional(signal_name), "a signal opens a window, for example SIGUSR1")
    slow_factor: float | None = _setting(
        None, optional(number_above(1)), "a step this many times slower than the median opens a window"
    )
    max: int = _setting(3, _COUNT, "how many windows may be opened on demand in one run")

    @property
    def opens_windows(self) -> bool:
        """Whether anything can open a window."""
        return self.max > 0 and (self.file or self.signal is not None or self.slow_factor is not None)


@dataclass(frozen=True, kw_only=True, slots=True)
class ChakraProfileConfig:
    """Settings of a recording; keys that NeMo has keep NeMo's names and documented meaning.

    Every instance is checked: values given as text are read, ``~`` is expanded, ``windows`` are in order of time.

    Raises:
        SettingsError: a value has a wrong type or cannot work.
    """

    enabled: bool = _setting(False, boolean, "off: no import of torch.profiler by us, no hook, no file")
    start_step: int | None = _setting(
        2,
        optional(_STEP),
        "first global step of the window, 0-based; null: phases only, and end_step, warmup_steps and active_steps "
        "have no effect",
    )
    end_step: int | None = _setting(2, optional(_STEP), "last global step of the window, inclusive")
    warmup_steps: int = _setting(
        0, _COUNT, "steps at the start of each cycle, inside the window, that warm up the profiler and are not recorded"
    )
    active_steps: int = _setting(
        1,
        _AT_LEAST_ONE,
        "steps recorded in each cycle. One cycle is warmup then active, repeated inside the window, one file pair "
        "per cycle, the last one clipped. With warmup_steps 0 cycles touch: one recording from start to end, and "
        "active_steps has no effect",
    )
    windows: list[WindowConfig] | None = _setting(
        None,
        optional(list_of(section_of(WindowConfig), "[{start_step: 2, end_step: 2}, {start_step: 99, end_step: 99}]")),
        "list of {start_step, end_step, warmup_steps, active_steps}, which replaces these four keys",
    )
    trace_dir: str | None = _setting(
        None, optional(path), "folder for all files of a run; required when enabled; created if missing"
    )
    ranks: list[int] | None = _setting(
        None, optional(rank_list), "global ranks that record the window, null: all; phases are on all ranks"
    )
    record_shapes: bool = _setting(True, boolean, "record the shapes of operator inputs")
    with_stack: bool = _setting(False, boolean, "record Python call stacks, and with them the modules of the model")
    profile_memory: bool = _setting(False, boolean, "record allocations and frees; all_threads is then off, said once")
    compress: bool = _setting(False, boolean, "write traces as .json.gz")
    all_threads: bool = _setting(True, boolean, "record operators of all threads, not only of the training thread")
    sync_events: bool = _setting(True, boolean, "record CUDA synchronisation events")
    phases: bool = _setting(True, boolean, "time the phases of every step")
    live: bool = _setting(
        False,
        boolean,
        "one plain-text line during training, on rank 0 and on a terminal: step time, phases, what that says",
    )
    log_to_logger: bool = _setting(
        False, boolean, "headline numbers and diagnosis to the loggers of a Lightning Trainer, when training ends"
    )
    replay_data: bool = _setting(False, boolean, "record data for et_replay; this stores training data")
    validation: Validation = _setting(
        Validation.keep,
        member(Validation),
        "validation inside the window: keep, or exclude (removed at merge; nothing is paused in the process)",
    )
    trigger: TriggerConfig = _setting(TriggerConfig(), section_of(TriggerConfig), "windows on demand")
    max_window_steps: int = _setting(
        50, _AT_LEAST_ONE, "refuse a window longer than this: 200 steps of a transformer are 0.6 GB per rank"
    )
    max_recorded_steps: int | None = _setting(
        None, optional(_AT_LEAST_ONE), "stop recording phases after this many steps"
    )
    job_id: str | None = _setting(
        None, optional(job_name), "first part of the folder names; null: SLURM_JOB_ID, else TORCHELASTIC_RUN_ID, else 0"
    )
    if_exists: IfExists = _setting(
        IfExists.new,
        member(IfExists),
        "files of another run under the same names: new (write beside them), overwrite or error",
    )
    on_fault: OnFault = _setting(
        OnFault.warn, member(OnFault), "a fault of profiling during training: warn and go on without it, or raise"
    )
    memory_snapshot: bool = _setting(
        False, boolean, "write a memory snapshot when CUDA runs out of memory in the window"
    )

    def __post_init__(self) -> None:
        for name, value in read_fields(SECTION, self).items():
            object.__setattr__(self, name, value)
        if self.windows is not None:
            object.__setattr__(self, "windows", _checked_windows(self.windows, self.max_window_steps))
        elif self.start_step is not None:
            _check_window(SECTION, self, self.max_window_steps)
        if self.enabled:
            _check_enabled(self)
            for warning in _without_effect(self):
                _log.warning(warning)

    @property
    def step_windows(self) -> tuple[WindowConfig, ...]:
        """The windows to record, from ``windows`` or from the four keys; empty for phases only.

        This is the plan, whether or not recording is enabled.
        """
        if self.windows is not None:
            return tuple(self.windows)
        if self.start_step is None or self.end_step is None:
            return ()
        return (
            WindowConfig(
                start_step=self.start_step,
                end_step=self.end_step,
                warmup_steps=self.warmup_steps,
                active_steps=self.active_steps,
            ),
        )


def _check_window(key: str, window: "WindowConfig | ChakraProfileConfig", max_steps: int) -> None:
    start, end, warmup = window.start_step, window.end_step, window.warmup_steps
    assert start is not None
    if end is None:
        raise SettingsError(
            f"{key}.end_step is null but {key}.start_step is {start}; expected the last step of the window. "
            f"Set {key}.end_step={start} to record one step, or {key}.start_step=null for phases only."
        )
    if end < start:
        raise SettingsError(
            f"{key}.end_step is {end} but {key}.start_step is {start}; the window is inclusive, so end_step must be "
            f"at least start_step. Set {key}.end_step={start} to record one step."
        )
    length = end - start + 1
    if warmup >= length:
        raise SettingsError(
            f"{key}.warmup_steps is {warmup} but the window {start}..{end} has {_steps(length)}; warm-up happens "
            f"inside the window, so nothing would be recorded. Set {key}.end_step={start + warmup} or later, or "
            f"{key}.warmup_steps={length - 1} or less."
        )
    if length > max_steps:
        raise SettingsError(
            f"{key}.start_step {start} to {key}.end_step {end} is a window of {length} steps; expected at most "
            f"{SECTION}.max_window_steps={max_steps}, because traces grow fast (200 steps of a transformer are 0.6 GB "
            f"per rank). Set {key}.end_step={start + max_steps - 1} or less, or raise {SECTION}.max_window_steps."
        )


def _steps(count: int) -> str:
    return "1 step" if count == 1 else f"{count} steps"


def _checked_windows(windows: list[WindowConfig], max_steps: int) -> list[WindowConfig]:
    for index, window in enumerate(windows):
        _check_window(f"{SECTION}.windows[{index}]", window, max_steps)
    ordered = sorted(windows, key=lambda window: window.start_step)
    for before, after in pairwise(ordered):
        if after.start_step <= before.end_step:
            raise SettingsError(
                f"{SECTION}.windows holds {before.start_step}..{before.end_step} and {after.start_step}.."
                f"{after.end_step}, which overlap; expected windows that share no step. "
                f"Start the later one at {before.end_step + 1}, or join the two."
            )
    return ordered


def _check_enabled(settings: ChakraProfileConfig) -> None:
    if settings.trace_dir is None:
        raise SettingsError(
            f"{SECTION}.trace_dir is null but {SECTION}.enabled is true; expected the folder for the files. "
            f"Set {SECTION}.trace_dir=./traces (it is created if missing), or {SECTION}.enabled=false."
        )
    if not settings.step_windows and not settings.phases and not settings.trigger.opens_windows:
        raise SettingsError(
            f"{SECTION}.start_step is null, {SECTION}.phases is false and {SECTION}.trigger opens no window, so "
            f"nothing would be recorded; expected at least one of them. "
            f"Set {SECTION}.phases=true, or {SECTION}.enabled=false."
        )


def _without_effect(settings: ChakraProfileConfig) -> list[str]:
    """Say which settings the user changed in vain; a default is never one of them."""
    if settings.windows is not None:
        changed = [f.name for f in fields(WindowConfig) if getattr(settings, f.name) != f.default]
        found = [
            f"{SECTION}.{name} has no effect: {SECTION}.windows replaces it. Remove one of them." for name in changed
        ]
    else:
        found = []
    if settings.trigger.slow_factor is not None and not settings.phases:
        found.append(
            f"{SECTION}.trigger.slow_factor has no effect with {SECTION}.phases=false: nothing times the steps then. "
            f"Set {SECTION}.phases=true."
        )
    for window in settings.step_windows:
        length = window.end_step - window.start_step + 1
        if window.warmup_steps == 0 and window.active_steps not in (1, length):
            found.append(
                f"{SECTION}: active_steps={window.active_steps} has no effect with warmup_steps=0: steps "
                f"{window.start_step} to {window.end_step} are one recording. Set warmup_steps to record cycles."
            )
    return found


def is_switched_off(environ: Mapping[str, str]) -> bool:
    """Say whether CHAKRA_CAPTURE_DISABLED turns everything off."""
    return environ.get(DISABLED_VARIABLE, "").strip().lower() not in {"", "0", "false", "no", "off"}


def settings_from(source: object) -> ChakraProfileConfig:
    """Read and check settings: dataclass, mapping or DictConfig, the section or a whole configuration that holds it.

    A dataclass is returned as it is. Null and a whole configuration without the section mean that recording is off.
    So it is, whatever ``source`` is, where the environment variable CHAKRA_CAPTURE_DISABLED is set (to anything but 0
    or false).

    Raises:
        SettingsError: a key is unknown, a value has a wrong type or cannot work, or another profiler
            (``nsys_profile``, or Nsight around this process) is in use.
    """
    if is_switched_off(os.environ):
        return ChakraProfileConfig()
    section = find_section(source, SECTION)
    settings = section.value
    known = [f.name for f in fields(ChakraProfileConfig)]
    check_not_both(source, section, SECTION)
    if settings is source and is_whole_config(source, SECTION, known):
        return ChakraProfileConfig()
    if not isinstance(settings, ChakraProfileConfig):
        settings = ChakraProfileConfig(**section_values(settings, SECTION, known))
    if settings.enabled:
        check_no_other_profiler(SECTION, section.holders)
    return settings


def phases_only() -> ChakraProfileConfig:
    """Return the settings of an ``init()`` without any: the phases of every step, no window, in the current folder."""
    return settings_from(ChakraProfileConfig(enabled=True, start_step=None, trace_dir=DEFAULT_TRACE_DIR))


class SettingRow(NamedTuple):
    """One line of the table of settings."""

    key: str
    default: str
    meaning: str


def settings_table() -> tuple[SettingRow, ...]:
    """List every setting with its default as YAML writes it and its meaning, in the order of the dataclass."""
    return tuple(_rows("", ChakraProfileConfig))


def _rows(prefix: str, shape: Any) -> list[SettingRow]:
    rows = []
    for item in fields(shape):
        key = f"{prefix}{item.name}"
        if isinstance(item.default, TriggerConfig):
            rows += _rows(f"{key}.", TriggerConfig)
        else:
            rows.append(SettingRow(key, _as_yaml(item.default), item.metadata["meaning"]))
    return rows


def _as_yaml(value: object) -> str:
    if isinstance(value, Enum):
        return value.name
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
