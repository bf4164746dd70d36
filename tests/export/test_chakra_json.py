"""``export chakra-json``: every field against the trace files themselves, read once more by plain Python."""

import json
from collections import Counter, defaultdict
from decimal import Decimal

import numpy as np
import polars as pl
import pytest
from builder import TraceBuilder, merge_files
from commands import Outcome, refused, run
from disks import files_end_at
from handed import DATA, load_json, require
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import kind_of, to_ns

from chakra_capture.export.chakra_json.kernels import COMPUTE, kernel_name, taken_for
from chakra_capture.export.chakra_json.run import export_rank
from chakra_capture.export.chakra_json.tables import RankTables
from chakra_capture.trace.discovery import WindowFiles

ATTRS = ["rf_id", "fw_parent", "seq_id", "scope", "tid", "fw_tid", "op_schema"]
ACTIVITIES = ("kernel", "memcpy", "memset")
THREAD = "[pytorch|profiler|execution_trace|thread]"


def load(path):
    return json.loads(path.read_text(), parse_float=Decimal)


def exported(trace, folder):
    """The file of a rank with one window, and what was said of it."""
    folder.mkdir(exist_ok=True)
    (one,) = export_rank(RankTables.of(trace), folder)
    return load(one.path), one.contents


def ns(us):
    assert us == us.quantize(Decimal("0.001"))
    return int(us * 1000)


def by_name(found):
    names = Counter(node["name"] for node in found["nodes"])
    return {node["name"]: node for node in found["nodes"] if names[node["name"]] == 1}


def attrs(node):
    return {one["name"]: one["value"] for one in node["attrs"]}


def check_shape(found):
    """What the converter reads is on every node, ids are unique, parents and what is waited for come before."""
    assert list(found)[:5] == ["schema", "pid", "time", "start_ts", "finish_ts"]
    assert found["schema"] == "1.1.1-chakra.0.0.4"
    *nodes, process = found["nodes"]
    assert (process["id"], process["ctrl_deps"]) == (1, 1)
    assert [node["id"] for node in nodes] == [*range(2, len(nodes) + 2)]
    hosts = {node["id"]: node for node in nodes if "cat" not in node}
    devices = {node["id"] for node in nodes if "cat" in node}
    for node in [*nodes, process]:
        assert [one["name"] for one in node["attrs"]][:7] == ATTRS
        assert all(isinstance(attrs(node)[name], int) for name in ATTRS[:6])
        for side in ("inputs", "outputs"):
            assert {"values", "shapes", "types"} <= set(node[side])
    for node in nodes:
        is_root = node["name"].endswith("thread]")
        assert node["ctrl_deps"] == 1 if is_root else node["ctrl_deps"] in hosts
        assert node["ctrl_deps"] < node["id"]
        if node["id"] in devices:
            assert node["ph"] == "X"
            assert node["inclusive_dur"] >= node["exclusive_dur"] >= 0
            assert {"ts", "stream"} <= set(node)
        elif not is_root:
            assert node["inter_thread_dep"] is None or node["inter_thread_dep"] in hosts
            assert (node["inter_thread_dep"] or 0) < node["id"]
            assert set(node["sync_dep"]) <= devices
            assert all(dep < node["id"] for dep in node["sync_dep"])
    return hosts, devices


