import json
import math
import statistics
import tempfile
from pathlib import Path

from builder import TraceBuilder, assert_table, merge_files
from commands import run
from handed import CASES, DATA, expected_breakdown, require
from hypothesis import given, settings
from hypothesis import strategies as st

from chakra_capture.analysis.kernels import SCHEMA, kernel_statistics
from chakra_capture.trace.discovery import WindowFiles
from chakra_capture.trace.merged import MergedTrace


def test_without_activities_or_ranks_there_is_no_row(tmp_path: Path) -> None:
    names = [column.name for column in SCHEMA]
    assert kernel_statistics([]).columns == names
    table = kernel_statistics([TraceBuilder().op("a", 0, 1).merged(tmp_path)])
    assert (table.height, table.columns) == (0, names)


def test_statistics_are_of_single_launches_over_all_ranks(tmp_path: Path) -> None:
    first = TraceBuilder().kernel("gemm", 0, 10).kernel("gemm", 20, 30).kernel("copy", 60, 10).merged(tmp_path / "a")
    other = MergedTrace(1, TraceBuilder().kernel("gemm", 0, 50).merged(tmp_path / "b").folder)
    columns = ("name", "count", "total_ns", "mean_ns", "min_ns", "p50_ns", "p90_ns", "max_ns", "share")
    assert_table(
        kernel_statistics([first, other]).select(columns),
        """
        name,count,total_ns,mean_ns,min_ns,p50_ns,p90_ns,max_ns,share
        gemm,3,90000,30000,10000,30000,50000,50000,0.9
        copy,1,10000,10000,10000,10000,10000,10000,0.1
        """,
    )
    by_rank = kernel_statistics([first, other], by=["rank"]).select("rank", "name", "total_ns").rows()
    assert by_rank == [(1, "gemm", 50000), (0, "gemm", 40000), (0, "copy", 10000)]


def test_rows_of_their_own_by_phase_and_only_of_some_steps(tmp_path: Path) -> None:
    trace = TraceBuilder().step(1, 0, 50).annotation("forward", 0, 20).launched("k", 5, 10, 1, at=1)
    trace.launched("k", 30, 20, 2, at=25).step(2, 50, 50).launched("k", 60, 40, 3, at=55)
    merged = trace.merged(tmp_path, host=False)
    rows = kernel_statistics([merged], by=["phase"], steps=[1]).select("phase", "name", "total_ns").rows()
    assert rows == [(None, "k", 20000), ("forward", "k", 10000)]


def test_what_reaches_past_the_next_start_is_clipped_and_counted(tmp_path: Path) -> None:
    # Case 014: 900 us as recorded, 420 us possible on one stream.
    path = require(CASES / "014-duration-overflows-next-slice" / "rank-0.json")
    table = kernel_statistics([merge_files(tmp_path, WindowFiles(None, path))])
    sums = table.filter(kind="kernel").select("raw_total_ns", "total_ns", "num_clipped").sum().row(0)
    assert sums == (900_000, 420_000, 1)


def test_kernels_of_a_graph_are_counted(tmp_path: Path) -> None:
    path = require(CASES / "017-cuda-graph-one-launch-many-kernels" / "rank-0.json")
    table = kernel_statistics([merge_files(tmp_path / "out", WindowFiles(None, path))])
    assert table.select("count", "num_in_graphs").sum().row(0) == (4, 4)


def test_kernels_below_a_microsecond_keep_their_time(tmp_path: Path) -> None:
    path = require(CASES / "010-sub-microsecond-kernels" / "rank-0.json")
    table = kernel_statistics([merge_files(tmp_path, WindowFiles(None, path))]).filter(kind="kernel")
    assert (table["count"].sum(), table["total_ns"].sum(), table["min_ns"].min()) == (5, 1000, 200)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(1, 30)), min_size=1, max_size=40))
def test_every_statistic_is_that_of_the_list_of_durations(launches: list[tuple[str, int]]) -> None:
    trace, at = TraceBuilder(), 0
    for name, dur in launches:
        trace.kernel(name, at, dur)
        at += dur
    with tempfile.TemporaryDirectory() as folder:
        table = kernel_statistics([trace.merged(Path(folder), host=False)])
    assert table["total_ns"].sum() == 1000 * at
    for row in table.iter_rows(named=True):
        durations = sorted(1000 * dur for name, dur in launches if name == row["name"])
        assert row["mean_ns"] == statistics.fmean(durations)
        assert (row["min_ns"], row["max_ns"]) == (durations[0], durations[-1])
        assert row["p50_ns"] == statistics.median_low(durations)
        assert row["p90_ns"] == durations[math.ceil(len(durations) * 9 / 10) - 1]
        assert math.isclose(row["share"], sum(durations) / (1000 * at))


def test_longest_kernels_of_the_twin_are_those_handed(tmp_path: Path) -> None:
    path = require(DATA / "pairs" / "resnet50_ddp_twin" / "device" / "rank-0.json.gz")
    table = kernel_statistics([merge_files(tmp_path, WindowFiles(None, path))])
    handed = expected_breakdown()["pairs/resnet50_ddp_twin"]
    top = [(row["name"], row["count"], row["sum_ns"]) for row in handed["kernel_top"]]
    assert table.head(len(top)).select("name", "count", "total_ns").rows() == top
    assert table["total_ns"].sum() == handed["sum_durations_ns"]


def test_the_command_says_what_share_graphs_launch(tmp_path: Path) -> None:
    trace = TraceBuilder().runtime("cudaGraphLaunch", 0, 5, 1).kernel("a", 10, 30, 1).kernel("b", 40, 10, 2)
    folder = trace.write(tmp_path)
    shown = json.loads(run("analyze", "kernels", folder, "--json").out)
    assert shown["notes"] == ["75.0 % of the device time is launched by graphs: which op it belongs to is not recorded"]
    rows = json.loads(run("analyze", "kernels", folder, "--json", "--by", "rank").out)["rows"]
    assert [(row["rank"], row["name"]) for row in rows] == [(0, "a"), (0, "b")]
