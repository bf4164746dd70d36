"""Event waits read from the runtime calls, where the trace has no cuda_sync records."""

import gzip
import json
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from builder import TraceBuilder, merge_files, write_json
from handed import CASES, DATA, load_json, require

from chakra_capture.trace.discovery import WindowFiles
from chakra_capture.trace.merged import MergedTrace

NCCL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


def waits(trace: MergedTrace, kind: str = "event_wait") -> list[tuple[str, str]]:
    names = dict(trace.nodes.select("node_id", "name").rows())
    rows = trace.edges.filter(pl.col("kind") == kind).select("src", "dst").rows()
    return sorted((names[src], names[dst]) for src, dst in rows)


def unresolved(trace: MergedTrace) -> dict[str, int]:
    return trace.link["windows"][0]["waits_unresolved"]  # type: ignore[no-any-return]


def before_collective(*calls: str) -> TraceBuilder:
    """Kernel a on stream 7, launched at 5; then calls; a collective on stream 40, launched at 26."""
    trace = TraceBuilder().launched("a", 20, 20, 1, at=5)
    for number, name in enumerate(calls):
        trace.runtime(name, 10 + 2 * number, 1, 2 + number)
    return trace.launched(NCCL, 50, 5, 20, at=26, stream=40)


def test_stream_made_to_wait_right_before_a_collective_waits_for_the_work_before_the_record(tmp_path: Path) -> None:
    merged = before_collective("cudaEventRecord", "cudaStreamWaitEvent").merged(tmp_path, host=False)
    assert waits(merged) == [("a", NCCL)]
    assert unresolved(merged) == {}


def test_work_between_the_record_and_the_launch_is_not_waited_for(tmp_path: Path) -> None:
    trace = before_collective("hipEventRecord", "hipStreamWaitEvent").launched("late", 42, 1, 30, at=30)
    trace.launched(NCCL, 60, 5, 31, at=32, stream=40)
    assert waits(trace.merged(tmp_path, host=False)) == [("a", NCCL)]


def test_wait_without_a_record_is_counted_not_guessed(tmp_path: Path) -> None:
    merged = before_collective("cudaStreamWaitEvent").merged(tmp_path, host=False)
    assert waits(merged) == []
    assert unresolved(merged) == {"cudaStreamWaitEvent": 1}


def test_of_two_records_in_a_row_either_may_be_meant(tmp_path: Path) -> None:
    merged = before_collective("cudaEventRecord", "cudaEventRecord", "cudaStreamWaitEvent").merged(tmp_path, host=False)
    assert waits(merged) == []
    assert unresolved(merged) == {"cudaStreamWaitEvent": 1}


def test_record_with_a_launch_between_it_and_the_wait_is_not_paired(tmp_path: Path) -> None:
    trace = before_collective("cudaEventRecord", "cudaStreamWaitEvent").launched("other", 41, 1, 30, at=11)
    merged = trace.merged(tmp_path, host=False)
    assert waits(merged) == []
    assert unresolved(merged) == {"cudaStreamWaitEvent": 1}


def test_record_of_another_thread_is_not_paired(tmp_path: Path) -> None:
    trace = before_collective("cudaStreamWaitEvent").runtime("cudaEventRecord", 8, 1, 30, tid=99)
    assert waits(trace.merged(tmp_path, host=False)) == []


def test_record_and_wait_between_compute_and_copies_do_not_show_which_waits(tmp_path: Path) -> None:
    """A prefetching loader: compute waits for the copies before the next one is launched."""
    trace = TraceBuilder().launched("compute", 20, 20, 1, at=5)
    trace.runtime("cudaEventRecord", 12, 1, 2).runtime("cudaStreamWaitEvent", 14, 1, 3)
    merged = trace.launched("copy", 50, 5, 4, at=16, stream=20).merged(tmp_path, host=False)
    assert waits(merged) == []
    assert unresolved(merged) == {"cudaStreamWaitEvent": 1}


def test_streams_that_nccl_lets_wait_after_its_launch_hold_up_no_compute(tmp_path: Path) -> None:
    trace = TraceBuilder().launched(NCCL, 20, 20, 1, at=5, stream=40)
    trace.runtime("cudaEventRecord", 12, 1, 2).runtime("cudaStreamWaitEvent", 14, 1, 3)
    merged = trace.launched("b", 50, 5, 4, at=16).merged(tmp_path, host=False)
    assert waits(merged) == []
    assert unresolved(merged) == {"cudaStreamWaitEvent": 1}


def test_wait_within_a_communication_op_is_for_what_its_thread_launched(tmp_path: Path) -> None:
    """Older profilers record the wait but not the record call before it."""
    trace = TraceBuilder().launched("a", 20, 20, 1, at=5).op("record_param_comms", 10, 20)
    trace.runtime("cudaStreamWaitEvent", 12, 1, 2).launched(NCCL, 50, 5, 3, at=16, stream=40)
    assert waits(trace.merged(tmp_path, host=False)) == [("a", NCCL)]


def waiting_for_number(folder: Path, *numbers: Any) -> MergedTrace:
    """Two collectives with these sequence numbers (correlation ids 1 and 2), a wait op for number 33, then kernel b."""
    trace = TraceBuilder()
    for number, at in enumerate((0, 20)):
        trace.op("record_param_comms", at, 10).launched(NCCL, at + 10, 5, number + 1, at=at + 2, stream=40, seq=number)
    trace.op("record_param_comms", 40, 10).runtime("cudaStreamWaitEvent", 42, 1, 3).launched("b", 70, 5, 4, at=60)
    host = trace.host_dict()
    inputs: list[list[Any]] = [[[[1, 2, 0, 8, 4, "cuda:0"]], numbers[0], ["0", "pg"], "allreduce"]]
    inputs += [[[], numbers[1], "broadcast"], [33, ["", ""], 0, "wait", [], []]]
    for node in host["nodes"]:
        if node["name"] == "record_param_comms":
            node["inputs"] = {**node["inputs"], "values": inputs.pop(0)}
    files = WindowFiles(write_json(folder / "h.json", host), trace.write_device(folder / "d.json"))
    return merge_files(folder / "out", files)