def test_times_parents_and_order_of_a_small_trace(tmp_path):
    trace = (
        TraceBuilder()
        .step(5, 0, 100)
        .op("outer", 10, 50)
        .op("first", 11, 4)
        .launched("gemm", 90, 3.125, 7, at=20)
        .op("second", 30, 10, record="x")
        .merged(tmp_path)
    )
    found, contents = exported(trace, tmp_path / "o")
    check_shape(found)
    nodes = by_name(found)
    assert [node["name"] for node in found["nodes"]] == [
        THREAD, "ProfilerStep#5", "outer", "first", "gemm", "second", THREAD.replace("thread", "process"),
    ]  # fmt: skip
    assert nodes["gemm"]["ctrl_deps"] == nodes["outer"]["id"]
    assert (nodes["gemm"]["cat"], nodes["gemm"]["stream"], nodes["gemm"]["device"]) == ("kernel", 7, 0)
    durations = {name: (ns(n["inclusive_dur"]), ns(n["exclusive_dur"])) for name, n in nodes.items() if "ts" in n}
    # The launch call, 1 us of outer, is no node: its time stays with outer.
    assert durations == {
        "ProfilerStep#5": (100_000, 50_000), "outer": (50_000, 36_000), "first": (4_000, 4_000),
        "second": (10_000, 10_000), "gemm": (3_125, 3_125),
    }  # fmt: skip
    starts = {name: ns(n["ts"]) + found["baseTimeNanoseconds"] for name, n in nodes.items() if "ts" in n}
    assert starts == {"ProfilerStep#5": 0, "outer": 10_000, "first": 11_000, "gemm": 90_000, "second": 30_000}
    assert contents.left_out == {"runtime": 1}
    rows = dict(trace.nodes.select("name", "node_id").iter_rows())
    assert all(node["node_id"] == rows[name] for name, node in nodes.items() if "node_id" in node)


def test_a_wait_for_the_device_is_on_the_next_op_of_its_thread(tmp_path):
    trace = (
        TraceBuilder()
        .op("a", 0, 10)
        .launched("gemm", 5, 40, 7, at=2)
        .op("around", 20, 60)
        .runtime("cudaDeviceSynchronize", 25, 25, 8)
        .op("inside", 60, 5)
        .op("late", 90, 5)
        .merged(tmp_path)
    )
    found, contents = exported(trace, tmp_path / "o")
    check_shape(found)
    nodes = by_name(found)
    assert {name: node["sync_dep"] for name, node in nodes.items() if node.get("sync_dep")} == {
        "inside": [nodes["gemm"]["id"]]
    }
    assert (contents.num_sync, contents.num_waits_unplaced) == (1, 0)
    assert ns(nodes["around"]["exclusive_dur"]) == 55_000


def test_backward_waits_for_the_forward_op_of_its_sequence_number_and_nothing_else_waits(tmp_path):
    engine = "autograd::engine::evaluate_function: MmBackward0"
    trace = (
        TraceBuilder()
        .op("aten::mm", 10, 5, **{"Sequence number": 9})
        .op("aten::add", 20, 5)
        .op(engine, 40, 10, tid=12, **{"Sequence number": 9, "Fwd thread id": 1})
        .op("aten::t", 41, 2, tid=12)
        .merged(tmp_path)
    )
    found, _ = exported(trace, tmp_path / "o")
    check_shape(found)
    nodes = by_name(found)
    waits = {name: node["inter_thread_dep"] for name, node in nodes.items() if node.get("inter_thread_dep")}
    assert waits == {engine: nodes["aten::mm"]["id"]}
    roots = {node["id"]: attrs(node)["tid"] for node in found["nodes"] if node["name"] == THREAD}
    assert roots[nodes[engine]["ctrl_deps"]] == 12
    assert attrs(nodes[engine])["seq_id"] == attrs(nodes["aten::mm"])["seq_id"] == 9


def test_activities_without_an_op_or_without_a_launch_are_kept_and_counted(tmp_path):
    trace = (
        TraceBuilder()
        .step(5, 0, 100)
        .op("a", 10, 5)
        .launched("bare", 40, 4, 7, at=30)
        .kernel("early", 1, 2, 99)
        .kernel("Memset (Device)", 50, 1, 98, cat="gpu_memset")
        .merged(tmp_path)
    )
    found, contents = exported(trace, tmp_path / "o")
    check_shape(found)
    nodes = by_name(found)
    roots = {node["id"]: attrs(node)["tid"] for node in found["nodes"] if node["name"] == THREAD}
    assert roots[nodes["bare"]["ctrl_deps"]] == 11  # its thread: never the step
    assert roots[nodes["early"]["ctrl_deps"]] == roots[nodes["Memset (Device)"]["ctrl_deps"]] == 0
    assert (contents.num_outside_ops, contents.num_without_launch, contents.num_roots_added) == (1, 2, 1)
    assert "device activities without a launch in the trace, put on a thread of their own: 2" in contents.notes


