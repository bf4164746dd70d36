"""Rows of one window: how both files join, which row encloses which, which step it belongs to."""

import json
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from builder import MAIN, TraceBuilder, assert_table, merge_files, write_json
from handed import CASES, DATA, require

from chakra_capture.trace.discovery import WindowFiles
from chakra_capture.trace.merged import MergedTrace


def named(trace: MergedTrace, *columns: str) -> pl.DataFrame:
    """Chosen columns, with the names of parent and launch instead of their ids."""
    names = trace.nodes.select("node_id", "name")
    joined = trace.nodes.join(names.rename({"node_id": "parent_id", "name": "parent"}), on="parent_id", how="left")
    joined = joined.join(names.rename({"node_id": "launch_id", "name": "launch"}), on="launch_id", how="left")
    return joined.filter(~pl.col("kind").is_in(["process", "thread"])).sort("node_id").select(columns)


def test_host_and_device_rows_are_one_row_with_what_both_know(tmp_path: Path) -> None:
    trace = TraceBuilder().step(3, 0, 100).op("aten::mm", 10, 20).launched("gemm", 50, 30, 1, at=15).merged(tmp_path)
    assert_table(
        named(trace, "kind", "name", "parent", "launch", "ts_ns", "dur_ns", "self_dur_ns", "host_id", "step"),
        """
        kind,name,parent,launch,ts_ns,dur_ns,self_dur_ns,host_id,step
        kernel,gemm,aten::mm,cudaLaunchKernel,50000,30000,30000,,3
        annotation,ProfilerStep#3,,,0,100000,80000,3,3
        host_op,aten::mm,ProfilerStep#3,,10000,20000,19000,4,3
        runtime,cudaLaunchKernel,aten::mm,,15000,1000,1000,,3
        """,
    )


def test_profiler_step_is_never_the_parent_of_a_device_activity(tmp_path: Path) -> None:
    trace = TraceBuilder().annotation("outer", 0, 200).step(3, 10, 100).launched("k", 60, 5, 1, at=50)
    trace.annotation("ProfilerStep#", 300, 50).launched("l", 320, 5, 2, at=310)
    trace.launched("m", 420, 5, 3, at=400)
    shown = named(trace.merged(tmp_path, host=False), "kind", "name", "parent", "step").filter(
        pl.col("kind") == "kernel"
    )
    # "ProfilerStep#" without a number is somebody else's annotation; m was launched outside any.
    assert_table(
        shown,
        """
        name,parent,step
        k,outer,3
        l,ProfilerStep#,
        m,,
        """,
    )


def test_of_rows_with_equal_bounds_the_one_opened_first_lies_outside(tmp_path: Path) -> None:
    trace = TraceBuilder()
    # Written in another order than opened; the ids say which was opened first. A call lies inside all ops.
    trace.runtime("cudaLaunchKernel", 10, 20, 1).op("third", 10, 20, **{"Record function id": 9})
    trace.op("second", 10, 20, **{"Record function id": 8}).annotation("first", 10, 20, **{"Record function id": 7})
    trace.event(ph="X", cat="python_function", name="python", pid=100, tid=11, ts=10, dur=20, args={"Python id": 1})
    trace.kernel("k", 40, 5, 1)
    assert dict(named(trace.merged(tmp_path, host=False), "name", "parent").iter_rows()) == {
        "python": None,
        "first": "python",
        "second": "first",
        "third": "second",
        "cudaLaunchKernel": "third",
        "k": "third",
    }


def test_outermost_of_nested_calls_with_one_correlation_is_the_launch(tmp_path: Path) -> None:
    trace = TraceBuilder().op("a", 0, 100).runtime("cudaLaunchKernel", 10, 20, 5)
    trace.runtime("cuLaunchKernel", 10, 10, 5, cat="cuda_driver").kernel("k", 40, 5, 5)
    shown = named(trace.merged(tmp_path), "kind", "parent", "launch").filter(pl.col("kind") == "kernel")
    assert shown.rows() == [("kernel", "a", "cudaLaunchKernel")]


@pytest.mark.parametrize("cat", ["cuda_runtime", "cuda_driver", "hip_runtime", "Runtime", "xpu_runtime"])
def test_any_runtime_call_with_the_correlation_is_a_launch_whatever_its_name(cat: str, tmp_path: Path) -> None:
    trace = TraceBuilder().op("a", 0, 100).runtime("brandNewLaunch", 10, 20, 5, cat=cat).kernel("k", 40, 5, 5)
    assert named(trace.merged(tmp_path), "launch").drop_nulls().rows() == [("brandNewLaunch",)]


