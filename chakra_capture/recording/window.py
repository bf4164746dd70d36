"""Which global steps are recorded: settings in, an action per step out; no torch, no state."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType

from chakra_capture.config import WindowConfig

NEVER = sys.maxsize
ALWAYS = -1


class Action(Enum):
    """What a recording session does with one step."""

    idle = "idle"
    prepare = "prepare"
    record = "record"


@dataclass(frozen=True, slots=True)
class Cycle:
    """One recording, one pair of files: warm-up from ``prepare_step``, then ``first_step..last_step``."""

    index: int
    window: WindowConfig
    prepare_step: int
    first_step: int
    last_step: int
    opens_window: bool
    closes_window: bool
    asked_by: str | None = None

    @property
    def steps(self) -> range:
        """The steps this cycle records."""
        return range(self.first_step, self.last_step + 1)


def _spans(window: WindowConfig) -> list[tuple[int, int, int]]:
    """List (prepare, first, last) of each cycle of one window."""
    end = window.end_step
    if window.warmup_steps == 0:
        # Cycles without a gap touch: one contiguous recording, as NeMo documents the window.
        return [(window.start_step, window.start_step, end)]
    length = window.warmup_steps + window.active_steps
    spans = []
    for prepare in range(window.start_step, end + 1, length):
        first = prepare + window.warmup_steps
        if first <= end:
            spans.append((prepare, first, min(end, prepare + length - 1)))
    return spans


class StepPlan:
    """The cycles of a job, in step order, and what they ask for at a given step."""

    def __init__(self, windows: Sequence[WindowConfig], on_demand: Mapping[int, str] = MappingProxyType({})) -> None:
        """Plan ``windows``; ``on_demand`` says of some, by their first step, why they were asked for."""
        self._windows, self._on_demand = tuple(windows), on_demand
        cycles: list[Cycle] = []
        for window in sorted(windows, key=lambda w: w.start_step):
            spans = _spans(window)
            for position, (prepare, first, last) in enumerate(spans):
                cycles.append(
                    Cycle(
                        index=len(cycles),
                        window=window,
                        prepare_step=prepare,
                        first_step=first,
                        last_step=last,
                        opens_window=position == 0,
                        closes_window=position == len(spans) - 1,
                        asked_by=on_demand.get(window.start_step),
                    )
                )
        self.cycles = tuple(cycles)

    def with_window(self, window: WindowConfig, why: str) -> "StepPlan":
        """The plan with one more window, asked for on demand; what comes before it keeps its index."""
        return StepPlan([*self._windows, window], {**self._on_demand, window.start_step: why})

    def free_from(self, step: int, num_steps: int) -> int:
        """Return the first step from ``step`` on that begins ``num_steps`` outside of every cycle."""
        for cycle in self.cycles:
            if step <= cycle.last_step and cycle.prepare_step < step + num_steps:
                step = cycle.last_step + 1
        return step

    def cycle_at(self, step: int) -> Cycle | None:
        """Return the cycle that warms up or records at ``step``."""
        for cycle in self.cycles:
            if cycle.prepare_step <= step <= cycle.last_step:
                return cycle
        return None

    def action(self, step: int) -> Action:
        """Say what to do with ``step``; entering inside a cycle records the rest of it."""
        cycle = self.cycle_at(step)
        if cycle is None:
            return Action.idle
        return Action.prepare if step < cycle.first_step else Action.record

    def next_step(self, step: int, from_cycle: int = 0) -> int:
        """Return the smallest step from ``step`` on at which a cycle from ``from_cycle`` on acts, else ``NEVER``."""
        for cycle in self.cycles[from_cycle:]:
            if step <= cycle.last_step:
                return max(step, cycle.prepare_step)
        return NEVER