def test_windows_are_files_of_their_own_and_files_of_more_windows_go(tmp_path):
    files = [
        WindowFiles(b.write_host(tmp_path / f"h{n}.json"), b.write_device(tmp_path / f"d{n}.json"))
        for n, b in enumerate([TraceBuilder().op("one", 0, 3), TraceBuilder().op("two", 100, 3)])
    ]
    trace = merge_files(tmp_path / "out", *files)
    stale = tmp_path / "chakra.0.window-2.json"
    other = tmp_path / "chakra.1.json"
    for path in (stale, other):
        path.write_text("{}")
    written = export_rank(RankTables.of(trace), tmp_path)
    assert [one.path.name for one in written] == ["chakra.0.json", "chakra.0.window-1.json"]
    assert [check_shape(load(one.path)) and sorted(by_name(load(one.path)))[-1] for one in written] == ["one", "two"]
    assert (stale.exists(), other.exists()) == (False, True)


def nccl(name, collective, *, ops=("c10d::op",), elements=6, **more):
    """A communication kernel of 100 us under ops around each other, the arguments as NCCL's kernels have them."""
    builder = TraceBuilder()
    for depth, op in enumerate(ops):
        builder.op(op, depth, 50 - 2 * depth)
    stated = {"Collective name": collective, "In msg nelems": elements, "Out msg nelems": elements, "dtype": "Float",
              "Process Group Name": "tp", "Process Group Ranks": "[0, 1]", "Group size": 2}  # fmt: skip
    stated = {key: value for key, value in (stated | more).items() if value is not None}
    return builder.runtime("cudaLaunchKernel", 20, 1, 7).kernel(name, 60, 100, 7, **stated)


ALL_REDUCE = "ncclDevKernel_AllReduce_Sum_f32_RING_LL"


@pytest.mark.parametrize(
    ("name", "collective", "written", "taken"),
    [
        (ALL_REDUCE, "allreduce", ALL_REDUCE, "all_reduce"),
        ("ncclSymkDevKernel_AllReduce", "allreduce", "ncclDevKernel_AllReduce: ncclSymkDevKernel_AllReduce",
         "all_reduce"),
        ("ncclKernel_SendRecv_RING", "all_to_all", "ncclDevKernel_AllToAll: ncclKernel_SendRecv_RING", "all_to_all"),
        ("ncclDevKernel_Generic", "allgather", "ncclDevKernel_AllGather: ncclDevKernel_Generic", "all_gather"),
        ("ncclDevKernel_Reduce_Sum", "reduce", "ncclDevKernel_AllReduce: ncclDevKernel_Reduce_Sum", "all_reduce"),
    ],
)  # fmt: skip
def test_a_collective_is_named_so_that_the_converter_knows_it(tmp_path, name, collective, written, taken):
    found, contents = exported(nccl(name, collective).merged(tmp_path), tmp_path / "o")
    (node,) = [node for node in found["nodes"] if "cat" in node]
    assert node["name"] == written
    assert node.get("kernel_name", name) == name
    assert ("kernel_name" in node) == (written != name)
    assert node["pg_name"] == "tp"
    assert node["inputs"] == {
        "values": [[0, 0, 0, 6, 4, "cuda:0"]], "shapes": [[6]], "types": ["Tensor(float)"]
    }  # fmt: skip
    assert [key[1] for key in contents.renamed] == ([taken] if written != name else [])


