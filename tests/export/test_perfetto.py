"""The Perfetto export of real and built runs, read by the independent reader: nothing lost, all at its time."""

import json
from collections import Counter

import polars as pl
import pytest
from builder import TraceBuilder, merge_files
from commands import run
from handed import CASES, require

from chakra_capture.trace.discovery import WindowFiles
from export.exported import merged, merged_device, merged_pair
from export.perfetto_checks import TRACES, check_made, check_rows, exported, nodes_of


@pytest.mark.parametrize(
    "name",
    [
        "hta_simple_add_critical_path", "hta_event_sync_multi_stream", "torch_compile_triton", "vllm_decode_cuda_graph",
        "mi300_qwen_0_5b_chat", "hta_cpu_only", "h100_bert_small", "mi210_gpu_only",
    ],
)  # fmt: skip
def test_every_row_of_a_handed_device_trace_is_there_once_at_its_time(tmp_path, name):
    folder = merged_device(tmp_path / "m", name)
    (path,) = folder.glob("rank=*")
    rank = int(path.name.removeprefix("rank="))
    trace, said = exported(folder, tmp_path / "t.json.gz")
    nodes, link = nodes_of(folder, rank), json.loads((path / "link.json").read_text())
    check_rows(trace, nodes, rank=rank, of_device=link["windows"][0]["clock_offset_ns"] or 0)
    timed = nodes.filter(pl.col("ts_ns").is_not_null() & ~pl.col("kind").is_in(["process", "thread"]))
    assert said["rows"] | ({"memory": said["num_samples"]} if said["num_samples"] else {}) == dict(
        sorted(timed["kind"].cast(pl.String).value_counts().iter_rows())
    )
    check_made(trace, said)


def test_every_row_of_a_pair_is_there_with_its_launch_and_the_path_is_the_elapsed_time(tmp_path):
    folder = merged_pair(tmp_path / "m", "resnet50_ddp_twin")
    trace, said = exported(folder, tmp_path / "t.json.gz")
    nodes = nodes_of(folder)
    check_rows(trace, nodes)
    check_made(trace, said)
    rows = {node: one for (_, node), one in trace.rows().items()}
    launched = nodes.filter(pl.col("launch_id").is_not_null() & pl.col("kind").is_in(["kernel", "memcpy", "memset"]))
    expected = {
        (rows[launch].tid, rows[launch].begin, rows[node].tid, rows[node].begin)
        for node, launch in launched.select("node_id", "launch_id").iter_rows()
    }
    assert {(s[1], s[2], f[1], f[2]) for s, f in trace.arrows["ac2g"]} == expected
    assert len(trace.arrows["ac2g"]) == launched.height

    path = trace.on("Run", "critical path")
    answer = run("analyze", "critical-path", folder, "--json")
    whole = [row["total_ns"] for row in json.loads(answer.out)["rows"] if row["step"] is None]
    assert path[-1].end - path[0].begin == sum(whole)

    device = json.loads(run("analyze", "device", folder, "--json").out)["rows"][0]
    states = trace.on("rank 0: GPU 0", "GPU state")
    times = Counter()
    for one in states:
        times[one.name] += one.end - one.begin
    assert times["compute"] == device["compute_ns"]
    assert times["exposed communication"] == device["exposed_communication_ns"]
    assert times["copy"] == device["exposed_memory_ns"]
    causes = json.loads(run("analyze", "idle", folder, "--json").out)["rows"]
    assert times["idle"] == sum(row["total_ns"] for row in causes)
    assert {one.args["cause"] for one in states if one.name == "idle"} == {row["cause"] for row in causes}

    queue = {name: [value for _, value in samples] for (_, name), samples in trace.counters.items() if "queue" in name}
    launches = json.loads(run("analyze", "launches", folder, "--json").out)["rows"]
    of_stream: dict[int, int] = {}
    for row in launches:
        of_stream[row["stream"]] = max(of_stream.get(row["stream"], 0), row["queue_max"])
    assert {name: max(values) for name, values in queue.items()} == {
        f"queue length stream {stream} [activities]": most for stream, most in of_stream.items()
    }
    assert all(values[-1] == 0 for values in queue.values())
    names = {name for (pid, _), name in trace.threads.items() if trace.processes[pid] == "rank 0: GPU 0"}
    assert names == {"GPU state", "stream 7 compute", "stream 40 NCCL default_pg"}


