"""Ranks that make the others wait, found in the phases of all steps.

A rank is named by a phase of its own that is longer than the others' in nearly every step. Nobody is named by the rest
of a step, which may hide waiting; nor by forward alone, where DistributedDataParallel waits for other ranks when it
broadcasts buffers: a long forward is the rank's own only if the others pay for it. Backward ends on all ranks together,
so there the rank that does not wait is the late one.
"""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import polars as pl

from chakra_capture.analysis.findings import Finding, Severity, graded, written_ms
from chakra_capture.analysis.late_ops import Cause
from chakra_capture.analysis.step_series import STEP
from chakra_capture.analysis.step_window import Float, StepWindow
from chakra_capture.analysis.stragglers import Stragglers
from chakra_capture.annotations import BACKWARD, FORWARD, H2D, INPUT_WAIT, OPTIMIZER

_WARN, _CRIT = 0.10, 0.20
# In so many steps the rank has to be the slower one, of at least so many.
_SAME_SIGN, _FEWEST_STEPS = 0.80, 10
# A cause has to explain so much of what the others lose.
_COVERED = 0.80
# Ranks keep step with each other if their steps differ by less than this part of the time lost.
_IN_STEP = 0.50
# More ranks than these are no exception; each is held against all others.
_MOST_RANKS = 16
_MS = 1e6

_KINDS = {
    INPUT_WAIT: "INPUT_STRAGGLER",
    H2D: "H2D_STRAGGLER",
    FORWARD: "COMPUTE_STRAGGLER",
    BACKWARD: "COMPUTE_STRAGGLER",
    OPTIMIZER: "COMPUTE_STRAGGLER",
}
_DOES = {
    INPUT_WAIT: "waits {} per step for its input",
    H2D: "copies {} per step to its device",
    FORWARD: "spends {} per step in forward",
    BACKWARD: "spends {} per step in backward",
    OPTIMIZER: "spends {} per step in the optimizer",
}
_ACTIONS = {
    INPUT_WAIT: "Look at the data shard, disk and loader workers of rank {}.",
    H2D: "Look at pinned memory and the copies of rank {}.",
    FORWARD: "Look at what forward computes on rank {}, and at its device's clock and load.",
    BACKWARD: "Look at what backward computes on rank {}, and at its device's clock and load.",
    OPTIMIZER: "Look at what the optimizer updates on rank {}.",
}
# Time here is never time in which a rank waits for another one.
_OWN = (INPUT_WAIT, H2D, OPTIMIZER)


def slow_ranks(window: StepWindow, collectives: Stragglers | None) -> list[Finding]:
    """Find the ranks that the others wait for.

    Args:
        window: of at least two ranks to find any.
        collectives: what the collectives of the recorded steps say.
    """
    found: list[Finding] = []
    if len(window.ranks) > 1 and window.num_steps >= _FEWEST_STEPS:
        found = _by_phase(window) or list(_by_backward(window))
    late = () if collectives is None else collectives.ranks
    for finding in found:
        finding.evidence["is_late_in_collectives"] = None if collectives is None else finding.ranks[0] in late
    named = {rank for finding in found for rank in finding.ranks}
    found += [each for rank in late if rank not in named and (each := _by_collectives(rank, collectives))]
    return [_with_op(finding, collectives) for finding in found]


def _with_op(finding: Finding, collectives: Stragglers | None) -> Finding:
    """The same with the op that makes the rank slow, where the recorded steps say so of the same phase."""
    late = None if collectives is None else collectives.late_in.get(finding.ranks[0])
    if late is None or late.what.op is None or (late.phase in _KINDS and late.phase != finding.phase):
        return finding
    what = late.what
    more = (what.op_ns or 0.0) - (what.op_others_ns or 0.0)
    where = " on the device" if what.cause == Cause.DEVICE else ""
    said = f"{finding.summary[:-1]}; {what.op} takes {written_ms(more)} longer{where}."
    evidence = {"op": what.op, "op_excess_ms": more / _MS, "call_path": list(what.call_path)}
    return replace(finding, summary=said, evidence={**finding.evidence, **evidence})


