import json
from collections import Counter
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from builder import MAIN, TraceBuilder, assert_table
from commands import run
from handed import DATA, load_json, require
from hypothesis import given, settings
from hypothesis import strategies as st

from chakra_capture.analysis.modules import SCHEMA, module_tree
from chakra_capture.analysis.operators import operator_statistics
from chakra_capture.trace.merged import MergedTrace

WORKER = 55
COLUMNS = ("path", "depth", "count", "total_ns", "self_ns", "device_total_ns", "device_self_ns", "num_launched")


def python(trace: TraceBuilder, name: str, ts: int, dur: int, tid: int = MAIN) -> TraceBuilder:
    return trace.event(ph="X", cat="python_function", name=name, pid=trace.pid, tid=tid, ts=ts, dur=dur, args={})


def net() -> TraceBuilder:
    """A net with two layers, its backward on another thread."""
    trace = TraceBuilder().step(1, 0, 200)
    for name, ts, dur in (
        ("nn.Module: Net_0", 10, 90), ("forward", 11, 88), ("nn.Module: Linear_0", 20, 30),
        ("nn.Module: Linear_1", 60, 10),
    ):  # fmt: skip
        python(trace, name, ts, dur)
    trace.op("aten::linear", 22, 20, **{"Sequence number": 4}).launched("gemm", 30, 7, 1, at=25)
    trace.op("aten::mul", 80, 10, **{"Sequence number": 5}).launched("mul", 90, 3, 2, at=82)
    trace.launched("copy", 110, 5, 3, at=105)
    for at, number, size in ((120, 5, 10), (150, 4, 20)):
        trace.op("autograd::engine::evaluate_function: F", at, size, tid=WORKER, **{"Sequence number": number})
        trace.runtime("cudaLaunchKernel", at + 2, 1, 10 + number, tid=WORKER).kernel(
            "grad", at + 4, number, 10 + number
        )
    return trace


def test_without_ranks_or_modules_there_is_no_row(tmp_path: Path) -> None:
    trace = TraceBuilder().op("aten::mm", 5, 20).merged(tmp_path)
    for traces in ([], [trace]):
        table = module_tree(traces)
        assert (table.height, table.columns) == (0, [column.name for column in SCHEMA])


def test_a_module_has_the_time_within_its_calls_and_the_work_they_launch(tmp_path: Path) -> None:
    assert_table(
        module_tree([net().merged(tmp_path, host=False)]).select(*COLUMNS, "backward_ns", "backward_device_ns"),
        """
        path,depth,count,total_ns,self_ns,device_total_ns,device_self_ns,num_launched,backward_ns,backward_device_ns
        Net_0,0,1,90000,50000,10000,3000,2,30000,9000
        Net_0/Linear_0,1,1,30000,30000,7000,7000,1,20000,4000
        Net_0/Linear_1,1,1,10000,10000,0,0,0,0,0
        """,
    )


def test_depth_leaves_out_rows_and_no_time(tmp_path: Path) -> None:
    trace = net().merged(tmp_path, host=False)
    assert module_tree([trace], depth=1).rows() == module_tree([trace]).head(1).rows()


def test_ranks_are_one_tree_or_one_each_and_steps_can_be_chosen(tmp_path: Path) -> None:
    trace = net().merged(tmp_path, host=False)
    both = [trace, MergedTrace(3, trace.folder)]
    assert module_tree(both).select("rank", "path", "count").rows() == [
        (None, "Net_0", 2), (None, "Net_0/Linear_0", 2), (None, "Net_0/Linear_1", 2),
    ]  # fmt: skip
    assert module_tree(both, by=["rank"])["rank"].to_list() == [0, 0, 0, 3, 3, 3]
    assert module_tree(both, steps=[2])["count"].to_list() == [0, 0, 0]


def test_without_a_device_or_numbers_its_times_are_not_measured(tmp_path: Path) -> None:
    trace = python(TraceBuilder(), "nn.Module: Net_0", 10, 90).op("aten::mul", 20, 10).merged(tmp_path, host=False)
    (row,) = module_tree([trace]).to_dicts()
    assert (row["total_ns"], row["self_ns"]) == (90_000, 90_000)
    device = ("device_total_ns", "device_self_ns", "num_launched", "backward_ns", "backward_device_ns")
    assert {row[name] for name in device} == {None}


