"""Waits that a trace shows: synchronising calls, event waits, blocking copies."""

from pathlib import Path

import polars as pl
import pytest
from builder import DEVICE, TraceBuilder
from handed import DATA, load_json, require
from reach import Reach

from chakra_capture.trace.merged import MergedTrace


def edges_of(trace: MergedTrace, *kinds: str) -> list[tuple[str, str, str, str, str]]:
    """(kind, src name, src_at, dst name, dst_at) of the edges of some kinds."""
    names = dict(trace.nodes.select("node_id", "name").rows())
    rows = trace.edges.filter(pl.col("kind").cast(pl.String).is_in(kinds))
    return sorted(
        (str(kind), names[src], str(src_at), names[dst], str(dst_at))
        for src, src_at, dst, dst_at, kind in rows.select("src", "src_at", "dst", "dst_at", "kind").rows()
    )


def sync(builder: TraceBuilder, name: str, correlation: int, *, stream: int = -1, **args: int) -> TraceBuilder:
    """A cuda_sync record of the call with the same correlation id."""
    known = {"cuda_sync_kind": name, "stream": stream, "device": DEVICE, "correlation": correlation, **args}
    return builder.event(ph="X", cat="cuda_sync", name=name, pid=DEVICE, tid=stream, ts=90, dur=1, args=known)


def two_streams() -> TraceBuilder:
    """Kernel a on stream 7 (20-40), kernel b on stream 20 (30-60); both launched before 15."""
    return TraceBuilder().launched("a", 20, 20, 1, at=5).launched("b", 30, 30, 2, at=10, stream=20)


def test_device_synchronize_waits_for_the_last_activity_of_every_stream(tmp_path: Path) -> None:
    trace = two_streams().runtime("cudaDeviceSynchronize", 15, 50, 3)
    assert edges_of(trace.merged(tmp_path, host=False), "sync") == [
        ("sync", "a", "end", "cudaDeviceSynchronize", "end"),
        ("sync", "b", "end", "cudaDeviceSynchronize", "end"),
    ]


def test_stream_sync_record_names_the_stream(tmp_path: Path) -> None:
    trace = sync(two_streams().runtime("cudaStreamSynchronize", 15, 30, 3), "Stream Sync", 3, stream=7)
    assert edges_of(trace.merged(tmp_path, host=False), "sync") == [
        ("sync", "a", "end", "cudaStreamSynchronize", "end")
    ]


def test_stream_synchronize_without_a_record_waits_for_what_its_thread_launched_last(tmp_path: Path) -> None:
    trace = two_streams().runtime("cudaStreamSynchronize", 15, 50, 3).runtime("hipStreamSynchronize", 15, 50, 4, tid=99)
    assert edges_of(trace.merged(tmp_path, host=False), "sync") == [
        ("sync", "b", "end", "cudaStreamSynchronize", "end")
    ]


def test_event_wait_joins_the_work_before_the_record_with_the_work_after_the_wait(tmp_path: Path) -> None:
    trace = two_streams().runtime("cudaEventRecord", 12, 1, 3).runtime("cudaStreamWaitEvent", 14, 1, 4)
    trace.launched("c", 70, 10, 5, at=16, stream=20)
    sync(trace, "Stream Wait Event", 4, stream=20, wait_on_stream=7, wait_on_cuda_event_record_corr_id=3)
    assert edges_of(trace.merged(tmp_path, host=False), "event_wait", "sync") == [
        ("event_wait", "a", "end", "c", "start")
    ]


def test_work_launched_after_the_record_is_not_waited_for(tmp_path: Path) -> None:
    trace = TraceBuilder().launched("early", 20, 5, 1, at=2).runtime("cudaEventRecord", 4, 1, 2)
    trace.launched("late", 25, 5, 3, at=6).runtime("cudaEventSynchronize", 8, 30, 4)
    sync(trace, "Event Sync", 4, wait_on_stream=7, wait_on_cuda_event_record_corr_id=2)
    assert edges_of(trace.merged(tmp_path, host=False), "sync") == [
        ("sync", "early", "end", "cudaEventSynchronize", "end")
    ]


def test_record_of_an_event_that_the_trace_does_not_hold_joins_nothing(tmp_path: Path) -> None:
    trace = two_streams().runtime("cudaEventQuery", 15, 50, 3)
    sync(trace, "Event Sync", 3, wait_on_stream=-1, wait_on_cuda_event_record_corr_id=-1)
    assert edges_of(trace.merged(tmp_path, host=False), "sync", "event_wait") == []


