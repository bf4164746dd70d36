"""What makes a training slow, from the phases of all its steps: TraceML's rules, and those for what it does not see.

Rules speak from what was measured. What was not is null, never 0: a rule that lacks its parts stays silent, and the
diagnosis says of each part in how many steps of how many ranks it was seen.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
import polars as pl

from chakra_capture.analysis.findings import Finding, Severity, graded, in_order, written, written_ms
from chakra_capture.analysis.memory_findings import memory_findings
from chakra_capture.analysis.slow_ranks import slow_ranks
from chakra_capture.analysis.step_series import BETWEEN_OTHER, COMPUTE, REST, STEP, StepSeries, step_series
from chakra_capture.analysis.step_window import GPU, Float, StepWindow, step_window
from chakra_capture.analysis.stragglers import Stragglers
from chakra_capture.analysis.uneven_steps import uneven_steps
from chakra_capture.annotations import (
    BACKWARD,
    CALLBACKS,
    CHECKPOINT,
    FORWARD,
    H2D,
    INPUT_WAIT,
    OPTIMIZER,
    VALIDATION_PHASE,
)
from chakra_capture.trace.phase_records import PhaseRecords

_WARN, _CRIT = 0.10, 0.20
_COMPUTE_BOUND = 0.90
_FEWEST_STEPS, _CONFIDENT_STEPS = 2, 20
# Steps get slower: so many steps in so many batches, of whose pairs nearly all rise, by so much in all.
_TREND_STEPS, _TREND_BATCHES, _TREND = 100, 8, 0.08
_RISING_PAIRS = 24
# The latest steps of a rank that are looked at, and of all ranks together.
_MOST_STEPS, _MOST_IN_ALL = 10_000, 4_000_000
_SIGNALS = (INPUT_WAIT, FORWARD, BACKWARD, OPTIMIZER)

_BOUND = {
    INPUT_WAIT: (
        "INPUT_BOUND",
        "input",
        "Training waits for its input {} of each step",
        "Give the loader more workers, prefetch or cache, and take work out of its transforms.",
    ),
    H2D: (
        "H2D_BOUND",
        "h2d",
        "Copies to the device take {} of each step",
        "Pin memory, copy with non_blocking=True, and overlap copies with compute.",
    ),
    REST: (
        "RESIDUAL_HEAVY",
        "residual",
        "{} of each step is in no phase",
        "Name what the loop does there with session.phase(...), or record a window with_stack.",
    ),
}
_BETWEEN = {
    VALIDATION_PHASE: ("VALIDATION_HEAVY", "Validation takes", "Validate less often, or on fewer batches."),
    CHECKPOINT: ("CHECKPOINT_HEAVY", "Saving checkpoints takes", "Save less often, or asynchronously."),
    CALLBACKS: ("CALLBACKS_HEAVY", "Callbacks take", "Look at what callbacks and loggers do after each step."),
    BETWEEN_OTHER: (
        "BETWEEN_STEPS_HEAVY",
        "The loop between two steps takes",
        "Look at what the loop does after the update: logging, metrics, the start of an epoch.",
    ),
}
# What there may be waiting for another rank in.
_MAY_WAIT = (CALLBACKS, BETWEEN_OTHER)


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What was found.

    Attributes:
        step_time: by TraceML's rules on step time; never empty, the first is the verdict.
        memory: on memory.
        others: on what comes between steps, and on steps that change.
        window: the steps all is from.
        coverage: by part: in how many ranks of how many, and on the best of them in how many steps of how many.
        series: of every rank.
    """

    step_time: tuple[Finding, ...]
    memory: tuple[Finding, ...]
    others: tuple[Finding, ...]
    window: StepWindow
    coverage: dict[str, dict[str, str]]
    series: tuple[StepSeries, ...]

    @property
    def findings(self) -> tuple[Finding, ...]:
        """All, the most important first."""
        return in_order([*self.step_time, *self.memory, *self.others])

    @property
    def problems(self) -> tuple[Finding, ...]:
        """Those that call for something to be done."""
        return tuple(finding for finding in self.findings if finding.severity > Severity.info)

    def as_json(self) -> dict[str, Any]:
        """The same as plain JSON values."""
        return {
            "verdict": self.findings[0].kind if self.problems else self.step_time[0].kind,
            "findings": [finding.as_json() for finding in self.findings],
            "clock": self.window.clock,
            "num_steps": self.window.num_steps,
            "ranks": list(self.window.ranks),
            "num_ranks": self.window.num_ranks,
            "coverage": self.coverage,
        }