def test_backward_functions_hang_on_the_last_op_before_them_with_their_sequence_number(tmp_path):
    folder = merged_pair(tmp_path / "m", "resnet50_ddp_twin")
    trace, _ = exported(folder, tmp_path / "t.json.gz", "--kind", "host_op")
    rows = [one for one in trace.rows().values() if "Sequence number" in one.args]
    assert trace.arrows["fwdbwd"]
    by_place = {(one.tid, one.begin): one for one in rows}
    for (_, tid, at), (_, tid_to, at_to) in trace.arrows["fwdbwd"]:
        forward, backward = by_place[tid, at], by_place[tid_to, at_to]
        assert backward.name.startswith("autograd::engine::evaluate_function")
        number = backward.args["Sequence number"]
        assert forward.args["Sequence number"] == number
        between = [
            one for one in rows if one.args["Sequence number"] == number and at < one.begin < at_to
            and not one.name.startswith("autograd::engine")
        ]  # fmt: skip
        assert between == []


def test_two_gloo_ranks_are_on_one_clock_with_an_arrow_from_the_last_one_to_each_collective(tmp_path):
    merging = run("merge", TRACES / "digits_ddp2_gloo", "-o", tmp_path / "m")
    assert merging.code == 0, merging.err
    trace, said = exported(tmp_path / "m", tmp_path / "t.json")
    clocks = json.loads((tmp_path / "m" / "alignment.json").read_text())["clocks"]
    for rank in (0, 1):
        check_rows(trace, nodes_of(tmp_path / "m", rank), rank=rank, shift=-clocks[str(rank)]["offset_ns"])
    check_made(trace, said)
    collectives = pl.read_parquet(tmp_path / "m" / "collectives.parquet")
    rows, expected = trace.rows(), set()
    for _, ranks in collectives.group_by("collective_id"):
        of = {row["rank"]: row for row in ranks.iter_rows(named=True)}
        last = of[0]["last_rank"]
        if last is None or len(of) < 2:
            continue
        first, second = (rows[rank, of[rank]["node_id"]] for rank in (last, 1 - last))
        expected.add((first.tid, first.begin, second.tid, max(second.begin, first.begin)))
    assert {(s[1], s[2], f[1], f[2]) for s, f in trace.arrows["collective"]} == expected
    assert len(expected) == len(trace.arrows["collective"]) > 0
    assert [*trace.processes.values()].count("Run") == 1
    assert {"rank 0: host", "rank 1: host"} <= {*trace.processes.values()}
    assert any(name.startswith("bus bandwidth") for _, name in trace.counters)
    phases = [one.name for one in trace.of_cat("phase")]
    assert {"forward", "backward", "optimizer"} <= {*phases}


def test_memory_is_shown_as_counters(tmp_path):
    folder = merged_device(tmp_path / "m", "mi300_qwen_0_5b_chat")
    trace, said = exported(folder, tmp_path / "t.json")
    memory = nodes_of(folder).filter(kind="memory").sort("ts_ns", "node_id")
    assert said["num_samples"] == memory.height > 0
    (samples,) = [of for (_, name), of in trace.counters.items() if name == "memory allocated of GPU 0 [bytes]"]
    told = [json.loads(args) for args in memory["args"]]
    said_values = [args["Total Allocated"] for args in told if args["Device Type"] != 0]
    assert max(value for _, value in samples) == max(said_values)
    assert samples[-1][1] == said_values[-1]


