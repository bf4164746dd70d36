"""What "a step" is on the page: the mean of the recorded steps, or of a run that marks none its window."""

from collections.abc import Sequence
from dataclasses import dataclass

import polars as pl

from chakra_capture.analysis import idle_gaps, idle_host
from chakra_capture.analysis.phases import RESIDUAL
from chakra_capture.annotations import BETWEEN_STEPS, INPUT_WAIT, PHASE_NAMES
from chakra_capture.report.facts import Facts
from chakra_capture.report.words import count_of, ranges

COMPUTE, COMMUNICATION, COPIES, IDLE = "compute", "exposed communication", "exposed copies", "GPU idle"
DEVICE_PARTS = {
    COMPUTE: ("compute_ns", "kernel"),
    COMMUNICATION: ("exposed_communication_ns", "communication"),
    COPIES: ("exposed_memory_ns", "copy"),
}
CAUSES = {
    idle_host.INPUT: "input wait",
    idle_host.OP: "CPU inside operators",
    idle_host.BETWEEN: "CPU between operators",
    idle_host.IN_ENGINE: "CPU between operators of backward",
    idle_host.SYNC: "CPU waits for the GPU",
    idle_host.COMMUNICATION: "communication on the CPU",
    idle_host.ALLOCATION: "memory allocation",
    idle_host.CALL: "other calls of the GPU's runtime",
    idle_gaps.LAUNCHING: "inside launch calls",
    idle_gaps.LATENCY: "launch latency",
    idle_gaps.STAGING: "staging of pageable copies",
    idle_gaps.SAME_STREAM: "hand-over on a stream",
    idle_gaps.OTHER_STREAM: "hand-over to another stream",
    idle_gaps.IN_GRAPH: "inside a graph",
    idle_gaps.NOT_RECORDED: "launch not recorded",
}
OF_CPU = (
    idle_host.OP, idle_host.BETWEEN, idle_host.IN_ENGINE, idle_host.SYNC, idle_host.ALLOCATION, idle_host.CALL,
    idle_gaps.LAUNCHING,
)  # fmt: skip
_TONES = {name: name for name in PHASE_NAMES}


@dataclass(frozen=True, slots=True)
class Scope:
    """What times are the mean of.

    Attributes:
        noun: step or window.
        num: steps (windows) of all ranks.
        over: what that is, in words.
        total_ns: its time, as its parts on the CPU (of a window: on the device) sum to; None where nothing was timed.
    """

    noun: str
    num: int
    over: str
    total_ns: float | None

    @property
    def is_step(self) -> bool:
        return self.noun == "step"


def scope_of(facts: Facts) -> Scope:
    """The steps, else the windows of all ranks that are shown."""
    steps = facts.phase_rows.select("rank", "window", "step").unique() if facts.phase_rows.height else None
    if steps is not None and steps.height:
        numbers = ranges(steps["step"].unique().sort().to_list())
        ranks = ranges(steps["rank"].unique().sort().to_list())
        several = steps["rank"].n_unique() > 1
        over = f"mean of {count_of(steps.height, 'profiled step')}: {numbers} of rank{'s' if several else ''} {ranks}"
        return Scope("step", steps.height, over, facts.step_ns)
    if not facts.ranks and facts.phases:
        return _of_all_steps(facts)
    whole = (
        facts.steps.filter(pl.col("step").is_null() & pl.col("dur_ns").is_not_null()) if facts.steps.height else None
    )
    if whole is None or whole.is_empty():
        return Scope("window", 0, "nothing that was timed", None)
    mean = whole["dur_ns"].mean()
    over = "the window from its first event to its last; no step is marked in it"
    return Scope("window", whole.height, over, float(mean) if isinstance(mean, int | float) else None)


def _of_all_steps(facts: Facts) -> Scope:
    """Of a run that recorded no window: all steps whose phases were timed."""
    means = [summary.step_mean_ns for summary in facts.phases.values() if summary.step_mean_ns is not None]
    num = sum(summary.num_steps for summary in facts.phases.values())
    several = len(facts.phases) > 1
    over = f"mean of {count_of(num, 'step')} of rank{'s' if several else ''} {ranges(sorted(facts.phases))}"
    return Scope("step", num, over, sum(means) / len(means) if means else None)


