"""Waiting for data, step by step: how long the loop waits, and how long the device has nothing to do meanwhile."""

from collections.abc import Sequence

import polars as pl

from chakra_capture.analysis.phase_times import phase_times
from chakra_capture.annotations import INPUT_WAIT
from chakra_capture.trace.merged import MergedTrace
from chakra_capture.trace.schema import Column

SCHEMA = (
    Column("rank", pl.Int64, "global rank"),
    Column("window", pl.Int32, "recorded window"),
    Column("step", pl.Int64, "global step number"),
    Column("dur_ns", pl.Int64, "duration of the step", "ns"),
    Column("input_wait_ns", pl.Int64, "time of the loop's thread in input_wait; null: the trace marks no such phase in "
           "any step", "ns"),
    Column("share", pl.Float64, "input_wait_ns of the step; null like it"),
    Column("device_idle_ns", pl.Int64, "time of it in which the device has nothing to do; null = not measured", "ns"),
)  # fmt: skip


def input_waits(traces: Sequence[MergedTrace], *, steps: Sequence[int] | None = None) -> pl.DataFrame:
    """A row per step and rank, in order.

    Args:
        traces: ranks.
        steps: only these.
    """
    tables = [pl.DataFrame(schema={column.name: column.dtype for column in SCHEMA})]
    for trace in traces:
        times = phase_times(trace)
        waits = times.filter(pl.col("phase") == INPUT_WAIT)
        whole = times.group_by("window", "step").agg(
            dur_ns=pl.col("wall_ns").sum(), measured=pl.col("device_idle_ns").is_not_null().all()
        )
        rows = whole.join(waits, on=["window", "step"], how="left", validate="1:1")
        # Where the phase is marked at all, a step without it did not wait.
        wait, idle = pl.col("wall_ns"), pl.col("device_idle_ns")
        if waits.height:
            wait, idle = wait.fill_null(0), pl.when("measured").then(idle.fill_null(0))
        rows = rows.with_columns(rank=pl.lit(trace.rank), input_wait_ns=wait, device_idle_ns=idle)
        rows = rows.with_columns(share=pl.col("input_wait_ns") / pl.when(pl.col("dur_ns") > 0).then("dur_ns"))
        tables.append(rows.select(pl.col(column.name).cast(column.dtype) for column in SCHEMA))
    table = pl.concat(tables).sort("window", "step", "rank")
    return table if steps is None else table.filter(pl.col("step").is_in(list(steps)))