def test_correlation_zero_joins_nothing(tmp_path: Path) -> None:
    merged = (
        TraceBuilder().op("a", 0, 100).runtime("l", 10, 20, 0).kernel("k", 40, 5, 0).kernel("m", 50, 5).merged(tmp_path)
    )
    assert merged.nodes["launch_id"].null_count() == merged.nodes.height
    orphans = merged.link["windows"][0]["device"]["orphans"]
    assert (orphans["no_correlation_id"], orphans["launch_not_in_file"]) == (2, 0)


def test_launch_in_several_processes_is_not_guessed(tmp_path: Path) -> None:
    trace = TraceBuilder().op("a", 0, 100).runtime("l", 10, 20, 5)
    trace.event(ph="X", cat="cuda_runtime", name="l", pid=999, tid=11, ts=5, dur=5, args={"correlation": 5})
    merged = trace.kernel("k", 40, 5, 5).merged(tmp_path)
    assert merged.nodes["launch_id"].null_count() == merged.nodes.height
    assert merged.link["windows"][0]["device"]["orphans"]["launch_in_several_processes"] == 1


def test_launch_whose_time_was_lost_gives_neither_parent_nor_clock_offset(tmp_path: Path) -> None:
    trace = TraceBuilder().op("a", 0, 100).runtime("l", None, 20, 5).kernel("k", 40, 5, 5)
    merged = trace.merged(tmp_path)
    assert named(merged, "kind", "parent", "launch").filter(pl.col("kind") == "kernel").rows() == [
        ("kernel", None, "l")
    ]
    assert merged.link["windows"][0]["clock_offset_ns"] == 0
    assert "launch" not in merged.link["windows"][0]["edges"]


def test_call_whose_time_was_lost_is_the_launch_only_if_there_is_no_other(tmp_path: Path) -> None:
    trace = TraceBuilder().op("a", 0, 100).runtime("cudaLaunchKernel", None, 20, 5)
    trace.runtime("cuLaunchKernel", 10, 10, 5, cat="cuda_driver").kernel("k", 40, 5, 5)
    shown = named(trace.merged(tmp_path), "kind", "parent", "launch").filter(pl.col("kind") == "kernel")
    assert shown.rows() == [("kernel", "a", "cuLaunchKernel")]


def test_threads_of_two_processes_with_one_number_do_not_mix(tmp_path: Path) -> None:
    trace = TraceBuilder().step(3, 0, 100).op("mine", 10, 20)
    trace.event(ph="X", cat="cpu_op", name="foreign", pid=999, tid=11, ts=5, dur=90, args={})
    merged = trace.merged(tmp_path, host=False)
    assert_table(
        named(merged, "name", "parent", "self_dur_ns", "step"),
        """
        name,parent,self_dur_ns,step
        ProfilerStep#3,,80000,3
        mine,ProfilerStep#3,20000,3
        foreign,,90000,
        """,
    )


def test_case_two_processes_same_tid(tmp_path: Path) -> None:
    path = require(CASES / "027-two-processes-same-tid" / "rank-0.json")
    merged = merge_files(tmp_path, WindowFiles(None, path))
    own = dict(merged.nodes.select("name", "self_dur_ns").iter_rows())
    assert (own["aten::to"], own["ProfilerStep#3"]) == (5000, 740000)


def test_case_crossing_rows(tmp_path: Path) -> None:
    merged = merge_files(
        tmp_path, WindowFiles(None, require(CASES / "028-partially-overlapping-cpu-ops" / "rank-0.json"))
    )
    own = dict(merged.nodes.select("name", "self_dur_ns").iter_rows())
    expected = {"outer": 50000, "inner": 50000, "same_start_parent": 30000, "same_start_child": 20000}
    assert {name: own[name] for name in expected} == expected
    assert merged.link["windows"][0]["repairs"]["rows_clipped_to_parent"] == 1
    assert merged.nodes.filter(pl.col("repaired"))["name"].to_list() == ["inner"]