def _by_phase(window: StepWindow) -> list[Finding]:
    """The largest phase of each rank that is longer there than elsewhere, and that it does not wait in."""
    slowest = float(np.nanmax(_row_medians(window.times[STEP]), initial=0.0))
    if slowest <= 0:
        return []
    found: dict[int, list[Finding]] = {}
    for phase in _KINDS:
        for at in _unusual(window.times[phase], slowest):
            finding = _candidate(window, phase, at, slowest)
            if finding is not None:
                found.setdefault(at, []).append(finding)
    own = [(at, each) for at, findings in found.items() for each in findings if each.phase in _OWN]

    def waits(at: int, finding: Finding) -> bool:
        """Whether another rank is late by what this one spends longer where it may wait."""
        score = _COVERED * (finding.score or 0.0)
        return finding.phase not in _OWN and any(other != at and (late.score or 0) >= score for other, late in own)

    kept = {at: [each for each in findings if not waits(at, each)] for at, findings in found.items()}
    return [max(findings, key=lambda each: each.score or 0.0) for findings in kept.values() if findings]


def _unusual(values: Float, slowest: float) -> list[int]:
    """Ranks that may be the exception, worst first."""
    medians = _row_medians(values)
    if np.isfinite(medians).sum() < 2:
        return []
    # Of three ranks the fast one is the exception, not each of the slow ones: they are near the median of all.
    low = float(np.nanmin(medians)) if len(medians) == 2 else float(np.nanmedian(medians))
    order = np.argsort(-np.nan_to_num(medians, nan=-np.inf), kind="stable")[:_MOST_RANKS]
    return [int(at) for at in order if np.isfinite(medians[at]) and medians[at] - low >= _WARN / 2 * slowest]


def _candidate(window: StepWindow, phase: str, at: int, slowest: float) -> Finding | None:
    times = window.times
    excess = _excess(times[phase], at)
    known = np.isfinite(excess)
    if known.sum() < _FEWEST_STEPS:
        return None
    median, same_sign = float(np.median(excess[known])), float((excess[known] > 0).mean())
    severity = graded(median / slowest, _WARN, _CRIT)
    if severity is None or same_sign < _SAME_SIGN:
        return None
    if phase not in _OWN and not _is_paid_for(window, phase, at, median):
        return None
    mine, others = float(np.nanmedian(times[phase][at])), float(np.nanmedian(_reference(times[phase], at)))
    return _finding(
        phase,
        window.ranks[at],
        severity=severity,
        score=median / slowest,
        mine=mine,
        others=others,
        evidence={
            "excess_ms": median / _MS,
            "step_time_ms": slowest / _MS,
            "same_sign": same_sign,
            "num_steps": int(known.sum()),
            "diagnosis_clock": window.clock,
        },
    )


def _is_paid_for(window: StepWindow, phase: str, at: int, excess: float) -> bool:
    """Whether a longer forward or backward is work: the rank takes longer by it, or the others wait in backward.

    With the time before each step: a rank that waits for what another one does between its steps takes no longer.
    """
    paid = [_median(_excess(window.wall, at))]
    if phase == FORWARD:
        paid.append(-_median(_excess(window.times[BACKWARD], at)))
    return any(value >= _COVERED * excess for value in paid)


