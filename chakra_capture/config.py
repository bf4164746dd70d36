"""Settings of a recording (Hydra group ``chakra_profile``): one frozen dataclass, checked before training starts."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

SECTION = "chakra_profile"


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
    """One window of global steps, inclusive, 0-based (see DESIGN: start_step, end_step)."""

    start_step: int = 2
    end_step: int = 2
    warmup_steps: int = 0
    active_steps: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class TriggerConfig:
    """Windows on demand."""

    file: bool = True
    signal: str | None = None
    slow_factor: float | None = None
    max: int = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class ChakraProfileConfig:
    """Settings of a recording; keys that NeMo has keep NeMo's names and documented meaning."""

    enabled: bool = False
    start_step: int | None = 2
    end_step: int | None = 2
    warmup_steps: int = 0
    active_steps: int = 1
    windows: list[WindowConfig] | None = None
    trace_dir: str | None = None
    ranks: list[int] | None = None
    record_shapes: bool = True
    with_stack: bool = False
    profile_memory: bool = False
    compress: bool = False
    all_threads: bool = True
    sync_events: bool = True
    phases: bool = True
    live: bool = False
    log_to_logger: bool = False
    replay_data: bool = False
    validation: Validation = Validation.keep
    trigger: TriggerConfig = field(default_factory=TriggerConfig)
    max_window_steps: int = 50
    max_recorded_steps: int | None = None
    job_id: str | None = None
    if_exists: IfExists = IfExists.new
    on_fault: OnFault = OnFault.warn
    memory_snapshot: bool = False

    @property
    def step_windows(self) -> tuple[WindowConfig, ...]:
        """The windows to record, from ``windows`` or from the four keys; empty for phases only."""
        raise NotImplementedError


def settings_from(source: "ChakraProfileConfig | Mapping[str, object] | object") -> ChakraProfileConfig:
    """Read and check settings given as dataclass, mapping or DictConfig (the section, or a whole
    configuration that holds ``chakra_profile``).

    Raises:
        SettingsError: a key is unknown, a value has a wrong type or cannot work, or another
            profiler (``nsys_profile``) is enabled in the same configuration.
    """
    raise NotImplementedError