# file of a case: kernels, copies, linked, busy ns; from its expect.json
GOOD = {
    "002-trailing-comma/rank-0.json": (3, 1, 4, 520000),
    "006-control-chars-and-bad-utf8/rank-0.json": (3, 1, 4, 520000),
    "008-bom-and-escaped-unicode/raw-bom.json": (3, 1, 4, 520000),
    "008-bom-and-escaped-unicode/escaped.json": (3, 1, 4, 520000),
    "008-bom-and-escaped-unicode/utf16.json": (3, 1, 4, 520000),
    "010-sub-microsecond-kernels/rank-0.json": (5, 0, 5, 1000),
    "016-duplicate-launch-correlation/rank-0.json": (3, 1, 4, 520000),
    "017-cuda-graph-one-launch-many-kernels/rank-0.json": (4, 0, 4, 400000),
    "018-launch-outside-window/rank-0.json": (4, 1, 3, 550000),
    "019-hip-launch-names/rank-0.json": (3, 1, 5, 526000),
    "021-gpu-user-annotations/rank-0.json": (3, 1, 4, 520000),
    "022-cuda-sync-not-compute/rank-0.json": (3, 1, 4, 520000),
    "024-no-profilerstep/rank-0.json": (3, 1, 4, 520000),
}


@pytest.mark.parametrize("name", GOOD)
def test_case_device_values(name: str, tmp_path: Path) -> None:
    from chakra_capture.analysis.device import device_time

    kernels, copies, linked, busy = GOOD[name]
    merged = merge_files(tmp_path, WindowFiles(None, require(CASES / name)))
    counts = dict(merged.nodes["kind"].value_counts().iter_rows())
    assert (counts.get("kernel", 0), counts.get("memcpy", 0)) == (kernels, copies)
    assert merged.nodes["launch_id"].drop_nulls().len() == linked
    assert device_time(merged)["busy_ns"].to_list() == [busy]


def test_case_names_read_alike_in_every_encoding(tmp_path: Path) -> None:
    folder = require(CASES / "008-bom-and-escaped-unicode")
    expected = set(json.loads((folder / "expect.json").read_text())["kernel_names"])
    for name in ("escaped", "raw-bom", "utf16"):
        merged = merge_files(tmp_path / name, WindowFiles(None, folder / f"{name}.json"))
        assert set(merged.nodes.filter(pl.col("kind") == "kernel")["name"]) == expected


def test_case_unfinished_and_negative_durations(tmp_path: Path) -> None:
    merged = merge_files(tmp_path, WindowFiles(None, require(CASES / "013-negative-and-zero-dur" / "rank-0.json")))
    nodes = merged.nodes
    assert nodes.filter(pl.col("dur_ns").is_null() & (pl.col("kind") == "host_op")).height == 1
    assert nodes.filter(pl.col("dur_ns").is_null() & pl.col("kind").is_in(["kernel", "memcpy"])).height == 1
    assert nodes.filter(pl.col("dur_ns").is_null())["repaired"].all()
    assert nodes["dur_ns"].drop_nulls().min() == nodes["self_dur_ns"].drop_nulls().min() == 0
    assert merged.device_activities.filter(pl.col("kind") == "kernel").height == 3


def steps_of(trace: MergedTrace) -> dict[str, int | None]:
    return dict(trace.nodes.filter(pl.col("kind") == "host_op").select("name", "step").iter_rows())


def test_step_is_the_innermost_one_of_the_process_also_on_other_threads(tmp_path: Path) -> None:
    trace = TraceBuilder().step(1, 0, 100).step(2, 100, 50).op("before", 99, 1).op("at", 100, 1)
    trace.op("backward", 120, 5, tid=77).op("after", 150, 5)
    assert steps_of(trace.merged(tmp_path)) == {"before": 1, "at": 2, "backward": 2, "after": None}


def test_empty_and_overlapping_steps_do_not_hide_the_one_around_them(tmp_path: Path) -> None:
    trace = TraceBuilder().step(1, 0, 100).step(2, 20, 0).step(3, 40, 10, tid=12)
    trace.op("a", 30, 1).op("b", 45, 1).op("c", 60, 1)
    assert steps_of(trace.merged(tmp_path, host=False)) == {"a": 1, "b": 3, "c": 1}


def test_repeated_ids_link_by_name_and_each_row_once(tmp_path: Path) -> None:
    trace = TraceBuilder()
    trace.op("other", 0, 5, host=False, **{"Record function id": 50}).op("mine", 10, 5, **{"Record function id": 50})
    trace.nodes.append({**trace.nodes[0], "id": 60})  # a second node with the same id and name
    merged = trace.merged(tmp_path)
    host = merged.link["windows"][0]["host"]
    assert (host["num_linked"], host["num_name_mismatch"], host["num_duplicate_record_function_ids"]) == (1, 0, 1)
    rows = merged.nodes.filter(pl.col("name") == "mine").sort("host_id").select("host_id", "ts_ns").rows()
    assert rows == [(4, 10000), (60, None)]  # the second node is kept, without a time