def test_sends_keep_their_direction_and_a_batch_of_both_is_computation():
    send = kernel_name("ncclKernel_SendRecv_RING", "send", "nccl:send 0->1")
    assert (send.name, send.taken_for) == ("ncclDevKernel_SendRecv: ncclKernel_SendRecv_RING", "send")
    assert kernel_name("ncclDevKernel_SendRecv", "recv", "nccl:recv 0<-1").name == "ncclDevKernel_SendRecv"
    batch = kernel_name("ncclDevKernel_SendRecv(args)", "send_recv", "nccl:coalesced")
    assert (batch.name, batch.taken_for, batch.is_exact) == ("nccl_SendRecv(args)", COMPUTE, False)


COLLECTIVES = ["all_reduce", "all_to_all", "all_gather", "reduce_scatter", "broadcast", "reduce", "gather", "scatter",
               "barrier", "send", "recv", "send_recv", "other"]  # fmt: skip
WORDS = ["nccl", "Kernel", "DevKernel", "Symk", "_", "SendRecv", "AllReduce", "AllGather", "Broadcast", "Reduce",
         "Scatter", "(", "send", "recv", "all_to_all", ":", "x"]  # fmt: skip


@given(st.lists(st.sampled_from(WORDS)).map("".join), st.sampled_from(COLLECTIVES), st.lists(st.sampled_from(WORDS)))
def test_no_name_ends_the_converter_and_none_says_another_collective(name, collective, op):
    named = kernel_name(name, collective, "".join(op))
    assert taken_for(named.name, "".join(op)) == named.taken_for
    lowered = {"barrier": "all_reduce", "reduce": "all_reduce", "gather": "all_gather", "scatter": "broadcast"}
    assert named.taken_for in (COMPUTE, lowered.get(collective, collective))
    if collective in COLLECTIVES[:9]:
        assert named.taken_for != COMPUTE
    assert named.is_exact == (named.taken_for == collective)


SPANS = st.lists(
    st.tuples(st.integers(11, 13), st.integers(0, 30), st.integers(0, 12), st.booleans()), min_size=1, max_size=14
)


@settings(max_examples=40, deadline=None)
@given(SPANS)
def test_of_any_nesting_on_any_threads_every_op_and_activity_is_there_after_its_parent(tmp_path_factory, spans):
    folder = tmp_path_factory.mktemp("spans")
    builder, ends = TraceBuilder(), []
    for number, (tid, ts, dur, launches) in enumerate(spans):
        # Nested or apart, as calls are: nothing reaches past the end of what is around it.
        around = [end for other, begin, end in ends if other == tid and begin <= ts < end]
        dur = min([dur, *(end - ts for end in around)])
        if any(other == tid and ts <= begin < ts + dur for other, begin, _ in ends):
            continue
        ends.append((tid, ts, ts + dur))
        builder.op(f"op{number}", ts, dur, tid=tid)
        if launches:
            builder.runtime("cudaLaunchKernel", ts, 0, number + 1, tid=tid)
            builder.kernel(f"kernel{number}", 50 + 20 * number, 3, number + 1)
    trace = builder.merged(folder)
    found, _ = exported(trace, folder / "o")
    hosts, devices = check_shape(found)
    rows = dict(trace.nodes.select("node_id", "parent_id").iter_rows())
    ids = {node["node_id"]: node["id"] for node in found["nodes"] if "node_id" in node}
    wanted = trace.nodes.filter(pl.col("kind").is_in(["host_op", *ACTIVITIES]))["node_id"].to_list()
    assert set(wanted) <= set(ids)
    assert len(devices) == sum(node["kind"] == "kernel" for node in trace.nodes.iter_rows(named=True))
    for node in found["nodes"]:
        if node.get("node_id") in wanted and rows[node["node_id"]] is not None:
            assert node["ctrl_deps"] == ids[rows[node["node_id"]]]
    starts = [n["ts"] for n in found["nodes"] if n["id"] in hosts and "ts" in n]
    assert starts == sorted(starts)