def test_slices_that_cross_are_on_lanes_below_their_track(tmp_path):
    built = TraceBuilder()
    for at, (ts, dur) in enumerate([(10, 20), (20, 20), (25, 30), (30, 2), (70, 5), (70, 5), (75, 0)]):
        built.launched(f"k{at}", ts, dur, at + 1, at=at)
    built.op("outer", 0, 50).op("crosses", 40, 30)
    folder = tmp_path / "m"
    built.merged(tmp_path / "b")
    folder = tmp_path / "b" / "out"
    rank = folder.rename(tmp_path / "rank=0")
    trace, said = exported(rank, tmp_path / "t.json")
    place = {one.name: trace.threads[one.pid, one.tid] for one in trace.rows().values()}
    assert [place[f"k{at}"] for at in range(7)] == [
        "stream 7 compute", "stream 7 compute (2)", "stream 7 compute (3)", "stream 7 compute", "stream 7 compute",
        "stream 7 compute", "stream 7 compute",
    ]  # fmt: skip
    assert place["outer"] == "thread 11"
    assert place["crosses"] == "thread 11 (2)"
    assert {(one["track"], one["num_lanes"]) for one in said["lanes"]} == {
        ("rank 0: GPU 0, stream 7 compute", 3), ("rank 0: host, thread 11", 2),
    }  # fmt: skip
    order = sorted((index, trace.threads[key]) for key, index in trace.order.items() if key[0] == 11)
    assert [name for _, name in order] == [
        "GPU state", "stream 7 compute", "stream 7 compute (2)", "stream 7 compute (3)",
    ]  # fmt: skip


HOSTILE = [
    'quote " backslash \\ end', "</script><img src=x onerror=alert(1)>", "a\nb\tc\x00d\x7f", "\u202eevil\u2028\u2029",
    "", "__proto__", "constructor", '{"ph":"X"}', ',"host":{', "ключ 🦑", "x" * 100_000,
]  # fmt: skip


def test_hostile_names_and_arguments_come_through_as_they_are(tmp_path):
    built = TraceBuilder()
    for at, name in enumerate(HOSTILE):
        built.launched(name, 10 + at, 1, at + 1, at=at)
        built.kernel(name, 100 + at, 1, stream=9, note=name, cat="kernel", host={"a": name}, b={"host": {"c": name}})
        built.event(ph="X", cat=name, name=name, pid=100, tid=12, ts=200 + at, dur=1, args={"k": [name], "o": {"h": 1}})
        built.op(f"{at}", 300 + at, 1, nested={"x": 1, "host": {"y": name}})
    files = WindowFiles(built.write_host(tmp_path / "h.json"), built.write_device(tmp_path / "d.json"))
    merge_files(tmp_path / "rank=0", files)
    trace, _ = exported(tmp_path / "rank=0", tmp_path / "t.json.gz")
    names = [one.name for one in trace.rows().values()]
    for name in HOSTILE:
        assert names.count(name) >= 3
    check_rows(trace, pl.read_parquet(tmp_path / "rank=0" / "nodes.parquet"))


@pytest.mark.parametrize("name", ["plain_loop", "digits_two_cycles"])
def test_own_recordings_are_there_with_all_of_their_windows(tmp_path, name):
    merging = run("merge", TRACES / name, "-o", tmp_path / "m")
    assert merging.code == 0, merging.err
    trace, said = exported(tmp_path / "m", tmp_path / "t.json.gz")
    check_rows(trace, nodes_of(tmp_path / "m"))
    steps = pl.read_parquet(tmp_path / "m" / "rank=0" / "steps.parquet").drop_nulls("step")
    shown = [(one.name, one.begin + trace.base, one.end - one.begin) for one in trace.of_cat("step")]
    assert shown == [(f"step {n}", ts, dur) for n, ts, dur in steps.select("step", "ts_ns", "dur_ns").iter_rows()]
    assert {one.cat for one in trace.slices} >= {"phase", "critical_path"}
    assert said["notes"] == []


@pytest.mark.parametrize(
    "case",
    [
        "034-no-record-function-ids", "036-cyclic-ctrl-deps", "043-collective-nodes-and-sizes",
        "044-gpu-stream-order-edges", "046-kineto-has-more-steps-than-et",
    ],
)  # fmt: skip
def test_handed_cases_are_exported_whole(tmp_path, case):
    host, device = require(CASES / case) / "et.json", CASES / case / "kineto.json"
    folder = merged(tmp_path / "m", host=host, device=device if device.exists() else None)
    trace, said = exported(folder, tmp_path / "t.json.gz")
    check_made(trace, said)
    (rank,) = said["ranks"]
    nodes = nodes_of(tmp_path / "m", rank).filter(~pl.col("kind").is_in(["process", "thread"]))
    assert sum(said["rows"].values()) + said["num_samples"] + sum(said["without_time"].values()) == nodes.height