def test_name_mismatch_is_left_unlinked_and_counted(tmp_path: Path) -> None:
    trace = TraceBuilder()
    for number in range(20):
        trace.op("same", 10 * number, 5)
    trace.nodes[3]["name"] = "renamed"
    host = trace.merged(tmp_path).link["windows"][0]["host"]
    assert (host["num_linked"], host["num_name_mismatch"], host["host_only_names"]) == (19, 1, {"renamed": 1})


def test_host_alone_has_the_parents_it_names_and_a_cycle_is_broken(tmp_path: Path) -> None:
    path = require(CASES / "036-cyclic-ctrl-deps" / "et.json")
    merged = merge_files(tmp_path, WindowFiles(path, None))
    host = merged.link["windows"][0]["host"]
    cycle = [{"id": 11, "name": "aten::linear"}, {"id": 12, "name": "aten::addmm"}]
    assert (host["num_nodes"], host["num_cycles"], host["cycles"]) == (14, 1, [cycle])
    parents = dict(named(merged, "name", "parent").iter_rows())
    assert (parents["aten::linear"], parents["aten::addmm"]) == (None, "aten::linear")


def test_nodes_without_a_device_row_stand_under_their_linked_parent(tmp_path: Path) -> None:
    trace = TraceBuilder().op("outer", 0, 100).op("inner", 10, 5)
    trace.events.pop()
    shown = named(trace.merged(tmp_path), "name", "parent", "ts_ns", "tid", "repaired")
    assert_table(
        shown,
        """
        name,parent,ts_ns,tid,repaired
        inner,outer,,11,False
        outer,,0,11,False
        """,
    )


def test_args_hold_category_device_args_and_host_rest(tmp_path: Path) -> None:
    trace = TraceBuilder().op("a", 0, 5, extra=[1, {"x": None}])
    args = json.loads(trace.merged(tmp_path).nodes.filter(pl.col("name") == "a")["args"][0])
    assert (args["cat"], args["extra"], args["Ev Idx"]) == ("cpu_op", [1, {"x": None}], 3)
    assert set(args["host"]) >= {"inputs", "outputs"}


@pytest.mark.parametrize("key", ["cat", "host"])
def test_args_of_an_event_hide_neither_its_category_nor_the_part_of_the_host(tmp_path: Path, key: str) -> None:
    trace = TraceBuilder().op("a", 0, 9, extra=1)
    trace.events[0]["args"][key] = "mine"
    (text,) = trace.merged(tmp_path).nodes.filter(pl.col("name") == "a")["args"]
    members = json.loads(text, object_pairs_hook=list)
    args = dict(members)
    assert sorted(name for name, _ in members) == ["Ev Idx", "args", "cat", "host"]
    assert (args["cat"], dict(args["args"])) == ("cpu_op", {key: "mine", "extra": 1})


@pytest.mark.parametrize("name", ["x" * 1_000_000, '\x00\x1f\u2028\\"', "ProfilerStep#99999999999999999999"])
def test_odd_names_are_kept(name: str, tmp_path: Path) -> None:
    merged = TraceBuilder().op(name, 0, 5).merged(tmp_path)
    assert merged.nodes.filter(pl.col("kind") == "host_op")["name"].to_list() == [name]


@pytest.mark.parametrize(
    ("stated", "name", "collective"),
    [
        ("allreduce", "anything", "all_reduce"), ("_allgather_base", "k", "all_gather"), ("weird", "k", "other"),
        (None, "ncclDevKernel_AllReduce_Sum_f32_RING_LL(x)", "all_reduce"),
        (None, "ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(x)", "send_recv"),
        (None, "ncclSymkDevKernel_ReduceScatter_LL(x)", "reduce_scatter"),
        (None, "gemm_with_nccl_in_its_name", None), (None, "gemm", None),
    ],
)  # fmt: skip
def test_communication_kernels_by_argument_then_by_name(
    stated: str | None, name: str, collective: str | None, tmp_path: Path
) -> None:
    args: dict[str, Any] = {} if stated is None else {"Collective name": stated}
    merged = TraceBuilder().kernel(name, 0, 5, 1, **args).merged(tmp_path, host=False)
    assert merged.nodes["collective"].to_list() == [collective]