@given(st.lists(st.integers(0, 59_999), unique=True, max_size=40))
@settings(max_examples=20, deadline=None)
def test_rows_far_and_near_are_read_in_the_order_asked_for(wide, rows):
    window = next(RankTables(0, wide, wide, wide).windows())
    assert window.read(np.array(rows, dtype=np.int64), ["name"])["name"].to_list() == [f"n{row}" for row in rows]


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    path = tmp_path_factory.mktemp("wide") / "nodes.parquet"
    rows = pl.DataFrame({"window": [0] * 60_000, "name": [f"n{row}" for row in range(60_000)]})
    rows.write_parquet(path, row_group_size=7_000)
    return pl.scan_parquet(path)


# The ResNet-50 pair: each of its files read once more here.


@pytest.fixture(scope="module")
def twin(tmp_path_factory):
    pair = DATA / "pairs" / "resnet50_ddp_twin"
    host, device = require(pair / "host" / "rank-0.json.gz"), pair / "device" / "rank-0.json.gz"
    folder = tmp_path_factory.mktemp("twin")
    trace = merge_files(folder / "merged", WindowFiles(host, device), force=True)
    found, contents = exported(trace, folder)
    return found, contents, load_json(host), load_json(device)


def test_every_node_of_the_host_trace_is_there_with_its_fields(twin):
    found, contents, host, _ = twin
    hosts, _ = check_shape(found)
    assert (len(hosts) + 1, contents.num_host) == (len(host["nodes"]), len(host["nodes"]))
    ours = {attrs(node)["rf_id"]: node for node in hosts.values() if "ts" in node}
    assert len(ours) == 14388
    parents = {}
    for node in host["nodes"]:
        theirs = attrs(node)
        if not theirs["rf_id"]:
            continue
        mine = ours[theirs["rf_id"]]
        assert (mine["name"], mine["inputs"], mine["outputs"]) == (node["name"], node["inputs"], node["outputs"])
        same = ("rf_id", "seq_id", "op_schema") if theirs["seq_id"] >= 0 else ("rf_id", "op_schema")
        assert {key: attrs(mine)[key] for key in same} == {key: theirs[key] for key in same}
        parents[node["id"]] = (mine["id"], mine["ctrl_deps"])
    # Numbered anew, the tree is the same one.
    number = {node: mine for node, (mine, _) in parents.items()}
    for node in host["nodes"]:
        if node["id"] in parents and node["ctrl_deps"] in number:
            assert parents[node["id"]][1] == number[node["ctrl_deps"]]


def test_nothing_that_ran_on_the_device_is_missing_and_its_time_is_whole(twin):
    found, contents, _, device = twin
    theirs = [event for event in device["traceEvents"] if event["ph"] == "X" and kind_of(event) in ACTIVITIES]
    ours = [node for node in found["nodes"] if "cat" in node]
    assert Counter(node["cat"] for node in ours) == {"kernel": 2700, "gpu_memcpy": 960, "gpu_memset": 114}
    assert Counter((n["cat"], n["name"], ns(n["inclusive_dur"]), n["stream"]) for n in ours) == Counter(
        (event["cat"], event["name"], to_ns(event["dur"]), event["args"]["stream"]) for event in theirs
    )
    assert sum(ns(node["exclusive_dur"]) for node in ours) == sum(to_ns(event["dur"]) for event in theirs)
    assert contents.num_device == 3774
    assert all(attrs(node)["rf_id"] > 0 for node in ours)


def test_exclusive_times_of_a_thread_add_up_to_the_time_that_its_ops_cover(twin):
    found, _, _, device = twin
    covered, ours = defaultdict(int), defaultdict(int)
    ops = [
        event for event in device["traceEvents"] if event["ph"] == "X" and kind_of(event) in ("host_op", "annotation")
    ]
    end = {}
    for event in sorted(ops, key=lambda one: (one["ts"], -one["dur"])):
        begin, stop = to_ns(event["ts"]), to_ns(event["ts"]) + to_ns(event["dur"])
        last = end.get(event["tid"], 0)
        covered[event["tid"]] += max(0, stop - max(begin, last))
        end[event["tid"]] = max(stop, last)
    for node in found["nodes"]:
        if "cat" not in node and "exclusive_dur" in node:
            ours[attrs(node)["tid"]] += ns(node["exclusive_dur"])
    assert ours == covered


