"""What was recorded during validation is left out where the recorder marked it, and only that."""

import json
from pathlib import Path

import polars as pl
from builder import MAIN, TraceBuilder, assert_table, merge_files

from chakra_capture.annotations import VALIDATION
from chakra_capture.trace.discovery import WindowFiles


def recorded() -> TraceBuilder:
    return (
        TraceBuilder()
        .step(1, ts=0, dur=100)
        .op("aten::mm", ts=10, dur=20)
        .launched("train", ts=20, dur=90, correlation=1, at=15)  # still runs while validation goes on
        .annotation(VALIDATION, ts=100, dur=100)
        .op("aten::eval", ts=110, dur=20)
        .op("aten::worker", ts=150, dur=5, tid=MAIN + 1)
        .launched("eval", ts=190, dur=50, correlation=2, at=115)  # still runs when training goes on
        .step(2, ts=200, dur=100)
        .op("aten::mm", ts=210, dur=20)
        .launched("train", ts=250, dur=10, correlation=3, at=215)
    )


def test_rows_of_validation_and_what_they_launched_are_left_out(tmp_path: Path) -> None:
    trace = recorded().merged(tmp_path)
    names = trace.nodes.select("node_id", "name").rename({"node_id": "parent_id", "name": "parent"})
    shown = trace.nodes.join(names, on="parent_id", how="left").filter(~pl.col("kind").is_in(["process", "thread"]))

    assert_table(
        shown.sort("node_id"),
        """
        kind,name,parent,ts_ns,step
        kernel,train,aten::mm,20000,1
        kernel,train,aten::mm,250000,2
        annotation,ProfilerStep#1,,0,1
        host_op,aten::mm,ProfilerStep#1,10000,1
        runtime,cudaLaunchKernel,aten::mm,15000,1
        annotation,ProfilerStep#2,,200000,2
        host_op,aten::mm,ProfilerStep#2,210000,2
        runtime,cudaLaunchKernel,aten::mm,215000,2
        """,
    )
    assert trace.nodes["node_id"].to_list() == list(range(len(trace.nodes)))
    ends = set(trace.edges["src"]) | set(trace.edges["dst"])
    assert ends <= set(trace.nodes["node_id"])
    (window,) = json.loads((tmp_path / "out/link.json").read_text())["windows"]
    assert window["num_rows_of_validation_left_out"] == 5
    assert "rows recorded during validation, left out because the job asked for it: 5" in window["notes"]
    assert not window["salvaged"]


def test_host_trace_alone_is_cut_by_parents(tmp_path: Path) -> None:
    host = recorded().write_host(tmp_path / "h.json")
    trace = merge_files(tmp_path / "out", WindowFiles(host, None))

    # The op of the other thread has no parent in the mark, and no time.
    assert trace.nodes.filter(pl.col("kind") == "host_op")["name"].to_list() == [
        "aten::mm", "aten::worker", "aten::mm",
    ]  # fmt: skip


def test_rows_that_only_look_like_it_stay(tmp_path: Path) -> None:
    trace = TraceBuilder().annotation("validation", 0, 50).op("aten::mm", 10, 20).merged(tmp_path)

    assert {"validation", "aten::mm"} <= set(trace.nodes["name"])