def test_wait_op_names_its_collective_by_sequence_number(tmp_path: Path) -> None:
    merged = waiting_for_number(tmp_path, 33, [34, False])
    edge = merged.edges.filter(pl.col("kind") == "event_wait").row(0, named=True)
    assert merged.nodes["correlation_id"][edge["src"]] == 1
    assert merged.nodes["name"][edge["dst"]] == "b"


def test_number_that_two_process_groups_have_reached_names_no_collective(tmp_path: Path) -> None:
    merged = waiting_for_number(tmp_path, 33, 33)
    assert waits(merged) == []
    assert unresolved(merged) == {"cudaStreamWaitEvent": 1}


def test_wait_before_a_collective_on_the_stream_of_the_work_was_for_something_else(tmp_path: Path) -> None:
    trace = TraceBuilder().launched("a", 20, 20, 1, at=5)
    trace.runtime("cudaEventRecord", 10, 1, 2).runtime("cudaStreamWaitEvent", 12, 1, 3)
    merged = trace.launched(NCCL, 50, 5, 4, at=26).merged(tmp_path, host=False)
    assert waits(merged) == []
    assert unresolved(merged) == {"cudaStreamWaitEvent": 1}


def test_thread_waits_for_the_event_it_recorded_just_before(tmp_path: Path) -> None:
    trace = TraceBuilder().launched("a", 20, 20, 1, at=5).runtime("cudaEventRecord", 12, 1, 2)
    trace.runtime("cudaEventSynchronize", 14, 30, 3).runtime("cudaEventSynchronize", 50, 5, 4)
    merged = trace.merged(tmp_path, host=False)
    assert waits(merged, "sync") == [("a", "cudaEventSynchronize")]
    assert unresolved(merged) == {"cudaEventSynchronize": 1}


def test_driver_call_within_a_runtime_call_is_one_wait(tmp_path: Path) -> None:
    trace = TraceBuilder().runtime("cudaStreamWaitEvent", 14, 4, 3)
    trace.runtime("cuStreamWaitEvent", 15, 1, 3, cat="cuda_driver")
    assert unresolved(trace.merged(tmp_path, host=False)) == {"cudaStreamWaitEvent": 1}


def test_case_all_reduce_waits_for_the_last_work_before_the_record(tmp_path: Path) -> None:
    folder = require(CASES / "044-gpu-stream-order-edges")
    merged = merge_files(tmp_path, WindowFiles(folder / "et.json", folder / "kineto.json"))
    expected = load_json(folder / "expect.json")
    ((src, dst),) = waits(merged)
    assert expected["cross_stream_edges"] == 1
    assert "multi_tensor_apply" in src
    assert dst.startswith("ncclDevKernel_AllReduce")
    assert unresolved(merged) == {}


@pytest.mark.parametrize("name", ["hta_event_sync", "hta_event_sync_multi_stream", "hta_alexnet_critical_path"])
def test_what_the_calls_show_agrees_with_the_records(name: str, tmp_path: Path) -> None:
    """With its records taken away a trace gives no event wait that the records do not give."""
    path = require(DATA / "device_only" / f"{name}.json.gz")
    events = [e for e in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"] if e.get("cat") != "cuda_sync"]
    bare = merge_files(tmp_path / "bare", WindowFiles(None, write_json(tmp_path / "d.json", {"traceEvents": events})))
    full = merge_files(tmp_path / "full", WindowFiles(None, path))
    assert event_waits(bare) <= event_waits(full)


def event_waits(trace: MergedTrace) -> set[tuple[int, int]]:
    """Correlation ids of both sides of each event wait, of an activity or of the call that waits."""
    names, ids = trace.nodes["name"], trace.nodes["correlation_id"]
    rows = trace.edges.filter(pl.col("kind").cast(pl.String).is_in(["event_wait", "sync"]))
    pairs = rows.select("src", "dst", pl.col("kind").cast(pl.String)).rows()
    return {(ids[src], ids[dst]) for src, dst, kind in pairs if kind == "event_wait" or "Event" in names[dst]}


@pytest.mark.parametrize("rank", range(4))
def test_waits_that_name_their_collective_never_point_back_in_time(rank: int, tmp_path: Path) -> None:
    pair = require(DATA / "pairs" / "dlrm_8gpu_by_order")
    files = WindowFiles(pair / "host" / f"rank-{rank}.json.gz", pair / "device" / f"rank-{rank}.json.gz")
    merged = merge_files(tmp_path, files, rank=rank)
    assert files.host is not None
    ops = [n["inputs"] for n in load_json(files.host)["nodes"] if n["name"] == "record_param_comms"]
    collectives = {next(v for v in inputs if isinstance(v, int)) for inputs in ops if "wait" not in inputs}
    named = [inputs[0] for inputs in ops if "wait" in inputs and inputs[0] in collectives]
    assert 0 < len([src for src, _ in waits(merged) if src.startswith("ncclKernel_SendRecv")]) <= len(named)
    assert "event_wait" not in merged.link["windows"][0]["edges_backward_left_out"]
