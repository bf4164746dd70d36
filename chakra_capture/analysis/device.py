"""Device time: compute, communication, copies and idle time, summing to the span exactly.

Definitions (interval arithmetic in integer ns over all streams): COMP = kernels that are not
communication, COMM = communication kernels, MEM = copies and memsets; exposed communication =
COMM - COMP; exposed memory = MEM - COMP - COMM; idle = span - (COMP + COMM + MEM). Hence
compute + exposed communication + exposed memory + idle = span. An activity counts up to the next start on its stream
(``self_dur_ns``). Agrees to the ns with HTA's definitions on traces in whole microseconds, over the same activities
(``hta_breakdown``).
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import polars as pl

from chakra_capture.analysis.activities import device_activities
from chakra_capture.merge import intervals
from chakra_capture.trace.columns import Int64
from chakra_capture.trace.merged import MergedTrace
from chakra_capture.trace.schema import Column

TIMES = (
    Column("num_activities", pl.Int64, "kernels, copies and memsets; of a step those of which a part runs in it"),
    Column("span_ns", pl.Int64, "first start to last end of any device activity, as counted; of a step its duration",
           "ns"),
    Column("busy_ns", pl.Int64, "time with at least one activity", "ns"),
    Column("compute_ns", pl.Int64, "time with a kernel that is not communication", "ns"),
    Column("communication_ns", pl.Int64, "time with a communication kernel", "ns"),
    Column("memory_ns", pl.Int64, "time with a copy or memset", "ns"),
    Column("exposed_communication_ns", pl.Int64, "communication while nothing computes", "ns"),
    Column("exposed_memory_ns", pl.Int64, "copies while nothing computes or communicates", "ns"),
    Column("idle_ns", pl.Int64, "time within the span without any activity", "ns"),
)  # fmt: skip
_COLUMNS = {column.name: column for column in TIMES}
_PARTS = ("span_ns", "compute_ns", "exposed_communication_ns", "exposed_memory_ns", "idle_ns")

SCHEMA = (
    Column("rank", pl.Int64, "global rank"),
    Column("window", pl.Int32, "recorded window"),
    Column("device", pl.Int64, "device"),
    Column("step", pl.Int64, "global step number; null: all that the window has of the device"),
    *(_COLUMNS[name] for name in _PARTS),
    Column("overlap", pl.Float64, "part of communication_ns in which something computes; null without communication"),
    *(column for column in TIMES if column.name not in _PARTS),
)

_Pair = tuple[Int64, Int64]


def device_breakdown(trace: MergedTrace) -> pl.DataFrame:
    """Break down the time of each device in each window: as a whole, and within each step.

    The rows of steps cover the steps alone, from start to end, whatever launched an activity: their sum is not the
    whole. Where the end of a device trace is lost only the number of activities is known; the times are null.
    """
    activities = device_activities(trace)
    steps = trace.steps.filter(pl.col("step").is_not_null() & pl.col("dur_ns").is_not_null())
    rows = []
    for (window, device), mine in activities.partition_by(
        "window", "device", as_dict=True, maintain_order=True
    ).items():
        own = steps.filter(pl.col("window") == window)
        measured = {"rank": trace.rank, "window": window, "device": device}
        for step, times in _times(mine, own, trace.device_tail_lost):
            rows.append({**measured, "step": step, **times})
    schema = pl.Schema({column.name: column.dtype for column in SCHEMA})
    hidden = pl.col("communication_ns") - pl.col("exposed_communication_ns")
    share = pl.when(pl.col("communication_ns") > 0).then(hidden / pl.col("communication_ns"))
    return pl.DataFrame(rows, schema=schema).with_columns(overlap=share)


def device_time(trace: MergedTrace) -> pl.DataFrame:
    """Sum up the windows; one row of ``TIMES``, no row without device activities.

    Of several devices of a rank the time in which any of them is busy counts once, as in the table steps.
    """
    activities, no_steps = device_activities(trace), trace.steps.clear()
    windows = activities.partition_by("window", maintain_order=True)
    rows = [times for mine in windows for _, times in _times(mine, no_steps, trace.device_tail_lost)]
    names = [column.name for column in TIMES]
    whole = pl.DataFrame(rows, schema=pl.Schema({column.name: column.dtype for column in TIMES}))
    # A sum of nulls is 0 in polars: what is not measured stays so.
    sums = [pl.when(pl.col(name).is_not_null().all()).then(pl.col(name).sum()).alias(name) for name in names]
    return whole.select(sums) if whole.height else whole.select(names)


def _times(mine: pl.DataFrame, steps: pl.DataFrame, tail_lost: bool) -> Iterator[tuple[int | None, dict[str, Any]]]:
    start, end = mine["ts_ns"].to_numpy(), mine["end_ns"].to_numpy()
    low = np.append(start.min(), steps["ts_ns"].to_numpy())
    high = np.append(end.max(), low[1:] + steps["dur_ns"].to_numpy())
    # Starts before the end, less those that are over before the start; an activity without length is where it starts.
    over = np.sort(np.maximum(end, start + 1))
    count = np.searchsorted(np.sort(start), high) - np.searchsorted(over, low, side="right")
    count[0] = mine.height
    columns = {"num_activities": count} if tail_lost else {"num_activities": count, **parts_within(mine, low, high)}
    for at, step in enumerate([None, *steps["step"].to_list()]):
        yield step, {name: int(values[at]) for name, values in columns.items()}


def parts_within(activities: pl.DataFrame, low: Int64, high: Int64) -> dict[str, Int64]:
    """The times of ``TIMES`` of one device within each of the spans [low, high)."""
    of_part = {
        name: _union(activities.filter(pl.col("part") == name)) for name in ("compute", "communication", "memory")
    }
    comp, comm, memory = (intervals.covered(*of_part[name], low, high) for name in of_part)
    comp_comm = intervals.union(*intervals.joined(of_part["compute"], of_part["communication"]))
    shown = intervals.covered(*comp_comm, low, high)
    busy = intervals.covered(*_union(activities), low, high)
    return {
        "span_ns": high - low,
        "busy_ns": busy,
        "compute_ns": comp,
        "communication_ns": comm,
        "memory_ns": memory,
        "exposed_communication_ns": shown - comp,
        "exposed_memory_ns": busy - shown,
        "idle_ns": high - low - busy,
    }


def _union(rows: pl.DataFrame) -> _Pair:
    return intervals.union(rows["ts_ns"].to_numpy(), rows["end_ns"].to_numpy())
