"""Hand-overs between CPU threads: only where the trace names both sides."""

from pathlib import Path

import polars as pl
import pytest
from builder import MAIN, TraceBuilder, merge_files
from handed import DATA, require

from chakra_capture.trace.discovery import WindowFiles
from chakra_capture.trace.merged import MergedTrace

ENGINE = "autograd::engine::evaluate_function: "
RUN_BACKWARD = "<built-in method run_backward of torch._C._EngineBase object at 0x7f00>"


def handovers(trace: MergedTrace) -> list[tuple[str, str]]:
    names = dict(trace.nodes.select("node_id", "name").rows())
    edges = trace.edges.filter(pl.col("kind") == "inter_thread")
    assert set(edges.select("src_at", "dst_at").rows()) <= {("end", "start")}
    return sorted((names[src], names[dst].removeprefix(ENGINE)) for src, dst in edges.select("src", "dst").rows())


def forward() -> TraceBuilder:
    """Two forward ops with sequence numbers 4 and 5 on the main thread, the second within another op."""
    trace = TraceBuilder().op("mm", 0, 10, **{"Sequence number": 4})
    return trace.op("loss", 20, 20).op("div", 22, 10, **{"Sequence number": 5})


def backward(trace: TraceBuilder, name: str, at: int, sequence: int, *, tid: int = 22) -> TraceBuilder:
    args = {"Sequence number": sequence, "Fwd thread id": 1}
    trace.op(ENGINE + name, at, 8, tid=tid, **args)
    return trace.op(name, at + 1, 6, tid=tid, **args)


def test_engine_begins_after_the_forward_op_with_its_sequence_number(tmp_path: Path) -> None:
    trace = backward(backward(forward(), "DivBackward0", 50, 5), "MmBackward0", 60, 4)
    # That mm came before follows from div: on the main thread mm, then div; on the other div, then mm.
    assert handovers(trace.merged(tmp_path)) == [("div", "DivBackward0")]


def test_of_several_rows_with_a_number_the_last_to_end_counts(tmp_path: Path) -> None:
    trace = TraceBuilder().op("linear", 0, 30, **{"Sequence number": 4}).op("addmm", 5, 10, **{"Sequence number": 4})
    assert handovers(backward(trace, "AddmmBackward0", 50, 4).merged(tmp_path)) == [("linear", "AddmmBackward0")]


def test_backward_on_the_forward_thread_is_no_handover(tmp_path: Path) -> None:
    assert handovers(backward(forward(), "DivBackward0", 50, 5, tid=MAIN).merged(tmp_path)) == []


def test_number_that_stands_on_two_threads_names_neither_and_is_counted(tmp_path: Path) -> None:
    trace = backward(forward().op("replica", 0, 10, tid=33, **{"Sequence number": 5}), "DivBackward0", 50, 5)
    merged = trace.merged(tmp_path)
    assert handovers(merged) == []
    assert merged.link["windows"][0]["waits_unresolved"] == {"autograd::engine": 1}


def test_number_of_another_process_is_another_number(tmp_path: Path) -> None:
    trace = TraceBuilder().op("elsewhere", 0, 10, **{"Sequence number": 5})
    trace.events[0]["pid"] = 7
    assert handovers(backward(trace, "DivBackward0", 50, 5).merged(tmp_path, host=False)) == []


def test_engine_that_began_before_its_forward_op_ended_is_counted_not_kept(tmp_path: Path) -> None:
    merged = backward(forward(), "DivBackward0", 30, 5).merged(tmp_path)
    assert handovers(merged) == []
    assert merged.link["windows"][0]["edges_backward_left_out"] == {"inter_thread": 1}


def called(trace: TraceBuilder, ts: int, dur: int, *, tid: int = MAIN) -> TraceBuilder:
    return trace.op(RUN_BACKWARD, ts, dur, tid=tid, cat="python_function", host=False)


