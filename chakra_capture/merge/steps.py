"""The steps table: bounds of each recorded step, and how long the device was busy within it."""

import numpy as np
import polars as pl

from chakra_capture.merge import intervals
from chakra_capture.merge.rows import ACTIVITY_KINDS
from chakra_capture.merge.tables import Columns, step_rows
from chakra_capture.trace.columns import MISSING
from chakra_capture.trace.schema import STEPS


def steps_table(
    columns: Columns, window: int, first_node_id: int, cut_steps: tuple[int, ...] | None = None
) -> pl.DataFrame:
    """One row per ProfilerStep of one window, in time order.

    Device busy and idle time are those between the step's own bounds, whatever step launched the
    activity, so that they sum to the step; they are null where the trace has no device events.
    ``cut_steps`` are those that a manifest says were cut short, None if no manifest says.
    """
    rows = [_step(columns, int(row), window, first_node_id) for row in step_rows(columns)]
    table = pl.DataFrame(rows, schema=STEPS.schema, orient="row")
    if cut_steps is None:
        return table
    # A warm-up step is run, not recorded, by our own recorder.
    return table.with_columns(partial=pl.col("step").is_in(list(cut_steps)), warmup=pl.lit(False))


def _step(columns: Columns, row: int, window: int, first_node_id: int) -> dict[str, object]:
    ts, dur = int(columns.ts_ns[row]), int(columns.dur_ns[row])
    known = ts != MISSING and dur != MISSING
    values: dict[str, object] = dict.fromkeys(STEPS.schema.names())
    values |= {
        "window": window,
        "step": int(columns.step[row]),
        "node_id": first_node_id + row,
        "pid": None if columns.pid[row] == MISSING else int(columns.pid[row]),
        "ts_ns": ts if ts != MISSING else None,
        "dur_ns": dur if known else None,
        "profiled": True,
    }
    activity = columns.is_kind(*ACTIVITY_KINDS) & (columns.ts_ns != MISSING) & (columns.dur_ns != MISSING)
    if known and activity.any():
        start = columns.ts_ns[activity]
        busy = intervals.total(*intervals.clip(start, start + columns.dur_ns[activity], ts, ts + dur))
        launched = columns.is_kind(*ACTIVITY_KINDS) & (columns.step == columns.step[row])
        values |= {
            "device_busy_ns": busy,
            "device_idle_ns": dur - busy,
            "num_device_activities": int(np.count_nonzero(launched)),
        }
    return values