def _by_backward(window: StepWindow) -> Iterator[Finding]:
    """TraceML's rule, on medians: others wait in backward, and a cause is named if it explains what they lose.

    A mean would do if it were not for one step in which one rank alone was held up.
    """
    times = window.times
    backward, steps = _row_medians(times[BACKWARD]), _row_medians(times[STEP])
    eligible = [at for at in range(len(backward)) if np.isfinite(backward[at]) and np.isfinite(steps[at])]
    if len(eligible) < 2:
        return
    order = sorted(eligible, key=lambda at: (backward[at], at))
    late, victim = order[0], order[len(order) // 2]
    behind = times[BACKWARD][victim] - times[BACKWARD][late]
    behind = behind[np.isfinite(behind)]
    cost = _median(behind)
    severity = graded(cost / steps[victim], _WARN, _CRIT)
    if severity is None or len(behind) < _FEWEST_STEPS or (behind > 0).mean() < _SAME_SIGN:
        return
    # Where ranks do not keep step nobody waits: one has less to do.
    if abs(steps[victim] - steps[late]) > _IN_STEP * cost:
        return
    excess = {phase: _median(times[phase][late] - times[phase][victim]) for phase in (INPUT_WAIT, H2D, FORWARD)}
    covered = {phase: min(1.0, value / cost) for phase, value in excess.items() if np.isfinite(value)}
    cause = max(covered, key=lambda phase: covered[phase], default=None)
    evidence = {
        "visible_metric": "backward",
        "culprit_rank": window.ranks[late],
        "victim_rank": window.ranks[victim],
        "visible_cost_ms": cost / _MS,
        "step_time_ms": float(steps[victim]) / _MS,
        "component_coverage": {phase: float(max(0.0, value)) for phase, value in covered.items()},
        "diagnosis_clock": window.clock,
    }
    score = float(cost / steps[victim])
    if cause is not None and covered[cause] >= _COVERED:
        mine, others = (_median(times[cause][at]) for at in (late, victim))
        yield _finding(
            cause, window.ranks[late], severity=severity, score=score, mine=mine, others=others, evidence=evidence
        )
        return
    rank = window.ranks[late]
    yield Finding(
        kind="STRAGGLER",
        severity=severity,
        summary=(
            f"The others spend {written_ms(cost)} per step more in backward than rank {rank}, as if waiting for it; "
            "what makes it late is in no phase."
        ),
        action=f"Look at what rank {rank} does outside the phases: record a window with_stack there.",
        phase="sync",
        metric="backward",
        score=score,
        skew=score,
        ranks=(rank,),
        evidence=evidence,
    )


def _by_collectives(rank: int, collectives: Stragglers | None) -> Finding | None:
    assert collectives is not None
    row = collectives.table.row(by_predicate=pl.col("rank") == rank, named=True)
    severity = graded(row["share"] or 0.0, _WARN, _CRIT)
    if severity is None:
        return None
    if collectives.num_steps < 2 * _FEWEST_STEPS:
        severity = min(severity, Severity.warn)
    evidence = {
        "delay_ms": row["delay_ns"] / _MS,
        "num_latest": row["num_latest"],
        "num_steps": row["num_steps"],
    }
    late = collectives.late_in.get(rank)
    if late is not None and late.phase in _KINDS:
        return _finding(
            late.phase, rank, severity=severity, score=row["share"], mine=late.own_ns, others=late.others_ns,
            evidence=evidence,
        )  # fmt: skip
    return Finding(
        kind="STRAGGLER",
        severity=severity,
        summary=f"Rank {rank} comes {written_ms(row['delay_ns'])} per step after the others to what all take part in.",
        action=f"Look at what rank {rank} does before it: chakra-capture summary PATH --rank {rank}.",
        phase="sync",
        metric="collectives",
        score=row["share"],
        skew=row["share"],
        ranks=(rank,),
        evidence=evidence,
    )


def _finding(
    phase: str, rank: int, *, severity: Severity, score: float, mine: float, others: float, evidence: dict[str, object]
) -> Finding:
    return Finding(
        kind=_KINDS[phase],
        severity=severity,
        summary=f"Rank {rank} {_DOES[phase].format(written_ms(mine))}, the others {written_ms(others)}.",
        action=_ACTIONS[phase].format(rank),
        phase=phase,
        metric=phase,
        score=score,
        skew=score,
        ranks=(rank,),
        evidence={"culprit_rank": rank, "rank_ms": mine / _MS, "others_ms": others / _MS, **evidence},
    )


def _reference(values: Float, at: int) -> Float:
    """What the others took, step by step: the median of them."""
    return _column_medians(np.delete(values, at, axis=0))


def _excess(values: Float, at: int) -> Float:
    found: Float = values[at] - _reference(values, at)
    return found


def _median(values: Float) -> float:
    known = values[np.isfinite(values)]
    return float(np.median(known)) if len(known) else float("nan")


def _column_medians(values: Float) -> Float:
    return _row_medians(values.T)


def _row_medians(values: Float) -> Float:
    """Median of each row without its nans; nan of a row of nans."""
    found = np.full(len(values), np.nan)
    some = np.isfinite(values).any(axis=1)
    found[some] = np.nanmedian(values[some], axis=1)
    return found
