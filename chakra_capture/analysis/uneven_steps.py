"""Steps that take much longer than others: some wait for data, a few take their time."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from chakra_capture.analysis.findings import Finding, Prize, Severity, graded, written, written_ms
from chakra_capture.analysis.step_series import STEP, TRACED, StepSeries
from chakra_capture.analysis.step_window import Float
from chakra_capture.annotations import INPUT_WAIT
from chakra_capture.trace.columns import Int64

_FEWEST_STEPS = 20
# One step in 20 waits five times as long as usual; one in 100 takes three times as long.
_BURST, _BURST_AT = 5.0, 0.95
_SLOW, _SLOW_AT = 3.0, 0.99
# What all of them take too long, as a part of the time of all steps.
_WARN, _CRIT = 0.03, 0.20
_MOST_NAMED = 8


def uneven_steps(series: Sequence[StepSeries], *, is_input_bound: bool) -> list[Finding]:
    """Find the steps that are the exception and cost much, on the rank where they cost most.

    Args:
        series: of all ranks.
        is_input_bound: steps wait for data as a rule, so that some which do are no news.
    """
    bursts = [] if is_input_bound else [each for one in series if (each := _bursts(one)) is not None]
    slow = [each for one in series if (each := _slow(one)) is not None]
    return [max(found, key=lambda each: each.score or 0.0) for found in (bursts, slow) if found]


def _bursts(one: StepSeries) -> Finding | None:
    found = _exceptions(one, INPUT_WAIT, _BURST, _BURST_AT)
    if found is None:
        return None
    values, usual, at, prize = found.values, found.usual, found.at, found.prize
    apart = set(np.diff(at).tolist())
    subject = f"Every {apart.pop()}th step waits" if len(apart) == 1 else f"{len(at)} of {len(values)} steps wait"
    return Finding(
        kind="INPUT_BURSTS",
        severity=graded(prize.share, _WARN, _CRIT) or Severity.warn,
        summary=f"{subject} {written_ms(float(np.median(values[at])))} for data, the others {written_ms(usual)}.",
        action=(
            "Keep the loader's workers (persistent_workers=True) and prefetch more; where these are the first steps of "
            "epochs, it is the start of the loader."
        ),
        phase=INPUT_WAIT,
        metric=INPUT_WAIT,
        score=prize.share,
        share=prize.share,
        evidence={"rank": one.rank, "steps": found.numbers, "median_ms": usual / 1e6, "num_steps": len(values)},
        prize=prize,
    )


def _slow(one: StepSeries) -> Finding | None:
    found = _exceptions(one, TRACED, _SLOW, _SLOW_AT)
    if found is None:
        return None
    values, usual, at, prize = found.values, found.usual, found.at, found.prize
    return Finding(
        kind="SLOW_STEPS",
        severity=graded(prize.share, _WARN, _CRIT) or Severity.warn,
        summary=(
            f"{len(at)} of {len(values)} steps take {written_ms(float(np.median(values[at])))}, the others "
            f"{written_ms(usual)}; that is {written(prize.share)} of the time of all steps, input left out."
        ),
        action="Look at what happens in these steps alone: garbage collection, logging, checkpoints, other jobs.",
        metric="step_time",
        score=prize.share,
        share=prize.share,
        evidence={"rank": one.rank, "steps": found.numbers, "median_ms": usual / 1e6, "num_steps": len(values)},
        prize=prize,
    )


@dataclass(frozen=True, slots=True)
class _Exceptions:
    """Steps ``at`` some places, of which a part takes much longer than the ``usual`` time of it."""

    values: Float
    usual: float
    at: Int64
    numbers: list[int]
    prize: Prize


def _exceptions(one: StepSeries, part: str, factor: float, quantile: float) -> _Exceptions | None:
    """Find them; None where they cost little."""
    known = one.cpu.drop_nulls([part, STEP])
    values, steps = (known[name].to_numpy() for name in (part, STEP))
    if len(values) < _FEWEST_STEPS:
        return None
    usual = float(np.median(values))
    if usual <= 0 or np.quantile(values, quantile, method="higher") < factor * usual:
        return None
    at = np.flatnonzero(values >= factor * usual)
    excess = float((values[at] - usual).sum()) / len(steps)
    prize = Prize(least_ns=None, most_ns=excess, step_ns=float(steps.mean()))
    numbers = known["step"].gather(at[:_MOST_NAMED]).to_list()
    return _Exceptions(values, usual, at, numbers, prize) if prize.share >= _WARN else None
