"""Device time as Holistic Trace Analysis defines it, to hold our numbers against its own.

HTA leaves out the last ProfilerStep: of activities it takes those whose launch starts before that step does, all of
them where fewer than two steps are marked. What is busy and not compute (kernels that are not communication) it calls
non-compute, so exposed communication and exposed copies are one number. Its rounding to whole microseconds and its
taking waits (``cuda_sync``) for kernels are not reproduced: on traces in whole microseconds without such records the
numbers are its own.
"""

import numpy as np
import polars as pl

from chakra_capture.analysis.activities import device_activities
from chakra_capture.analysis.device import parts_within
from chakra_capture.trace.merged import MergedTrace
from chakra_capture.trace.schema import Column

SCHEMA = (
    Column("rank", pl.Int64, "global rank"),
    Column("window", pl.Int32, "recorded window"),
    Column("device", pl.Int64, "device"),
    Column("num_activities", pl.Int64, "activities that count"),
    Column("kernel_time_ns", pl.Int64, "first start to last end of these", "ns"),
    Column("idle_time_ns", pl.Int64, "of that, without any", "ns"),
    Column("compute_time_ns", pl.Int64, "with a kernel that is not communication", "ns"),
    Column("non_compute_time_ns", pl.Int64, "with another activity alone", "ns"),
    Column("comp_comm_overlap_pctg", pl.Float64, "communication while something computes, percent of communication; "
           "null without any", "%"),
)  # fmt: skip


def hta_breakdown(trace: MergedTrace) -> pl.DataFrame:
    """One row per window and device; the times are null where the end of a device trace is lost."""
    activities = device_activities(trace)
    launch = trace.some_of_nodes("node_id", "ts_ns").rename({"node_id": "launch_id", "ts_ns": "launched_ns"})
    activities = activities.join(launch, on="launch_id", how="left", validate="m:1", maintain_order="left")
    steps = trace.steps.filter(pl.col("step").is_not_null())
    rows = []
    for (window, device), mine in activities.partition_by(
        "window", "device", as_dict=True, maintain_order=True
    ).items():
        starts = steps.filter(pl.col("window") == window)["ts_ns"].sort()
        counted = mine.filter(pl.col("launched_ns") < starts[-1]) if len(starts) > 1 else mine
        row = {"rank": trace.rank, "window": window, "device": device, "num_activities": counted.height}
        rows.append({**row, **({} if trace.device_tail_lost or counted.is_empty() else _times(counted))})
    return pl.DataFrame(rows, schema={column.name: column.dtype for column in SCHEMA})


def _times(counted: pl.DataFrame) -> dict[str, float | None]:
    low, high = (np.array([counted[name].to_numpy()]) for name in ("ts_ns", "end_ns"))
    parts = parts_within(counted, low.min(axis=1), high.max(axis=1))
    time = {name: int(values[0]) for name, values in parts.items()}
    comm, exposed = time["communication_ns"], time["exposed_communication_ns"]
    return {
        "kernel_time_ns": time["span_ns"],
        "idle_time_ns": time["idle_ns"],
        "compute_time_ns": time["compute_ns"],
        "non_compute_time_ns": time["exposed_communication_ns"] + time["exposed_memory_ns"],
        "comp_comm_overlap_pctg": 100 * (comm - exposed) / comm if comm else None,
    }
