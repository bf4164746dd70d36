"""The steps table: bounds of each recorded step, and how long the device was busy within it."""

import numpy as np
import polars as pl

from chakra_capture.merge import intervals
from chakra_capture.merge.link import match_keys
from chakra_capture.merge.rows import ACTIVITY_KINDS
from chakra_capture.merge.tables import Columns, step_rows
from chakra_capture.trace.columns import MISSING, Bool, Int64, missing
from chakra_capture.trace.schema import STEPS


def steps_table(
    columns: Columns,
    window: int,
    first_node_id: int,
    *,
    cut_steps: tuple[int, ...] | None = None,
    device_tail_lost: bool = False,
) -> pl.DataFrame:
    """One row per ProfilerStep of one window, in time order.

    Device busy and idle time are those between the step's own bounds, whatever step launched the
    activity, so that they sum to the step; they are null where the trace has no device events, or may have lost
    some. ``cut_steps`` are those that a manifest says were cut short, None if no manifest says.
    """
    rows = step_rows(columns)
    ts, dur = columns.ts_ns[rows], columns.dur_ns[rows]
    known = (ts != MISSING) & (dur != MISSING)
    # A device trace is not in time order: what a lost tail held may have run in any step.
    busy, count = (missing(len(rows)),) * 2 if device_tail_lost else _device_time(columns, rows, known)
    values = {
        "window": np.full(len(rows), window),
        "step": columns.step[rows],
        "node_id": rows + first_node_id,
        "pid": columns.integers("pid", rows),
        "ts_ns": ts,
        "dur_ns": np.where(known, dur, MISSING),
        "device_busy_ns": busy,
        "device_idle_ns": np.where(busy != MISSING, dur - np.where(busy != MISSING, busy, 0), MISSING),
        "num_device_activities": count,
    }
    table = pl.DataFrame(
        [
            pl.Series(name, values[name]).replace(MISSING, None).cast(dtype)
            if name in values
            else pl.repeat(name == "profiled" or None, len(rows), dtype=dtype, eager=True).alias(name)
            for name, dtype in STEPS.schema.items()
        ]
    )
    if cut_steps is None:
        return table
    # A warm-up step is run, not recorded, by our own recorder.
    return table.with_columns(partial=pl.col("step").is_in(list(cut_steps)), warmup=pl.lit(False))


def _device_time(columns: Columns, rows: Int64, known: Bool) -> tuple[Int64, Int64]:
    """Busy ns within each step and activities launched in it; ``MISSING`` without device events or an end."""
    activity = columns.is_kind(*ACTIVITY_KINDS)
    timed = activity & (columns.self_ns != MISSING)
    if not timed.any():
        return missing(len(rows)), missing(len(rows))
    start = columns.ts_ns[timed]
    union = intervals.union(start, start + columns.self_ns[timed])
    low = np.where(known, columns.ts_ns[rows], 0)
    busy = intervals.covered(*union, low, low + np.where(known, columns.dur_ns[rows], 0))
    steps, counts = np.unique(columns.step[activity], return_counts=True)
    at = match_keys(columns.step[rows], steps)
    count = np.where(at >= 0, counts[np.maximum(at, 0)], 0)
    return np.where(known, busy, MISSING), np.where(known, count, MISSING)
