"""Are two series of step times different, or is it noise? Batch medians, and an interval that autocorrelation widens.

A run's steps are not independent: what slows one slows its neighbours. So a series is cut into consecutive batches,
whose medians outliers do not move, and the interval of their mean is as wide as their own correlation makes it (the
method of batch means: Law, Simulation Modeling and Analysis, section 9.5.3).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import NormalDist, median

import numpy as np
import numpy.typing as npt

NUM_BATCHES = 8
# Fewer steps make batches whose medians are single outliers.
FEWEST_STEPS = 3 * NUM_BATCHES
# A change smaller than this is none that anybody acts on; an interval within the second says there is no larger one.
SMALLEST_CHANGE, SAME = 0.03, 0.05
_CONFIDENCE = 0.95
_UNSEEN = 0.1

Float = npt.NDArray[np.float64]


class Verdict(StrEnum):
    """What two series say of each other."""

    slower = "slower"
    faster = "faster"
    same = "same"
    inconclusive = "inconclusive"


@dataclass(frozen=True, slots=True)
class Change:
    """From a first series to a second one.

    Attributes:
        change: relative change of a step; 0.05 is 5 % slower. None without a time on both sides.
        low, high: its 95 % interval, of several runs how far these differ; None where there are too few for one.
        reason: why it is inconclusive.
    """

    verdict: Verdict
    change: float | None
    low: float | None = None
    high: float | None = None
    reason: str | None = None


def compare_series(first: Sequence[float] | Float, second: Sequence[float] | Float) -> Change:
    """Compare the step times of two runs; both in the order in which the steps ran.

    Returns:
        slower or faster, if the interval of the change excludes none and it is 3 % or more; same, if the whole interval
        lies within 5 %; else inconclusive.
    """
    sides = [_clean(series) for series in (first, second)]
    if any(not len(series) for series in sides):
        return Change(Verdict.inconclusive, None, reason="not measured on both sides")
    change = float(np.median(sides[1]) / np.median(sides[0])) - 1
    fewest = min(len(series) for series in sides)
    if fewest < FEWEST_STEPS:
        return Change(Verdict.inconclusive, change, reason=f"{fewest} steps are too few (at least {FEWEST_STEPS})")
    means, errors, degrees = zip(*(_batches(series) for series in sides), strict=True)
    difference, error = means[1] - means[0], math.hypot(*errors)
    half = student_quantile(_welch(errors, degrees)) * error
    low, high = math.expm1(difference - half), math.expm1(difference + half)
    middle = math.expm1(difference)
    if (low > 0 or high < 0) and abs(middle) >= SMALLEST_CHANGE:
        return Change(Verdict.slower if middle > 0 else Verdict.faster, middle, low, high)
    if low >= -SAME and high <= SAME:
        return Change(Verdict.same, middle, low, high)
    noise = (high - low) / 2
    return Change(Verdict.inconclusive, middle, low, high, f"noise of {noise:.1%}")


def _clean(series: Sequence[float] | Float) -> Float:
    values = np.asarray(series, dtype=np.float64)
    return values[np.isfinite(values) & (values > 0)]


def _batches(series: Float) -> tuple[float, float, float]:
    """Mean of the batch medians on a log scale, its standard error, and degrees of freedom."""
    medians = np.array([np.median(part) for part in np.array_split(np.log(series), NUM_BATCHES)])
    centred = medians - medians.mean()
    spread = float((centred**2).sum())
    # Eight values show less correlation than there is, so some is put on top.
    seen = float((centred[1:] * centred[:-1]).sum()) / spread if spread else 0.0
    correlation = min(max(seen + _UNSEEN, 0.0), 0.9)
    widened = math.sqrt((1 + correlation) / (1 - correlation))
    error = math.sqrt(spread / (NUM_BATCHES - 1) / NUM_BATCHES) * widened
    return float(medians.mean()), error, NUM_BATCHES - 1


def _welch(errors: Sequence[float], degrees: Sequence[float]) -> float:
    """Degrees of freedom of a difference (Welch 1947)."""
    parts = [error**4 / degree for error, degree in zip(errors, degrees, strict=True)]
    total = sum(error**2 for error in errors) ** 2
    return total / sum(parts) if sum(parts) else sum(degrees)


def student_quantile(degrees: float, confidence: float = _CONFIDENCE) -> float:
    """Two-sided quantile of Student's t (Abramowitz and Stegun 26.7.5); to 0.3 % from 5 degrees of freedom on."""
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / degrees ** (power + 1) for power, term in enumerate(terms))


def compare_runs(first: Sequence[Sequence[float] | Float], second: Sequence[Sequence[float] | Float]) -> Change:
    """Compare several runs a side, which tells a change from what differs between runs of one program.

    The statistic of a side is the smallest of its runs' 10th percentiles: what others on the machine do only adds time.
    A change counts beyond 10 %, from five runs a side beyond 5 %, and beyond what the runs of one side differ by.
    """
    sides = [[_low(_clean(run)) for run in side if len(_clean(run))] for side in (first, second)]
    fewest = min(len(side) for side in sides)
    if fewest == 0:
        return Change(Verdict.inconclusive, None, reason="not measured on both sides")
    if fewest == 1 and max(len(side) for side in sides) == 1:
        return compare_series(first[0], second[0])
    limit = 0.05 if fewest >= 5 else 0.10
    change = min(sides[1]) / min(sides[0]) - 1
    noise = max(_noise(side) for side in sides)
    if fewest < 3:
        return Change(Verdict.inconclusive, change, reason=f"{fewest} runs on one side are too few (3, or 1 on each)")
    if abs(change) > max(limit, noise):
        return Change(Verdict.slower if change > 0 else Verdict.faster, change, change - noise, change + noise)
    if noise > limit / 2:
        reason = f"runs of one side differ by {noise:.1%}, more than half of the {limit:.0%} that are asked about"
        return Change(Verdict.inconclusive, change, change - noise, change + noise, reason)
    return Change(Verdict.same, change, change - noise, change + noise)


def lowest(runs: Sequence[Float]) -> float | None:
    """What ``compare_runs`` looks at of a side; 0 of runs without a time in them, None without any step."""
    found = [_low(clean) for run in runs if len(clean := _clean(run))]
    return min(found) if found else 0.0 if any(len(run) for run in runs) else None


def _low(run: Float) -> float:
    return float(np.quantile(run, 0.1))


def _noise(lows: list[float]) -> float:
    """How far the middle run of a side is above its best one."""
    return median(lows) / min(lows) - 1
