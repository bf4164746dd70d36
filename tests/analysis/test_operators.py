import json
from collections import Counter
from pathlib import Path

import polars as pl
from builder import TraceBuilder, assert_table, merge_files
from commands import run
from handed import CASES, DATA, require

from chakra_capture.analysis.operators import SCHEMA, operator_statistics
from chakra_capture.trace.discovery import WindowFiles
from chakra_capture.trace.merged import MergedTrace

COLUMNS = ("name", "count", "self_ns", "total_ns", "device_self_ns", "device_total_ns", "num_launched")


def test_without_ranks_the_table_has_its_columns() -> None:
    assert operator_statistics([]).columns == [column.name for column in SCHEMA]


def test_device_time_counts_to_the_op_right_around_the_launch_and_to_all_that_are_open(tmp_path: Path) -> None:
    trace = TraceBuilder().step(1, 0, 100).op("linear", 0, 40).op("addmm", 10, 20)
    trace.launched("gemm", 30, 20, 1, at=12).launched("bias", 50, 5, 2, at=35).launched("loose", 60, 7, 3, at=50)
    assert_table(
        operator_statistics([trace.merged(tmp_path, host=False)]).select(COLUMNS),
        """
        name,count,self_ns,total_ns,device_self_ns,device_total_ns,num_launched
        (outside any op),1,59000,100000,7000,32000,3
        addmm,1,19000,20000,20000,20000,1
        linear,1,19000,40000,5000,25000,2
        cudaLaunchKernel,3,3000,3000,0,32000,3
        """,
    )


def test_recursion_counts_once(tmp_path: Path) -> None:
    trace = TraceBuilder().op("f", 0, 40).op("f", 10, 20).launched("k", 30, 20, 1, at=12)
    (row,) = operator_statistics([trace.merged(tmp_path, host=False)]).filter(name="f").to_dicts()
    assert (row["count"], row["self_ns"], row["total_ns"]) == (2, 39000, 40000)
    assert (row["device_self_ns"], row["device_total_ns"], row["num_launched"]) == (20000, 20000, 1)


def test_without_a_device_its_times_are_not_measured(tmp_path: Path) -> None:
    trace = TraceBuilder().op("f", 0, 40).merged(tmp_path)
    assert operator_statistics([trace]).select(COLUMNS).rows() == [("f", 1, 40000, 40000, None, None, None)]


def test_rows_of_their_own_by_shapes_phase_and_rank_and_only_of_some_steps(tmp_path: Path) -> None:
    trace = TraceBuilder().step(1, 0, 50).annotation("forward", 0, 20)
    for at, shape in ((1, 2), (5, 2), (30, 4)):
        trace.op("mm", at, 3, **{"Input Dims": [[shape, shape]]})
    trace.step(2, 50, 50).op("mm", 60, 9)
    merged = trace.merged(tmp_path, host=False)
    table = operator_statistics([merged, MergedTrace(7, merged.folder)], by=["phase", "input_shapes"], steps=[1])
    rows = table.filter(name="mm").select("phase", "input_shapes", "count", "self_ns").rows()
    assert rows == [("forward", "[[2,2]]", 4, 12000), (None, "[[4,4]]", 2, 6000)]
    by_rank = operator_statistics([merged, MergedTrace(7, merged.folder)], by=["rank"]).filter(name="mm")
    assert by_rank.select("rank", "count").rows() == [(0, 4), (7, 4)]


def test_ops_of_another_process_are_not_around_those_of_the_first(tmp_path: Path) -> None:
    # Case 027: the same thread number in two processes.
    path = require(CASES / "027-two-processes-same-tid" / "rank-0.json")
    trace = merge_files(tmp_path, WindowFiles(None, path))
    own = dict(operator_statistics([trace]).select("name", "self_ns").rows())
    assert (own["aten::to"], own["(outside any op)"]) == (5000, 740_000)


def test_self_times_of_overlapping_ops_sum_to_their_union(tmp_path: Path) -> None:
    path = require(CASES / "028-partially-overlapping-cpu-ops" / "rank-0.json")
    trace = merge_files(tmp_path, WindowFiles(None, path))
    own = dict(operator_statistics([trace]).select("name", "self_ns").rows())
    assert [own[name] for name in ("outer", "inner", "same_start_parent", "same_start_child")] == [
        50_000, 50_000, 30_000, 20_000,
    ]  # fmt: skip


def test_device_times_of_the_twin_are_those_of_walking_up_from_each_launch(tmp_path: Path) -> None:
    folder = require(DATA / "pairs" / "resnet50_ddp_twin")
    trace = merge_files(tmp_path, WindowFiles(None, folder / "device" / "rank-0.json.gz"))
    nodes = {row["node_id"]: row for row in trace.nodes.iter_rows(named=True)}
    total, right = Counter[str](), Counter[str]()
    for row in nodes.values():
        if row["kind"] not in ("kernel", "memcpy", "memset"):
            continue
        right[nodes[row["parent_id"]]["name"] if row["parent_id"] is not None else ""] += row["self_dur_ns"]
        at, names = row["launch_id"], set()
        while at is not None:
            names.add(nodes[at]["name"])
            at = nodes[at]["parent_id"]
        total.update(dict.fromkeys(names, row["self_dur_ns"]))
    table = operator_statistics([trace]).filter(~pl.col("name").str.starts_with("("))
    for name, own, device_total in table.select("name", "device_self_ns", "device_total_ns").rows():
        assert (own, device_total) == (right[name], total[name]), name
    assert table["device_self_ns"].sum() + right[""] == sum(right.values())


def test_the_command_shows_ops_by_phase(tmp_path: Path) -> None:
    folder = TraceBuilder().step(1, 0, 50).annotation("forward", 0, 20).op("mm", 5, 10).write(tmp_path)
    shown = json.loads(run("analyze", "operators", folder, "--by", "phase", "--json").out)
    assert ("forward", "mm", 10000) in [(row["phase"], row["name"], row["self_ns"]) for row in shown["rows"]]
    assert "mm" in run("analyze", "operators", folder, "--by", "phase", "shapes").out