def test_copy_to_pageable_memory_blocks_its_own_call(tmp_path: Path) -> None:
    name = "Memcpy DtoH (Device -> Pageable)"
    trace = TraceBuilder().runtime("cudaMemcpyAsync", 0, 20, 1).kernel(name, 5, 10, 1, cat="gpu_memcpy")
    trace.runtime("cudaMemcpyAsync", 30, 2, 2).kernel("Memcpy HtoD (Pinned -> Device)", 31, 1, 2, cat="gpu_memcpy")
    assert edges_of(trace.merged(tmp_path, host=False), "sync") == [("sync", name, "end", "cudaMemcpyAsync", "end")]


def test_wait_that_another_one_implies_is_left_out(tmp_path: Path) -> None:
    trace = two_streams().runtime("cudaDeviceSynchronize", 15, 50, 3).runtime("cudaDeviceSynchronize", 70, 5, 4)
    merged = trace.merged(tmp_path, host=False)
    first = merged.nodes.filter(pl.col("correlation_id") == 3, pl.col("kind") == "runtime")["node_id"].item()
    waits = merged.edges.filter(pl.col("kind") == "sync")
    assert waits["dst"].to_list() == [first, first]


def test_wait_that_ended_before_the_work_is_counted_not_kept(tmp_path: Path) -> None:
    trace = TraceBuilder().launched("a", 20, 20, 1, at=5).runtime("cudaDeviceSynchronize", 15, 10, 2)
    merged = trace.merged(tmp_path, host=False)
    assert edges_of(merged, "sync") == []
    assert merged.link["windows"][0]["edges_backward_left_out"] == {"sync": 1}


# Activities (correlation id) that the call or activity with the second correlation id waits for, read by hand from the
# cuda_sync records of the file: the last activity launched on the stream before the record or the call.
@pytest.mark.parametrize("name", ["hta_event_sync", "hta_event_sync_multi_stream", "hta_alexnet_critical_path"])
def test_every_wait_of_the_records_is_implied_by_the_edges(name: str, tmp_path: Path) -> None:
    path = require(DATA / "device_only" / f"{name}.json.gz")
    wanted = waits_in(load_json(path)["traceEvents"])
    assert wanted
    reach = Reach(merge_device(path, tmp_path))
    missing = [pair for pair in wanted if not reach.holds(*pair)]
    assert missing == []


def merge_device(path: Path, folder: Path) -> MergedTrace:
    from builder import merge_files

    from chakra_capture.trace.discovery import WindowFiles

    return merge_files(folder / "out", WindowFiles(None, path))


def waits_in(events: list[dict]) -> list[tuple[int, int, str]]:
    """(correlation of the source activity, correlation of the waiting row, its side), in plain Python."""
    calls = {
        e["args"]["correlation"]: e for e in events if e.get("cat") == "cuda_runtime" and "correlation" in e["args"]
    }
    work = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]

    def launched(stream: int | None, before: float) -> dict[int, dict]:
        """Last activity launched before a time, per stream."""
        last: dict[int, dict] = {}
        for e in sorted(work, key=lambda e: calls[e["args"]["correlation"]]["ts"]):
            if calls[e["args"]["correlation"]]["ts"] < before and stream in (None, e["args"]["stream"]):
                last[e["args"]["stream"]] = e
        return last

    found = []
    for e in events:
        if e.get("cat") != "cuda_sync" or e["args"]["correlation"] not in calls:
            continue
        args, call = e["args"], calls[e["args"]["correlation"]]
        record = calls.get(args.get("wait_on_cuda_event_record_corr_id"))
        if e["name"] == "Context Sync":
            sources = launched(None, call["ts"])
        elif e["name"] == "Stream Sync":
            sources = launched(args["stream"], call["ts"])
        else:
            sources = launched(args["wait_on_stream"], record["ts"]) if record else {}
        target, side = args["correlation"], "end"
        if e["name"] == "Stream Wait Event":
            after = [k for k in work if k["args"]["stream"] == args["stream"]]
            after = [k for k in after if calls[k["args"]["correlation"]]["ts"] >= call["ts"]]
            if not after:
                continue
            target = min(after, key=lambda k: calls[k["args"]["correlation"]]["ts"])["args"]["correlation"]
            side = "start"
        found += [(source["args"]["correlation"], target, side) for source in sources.values()]
    return found