def test_starts_are_those_of_the_file_to_the_nanosecond_also_as_floats(twin):
    found, _, _, device = twin
    theirs = {
        event["args"]["Record function id"]: to_ns(event["ts"], int(device["baseTimeNanoseconds"]))
        for event in device["traceEvents"]
        if event["ph"] == "X" and kind_of(event) in ("host_op", "annotation")
    }
    base = found["baseTimeNanoseconds"]
    ours = [node for node in found["nodes"] if "ts" in node and "cat" not in node]
    assert {attrs(node)["rf_id"]: ns(node["ts"]) + base for node in ours} == theirs
    assert all(round(float(node["ts"]) * 1000) == ns(node["ts"]) for node in ours)


def test_collectives_keep_their_group_and_state_what_this_rank_puts_in(twin):
    found, _, _, device = twin
    kernels = [event for event in device["traceEvents"] if event["ph"] == "X" and kind_of(event) == "kernel"]
    theirs = [event for event in kernels if "Collective name" in event["args"]]
    size = {"Float": 4, "Long": 8}
    ours = [node for node in found["nodes"] if "pg_name" in node]
    assert Counter((n["pg_name"], n["inputs"]["values"][0][3] * n["inputs"]["values"][0][4]) for n in ours) == Counter(
        (e["args"]["Process Group Name"], e["args"]["In msg nelems"] * size[e["args"]["dtype"]]) for e in theirs
    )
    assert len(ours) == 21


def test_hand_overs_are_those_of_the_tables_and_no_more(twin):
    found, contents, _, _ = twin
    waits = [node for node in found["nodes"] if node.get("inter_thread_dep")]
    names = {node["id"]: node["name"] for node in found["nodes"]}
    assert len(waits) == contents.num_inter_thread == 6
    assert {names[node["inter_thread_dep"]] for node in waits} == {"aten::div", "aten::cross_entropy_loss"}
    assert contents.num_waits_unplaced == 2  # the synchronisation at the end, after the last op


# One side alone, and the command line.


def test_a_host_trace_alone_has_its_tree_in_its_order_and_no_times(tmp_path):
    builder = TraceBuilder().op("outer", 0, 9).op("inner", 1, 2).op("after", 20, 1)
    trace = merge_files(tmp_path / "out", WindowFiles(builder.write_host(tmp_path / "h.json"), None))
    found, _ = exported(trace, tmp_path / "o")
    check_shape(found)
    assert [node["name"] for node in found["nodes"][1:-1]] == ["outer", "inner", "after"]
    assert by_name(found)["inner"]["ctrl_deps"] == by_name(found)["outer"]["id"]
    assert not [node for node in found["nodes"] if {"ts", "inclusive_dur", "exclusive_dur"} & set(node)]
    assert (found["time"], found["start_ts"], found["finish_ts"]) == ("", 0, 0)


def test_a_device_trace_alone_gets_roots_for_its_threads(tmp_path):
    trace = (
        TraceBuilder().op("a", 0, 9).op("b", 1, 2, tid=12).launched("k", 30, 4, 7, at=3).merged(tmp_path, host=False)
    )
    found, contents = exported(trace, tmp_path / "o")
    check_shape(found)
    assert contents.num_roots_added == 2
    assert sorted(attrs(node)["tid"] for node in found["nodes"] if node["name"] == THREAD) == [11, 12]
    assert by_name(found)["k"]["ctrl_deps"] == by_name(found)["a"]["id"]


def test_an_op_of_very_many_ops_does_not_take_the_converter_back_over_all_of_them(tmp_path):
    builder = TraceBuilder().op("whole", 0, 10_000)
    for number in range(600):
        builder.op("aten::add", 10 * number + 1, 2)
    trace = builder.launched("gemm", 9_500, 5, 7, at=9_000).launched("soon", 9_400, 5, 8, at=1_005).merged(tmp_path)
    found, contents = exported(trace, tmp_path / "o")
    check_shape(found)
    nodes = by_name(found)
    assert nodes["gemm"]["id"] == nodes["whole"]["id"] + 1
    assert nodes["soon"]["id"] == nodes["whole"]["id"] + 103  # after gemm and the 101 ops before it
    assert contents.num_early == 1


