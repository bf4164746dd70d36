import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from builder import MAIN, TraceBuilder, assert_table
from commands import run
from handed import CASES, DATA, load_json, require

from chakra_capture.analysis.spotted import SCHEMA, spotted
from chakra_capture.trace.merged import MergedTrace

COLUMNS = (
    "what",
    "name",
    "count",
    "cpu_ns",
    "cpu_share",
    "backward_share",
    "num_launched",
    "device_ns",
    "device_share",
)


def function(trace: TraceBuilder, name: str, ts: int, dur: int, number: int) -> TraceBuilder:
    """A function of backward and its own op, as the engine calls them."""
    args = {"Sequence number": number}
    return trace.op(f"autograd::engine::evaluate_function: {name}", ts, dur, **args).op(name, ts + 1, dur - 2, **args)


def numbered(trace: TraceBuilder, name: str, ts: int, dur: int, number: int) -> TraceBuilder:
    return trace.op(name, ts, dur, **{"Sequence number": number})


def without_conversions(trace: TraceBuilder, folder: Path) -> list[tuple[Any, ...]]:
    table = spotted([trace.merged(folder, host=False)]).filter(what="recompute")
    return table.select("name", "count", "cpu_ns").rows()


def test_without_ranks_there_is_no_row() -> None:
    assert spotted([]).columns == [column.name for column in SCHEMA]


def test_forward_run_again_in_backward_is_recompute_with_all_it_launches(tmp_path: Path) -> None:
    trace = TraceBuilder().step(1, 0, 200)
    numbered(trace, "aten::mm", 5, 10, 7).launched("gemm", 30, 20, 1, at=6)
    function(trace, "MmBackward0", 100, 50, 7)
    # In the hook that gives back what was saved: a linear and what it is made of, then the function's own work.
    numbered(trace, "aten::linear", 105, 20, 8)
    numbered(trace, "aten::mm", 106, 10, 8).launched("gemm", 110, 20, 2, at=108)
    trace.op("aten::mm", 130, 10).launched("gemm", 140, 40, 3, at=131)
    assert_table(
        spotted([trace.merged(tmp_path, host=False)]).filter(what="recompute").select(COLUMNS),
        """
        what,name,count,cpu_ns,cpu_share,backward_share,num_launched,device_ns,device_share
        recompute,,1,20000,0.1,0.4,1,20000,0.25
        recompute,aten::linear,1,20000,0.1,0.4,1,20000,0.25
        """,
    )


def test_a_checkpoint_that_runs_its_own_backward_is_recompute_too(tmp_path: Path) -> None:
    trace = TraceBuilder()
    numbered(trace, "CheckpointFunction", 5, 10, 7)
    function(trace, "CheckpointFunctionBackward", 100, 80, 7)
    numbered(trace, "aten::mm", 105, 20, 8)
    function(trace, "MmBackward0", 130, 30, 8)
    assert without_conversions(trace, tmp_path) == [(None, 1, 20_000), ("aten::mm", 1, 20_000)]


def test_backward_that_is_differentiated_again_is_no_recompute(tmp_path: Path) -> None:
    trace = TraceBuilder()
    numbered(trace, "aten::mm", 5, 10, 7)
    function(trace, "MmBackward0", 100, 50, 7)
    numbered(trace, "aten::matmul", 105, 20, 8)
    numbered(trace, "aten::mm", 106, 10, 8)
    function(trace, "MmBackward0", 200, 30, 8)
    assert without_conversions(trace, tmp_path) == [(None, 0, 0)]


def test_without_any_number_recompute_is_not_measured(tmp_path: Path) -> None:
    trace = TraceBuilder().op("aten::mm", 5, 10).op("autograd::engine::evaluate_function: MmBackward0", 20, 9)
    assert without_conversions(trace, tmp_path) == [(None, None, None)]


@pytest.mark.parametrize(
    "types", [["c10::BFloat16", "float", "Scalar"], ["Tensor(c10::BFloat16)", "Tensor(float)", "Bool"]]
)
def test_copies_to_another_type_are_conversions_with_the_op_around_them(types: list[str], tmp_path: Path) -> None:
    trace = TraceBuilder().step(1, 0, 100).op("aten::_to_copy", 0, 20)
    trace.op("aten::copy_", 10, 5, **{"Input type": types}).launched("copy", 20, 4, 1, at=12)
    trace.op("aten::copy_", 30, 10, **{"Input type": types})
    trace.op("aten::copy_", 50, 10, **{"Input type": [types[0], types[0], types[2]]}).launched("copy", 60, 6, 2, at=52)
    assert_table(
        spotted([trace.merged(tmp_path, host=False)]).filter(what="dtype conversion").select(COLUMNS),
        """
        what,name,count,cpu_ns,cpu_share,backward_share,num_launched,device_ns,device_share
        dtype conversion,,2,30000,0.3,,1,4000,0.4
        dtype conversion,float -> BFloat16,2,30000,0.3,,1,4000,0.4
        """,
    )


