"""How much of the recorded steps passes in communication, on any thread or stream: each stretch of time counts once."""

from collections.abc import Sequence

import polars as pl

from chakra_capture.merge import intervals
from chakra_capture.trace.merged import MergedTrace


def communication_cover(traces: Sequence[MergedTrace]) -> float | None:
    """The part of the recorded steps of all ranks (of windows that mark none) with an operation; None without time."""
    covered, total = 0, 0
    for trace in traces:
        marks = trace.steps.filter(pl.col("ts_ns").is_not_null() & pl.col("dur_ns").is_not_null())
        steps = marks.filter(pl.col("step").is_not_null())
        steps = (steps if steps.height else marks).sort("ts_ns")
        low = steps["ts_ns"].to_numpy()
        high = low + steps["dur_ns"].to_numpy()
        rows = trace.communication.filter(pl.col("ts_ns").is_not_null() & pl.col("dur_ns").is_not_null())
        start = rows["ts_ns"].to_numpy()
        busy = intervals.union(start, start + rows["dur_ns"].to_numpy())
        covered += int(intervals.covered(*busy, low, high).sum())
        total += int((high - low).sum())
    return covered / total if total else None
