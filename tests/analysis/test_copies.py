from pathlib import Path

from builder import TraceBuilder, assert_table, merge_files
from commands import run
from handed import DATA, expected_breakdown, require

from chakra_capture.analysis.copies import SCHEMA, copy_statistics
from chakra_capture.trace.discovery import WindowFiles

TO_DEVICE, FROM_DEVICE = "Memcpy HtoD (Pinned -> Device)", "Memcpy DtoH (Device -> Pageable)"


def test_without_copies_or_ranks_there_is_no_row(tmp_path: Path) -> None:
    names = [column.name for column in SCHEMA]
    assert copy_statistics([]).columns == names
    assert copy_statistics([TraceBuilder().kernel("k", 0, 5).merged(tmp_path, host=False)]).rows() == []


def test_bandwidth_by_direction_and_what_no_kernel_hides(tmp_path: Path) -> None:
    trace = TraceBuilder().kernel("gemm", 0, 10, stream=1)
    for stream, ts, dur, size in ((2, 5, 10, 10_000), (3, 10, 10, 30_000)):
        trace.kernel(TO_DEVICE, ts, dur, cat="gpu_memcpy", stream=stream, bytes=size)
    trace.kernel(FROM_DEVICE, 50, 4, cat="gpu_memcpy").kernel("Memset (Device)", 60, 2, cat="gpu_memset", bytes=8_000)
    columns = ("direction", "memory", "count", "bytes", "total_ns", "bandwidth", "bandwidth_p50", "exposed_ns")
    assert_table(
        copy_statistics([trace.merged(tmp_path, host=False)]).select(columns),
        """
        direction,memory,count,bytes,total_ns,bandwidth,bandwidth_p50,exposed_ns
        HtoD,Pinned -> Device,2,40000,20000,2e+09,2e+09,10000
        DtoH,Device -> Pageable,1,,4000,,,4000
        memset,Device,1,8000,2000,4e+09,4e+09,2000
        """,
    )


def test_only_what_some_steps_launched(tmp_path: Path) -> None:
    trace = TraceBuilder().step(1, 0, 50).step(2, 50, 50)
    trace.launched(TO_DEVICE, 10, 5, 1, at=5, cat="gpu_memcpy").launched(TO_DEVICE, 60, 7, 2, at=55, cat="gpu_memcpy")
    assert copy_statistics([trace.merged(tmp_path, host=False)], steps=[2])["total_ns"].to_list() == [7000]


def test_copies_of_the_twin_are_exposed_as_handed(tmp_path: Path) -> None:
    path = require(DATA / "pairs" / "resnet50_ddp_twin" / "device" / "rank-0.json.gz")
    table = copy_statistics([merge_files(tmp_path, WindowFiles(None, path))])
    assert table["exposed_ns"].sum() == expected_breakdown()["pairs/resnet50_ddp_twin"]["exposed_mem_ns"]


def test_the_command_shows_bandwidth_for_people(tmp_path: Path) -> None:
    folder = TraceBuilder().kernel(TO_DEVICE, 0, 10, cat="gpu_memcpy", bytes=20_000).write(tmp_path)
    assert "2.0 GB/s" in run("analyze", "memory", folder).out
