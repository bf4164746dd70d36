"""The steps table: bounds of each recorded step, and how long the device was busy within it."""

from dataclasses import dataclass

import numpy as np
import polars as pl

from chakra_capture.merge import intervals
from chakra_capture.merge.rows import ACTIVITY_KINDS, DEVICE_KINDS
from chakra_capture.merge.tables import Columns, step_rows
from chakra_capture.trace.columns import MISSING, Int64, missing
from chakra_capture.trace.keys import match_keys
from chakra_capture.trace.schema import STEPS


def steps_table(
    columns: Columns,
    window: int,
    first_node_id: int,
    *,
    cut_steps: tuple[int, ...] | None = None,
    device_tail_lost: bool = False,
) -> pl.DataFrame:
    """One row per ProfilerStep of one window, in time order; without any, one for the window as a whole.

    Device busy and idle time are those between the step's own bounds, whatever step launched the
    activity, so that they sum to the step; they are null where the trace has no device events, or may have lost
    some. ``cut_steps`` are those that a manifest says were cut short, None if no manifest says.
    """
    rows = step_rows(columns)
    spans = _step_spans(columns, rows, first_node_id) if len(rows) else _window_span(columns)
    size = len(spans.step)
    # A device trace is not in time order: what a lost tail held may have run in any step.
    busy, count = (missing(size),) * 2 if device_tail_lost else _device_time(columns, spans)
    values = {
        "window": np.full(size, window),
        "step": spans.step,
        "node_id": spans.node_id,
        "pid": spans.pid,
        "ts_ns": spans.ts_ns,
        "dur_ns": spans.dur_ns,
        "device_busy_ns": busy,
        "device_idle_ns": np.where(busy != MISSING, spans.dur_ns - np.where(busy != MISSING, busy, 0), MISSING),
        "num_device_activities": count,
    }
    table = pl.DataFrame(
        [
            pl.Series(name, values[name]).replace(MISSING, None).cast(dtype)
            if name in values
            else pl.repeat(name == "profiled" or None, size, dtype=dtype, eager=True).alias(name)
            for name, dtype in STEPS.schema.items()
        ]
    )
    if cut_steps is None:
        return table
    # A warm-up step is run, not recorded, by our own recorder.
    return table.with_columns(partial=pl.col("step").is_in(list(cut_steps)), warmup=pl.lit(False))


@dataclass(frozen=True, slots=True)
class _Spans:
    """Rows of the steps table to be: steps, or one span without a number or node that is the whole window."""

    step: Int64
    node_id: Int64
    pid: Int64
    ts_ns: Int64
    dur_ns: Int64


def _step_spans(columns: Columns, rows: Int64, first_node_id: int) -> _Spans:
    ts, dur = columns.ts_ns[rows], columns.dur_ns[rows]
    known = (ts != MISSING) & (dur != MISSING)
    return _Spans(
        step=columns.step[rows],
        node_id=rows + first_node_id,
        pid=columns.integers("pid", rows),
        ts_ns=ts,
        dur_ns=np.where(known, dur, MISSING),
    )


def _window_span(columns: Columns) -> _Spans:
    """First start to last end of what ran; nothing where nothing has a time."""
    on_cpu = columns.is_kind("host_op", "annotation", "python_function", "runtime")
    timed = (columns.ts_ns != MISSING) & (columns.dur_ns != MISSING)
    rows = np.flatnonzero(timed & (on_cpu | columns.is_kind(*DEVICE_KINDS)))
    if not len(rows):
        return _Spans(*[missing(0)] * 5)
    start = columns.ts_ns[rows].min(keepdims=True)
    end = (columns.ts_ns[rows] + columns.dur_ns[rows]).max(keepdims=True)
    pids = np.unique(columns.integers("pid", np.flatnonzero(timed & on_cpu)))
    return _Spans(missing(1), missing(1), pids if len(pids) == 1 else missing(1), start, end - start)


def _device_time(columns: Columns, spans: _Spans) -> tuple[Int64, Int64]:
    """Busy ns within each span and activities launched in it; ``MISSING`` without device events or an end."""
    activity = columns.is_kind(*ACTIVITY_KINDS)
    timed = activity & (columns.self_ns != MISSING)
    if not timed.any():
        return missing(len(spans.step)), missing(len(spans.step))
    start = columns.ts_ns[timed]
    union = intervals.union(start, start + columns.self_ns[timed])
    known = spans.dur_ns != MISSING
    low = np.where(known, spans.ts_ns, 0)
    busy = intervals.covered(*union, low, low + np.where(known, spans.dur_ns, 0))
    steps, counts = np.unique(columns.step[activity], return_counts=True)
    at = match_keys(spans.step, steps)
    count = np.where(at >= 0, counts[np.maximum(at, 0)], 0)
    count[spans.step == MISSING] = np.count_nonzero(activity)
    return np.where(known, busy, MISSING), np.where(known, count, MISSING)