def test_call_of_backward_hands_over_and_takes_back(tmp_path: Path) -> None:
    trace = called(forward().op("ones_like", 42, 3), 46, 50).op("step", 100, 10)
    backward(backward(trace, "DivBackward0", 50, 5), "AccumulateGrad", 70, -1)
    assert handovers(trace.merged(tmp_path, host=False)) == [
        ("autograd::engine::evaluate_function: AccumulateGrad", "step"),
        ("ones_like", "DivBackward0"),
    ]


def test_each_thread_of_the_engine_is_handed_to_and_taken_back_from(tmp_path: Path) -> None:
    trace = called(TraceBuilder().op("ones_like", 42, 3), 46, 50).op("step", 100, 10)
    backward(backward(trace, "A", 50, -1, tid=22), "B", 60, -1, tid=23)
    assert handovers(trace.merged(tmp_path, host=False)) == [
        (ENGINE + "A", "step"),
        (ENGINE + "B", "step"),
        ("ones_like", "A"),
        ("ones_like", "B"),
    ]


def test_two_threads_that_call_backward_at_once_are_not_told_apart(tmp_path: Path) -> None:
    trace = called(called(TraceBuilder().op("ones_like", 42, 3), 46, 50), 48, 50, tid=33).op("step", 100, 10)
    merged = backward(trace, "A", 50, -1).merged(tmp_path, host=False)
    assert handovers(merged) == []
    assert merged.link["windows"][0]["waits_unresolved"] == {"autograd::engine": 2}


def test_backward_called_within_the_engine_is_part_of_the_one_around_it(tmp_path: Path) -> None:
    trace = called(TraceBuilder().op("ones_like", 42, 3), 46, 50).op("step", 100, 10)
    trace.op(ENGINE + "Checkpoint", 50, 40, tid=22, host=False)
    merged = backward(called(trace, 60, 20, tid=22), "Inner", 65, -1).merged(tmp_path, host=False)
    assert handovers(merged) == [(ENGINE + "Checkpoint", "step"), ("ones_like", "Checkpoint")]


def test_threads_of_a_loader_hand_over_nothing_that_is_recorded(tmp_path: Path) -> None:
    trace = TraceBuilder().op("enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__", 0, 50)
    merged = trace.op("aten::pin_memory", 10, 20, tid=44).op("aten::to", 60, 5).merged(tmp_path)
    assert handovers(merged) == []


@pytest.mark.parametrize("place", ["pairs/resnet50_ddp_twin/device/rank-0", "device_only/hta_ns_resolution"])
def test_every_forward_backward_pair_of_two_threads_is_implied(place: str, tmp_path: Path) -> None:
    merged = merge_files(tmp_path, WindowFiles(None, require(DATA / f"{place}.json.gz")))
    start, end = merged.nodes["ts_ns"], merged.nodes["ts_ns"] + merged.nodes["dur_ns"]
    kept = merged.edges.filter(pl.col("kind") == "inter_thread").select("src", "dst").rows()
    pairs = pairs_of(merged)
    assert len(pairs) > 400
    for forward_row, backward_row in pairs:
        assert any(end[forward_row] <= end[src] and start[dst] <= start[backward_row] for src, dst in kept), (
            merged.nodes["name"][backward_row]
        )


def pairs_of(merged: MergedTrace) -> list[tuple[int, int]]:
    """Rows with one sequence number, outside and inside the engine, on two threads."""
    numbered = merged.nodes.filter(pl.col("sequence_number").is_not_null())
    outside: dict[int, list[tuple[int, int]]] = {}
    for node, tid, number, name in numbered.select("node_id", "tid", "sequence_number", "name").rows():
        if "Backward" not in name:
            outside.setdefault(number, []).append((node, tid))
    engine = numbered.filter(pl.col("name").str.starts_with(ENGINE)).select("node_id", "tid", "sequence_number")
    return [(row, node) for node, tid, number in engine.rows() for row, on in outside.get(number, []) if on != tid]