def loop_parts(facts: Facts) -> dict[str | None, float]:
    """In which phases the loop is, None for the rest; sums to the step. Empty where nothing tells."""
    means = facts.phase_means
    if means.height:
        return dict(zip(means["phase"].to_list(), means["wall_ns"].to_list(), strict=True))
    tables = [summary.table for summary in facts.phases.values() if summary.step_mean_ns is not None]
    if not tables:
        return {}
    rows = pl.concat(tables).filter((pl.col("place") == "step") & pl.col("mean_ns").is_not_null())
    sums = rows.group_by("phase").agg(pl.col("mean_ns").sum() / len(tables))
    return {None if phase == RESIDUAL else phase: ns for phase, ns in sums.iter_rows()}


def device_parts(facts: Facts, scope: Scope) -> dict[str, float] | None:
    """What the device did in it: four times that sum to it; None where that was not measured."""
    if scope.is_step:
        means = facts.phase_means
        if not means.height or not means["device_idle_ns"].count():
            return None
        found = {part: float(means[column].sum()) for part, (column, _) in DEVICE_PARTS.items()}
        return {**found, IDLE: float(means["device_idle_ns"].sum())}
    whole = (
        facts.device.filter(pl.col("step").is_null() & pl.col("span_ns").is_not_null()) if facts.has_device else None
    )
    if whole is None or whole.is_empty():
        return None
    sums = {name: float(whole[name].sum()) / whole.height for name in whole.columns if name.endswith("_ns")}
    return {**{part: sums[column] for part, (column, _) in DEVICE_PARTS.items()}, IDLE: sums["idle_ns"]}


@dataclass(frozen=True, slots=True)
class Cause:
    """A cause of idle time: in words, how long, in how many gaps, the longest; ``of_cpu``: the CPU was too slow."""

    name: str
    ns: float
    num_gaps: float
    longest_ns: int
    of_cpu: bool
    is_input: bool


def idle_by_cause(facts: Facts, scope: Scope) -> list[Cause]:
    """Idle time by cause, most first; sums to the idle time of ``device_parts``. Empty where it does not.

    It does not where a rank has several devices: each has its own idle time, and a step is busy with any of them.
    """
    parts = device_parts(facts, scope)
    if parts is None:
        return []
    inside = pl.col("step").is_not_null() if scope.is_step else pl.col("position") == idle_gaps.INNER
    rows = facts.idle.filter(inside)
    num = _num_with_device(facts, scope)
    summed = rows.group_by("cause").agg(pl.col("total_ns", "count").sum(), pl.col("longest_ns").max())
    found = [
        Cause(CAUSES.get(cause, cause), ns / num, gaps / num, longest, cause in OF_CPU, cause == idle_host.INPUT)
        for cause, ns, gaps, longest in summed.sort("total_ns", "cause", descending=[True, False]).iter_rows()
    ]
    # Rounded once for each step at most.
    return found if abs(sum(cause.ns for cause in found) - parts[IDLE]) <= 1.0 else []


def _num_with_device(facts: Facts, scope: Scope) -> int:
    """Steps (windows of a device) over which the device's times are the mean."""
    if scope.is_step:
        return facts.phase_rows.filter(pl.col("device_idle_ns").is_not_null()).n_unique(["rank", "window", "step"])
    return facts.device.filter(pl.col("step").is_null() & pl.col("span_ns").is_not_null()).height


def phase_tone(phase: str | None) -> str:
    """The colour of a phase."""
    return _TONES.get(phase or "", "other")


def phase_word(phase: str | None) -> str:
    """A phase as the page calls it."""
    return "in no phase" if phase is None else "input wait" if phase == INPUT_WAIT else phase


def in_order(phases: Sequence[str | None]) -> list[str | None]:
    """Phases as they follow each other in a step; others after them, the rest last."""
    order = {name: at for at, name in enumerate((*PHASE_NAMES, *BETWEEN_STEPS))}
    return sorted(
        phases, key=lambda phase: (len(order) + 1 if phase is None else order.get(phase, len(order)), phase or "")
    )
