"""Memory of ranks: near the capacity of the device, apart between ranks, growing. TraceML's rules and thresholds."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl

from chakra_capture.analysis.findings import Finding, Severity, graded, written
from chakra_capture.analysis.step_series import StepSeries

_FEWEST_STEPS = 50
# Memory is read once a second, so there may be fewer values than steps.
_FEWEST_VALUES = 20
_PRESSURE = (0.92, 0.97)
_SKEW = ((0.20, 0.30), (0.30, 0.50))
_GIB = 1 << 30
# The steps, as parts of all, whose means say what memory was at first, in the middle and at last.
_BANDS = ((0.15, 0.25), (0.45, 0.55), (0.90, 1.00))
# A process grows a little for good reasons (caches, allocator): less than this is not worth a word.
_RISE = 0.06


def memory_findings(series: Sequence[StepSeries]) -> list[Finding]:
    """Find what threatens the memory of the device, or of the process."""
    ranks = {each.rank: each for each in series if each.cpu.height >= _FEWEST_STEPS}
    device = [_pressure(ranks), _skew(ranks), _creep({r: _values(e.memory, _ALLOCATED) for r, e in ranks.items()}, "")]
    of_process = {rank: _values(each.cpu, "rss_bytes") for rank, each in ranks.items()}
    return [finding for finding in (*device, _creep(of_process, "rss_bytes")) if finding is not None]


_ALLOCATED = "allocated_bytes"
_PEAK = "peak_reserved_bytes"


def _values(table: pl.DataFrame, column: str) -> list[int]:
    return table[column].drop_nulls().to_list()


def _peaks(ranks: dict[int, StepSeries]) -> dict[int, int]:
    return {rank: max(values) for rank, each in ranks.items() if (values := _values(each.memory, _PEAK))}


def _shares_used(ranks: dict[int, StepSeries]) -> dict[int, float]:
    """Peak of reserved memory in the capacity of the device, of ranks where both are known."""
    found = {}
    for rank, peak in _peaks(ranks).items():
        capacity = _values(ranks[rank].memory, "capacity_bytes")
        if capacity and capacity[-1] > 0:
            found[rank] = peak / capacity[-1]
    return found


def _pressure(ranks: dict[int, StepSeries]) -> Finding | None:
    used = _shares_used(ranks)
    if not used:
        return None
    worst = max(used, key=lambda rank: used[rank])
    severity = graded(used[worst], *_PRESSURE)
    if severity is None:
        return None
    return Finding(
        kind="HIGH_PRESSURE",
        severity=severity,
        summary=f"Reserved memory of rank {worst} came to {written(used[worst])} of its device.",
        action="Reduce the batch, or checkpoint activations.",
        phase="memory",
        metric="peak_reserved",
        score=used[worst],
        ranks=(worst,),
        evidence={"pressure_frac": used[worst]},
    )


def _skew(ranks: dict[int, StepSeries]) -> Finding | None:
    peaks, used = _peaks(ranks), _shares_used(ranks)
    if len(peaks) < 2:
        return None
    worst, median = max(peaks, key=lambda rank: peaks[rank]), float(np.median([*peaks.values()]))
    if median <= 0 or worst not in used:
        return None
    skew = (peaks[worst] - median) / median
    grades = [graded(value, *limits) for value, limits in zip((skew, used[worst]), _SKEW, strict=True)]
    if None in grades:
        return None
    return Finding(
        kind="IMBALANCE",
        severity=min(grade for grade in grades if grade is not None),
        summary=(
            f"Rank {worst} reserves {written(skew)} more memory than the median rank, {written(used[worst])} of its "
            "device."
        ),
        action="Compare what the ranks work on: batch sizes, sequence lengths, parts of the model.",
        phase="memory",
        metric="peak_reserved",
        score=skew,
        skew=skew,
        ranks=(worst,),
        evidence={"skew_pct": skew, "pressure_frac": used[worst]},
    )


@dataclass(frozen=True, slots=True)
class _Growth:
    first: float
    middle: float
    last: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "_Growth":
        num = len(values)
        bands = [values[math.floor(num * start) : max(math.ceil(num * end), 1)] for start, end in _BANDS]
        return cls(*(float(np.mean(band)) for band in bands))

    @property
    def is_steady(self) -> bool:
        return self.last > self.middle > self.first


def _creep(values: dict[int, list[int]], of_process: str) -> Finding | None:
    """Memory that grows from the first to the middle to the last steps, on the worst and on the median rank."""
    growths = {rank: _Growth.of(mine) for rank, mine in values.items() if len(mine) >= _FEWEST_VALUES}
    if not growths:
        return None
    worst = max(growths, key=lambda rank: growths[rank].last - growths[rank].first)
    growth = growths[worst]
    # Ranks read their memory at different steps: the median of their bands is that of their growths.
    median = _Growth(*(float(np.median([getattr(g, band) for g in growths.values()])) for band in _Growth.__slots__))
    grown = growth.last - growth.first
    if not (growth.is_steady and median.is_steady):
        return None
    is_confirmed = grown >= _GIB
    if of_process and not is_confirmed and grown < _RISE * growth.first:
        return None
    what = "Process memory" if of_process else "Device memory in use"
    return Finding(
        kind="CREEP_CONFIRMED" if is_confirmed else "CREEP_EARLY",
        severity=Severity.warn if is_confirmed else Severity.info,
        summary=f"{what} of rank {worst} grows from {growth.first / 1e6:.0f} to {growth.last / 1e6:.0f} MB.",
        action="Look for tensors, graphs or lists that are kept from step to step."
        if is_confirmed
        else "Watch whether it goes on in a longer run.",
        phase="memory",
        metric=of_process or "allocated_bytes",
        score=grown / growth.first if growth.first else None,
        ranks=(worst,),
        evidence={
            "overall_abs_delta_bytes": grown,
            "overall_worst_growth_pct": grown / growth.first if growth.first else None,
            "baseline_bytes": growth.first,
            "recent_bytes": growth.last,
        },
    )
