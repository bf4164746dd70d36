"""What a rank says about its recording: the shapes of ``rank-<R>.json`` in the run folder."""

import os
import socket
import time
from dataclasses import asdict, dataclass, field
from enum import Enum, StrEnum

from chakra_capture.config import ChakraProfileConfig
from chakra_capture.recording.surroundings import Surroundings

SCHEMA_VERSION = 1


class Reason(StrEnum):
    """Why a recording ended, or did not begin."""

    complete = "complete"
    running = "running"
    training_ended = "training ended"
    exception = "exception"
    process_exit = "process exit"
    terminated = "SIGTERM"
    resumed_inside = "resumed inside the window"
    never_reached = "window never reached"
    already_past = "window already past"
    steps_skipped = "steps skipped"
    steps_repeated = "step numbers went back"
    fault = "fault"
    no_window = "no window"


@dataclass(frozen=True, slots=True)
class ClockAnchor:
    """One moment on two clocks."""

    unix_ns: int
    monotonic_ns: int

    @classmethod
    def now(cls) -> "ClockAnchor":
        return cls(time.time_ns(), time.monotonic_ns())


@dataclass(slots=True)
class CycleRecord:
    """One file pair: what was asked for and what became of it."""

    cycle: int
    start_step: int
    end_step: int
    warmup_steps: int
    active_steps: int
    first_step: int
    last_step: int
    asked_by: str | None = None  # why a window on demand was opened
    steps: list[int] = field(default_factory=list)
    partial_step: int | None = None
    aborted_steps: list[int] = field(default_factory=list)
    host_trace: str | None = None
    device_trace: str | None = None
    host_bytes: int | None = None
    device_bytes: int | None = None
    repaired_names: int = 0
    repaired_parents: int = 0
    slept_ns: int = 0
    memory_snapshot: str | None = None
    resources: str | None = None
    collectives: str | None = None
    reason: Reason = Reason.fault
    started: ClockAnchor | None = None
    ended: ClockAnchor | None = None

    @property
    def is_complete(self) -> bool:
        """Say whether both files hold every step of the cycle."""
        whole = self.steps == list(range(self.first_step, self.last_step + 1)) and self.partial_step is None
        return whole and self.host_trace is not None and self.device_trace is not None


@dataclass(frozen=True, slots=True)
class ProfilerOptions:
    """What the profiler of the latest window was asked to record."""

    activities: list[str]
    options: list[str]


@dataclass(slots=True)
class Manifest:
    """All of one rank's recordings in one run; a second fit in the process adds to it."""

    run_id: str
    job: str
    rank: int
    world_size: int
    settings: dict[str, object]
    versions: dict[str, str | None]
    complete: bool = False
    reason: Reason = Reason.running
    detail: str | None = None
    windows: list[CycleRecord] = field(default_factory=list)
    surroundings: Surroundings | None = None
    options: ProfilerOptions | None = None
    unavailable_options: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    schema_version: int = SCHEMA_VERSION
    pid: int = field(default_factory=os.getpid)
    hostname: str = field(default_factory=socket.gethostname)
    opened: ClockAnchor = field(default_factory=ClockAnchor.now)
    written: ClockAnchor | None = None

    def as_json(self) -> dict[str, object]:
        """Return the content of the file, stamped with the present time."""
        self.written = ClockAnchor.now()
        content = asdict(self)
        return {"schema_version": content.pop("schema_version"), **content}


def settings_in_effect(settings: ChakraProfileConfig) -> dict[str, object]:
    """Return the settings as plain JSON values."""
    return {name: _plain(value) for name, value in asdict(settings).items()}


def _plain(value: object) -> object:
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
