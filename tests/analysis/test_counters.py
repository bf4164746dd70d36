"""Numbers over time, each case by hand."""

from pathlib import Path

import polars as pl
from builder import TraceBuilder, assert_table

from chakra_capture.analysis import counters
from chakra_capture.trace.merged import MergedRun
from chakra_capture.trace.schema import COLLECTIVES


def since(table: pl.DataFrame, zero: int) -> pl.DataFrame:
    return table.with_columns(ts_ns=pl.col("ts_ns") - zero)


def first_ns(trace) -> int:
    return int(trace.nodes["ts_ns"].min())


def test_a_queue_grows_with_each_launch_and_shrinks_when_work_starts(tmp_path: Path) -> None:
    built = TraceBuilder()
    for number, (at, start) in enumerate([(0, 5), (10, 65), (20, 70)]):
        built.launched("k", start, 5, number + 1, at=at)
    built.kernel("launched before the window", 1, 2)
    trace = built.merged(tmp_path, host=False)
    assert_table(
        since(counters.queue_lengths(trace), first_ns(trace)),
        """
        device,stream,ts_ns,value
        0,7,0,1
        0,7,5000,0
        0,7,10000,1
        0,7,20000,2
        0,7,65000,1
        0,7,70000,0
        """,
    )


def test_bandwidths_of_copies_at_one_time_add_up(tmp_path: Path) -> None:
    built = TraceBuilder()
    for number, (start, dur, size, stream) in enumerate([(10, 10, 10_000, 7), (15, 10, 40_000, 8), (40, 0, 5, 7)]):
        built.runtime("cudaMemcpyAsync", number, 1, number + 1)
        built.kernel(
            "Memcpy HtoD (Pinned -> Device)", start, dur, number + 1, stream=stream, cat="gpu_memcpy", bytes=size
        )
    trace = built.merged(tmp_path, host=False)
    assert_table(
        since(counters.copy_bandwidths(trace), first_ns(trace)),
        """
        device,ts_ns,value
        0,10000,1000000000
        0,15000,5000000000
        0,20000,4000000000
        0,25000,0
        """,
    )


def test_memory_is_that_of_the_host_or_of_a_device(tmp_path: Path) -> None:
    built = TraceBuilder().op("a", 0, 10)
    for ts, kind, device, allocated in ((1, 0, -1, 100), (2, 1, 0, 200), (3, 1, 0, 50)):
        numbers = {"Device Type": kind, "Device Id": device, "Total Allocated": allocated, "Bytes": 1, "Addr": 1}
        built.event(ph="i", cat="cpu_instant_event", name="[memory]", s="t", pid=100, tid=11, ts=ts, args=numbers)
    trace = built.merged(tmp_path, host=False)
    assert_table(
        since(counters.memory_held(trace), first_ns(trace)),
        """
        device,ts_ns,allocated,reserved
        ,1000,100,
        0,2000,200,
        0,3000,50,
        """,
    )


def test_bus_bandwidth_lasts_for_the_transfer_on_the_clock_of_the_rank(tmp_path: Path) -> None:
    row = {
        "rank": 1, "collective": "all_reduce", "comm_bytes": 1000, "num_ranks": 4, "transfer_ns": 500, "end_ns": 10_000,
    }  # fmt: skip
    table = pl.DataFrame([row, {**row, "transfer_ns": None}, {**row, "rank": 0}])
    table = table.select(
        (pl.col(name) if name in row else pl.lit(None)).cast(dtype).alias(name)
        for name, dtype in COLLECTIVES.schema.items()
    )
    table.write_parquet(tmp_path / "collectives.parquet")
    (tmp_path / "alignment.json").write_text('{"clocks": {"1": {"offset_ns": 300}}}')
    # 1000 B in 500 ns are 2 GB/s, of 4 ranks 2 x 3/4 of it on each link.
    assert_table(
        counters.bus_bandwidths(MergedRun(tmp_path), 1),
        """
        ts_ns,value
        9800,3000000000
        10300,0
        """,
    )
    assert counters.bus_bandwidths(MergedRun(tmp_path), 2).height == 0
    assert counters.bus_bandwidths(MergedRun(tmp_path / "none"), 1).height == 0