def diagnose(records: Mapping[int, PhaseRecords], collectives: Stragglers | None = None) -> Diagnosis:
    """Diagnose a run.

    Args:
        records: the phases of each rank.
        collectives: which ranks the others wait for, as the recorded steps say; None where nothing was matched.
    """
    return diagnose_series([series_of(rank, mine, len(records)) for rank, mine in records.items()], collectives)


def series_of(rank: int, records: PhaseRecords, num_ranks: int) -> StepSeries:
    """What a diagnosis of so many ranks looks at of one, so that all of them fit into memory."""
    return step_series(rank, records, max(_CONFIDENT_STEPS, min(_MOST_STEPS, _MOST_IN_ALL // max(1, num_ranks))))


def diagnose_series(series: Sequence[StepSeries], collectives: Stragglers | None = None) -> Diagnosis:
    """Diagnose a run whose ranks are laid out already."""
    window = step_window(series)
    coverage = _coverage(window)
    step_time = _step_time(window, collectives, coverage)
    is_input_bound = any(finding.phase in ("input", INPUT_WAIT) for finding in step_time)
    return Diagnosis(
        step_time=step_time,
        memory=in_order(memory_findings(series)),
        others=in_order(
            [*_between(series, window), *_slowing(window), *uneven_steps(series, is_input_bound=is_input_bound)]
        ),
        window=window,
        coverage=coverage,
        series=tuple(series),
    )


def _step_time(
    window: StepWindow, collectives: Stragglers | None, coverage: dict[str, dict[str, str]]
) -> tuple[Finding, ...]:
    num_steps = window.num_steps
    if not num_steps:
        return (_nothing("NO_DATA", "No step was timed outside the profiler.", "Run more steps outside the window."),)
    if num_steps < _FEWEST_STEPS:
        why = f"Only {num_steps} step was timed outside the profiler, {_FEWEST_STEPS} are needed."
        return (_nothing("WARMUP", why, "Run for more steps."),)
    stragglers = slow_ranks(window, collectives)
    bound = [
        finding
        for part in _BOUND
        if (part != H2D or window.clock == GPU) and (finding := _bound(window, part, stragglers)) is not None
    ]
    found = stragglers + bound
    if num_steps < _CONFIDENT_STEPS:
        found = [_capped(finding) for finding in found]
    if not bound and (compute := _compute_bound(window)) is not None:
        found.append(compute)
    return in_order(found) or (_without(window, coverage),)


def _bound(window: StepWindow, part: str, stragglers: list[Finding]) -> Finding | None:
    """Whether a part takes much of a step on the median rank.

    A rank that is slow has its own finding for what makes it slow; and the rest of the other ranks' steps, in which
    they may wait for it, says nothing.
    """
    kind, phase, sentence, action = _BOUND[part]
    named = {rank for finding in stragglers for rank in finding.ranks if part == REST or finding.phase == part}
    ranks = [at for at, rank in enumerate(window.ranks) if not named or (rank in named) == (part == REST)]
    shares = window.share(part)[ranks]
    known = shares[np.isfinite(shares)]
    if not len(known) or window.num_measured(part) < _FEWEST_STEPS:
        return None
    share = float(np.median(known))
    severity = graded(share, _WARN, _CRIT)
    if severity is None:
        return None
    if window.num_measured(part) < _CONFIDENT_STEPS:
        severity = Severity.warn
    means = window.mean(part)
    worst = int(ranks[int(np.nanargmax(shares))])
    middle = float(np.median(means[ranks][np.isfinite(shares)]))
    return Finding(
        kind=kind,
        severity=severity,
        summary=f"{sentence.format(written(share))} ({written_ms(middle)}).",
        action=action,
        phase=phase,
        metric={REST: "residual_proxy"}.get(part, part),
        score=share,
        share=share,
        skew=_skew(means),
        # What is in no phase may be waiting for another rank.
        ranks=() if part == REST else (window.ranks[worst],),
        evidence={
            f"{'residual' if part == REST else part}_ms": middle / 1e6,
            "step_time_ms": float(np.nanmedian(window.mean(STEP))) / 1e6,
            "num_steps": window.num_measured(part),
            "num_ranks": len(known),
            "diagnosis_clock": window.clock,
        },
    )


def _skew(means: Float) -> float | None:
    """How much more the worst rank has than the median one."""
    known = means[np.isfinite(means)]
    middle = float(np.median(known)) if len(known) else 0.0
    return None if len(known) < 2 or middle <= 0 else (float(known.max()) - middle) / middle


def _compute_bound(window: StepWindow) -> Finding | None:
    shares = window.share(COMPUTE)
    known = shares[np.isfinite(shares)]
    if not len(known) or (share := float(np.median(known))) < _COMPUTE_BOUND:
        return None
    means = {phase: float(np.nanmedian(window.mean(phase))) for phase in (FORWARD, BACKWARD, OPTIMIZER)}
    largest = max(means, key=lambda phase: means[phase])
    return Finding(
        kind="COMPUTE_BOUND",
        severity=Severity.info,
        summary=f"{written(share)} of each step is compute, most of it in {largest} ({written_ms(means[largest])}).",
        action="Make compute cheaper: mixed precision, torch.compile, bigger batch.",
        phase=largest,
        metric="compute",
        share=share,
        skew=_skew(window.mean(COMPUTE)),
        evidence={f"{phase}_ms": mean / 1e6 for phase, mean in means.items()},
    )


def _without(window: StepWindow, coverage: dict[str, dict[str, str]]) -> Finding:
    """What to say where no rule speaks."""
    missing = [name for name in _SIGNALS if not np.isfinite(window.mean(name)).all()]
    if not missing:
        return _nothing(
            "BALANCED",
            f"Nothing but compute takes {100 * _WARN:.0f} % of a step, and no rank is slower than the others.",
            "To be faster look at the operators and kernels of a recorded window.",
        )
    return Finding(
        kind="INCOMPLETE_DATA",
        severity=Severity.info,
        summary=f"No verdict on step time: not measured on every rank: {', '.join(missing)}.",
        action="Use an adapter for the framework, or wrap what the loop calls (chakra_capture.phases).",
        evidence={
            "missing_signals": missing,
            "signal_coverage": {name: coverage[name]["ranks"] for name in missing},
        },
    )


def _nothing(kind: str, summary: str, action: str) -> Finding:
    return Finding(kind=kind, severity=Severity.info, summary=summary, action=action)


def _capped(finding: Finding) -> Finding:
    """Few steps make no finding critical."""
    values = {name: getattr(finding, name) for name in finding.__slots__}
    return Finding(**{**values, "severity": min(finding.severity, Severity.warn)})


def _coverage(window: StepWindow) -> dict[str, dict[str, str]]:
    def of(part: str) -> dict[str, str]:
        known = np.isfinite(window.times[part])
        return {
            "ranks": f"{int(known.any(axis=1).sum())}/{window.num_ranks}",
            "steps": f"{int(known.sum(axis=1).max(initial=0))}/{window.num_steps}",
        }

    return {part: of(part) for part in (*_SIGNALS, H2D)}


def _between(series: Sequence[StepSeries], window: StepWindow) -> list[Finding]:
    """What comes between steps and takes much of the wall time of any rank: the others wait for it."""
    found = []
    all_shares = {
        name: {each.rank: share for each in series if (share := _wall_share(each.cpu, name)) is not None}
        for name in _BETWEEN
    }
    totals = {each.rank: sum(shares.get(each.rank, 0.0) for shares in all_shares.values()) for each in series}
    for name, (kind, subject, action) in _BETWEEN.items():
        shares = all_shares[name]
        if not shares or window.num_steps < _FEWEST_STEPS:
            continue
        worst = max(shares, key=lambda rank: shares[rank])
        severity = graded(shares[worst], _WARN, _CRIT)
        if severity is None:
            continue
        is_alone = len(series) > 1 and _is_alone(worst, shares)
        # A rank that waits for another one's checkpoint, say, has as much time between its steps as that.
        is_alone &= name not in _MAY_WAIT or _is_alone(worst, totals)
        where = f" on rank {worst}" if is_alone else ""
        finding = Finding(
            kind=kind,
            severity=severity,
            summary=f"{subject} {written(shares[worst])} of the time of training{where}.",
            action=action,
            phase=name,
            metric="wall_time",
            score=shares[worst],
            share=shares[worst],
            ranks=(worst,) if is_alone else (),
            evidence={"worst_rank": worst, "num_ranks": len(shares)},
        )
        found.append(finding if window.num_steps >= _CONFIDENT_STEPS else _capped(finding))
    return found


def _is_alone(rank: int, shares: Mapping[int, float]) -> bool:
    """Whether the others have less than half of what a rank has."""
    others = [share for other, share in shares.items() if other != rank]
    return not others or median(others) < shares[rank] / 2


def _wall_share(steps: pl.DataFrame, name: str) -> float | None:
    """Share of the wall time, of the steps in which it was measured."""
    known = steps.filter(pl.col(name).is_not_null())
    total = float(known["wall"].sum())
    return float(known[name].sum()) / total if total > 0 else None


def _slowing(window: StepWindow) -> list[Finding]:
    """Steps that take longer and longer: medians of batches of steps that rise nearly without exception."""
    if window.num_steps < _TREND_STEPS:
        return []
    batches = np.array_split(np.arange(window.num_steps), _TREND_BATCHES)
    steps = np.nanmedian(window.times[STEP], axis=0)
    medians = [float(np.median(steps[batch])) for batch in batches]
    pairs = [b > a for at, a in enumerate(medians) for b in medians[at + 1 :]]
    growth = medians[-1] / medians[0] - 1 if medians[0] > 0 else 0.0
    if growth < _TREND or sum(pairs) < _RISING_PAIRS:
        return []
    more = {part: _gain(window.times[part], batches) for part in (INPUT_WAIT, H2D, FORWARD, BACKWARD, OPTIMIZER, REST)}
    known = {part: gain for part, gain in more.items() if np.isfinite(gain)}
    most = max(known, key=lambda part: known[part], default=None)
    where = "" if most is None else f", most of it in {'no phase' if most == REST else most}"
    return [
        Finding(
            kind="STEPS_SLOW_DOWN",
            severity=Severity.warn,
            summary=(
                f"Steps take longer and longer: {written_ms(medians[0])} at first, {written_ms(medians[-1])} "
                f"at last{where}."
            ),
            action="Look for lists and graphs that grow, a device that gets hot, or a loader that slows down.",
            phase="residual" if most == REST else most,
            metric="step_time",
            score=growth,
            evidence={"batch_medians_ms": [value / 1e6 for value in medians], "growth": growth},
        )
    ]


def _gain(values: Float, batches: Sequence[Any]) -> float:
    """How much more a part takes in the last batch than in the first, on the mean of the ranks that measured it."""
    first, last = values[:, batches[0]], values[:, batches[-1]]
    if not (np.isfinite(first).any() and np.isfinite(last).any()):
        return float("nan")
    return float(np.nanmean(last) - np.nanmean(first))