def test_without_types_conversions_are_not_measured_and_without_copies_there_are_none(tmp_path: Path) -> None:
    for name, count in (("aten::copy_", None), ("aten::mm", 0)):
        trace = TraceBuilder().op(name, 0, 20).merged(tmp_path / name[-3:], host=False)
        assert spotted([trace]).filter(what="dtype conversion")["count"].to_list() == [count]


def test_only_what_some_steps_hold_counts(tmp_path: Path) -> None:
    trace = TraceBuilder().step(1, 0, 50).step(2, 50, 50)
    for at in (10, 60, 70):
        trace.op("aten::copy_", at, 5, **{"Input type": ["float", "double", "Scalar"]})
    table = spotted([trace.merged(tmp_path, host=False)], steps=[2]).filter(
        what="dtype conversion", name="double -> float"
    )
    assert table.select("count", "cpu_share").rows() == [(2, 0.2)]


def test_what_graphs_launch_is_a_share_of_the_device_time(tmp_path: Path) -> None:
    path = require(CASES / "017-cuda-graph-one-launch-many-kernels")
    assert run("merge", "--device", path / "rank-0.json", "-o", tmp_path).code == 0
    rows = json.loads(run("analyze", "spotted", tmp_path, "--json").out)["rows"]
    (row,) = [row for row in rows if row["what"] == "graph" and row["name"] is None]
    expected = load_json(path / "expect.json")
    assert (row["count"], row["num_launched"]) == (expected["launches"], expected["kernels"])
    assert row["device_share"] == float(expected["graph_share_of_gpu_time"])


def conversions(events: list[dict[str, Any]]) -> Counter[str]:
    """Count from the file itself."""
    found: Counter[str] = Counter()
    for event in events:
        types = (event.get("args") or {}).get("Input type")
        if event.get("name") == "aten::copy_" and event.get("cat") in ("cpu_op", "Operator") and types:
            to, of = (re.sub(r"^c10::", "", name) for name in types[:2])
            if to != of:
                found[f"{of} -> {to}"] += 1
    return found


@pytest.mark.parametrize(
    "name", ["h100_qwen_0_5b_chat", "mi300_qwen_0_5b_chat", "hta_trace_diff_control", "vllm_decode_cuda_graph"]
)
def test_conversions_and_graphs_of_real_traces_are_those_of_their_files(merged: Any, name: str) -> None:
    (folder,) = merged(f"device_only/{name}").glob("rank=*")
    table = spotted([MergedTrace(0, folder)])
    events = load_json(require(DATA / "device_only" / f"{name}.json.gz"))["traceEvents"]
    rows = table.filter(what="dtype conversion").drop_nulls("name")
    assert dict(rows.select("name", "count").rows()) == conversions(events)
    launches = {e["args"].get("correlation") for e in events if str(e.get("name")).endswith("GraphLaunch")}
    work = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset", "Kernel", "Memcpy", "Memset")]
    of_graphs = sum(e["dur"] for e in work if e["args"].get("correlation") in launches)
    (share,) = table.filter(table["name"].is_null(), what="graph")["device_share"].to_list()
    # What reaches past the next start on its stream is clipped.
    assert share == pytest.approx(float(of_graphs / sum(e["dur"] for e in work)), abs=0.003)


# None of these was recorded with activation checkpointing.
@pytest.mark.parametrize(
    "name", ["pairs/resnet50_ddp_twin", "device_only/hta_trace_diff_control", "device_only/hta_ns_resolution",
             "pairs/linear_one_of_40_iterations", "pairs/dlrm_8gpu_by_order"]
)  # fmt: skip
def test_ordinary_backward_has_no_recompute(merged: Any, name: str) -> None:
    for folder in merged(name).glob("rank=*"):
        table = spotted([MergedTrace(0, folder)]).filter(what="recompute")
        assert table.select("name", "count", "cpu_ns", "device_ns").rows() == [(None, 0, 0, 0)]


def test_the_command_says_why_something_is_not_measured(tmp_path: Path) -> None:
    trace = TraceBuilder().op("aten::copy_", 0, 20).op("autograd::engine::evaluate_function: F", 30, 9, tid=MAIN)
    shown = json.loads(run("analyze", "spotted", trace.write(tmp_path), "--json").out)
    assert any("dtype conversion is not measured on rank 0: the types" in note for note in shown["notes"])
    assert any("recompute is not measured on rank 0: no op has" in note for note in shown["notes"])


def test_a_host_trace_alone_has_counts_and_no_times(tmp_path: Path) -> None:
    path = require(DATA / "host_only" / "small_schema_1.0.2.json.gz")
    assert run("merge", "--host", path, "-o", tmp_path).code == 0
    rows = json.loads(run("analyze", "spotted", tmp_path, "--json").out)["rows"]
    counts = {row["what"]: row["count"] for row in rows if row["name"] is None}
    assert counts == {"recompute": 0, "dtype conversion": 0, "graph": None}
    assert {row[name] for row in rows for name in ("cpu_ns", "cpu_share", "device_ns", "device_share")} == {None}
