"""Device time of one rank: compute, communication, copies and idle time, summing to the span exactly.

Definitions (interval arithmetic in integer ns over all streams): COMP = kernels that are not
communication, COMM = communication kernels, MEM = copies and memsets; exposed communication =
COMM - COMP; exposed memory = MEM - COMP - COMM; idle = span - (COMP + COMM + MEM). Hence
compute + exposed communication + exposed memory + idle = span. An activity counts up to the next start on its stream
(``self_dur_ns``). Agrees to the ns with HTA's
definitions on traces in whole microseconds.
"""

import polars as pl

from chakra_capture.merge import intervals
from chakra_capture.trace.columns import Int64
from chakra_capture.trace.merged import MergedTrace
from chakra_capture.trace.schema import Column

SCHEMA = (
    Column("num_activities", pl.Int64, "kernels, copies and memsets"),
    Column("span_ns", pl.Int64, "first start to last end of any device activity, as counted", "ns"),
    Column("busy_ns", pl.Int64, "time with at least one activity", "ns"),
    Column("compute_ns", pl.Int64, "time with a kernel that is not communication", "ns"),
    Column("communication_ns", pl.Int64, "time with a communication kernel", "ns"),
    Column("memory_ns", pl.Int64, "time with a copy or memset", "ns"),
    Column("exposed_communication_ns", pl.Int64, "communication while nothing computes", "ns"),
    Column("exposed_memory_ns", pl.Int64, "copies while nothing computes or communicates", "ns"),
    Column("idle_ns", pl.Int64, "time within the span without any activity", "ns"),
)


def device_time(trace: MergedTrace) -> pl.DataFrame:
    """Break the device's span down; one row, no row without device activities.

    Where the end of a device trace is lost only the number of activities is known; the times are null.
    """
    schema = pl.Schema({column.name: column.dtype for column in SCHEMA})
    activities = trace.device_activities
    if activities.is_empty():
        return pl.DataFrame(schema=schema)
    if trace.device_tail_lost:
        return pl.DataFrame([{"num_activities": activities.height}], schema=schema)
    is_kernel = pl.col("kind") == "kernel"
    is_comm = pl.col("collective").is_not_null()
    comp = _intervals(activities.filter(is_kernel & ~is_comm))
    comm = _intervals(activities.filter(is_kernel & is_comm))
    mem = _intervals(activities.filter(~is_kernel))
    comp_ns = intervals.total(*comp)
    comp_comm_ns = intervals.total(*intervals.joined(comp, comm))
    start, end = _intervals(activities)
    busy_ns = intervals.total(start, end)
    span_ns = int(end.max() - start.min())
    row = {
        "num_activities": activities.height,
        "span_ns": span_ns,
        "busy_ns": busy_ns,
        "compute_ns": comp_ns,
        "communication_ns": intervals.total(*comm),
        "memory_ns": intervals.total(*mem),
        "exposed_communication_ns": comp_comm_ns - comp_ns,
        "exposed_memory_ns": busy_ns - comp_comm_ns,
        "idle_ns": span_ns - busy_ns,
    }
    return pl.DataFrame([row], schema=schema)


def _intervals(rows: pl.DataFrame) -> tuple[Int64, Int64]:
    start = rows["ts_ns"].to_numpy()
    return start, start + rows["self_dur_ns"].to_numpy()
