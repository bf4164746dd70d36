"""What is wrong with a run: findings from the phases of all steps and from recorded windows, as one ranked list.

Where both say the same it is one finding: the phases of many steps outside the profiler are the better evidence of how
much, the recorded window of why and of what it would save.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import polars as pl

from chakra_capture.analysis.diagnosis import Diagnosis
from chakra_capture.analysis.findings import Finding, Severity
from chakra_capture.analysis.step_series import STEP, StepSeries
from chakra_capture.analysis.stragglers import Stragglers
from chakra_capture.analysis.window_findings.recorded import Pace, Recorded
from chakra_capture.analysis.window_findings.rules import QUALITY, window_findings
from chakra_capture.trace.merged import MergedRun, MergedTrace
from chakra_capture.trace.schema import Column

SCHEMA = (
    Column("place", pl.Int64, "1 is what would save most; null: for information"),
    Column("kind", pl.String, "name of the finding"),
    Column("severity", pl.String, "crit, warn or info"),
    Column("summary", pl.String, "the evidence in a sentence"),
    Column("action", pl.String, "what to do next"),
    Column("phase", pl.String, "phase of the step it is in; null: the whole step, or not known"),
    Column("ranks", pl.String, "whom it is about, with commas; null: all ranks"),
    Column("least_ns", pl.Float64, "a step would be shorter by so much at least; null: nothing tells, perhaps 0", "ns"),
    Column("most_ns", pl.Float64, "by so much at most; null: not known", "ns"),
    Column("step_ns", pl.Float64, "of steps that take so long", "ns"),
    Column("share", pl.Float64, "most_ns of step_ns; null like it"),
    Column("is_predicted", pl.Boolean, "a replay without it says so; else it is the time measured of it"),
    Column("doubt", pl.String, "what is not known of the prize; null: nothing to say"),
)

# So many ranks of a large run are looked at in their windows, spread over it.
MOST_RANKS = 8
# At most so many are told at once.
MOST_SHOWN = 5
_FEWEST_UNPROFILED = 20
# A finding of a window by the kind of that of the phases which says the same, and whether it has more to say.
_SAME = {
    "DEVICE_WAITS_FOR_INPUT": ("INPUT_BOUND", True),
    "INPUT_BOUND": ("INPUT_BOUND", False),
    "PAGEABLE_COPIES": ("H2D_BOUND", True),
    "BETWEEN_OPS": ("RESIDUAL_HEAVY", True),
}
# What is explained where the phases name a rank that is slow.
_BY_STRAGGLER = ("RANKS_TAKE_TURNS", "WAITS_FOR_PEERS")
_BY_INPUT_STRAGGLER = ("DEVICE_WAITS_FOR_INPUT", "INPUT_BOUND")


@dataclass(frozen=True, slots=True)
class RunFindings:
    """What was found.

    Attributes:
        problems: what calls for something to be done, that with the largest prize first.
        notes: what is to be known beside them.
        minor: what would save less than is worth a word.
        num_steps: recorded steps that were looked at; ``ranks`` those of which.
    """

    problems: tuple[Finding, ...]
    notes: tuple[Finding, ...]
    minor: tuple[Finding, ...]
    num_steps: int
    ranks: tuple[int, ...]

    @property
    def is_told(self) -> bool:
        """What was recorded is good enough to say that nothing is wrong."""
        return not any(finding.kind == QUALITY for finding in self.notes)

    def table(self, *, with_minor: bool) -> pl.DataFrame:
        """A row of ``SCHEMA`` per finding, those for information last.

        Args:
            with_minor: those that would save too little as well.
        """
        others = (*self.notes, *(self.minor if with_minor else ()))
        rows = [_row(finding, place) for place, finding in enumerate(self.problems, 1)]
        rows += [_row(finding, None) for finding in others]
        return pl.DataFrame(rows, schema=pl.Schema({column.name: column.dtype for column in SCHEMA}))

    def as_json(self) -> dict[str, Any]:
        """The same as plain JSON values."""
        lists = {name: [each.as_json() for each in getattr(self, name)] for name in ("problems", "notes", "minor")}
        return {**lists, "num_steps": self.num_steps, "ranks": list(self.ranks)}


def run_findings(
    traces: Sequence[MergedTrace],
    run: MergedRun,
    *,
    series: Sequence[StepSeries] = (),
    diagnosis: Diagnosis | None = None,
    stragglers: Stragglers | None = None,
    steps: Sequence[int] | None = None,
) -> RunFindings:
    """Find what is wrong with a run.

    Args:
        traces: its ranks.
        run: what they have in common.
        series: the steps of ranks that recorded phases.
        diagnosis: what these say.
        stragglers: which ranks the others wait for; None where nothing was matched.
        steps: of the recorded ones only these.
    """
    named = () if stragglers is None else stragglers.ranks
    used = _comparable(_some_of(traces, named))
    recorded = Recorded(used, run, pace=_pace(series), stragglers=stragglers, steps=steps)
    found = window_findings(recorded) if used else ()
    problems, others = _joined(() if diagnosis is None else diagnosis.problems, found)
    return RunFindings(
        problems=tuple(sorted(problems, key=_weight, reverse=True)),
        notes=tuple(each for each in others if each.prize is None),
        minor=tuple(sorted((each for each in others if each.prize is not None), key=_weight, reverse=True)),
        num_steps=recorded.num_steps if used else 0,
        ranks=tuple(trace.rank for trace in used),
    )


def _row(finding: Finding, place: int | None) -> dict[str, Any]:
    said = {name: getattr(finding, name) for name in ("kind", "summary", "action", "phase")}
    ranks = ",".join(str(rank) for rank in finding.ranks) or None
    prize = None if finding.prize is None else finding.prize.as_json()
    names = ("least_ns", "most_ns", "step_ns", "share", "is_predicted", "doubt")
    return {
        "place": place, **said, "severity": finding.severity.name, "ranks": ranks,
        **{name: None if prize is None else prize[name] for name in names},
    }  # fmt: skip


def _some_of(traces: Sequence[MergedTrace], named: Sequence[int]) -> list[MergedTrace]:
    """Ranks spread over the run, and those that are slow."""
    if len(traces) <= MOST_RANKS:
        return list(traces)
    wanted = {at * len(traces) // MOST_RANKS for at in range(MOST_RANKS)}
    return [trace for at, trace in enumerate(traces) if at in wanted or trace.rank in named]


def _comparable(traces: Sequence[MergedTrace]) -> list[MergedTrace]:
    """Without ranks whose device is not all recorded, where that of others is; nothing of those with half a device."""
    whole = [trace for trace in traces if not trace.device_tail_lost]
    with_device = [trace for trace in whole if trace.num_activities]
    return with_device or whole


def _pace(series: Sequence[StepSeries]) -> Pace | None:
    """How fast steps are outside the profiler."""
    times = {each.rank: each.cpu[STEP].drop_nulls() for each in series}
    known = {rank: values for rank, values in times.items() if len(values) >= _FEWEST_UNPROFILED}
    if not known:
        return None
    middles: Mapping[int, float] = {rank: float(median(values.to_list())) for rank, values in known.items()}
    return Pace(median(middles.values()), min(len(values) for values in known.values()))


def _joined(of_phases: Sequence[Finding], of_window: Sequence[Finding]) -> tuple[list[Finding], list[Finding]]:
    """The problems of both, and what else the window shows."""
    problems, others = list(of_phases), []
    for finding in of_window:
        if _is_explained(finding, problems):
            continue
        at = next((at for at, each in enumerate(problems) if _says_the_same(each, finding)), None)
        if at is not None:
            problems[at] = _both(problems[at], finding)
        elif finding.severity > Severity.info:
            problems.append(finding)
        else:
            others.append(finding)
    return problems, others


def _is_explained(finding: Finding, problems: Sequence[Finding]) -> bool:
    kinds = {each.kind for each in problems}
    if finding.kind in _BY_INPUT_STRAGGLER and "INPUT_STRAGGLER" in kinds:
        return True
    return finding.kind in _BY_STRAGGLER and any(kind.endswith("STRAGGLER") for kind in kinds)


def _says_the_same(of_phases: Finding, of_window: Finding) -> bool:
    if of_window.kind == "STRAGGLER":
        return of_phases.kind.endswith("STRAGGLER") and of_phases.ranks == of_window.ranks
    kind, _ = _SAME.get(of_window.kind, (None, False))
    # What is in no phase is the rest; the same in a phase is something else.
    return kind == of_phases.kind and (kind != "RESIDUAL_HEAVY" or of_window.phase is None)


def _both(of_phases: Finding, of_window: Finding) -> Finding:
    _, has_more = _SAME.get(of_window.kind, (None, False))
    summary = f"{of_phases.summary} {of_window.summary}" if has_more else of_phases.summary
    evidence = {**of_phases.evidence, "recorded_steps": of_window.evidence}
    return replace(of_phases, summary=summary, evidence=evidence, prize=of_window.prize)


def _weight(finding: Finding) -> tuple[int, float, bool]:
    """Severity, then what it would save or takes, as a part of a step; of equals the one about certain ranks."""
    shares = (finding.prize.share if finding.prize else None, finding.share, finding.score)
    return finding.severity, next((share for share in shares if share is not None), 0.0), bool(finding.ranks)
