"""Launches: what the calls cost the CPU, how long until the work starts, and how much work waits on its stream.

Times of the device are put on the host's clock by the offset in link.json; a start that is still before its call has no
delay and is counted. The queue of a stream at a launch is what was launched on it and has not started, the launch
itself included: never below 0, since work whose launch is not recorded is not in it.
"""

from collections.abc import Sequence

import numpy as np
import polars as pl

from chakra_capture.analysis.activities import device_activities
from chakra_capture.analysis.shares import quantile_of
from chakra_capture.trace.columns import Int64
from chakra_capture.trace.merged import MergedTrace
from chakra_capture.trace.schema import Column

SCHEMA = (
    Column("rank", pl.Int64, "global rank"),
    Column("device", pl.Int64, "device"),
    Column("stream", pl.Int64, "stream"),
    Column("call", pl.String, "launch call; null: no launch is recorded (the window opened after it)"),
    Column("num_launches", pl.Int64, "calls; null without a recorded launch"),
    Column("num_activities", pl.Int64, "device activities that they launched: more than calls of a graph"),
    Column("call_total_ns", pl.Int64, "summed durations of the calls", "ns"),
    Column("call_p50_ns", pl.Int64, "median duration of a call", "ns"),
    Column("call_p90_ns", pl.Int64, "duration that 9 of 10 calls do not exceed", "ns"),
    Column("delay_p50_ns", pl.Int64, "median time from the start of the call to that of the activity", "ns"),
    Column("delay_p90_ns", pl.Int64, "time that 9 of 10 do not exceed", "ns"),
    Column("activity_p50_ns", pl.Int64, "median duration of the activities", "ns"),
    Column("num_short", pl.Int64, "activities that are shorter than their launch call"),
    Column("queue_p50", pl.Int64, "median number of activities that were launched on the stream and had not started, "
           "at the start of a call, its own included"),
    Column("queue_max", pl.Int64, "largest such number"),
    Column("num_backward", pl.Int64, "activities that start before their call does: a fault of the clocks"),
)  # fmt: skip


def launch_statistics(traces: Sequence[MergedTrace], *, steps: Sequence[int] | None = None) -> pl.DataFrame:
    """Sum up launches by stream and call, the calls that cost most first.

    Args:
        traces: ranks.
        steps: only what these steps launched; the queue counts what others launched, too.
    """
    keys = ["rank", "device", "stream", "call"]
    tables = [pl.DataFrame(schema={column.name: column.dtype for column in SCHEMA})]
    for trace in traces:
        rows = launched_activities(trace)
        if steps is not None:
            rows = rows.filter(pl.col("step").is_in(list(steps)))
        known = pl.col("launch_id").count() > 0
        # A graph launches many activities, on several streams: its call counts once on each.
        calls = rows.unique(["device", "stream", "launch_id"], keep="first")
        of_calls = calls.group_by("device", "stream", "call").agg(
            num_launches=pl.when(known).then(pl.col("launch_id").count()),
            call_total_ns=pl.when(known).then(pl.col("call_ns").sum()),
            call_p50_ns=quantile_of("call_ns", 1, 2),
            call_p90_ns=quantile_of("call_ns", 9, 10),
        )
        of_work = rows.group_by("device", "stream", "call").agg(
            num_activities=pl.len(),
            delay_p50_ns=quantile_of("delay_ns", 1, 2),
            delay_p90_ns=quantile_of("delay_ns", 9, 10),
            activity_p50_ns=quantile_of("self_dur_ns", 1, 2),
            num_short=pl.when(known).then((pl.col("self_dur_ns") < pl.col("call_ns")).sum()),
            queue_p50=quantile_of("queue", 1, 2),
            queue_max=pl.col("queue").max(),
            num_backward=pl.when(known).then(pl.col("is_backward").sum()),
        )
        both = of_work.join(of_calls, on=keys[1:], how="left", nulls_equal=True, validate="1:1")
        both = both.with_columns(rank=pl.lit(trace.rank))
        tables.append(both.select(pl.col(column.name).cast(column.dtype) for column in SCHEMA))
    order = ["call_total_ns", *keys]
    return pl.concat(tables).sort(order, descending=[True, False, False, False, False], nulls_last=True)


def launched_activities(trace: MergedTrace) -> pl.DataFrame:
    """Device activities with their launch call, the delay of their start and the queue that the call finds.

    ``called_ns`` and ``started_ns`` are on the host's clock; an activity does not start before its call.
    """
    rows = device_activities(trace, "step")
    calls = trace.some_of_nodes("kind", "node_id", "name", "ts_ns", "dur_ns").filter(pl.col("kind") == "runtime")
    calls = calls.select(launch_id="node_id", call="name", called_ns="ts_ns", call_ns="dur_ns")
    rows = rows.join(calls, on="launch_id", how="left", validate="m:1", maintain_order="left")
    # A launch that was cut out of the file, as by a slice, is none.
    rows = rows.with_columns(launch_id=pl.when(pl.col("called_ns").is_not_null()).then("launch_id"))
    offsets = trace.clock_offsets
    offset = pl.col("window").cast(pl.Int64).replace_strict(offsets, default=0, return_dtype=pl.Int64)
    lag = pl.col("ts_ns") + offset - pl.col("called_ns")
    rows = rows.with_columns(is_backward=lag < 0, delay_ns=pl.when(lag >= 0).then(lag))
    start = pl.max_horizontal(pl.col("ts_ns") + offset, "called_ns").alias("started_ns")
    return rows.with_columns(start).with_columns(
        queue=pl.struct("called_ns", "started_ns")
        .map_batches(_queue, return_dtype=pl.Int64)
        .over("window", "device", "stream")
    )


def _queue(stream: pl.Series) -> pl.Series:
    """How many of the launched have not started when each call begins; null without a launch."""
    table = stream.struct.unnest()
    called, known = table["called_ns"].fill_null(0).to_numpy(), table["called_ns"].is_not_null().to_numpy()
    started = np.sort(table["started_ns"].to_numpy()[known])
    waiting: Int64 = np.searchsorted(np.sort(called[known]), called, side="right")
    waiting = waiting - np.searchsorted(started, called, side="right")
    return pl.Series(waiting).zip_with(pl.Series(known), pl.Series([None], dtype=pl.Int64))
