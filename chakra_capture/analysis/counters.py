"""Numbers over time, on the host's clock: queues of streams, memory, bandwidth of copies and collectives."""

import polars as pl

from chakra_capture.analysis.activities import device_activities
from chakra_capture.analysis.communication import bus_bytes
from chakra_capture.analysis.copies import copies_of
from chakra_capture.analysis.launches import launched_activities
from chakra_capture.trace.merged import MergedRun, MergedTrace

# As torch numbers kinds of devices: the memory of the CPU is the host's.
_CPU = 0
_NUMBERS = {
    "Device Type": "device_type", "Device Id": "device_id", "Total Allocated": "allocated",
    "Total Reserved": "reserved",
}  # fmt: skip


def queue_lengths(trace: MergedTrace) -> pl.DataFrame:
    """What was launched on a stream and has not started: ``device``, ``stream``, ``ts_ns``, ``value``; on change."""
    rows = launched_activities(trace).filter(pl.col("launch_id").is_not_null())
    return _over_time(rows.with_columns(value=pl.lit(1, pl.Int64)), ["device", "stream"], "called_ns", "started_ns")


def memory_held(trace: MergedTrace) -> pl.DataFrame:
    """Bytes of the allocator: ``device`` (null: host), ``ts_ns``, ``allocated``, ``reserved``; null: not said."""
    rows = trace.some_of_nodes("node_id", "kind", "ts_ns", "args").filter(
        (pl.col("kind") == "memory") & pl.col("ts_ns").is_not_null()
    )
    said = rows.select(
        "node_id", "ts_ns",
        *(pl.col("args").str.extract(rf'"{key}":\s*"?(-?\d+)').cast(pl.Int64, strict=False).alias(name)
          for key, name in _NUMBERS.items()),
    )  # fmt: skip
    device = pl.when(pl.col("device_type") != _CPU).then("device_id")
    return (
        said.select("ts_ns", "allocated", "reserved", "node_id", device=device).sort("ts_ns", "node_id").drop("node_id")
    )


def copy_bandwidths(trace: MergedTrace) -> pl.DataFrame:
    """Bytes per second of the copies and memsets that run: ``device``, ``ts_ns``, ``value``; on change."""
    rows = copies_of(trace, device_activities(trace)).filter(
        (pl.col("self_dur_ns") > 0) & pl.col("bytes").is_not_null()
    )
    offset = pl.col("window").cast(pl.Int64).replace_strict(trace.clock_offsets, default=0, return_dtype=pl.Int64)
    begin = pl.col("ts_ns") + offset.fill_null(0)
    value = (pl.col("bytes") * 1e9 / pl.col("self_dur_ns")).round().cast(pl.Int64)
    rows = rows.with_columns(begin=begin, stop=begin + pl.col("self_dur_ns"), value=value)
    return _over_time(rows, ["device"], "begin", "stop")


def bus_bandwidths(run: MergedRun, rank: int) -> pl.DataFrame:
    """Bytes per second of the collectives of a rank while they transfer: ``ts_ns``, ``value``; on change."""
    if run.collectives is None:
        return pl.DataFrame(schema={"ts_ns": pl.Int64, "value": pl.Int64})
    clock = run.clocks.get(rank)
    offset = 0 if clock is None or clock.reason is not None else clock.offset_ns or 0
    per_second = bus_bytes() / pl.when(pl.col("transfer_ns") > 0).then("transfer_ns") * 1e9
    rows = run.collectives.filter(pl.col("rank") == rank).with_columns(
        value=per_second.round().cast(pl.Int64, strict=False), stop=pl.col("end_ns") + offset
    )
    rows = rows.filter((pl.col("value") > 0) & pl.col("stop").is_not_null())
    return _over_time(rows.with_columns(begin=pl.col("stop") - pl.col("transfer_ns")), [], "begin", "stop")


def _over_time(rows: pl.DataFrame, keys: list[str], begin: str, end: str) -> pl.DataFrame:
    """Sum of the values of rows while they last, at each time at which it may change."""
    both = [
        rows.select(*keys, ts_ns=pl.col(column), value=pl.col("value") * sign)
        for column, sign in ((begin, 1), (end, -1))
    ]
    at = pl.concat(both).group_by(*keys, "ts_ns").agg(pl.col("value").sum()).sort(*keys, "ts_ns")
    value = pl.col("value").cum_sum()
    return at.with_columns(value.over(keys) if keys else value)
