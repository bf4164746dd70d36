from itertools import pairwise
from pathlib import Path

import polars as pl
from builder import TraceBuilder, merge_files
from handed import CASES, require

from chakra_capture.trace.discovery import WindowFiles
from chakra_capture.trace.merged import MergedTrace


def edges(trace: MergedTrace, kind: str) -> set[tuple[str, str, str, str]]:
    """Edges of one kind with the names of their ends."""
    name = dict(trace.nodes.select("node_id", "name").iter_rows())
    rows = trace.edges.filter(pl.col("kind") == kind).select("src", "src_at", "dst", "dst_at").iter_rows()
    return {(name[src], src_at, name[dst], dst_at) for src, src_at, dst, dst_at in rows}


def test_siblings_first_and_last_child_are_ordered(tmp_path: Path) -> None:
    trace = TraceBuilder().op("p", 0, 100).op("a", 10, 10).op("b", 30, 10).op("c", 50, 10).op("q", 200, 5)
    trace.op("elsewhere", 15, 5, tid=99)
    assert edges(trace.merged(tmp_path), "thread_order") == {
        ("p", "start", "a", "start"),
        ("a", "end", "b", "start"),
        ("b", "end", "c", "start"),
        ("c", "end", "p", "end"),
        ("p", "end", "q", "start"),
    }


def test_rows_inside_one_without_an_end_are_ordered_by_the_row_around_it(tmp_path: Path) -> None:
    trace = TraceBuilder().op("p", 0, 100).op("a", 10, 10).op("open", 30, -1).op("b", 40, 10).op("c", 60, 10)
    assert edges(trace.merged(tmp_path, host=False), "thread_order") == {
        ("p", "start", "a", "start"),
        ("a", "end", "b", "start"),
        ("b", "end", "c", "start"),
        ("c", "end", "p", "end"),
    }


def test_graph_launch_points_to_the_first_kernel_of_each_stream(tmp_path: Path) -> None:
    trace = TraceBuilder().runtime("cudaGraphLaunch", 0, 5, 1)
    for number in range(3):
        trace.kernel(f"k{number}", 10 + 10 * number, 5, 1).kernel(f"l{number}", 12 + 10 * number, 5, 1, stream=8)
    merged = trace.merged(tmp_path, host=False)
    assert edges(merged, "launch") == {("cudaGraphLaunch", "start", k, "start") for k in ("k0", "l0")}
    assert edges(merged, "stream_order") == {(f"{s}{n}", "end", f"{s}{n + 1}", "start") for s in "kl" for n in (0, 1)}


def test_device_clock_behind_the_host_is_moved_and_said(tmp_path: Path) -> None:
    trace = TraceBuilder().launched("k", 7, 2, 1, at=10).launched("l", 12, 2, 2, at=11)
    merged = trace.merged(tmp_path, host=False)
    assert merged.link["windows"][0]["clock_offset_ns"] == 3000
    assert len(edges(merged, "launch")) == 2
    assert merged.nodes.filter(pl.col("name") == "k")["ts_ns"].to_list() == [7000]  # times stay as recorded


def test_one_absurd_kernel_time_does_not_move_the_clock(tmp_path: Path) -> None:
    trace = TraceBuilder().launched("k", 20, 2, 1, at=10).launched("l", 5, 2, 2, at=9_000_000)
    window = trace.merged(tmp_path, host=False).link["windows"][0]
    assert window["clock_offset_ns"] == 0
    assert window["edges_backward_left_out"] == {"launch": 1}


def test_streams_of_two_devices_do_not_mix(tmp_path: Path) -> None:
    trace = TraceBuilder().kernel("a", 0, 5, 1).kernel("b", 10, 5, 2, device=1).kernel("c", 20, 5, 3)
    assert edges(trace.merged(tmp_path, host=False), "stream_order") == {("a", "end", "c", "start")}


def test_overrunning_kernel_orders_nothing_after_it_and_is_counted(tmp_path: Path) -> None:
    trace = TraceBuilder().kernel("a", 0, 50, 1).kernel("b", 10, 5, 2).kernel("c", 20, 5, 3)
    merged = trace.merged(tmp_path, host=False)
    assert edges(merged, "stream_order") == {("b", "end", "c", "start")}
    assert merged.link["windows"][0]["edges_backward_left_out"] == {"stream_order": 1}


def test_case_stream_order(tmp_path: Path) -> None:
    folder = require(CASES / "044-gpu-stream-order-edges")
    merged = merge_files(tmp_path, WindowFiles(folder / "et.json", folder / "kineto.json"))
    chain = [
        "Memcpy HtoD (Pageable -> Device)",
        "ampere_sgemm_32x32_sliced1x4_tn",
        "ampere_sgemm_32x32_sliced1x4_nn",
    ]
    seen = edges(merged, "stream_order")
    assert {(a, "end", b, "start") for a, b in pairwise(chain)} <= seen
    assert len(seen) == 3


def test_kernel_that_overlaps_the_one_ahead_keeps_the_edge_of_its_launch(tmp_path: Path) -> None:
    trace = TraceBuilder().runtime("graphLaunch", 0, 1, 1)
    trace.kernel("a", 10, 10, 1).kernel("b", 15, 10, 1).kernel("c", 30, 5, 1)  # no edge of the stream leads from a to b
    merged = trace.merged(tmp_path, host=False)
    assert edges(merged, "stream_order") == {("b", "end", "c", "start")}
    assert edges(merged, "launch") == {("graphLaunch", "start", "a", "start"), ("graphLaunch", "start", "b", "start")}


def test_launch_edge_left_out_as_backward_hides_no_other(tmp_path: Path) -> None:
    trace = TraceBuilder().runtime("graphLaunch", 3_000_000, 1, 1)
    trace.kernel("a", 10, 10, 1).kernel("b", 3_000_010, 10, 1)
    merged = trace.merged(tmp_path, host=False)
    assert edges(merged, "launch") == {("graphLaunch", "start", "b", "start")}
    assert merged.link["windows"][0]["edges_backward_left_out"] == {"launch": 1}