@pytest.mark.parametrize(
    ("op", "kernel", "collective"),
    [
        ("c10d::alltoall_base_", "ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(x)", "all_to_all"),
        ("nccl:send 0->1", "ncclDevKernel_SendRecv(x)", "send"),
        ("nccl:recv 1<-0", "ncclDevKernel_SendRecv(x)", "recv"),
        ("nccl:all_to_all", "ncclDevKernel_Generic(x)", "all_to_all"),
        # What the caller does not say, and what the name of the kernel does say, stays.
        ("nccl:coalesced", "ncclDevKernel_SendRecv(x)", "send_recv"),
        ("c10d::alltoall_base_", "ncclDevKernel_AllReduce_Sum_f32_RING_LL(x)", "all_reduce"),
        ("c10d::alltoall_base_", "gemm", None),
    ],
)
def test_kernel_of_many_collectives_runs_that_of_the_op_around_its_launch(
    op: str, kernel: str, collective: str | None, tmp_path: Path
) -> None:
    trace = TraceBuilder().op("loss", 0, 90).op(op, 10, 50).op("record_param_comms", 20, 30)
    nodes = trace.launched(kernel, 40, 5, 1, at=25, stream=20).merged(tmp_path, host=False).nodes
    assert nodes.filter(pl.col("kind") == "kernel")["collective"].to_list() == [collective]


def test_op_that_states_its_collective_names_that_of_its_kernel(tmp_path: Path) -> None:
    trace = TraceBuilder().op("record_param_comms", 0, 30, host=False, **{"Collective name": "all_to_allv"})
    nodes = trace.launched("ncclDevKernel_SendRecv(x)", 40, 5, 1, at=5).merged(tmp_path, host=False).nodes
    shown = nodes.filter(pl.col("collective").is_not_null()).sort("kind")
    assert shown.select("kind", "collective").rows() == [("host_op", "all_to_all"), ("kernel", "all_to_all")]


@pytest.mark.parametrize(("file", "num_kernels"), [("dlrm", 5), ("diff", 42)])
def test_send_recv_kernels_of_real_all_to_alls(file: str, num_kernels: int, tmp_path: Path) -> None:
    """As many as the trace has annotations of all-to-all; nothing in the name of the kernel says it."""
    paths = {"dlrm": "pairs/dlrm_8gpu_by_order/device/rank-0", "diff": "device_only/hta_trace_diff_control"}
    trace = merge_files(tmp_path, WindowFiles(None, require(DATA / f"{paths[file]}.json.gz")), force=True)
    kernels = trace.nodes.filter((pl.col("kind") == "kernel") & pl.col("name").str.contains("SendRecv"))
    assert kernels["collective"].to_list() == ["all_to_all"] * num_kernels


def test_wait_for_a_whole_device_is_of_no_stream(tmp_path: Path) -> None:
    trace = TraceBuilder().launched("k", 5, 5, 1, at=0).kernel("Context Sync", 10, 5, 2, stream=-1, cat="cuda_sync")
    nodes = trace.merged(tmp_path, host=False).nodes
    assert nodes.filter(pl.col("kind") == "sync").select("device", "stream").rows() == [(0, None)]


def test_case_stream_of_a_context_sync_is_none(tmp_path: Path) -> None:
    file = require(CASES / "022-cuda-sync-not-compute" / "rank-0.json")
    expected = json.loads(file.with_name("expect.json").read_text())
    nodes = merge_files(tmp_path, WindowFiles(None, file)).nodes
    assert nodes["stream"].drop_nulls().unique().to_list() == expected["streams"]
    assert nodes.filter(pl.col("kind") == "sync").height == expected["sync_events"]


def test_times_near_the_largest_make_no_negative_time(tmp_path: Path) -> None:
    content = TraceBuilder().op("a", 1_700_000_000_000_000, 9_007_199_254_740).op("b", 1_700_000_000_000_001, 1)
    path = write_json(tmp_path / "d.json", content.device_dict())
    nodes = merge_files(tmp_path / "out", WindowFiles(None, path)).nodes
    assert nodes.filter(pl.col("self_dur_ns") < 0).is_empty()
    assert nodes.sort("ts_ns")["parent_id"].to_list() == [None, 0]


def test_a_step_that_begins_in_a_python_call_holds_what_comes_after_that_call(tmp_path):
    # With a recorded stack ProfilerStep is entered within ``__enter__``, which returns long before the step ends.
    trace = TraceBuilder()
    for name, ts, dur in (("train", 0, 120), ("__enter__", 5, 10)):
        trace.event(ph="X", cat="python_function", name=name, pid=trace.pid, tid=MAIN, ts=ts, dur=dur, args={})
    trace.step(3, 10, 100, host=False).op("aten::mm", 50, 20).launched("gemm", 70, 9, 1, at=60)
    trace.op("aten::later", 112, 3)
    rows = dict(trace.merged(tmp_path, host=False).nodes.select("name", "step").rows())
    assert rows == {**rows, "aten::mm": 3, "gemm": 3, "aten::later": None, "__enter__": None, "train": None}