def test_operators_tell_the_module_they_run_in_and_in_backward_that_of_forward(tmp_path: Path) -> None:
    table = operator_statistics([net().merged(tmp_path, host=False)], by=["module"])
    rows = (
        table.filter(pl.col("name").str.contains("aten::|evaluate_function"))
        .select("module", "name", "self_ns")
        .sort("module", "name")
        .rows()
    )
    assert rows == [
        ("Linear_0", "aten::linear", 19_000), ("Linear_0", "autograd::engine::evaluate_function: F", 19_000),
        ("Net_0", "aten::mul", 9_000), ("Net_0", "autograd::engine::evaluate_function: F", 9_000),
    ]  # fmt: skip


# Nested calls as a list of children; a call takes 10 us of its own before and after each child.
TREES = st.recursive(st.just([]), lambda inside: st.lists(inside, max_size=3), max_leaves=12)


@settings(max_examples=30, deadline=None)
@given(st.lists(TREES, min_size=1, max_size=3))
def test_totals_of_random_trees_are_the_durations_and_self_times_sum_to_them(
    tmp_path_factory: Any, calls: list[Any]
) -> None:
    trace, right = TraceBuilder(), Counter[str]()

    def add(inside: list[Any], path: str, at: int) -> int:
        name = f"M_{len(path) % 3}"
        path = f"{path}/{name}".removeprefix("/")
        now = at + 10
        for child in inside:
            now = add(child, path, now) + 10
        python(trace, f"nn.Module: {name}", at, now - at)
        right[path] += 1000 * (now - at)
        return now

    now = 0
    for inside in calls:
        now = add(inside, "", now) + 1
    table = module_tree([trace.merged(tmp_path_factory.mktemp("m"), host=False)])
    assert dict(table.select("path", "total_ns").rows()) == right
    assert table["self_ns"].sum() == table.filter(depth=0)["total_ns"].sum()
    # Every module comes after the one around it, with nothing between that is not inside that one.
    around: list[str] = []
    for path in table["path"]:
        around = [*around[: path.count("/")], path]
        assert path == around[-1]
        assert path.rpartition("/")[0] == (around[-2] if len(around) > 1 else "")


@pytest.mark.parametrize("name", ["h100_bert_small", "h100_qwen_0_5b_chat", "mi300_qwen_0_5b_chat"])
def test_modules_of_real_traces_have_the_durations_and_launches_of_their_files(merged: Any, name: str) -> None:
    (folder,) = merged(f"device_only/{name}").glob("rank=*")
    table = module_tree([MergedTrace(0, folder)])
    events = load_json(require(DATA / "device_only" / f"{name}.json.gz"))["traceEvents"]
    calls = [e for e in events if e.get("cat") == "python_function" and e["name"].startswith("nn.Module: ")]
    durations, counts, device = Counter[str](), Counter[str](), Counter[str]()
    launches = {e["args"].get("correlation"): e for e in events if e.get("cat") in ("cuda_runtime", "cuda_driver")}
    work = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    starts = [(launches.get(e["args"].get("correlation")), e["dur"]) for e in work]
    for call in calls:
        path = call["name"].removeprefix("nn.Module: ")
        durations[path] += call["dur"]
        counts[path] += 1
        low, high = call["ts"], call["ts"] + call["dur"]
        inside = [dur for at, dur in starts if at and at["tid"] == call["tid"] and low <= at["ts"] < high]
        device[path] += sum(inside)
    # No module of these models is in itself, so a name's rows sum to its calls.
    sums = table.group_by("module").agg(pl.col("count", "total_ns", "device_total_ns").sum())
    for module, count, total, on_device in sums.rows():
        assert count == counts[module]
        assert total == pytest.approx(float(1000 * durations[module]), abs=2 * count)
        assert on_device == pytest.approx(float(1000 * device[module]), abs=200)


def test_the_command_shows_a_tree_or_says_how_to_record_it(tmp_path: Path) -> None:
    folder = net().write(tmp_path / "with")
    assert "\n  Linear_0 " in run("analyze", "modules", folder).out
    assert "Linear_0" not in run("analyze", "modules", folder, "--depth", "1").out
    shown = json.loads(run("analyze", "modules", folder, "--json").out)
    assert [row["module"] for row in shown["rows"]] == ["Net_0", "Linear_0", "Linear_1"]
    assert run("analyze", "modules", folder, "--depth", "0").code == 2
    without = TraceBuilder().op("aten::mm", 5, 20).write(tmp_path / "without")
    notes = json.loads(run("analyze", "modules", without, "--json").out)["notes"]
    assert "rank 0: modules not recorded, record with with_stack: true" in notes
    shown = json.loads(run("analyze", "operators", without, "--by", "module", "--json").out)
    assert "modules are not recorded: record with with_stack: true" in shown["notes"]