@pytest.fixture
def merged(tmp_path):
    for rank in range(2):
        TraceBuilder(rank=rank, pid=100 + rank).op("a", 1, 5).launched("k", 9, 2, 7, at=2).write(tmp_path, rank)
    assert run("merge", tmp_path).code == 0
    return tmp_path


def said(done: Outcome):
    assert (done.code, done.err) == (0, "")
    return json.loads(done.out)


def test_all_ranks_are_written_beside_the_tables_and_reported(merged):
    report = said(run("export", "chakra-json", merged, "--json"))
    folder = merged / "0_merged" / "chakra_json"
    assert (report["schema_version"], report["output"]) == (1, str(folder))
    assert sorted(path.name for path in folder.iterdir()) == ["chakra.0.json", "chakra.1.json"]
    for rank in report["ranks"]:
        (one,) = rank["files"]
        assert (rank["error"], one["num_host"], one["num_device"], one["notes"]) == (None, 3, 1, [])
        check_shape(load(folder / f"chakra.{rank['rank']}.json"))
    done = run("export", "chakra-json", merged, "-o", merged / "o", "--ranks", 1)
    assert (done.code, [path.name for path in (merged / "o").iterdir()]) == (0, ["chakra.1.json"])
    assert "rank 1: chakra.1.json, " in done.out


def test_help_says_what_the_tables_do_not_keep():
    done = run("export", "chakra-json", "--help")
    assert done.code == 0
    for word in ("fw_parent", "scope", "kernel_name", "chakra_converter", "sync_dep"):
        assert word in done.out
    assert "chakra-json" in run("export", "--help").out


def test_what_is_there_is_refused_before_anything_is_written_or_replaced_when_told(merged):
    folder = merged / "o"
    folder.mkdir()
    (folder / "chakra.1.json").write_text("mine")
    refused(run("export", "chakra-json", merged, "-o", folder), "chakra.1.json exists already", "--overwrite")
    assert [path.name for path in folder.iterdir()] == ["chakra.1.json"]
    assert run("export", "chakra-json", merged, "-o", folder, "--overwrite").code == 0
    check_shape(load(folder / "chakra.1.json"))
    assert sorted(path.name for path in folder.iterdir()) == ["chakra.0.json", "chakra.1.json"]


def test_bad_input_is_one_sentence(merged, tmp_path):
    empty = tmp_path / "new"
    TraceBuilder().op("a", 1, 1).write(empty)
    refused(run("export", "chakra-json", empty), "has no merged ranks", "chakra-capture merge")
    refused(run("export", "chakra-json", merged, "--ranks", 7), "has no merged rank 7; it has 0-1")
    (tmp_path / "file").write_text("")
    refused(run("export", "chakra-json", merged, "-o", tmp_path / "file"), "cannot be written", "-o")
    done = run("export", "chakra-json", merged, "--ranks")
    assert (done.code, "Traceback" in done.err) == (2, False)


def test_a_rank_whose_tables_are_damaged_is_reported_and_the_others_are_written(merged):
    (merged / "0_merged" / "rank=0" / "nodes.parquet").write_bytes(b"no table")
    done = run("export", "chakra-json", merged, "-o", merged / "o")
    assert done.code == 1
    assert "rank 0 was not exported: the tables of rank 0 cannot be read" in done.err
    assert "1 of 2 ranks exported" in done.out
    assert [path.name for path in (merged / "o").iterdir()] == ["chakra.1.json"]


def test_a_full_disk_leaves_no_part_of_a_file(merged):
    with files_end_at(1000):
        done = run("export", "chakra-json", merged, "-o", merged / "o")
    assert done.code == 1
    assert "cannot be written" in done.err
    assert list((merged / "o").iterdir()) == []
