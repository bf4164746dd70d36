import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from builder import MAIN, TraceBuilder, assert_table
from commands import run
from handed import DATA, load_json, require
from hypothesis import given, settings
from hypothesis import strategies as st

from chakra_capture.analysis.allocations import OUTSIDE, SCHEMA, TIMELINE, allocation_statistics, allocation_timeline
from chakra_capture.trace.merged import MergedTrace

CPU, CUDA = 0, 1


def memory(trace: TraceBuilder, ts: float, size: int, total: int, reserved: int = 0, kind: int = CUDA) -> None:
    """One record as torch writes it."""
    args = {"Device Type": kind, "Device Id": -1 if kind == CPU else 0, "Addr": 1, "Bytes": size,
            "Total Allocated": total, "Total Reserved": reserved, "Ev Idx": 1}  # fmt: skip
    trace.event(ph="i", s="t", cat="cpu_instant_event", name="[memory]", pid=trace.pid, tid=MAIN, ts=ts, args=args)


def small() -> TraceBuilder:
    """Two steps; 1000 bytes were in use before."""
    trace = TraceBuilder().step(1, 0, 50).annotation("forward", 0, 40).op("aten::mm", 5, 20).op("aten::empty", 6, 5)
    trace.step(2, 50, 50).op("autograd::engine::evaluate_function: MmBackward0", 60, 20).op("MmBackward0", 61, 9)
    for ts, size, total in ((8, 500, 1500), (20, -200, 1300), (45, 100, 1400), (62, 300, 1700), (90, -1200, 500)):
        memory(trace, ts, size, total, 4096)
    memory(trace, 63, 64, 64, kind=CPU)
    return trace


def test_without_ranks_or_records_there_is_no_row(tmp_path: Path) -> None:
    trace = TraceBuilder().step(1, 0, 50).op("aten::mm", 5, 20).merged(tmp_path)
    for traces in ([], [trace]):
        table, timeline = allocation_statistics(traces), allocation_timeline(traces)
        assert (table.height, table.columns) == (0, [column.name for column in SCHEMA])
        assert (timeline.height, timeline.columns) == (0, [column.name for column in TIMELINE])


def test_each_allocator_has_its_peak_and_the_op_that_allocated_most(tmp_path: Path) -> None:
    assert_table(
        allocation_statistics([small().merged(tmp_path, host=False)]).drop("window", "step", "phase", "op"),
        """
        rank,allocator,num_allocations,allocated_bytes,num_frees,freed_bytes,growth_bytes,peak_bytes,peak_reserved_bytes,peak_op,top_op,top_op_bytes
        0,cpu,1,64,0,0,64,64,,MmBackward0,MmBackward0,64
        0,cuda:0,3,900,2,1400,-500,1700,4096,MmBackward0,aten::mm,500
        """,
    )


def test_peaks_of_steps_and_phases_know_what_was_in_use_before(tmp_path: Path) -> None:
    trace = small().merged(tmp_path, host=False)
    columns = ("step", "phase", "num_allocations", "num_frees", "growth_bytes", "peak_bytes", "peak_op")
    rows = allocation_statistics([trace], by=["step", "phase"]).filter(allocator="cuda:0").select(columns).rows()
    assert rows == [
        (1, "forward", 1, 1, 300, 1500, "aten::mm"), (1, None, 1, 0, 100, 1400, OUTSIDE),
        (2, None, 1, 1, -900, 1700, "MmBackward0"),
    ]  # fmt: skip
    only = allocation_statistics([trace], steps=[1])
    assert only.select("allocator", "peak_bytes", "growth_bytes").rows() == [("cuda:0", 1500, 400)]


def test_ops_are_the_outermost_and_the_one_that_allocates_most_comes_first(tmp_path: Path) -> None:
    table = allocation_statistics([small().merged(tmp_path, host=False)], by=["op"]).filter(allocator="cuda:0")
    assert table.select("op", "allocated_bytes", "num_frees").rows() == [
        ("aten::mm", 500, 1), ("MmBackward0", 300, 0), (OUTSIDE, 100, 1),
    ]  # fmt: skip


def test_the_timeline_has_every_record_in_order_of_time(tmp_path: Path) -> None:
    table = allocation_timeline([small().merged(tmp_path, host=False)])
    columns = ("allocator", "since_ns", "bytes", "in_use_bytes", "reserved_bytes", "op", "step", "phase")
    assert_table(
        table.select(columns),
        """
        allocator,since_ns,bytes,in_use_bytes,reserved_bytes,op,step,phase
        cpu,55000,64,64,,MmBackward0,2,
        cuda:0,0,500,1500,4096,aten::mm,1,forward
        cuda:0,12000,-200,1300,4096,aten::mm,1,forward
        cuda:0,37000,100,1400,4096,(outside any op),1,
        cuda:0,54000,300,1700,4096,MmBackward0,2,
        cuda:0,82000,-1200,500,4096,(outside any op),2,
        """,
    )


def test_a_record_that_does_not_say_its_totals_has_none(tmp_path: Path) -> None:
    trace = (
        TraceBuilder()
        .op("aten::mm", 0, 5)
        .event(
            ph="i",
            cat="cpu_instant_event",
            name="[memory]",
            pid=100,
            tid=MAIN,
            ts=1,
            args={"Device Type": 1, "Bytes": 8},
        )
    )
    (row,) = allocation_statistics([trace.merged(tmp_path, host=False)]).to_dicts()
    assert (row["allocator"], row["allocated_bytes"]) == ("cuda", 8)
    assert (row["peak_bytes"], row["peak_reserved_bytes"]) == (None, None)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 90), st.booleans()), min_size=1, max_size=12))
def test_peak_is_the_highest_of_all_levels(tmp_path_factory: Any, sizes: list[tuple[int, bool]]) -> None:
    trace, level, levels = TraceBuilder().op("aten::mm", 0, 5), 500, [500]
    for at, (size, grows) in enumerate(sizes):
        level += size if grows else -size
        levels.append(level)
        memory(trace, at, size if grows else -size, level)
    (row,) = allocation_statistics([trace.merged(tmp_path_factory.mktemp("m"), host=False)]).to_dicts()
    assert (row["peak_bytes"], row["growth_bytes"]) == (max(levels), level - 500)


def expected(path: Path) -> tuple[dict[str, tuple[int, int, int]], Counter[tuple[str, str]]]:
    """From the file itself: peak, allocated and freed bytes by allocator; allocated by allocator and outermost op."""
    events = load_json(path)["traceEvents"]
    ops = [e for e in events if e.get("cat") == "cpu_op"]
    outer: dict[Any, list[tuple[Any, Any, str]]] = {}
    for op in sorted(ops, key=lambda e: (e["ts"], -e["dur"])):
        thread = outer.setdefault(op["tid"], [])
        if not thread or op["ts"] >= thread[-1][1]:
            thread.append(
                (op["ts"], op["ts"] + op["dur"], op["name"].removeprefix("autograd::engine::evaluate_function: "))
            )
    sums: dict[str, tuple[int, int, int]] = {}
    by_op: Counter[tuple[str, str]] = Counter()
    for event in events:
        if event.get("name") != "[memory]":
            continue
        args, kind = event["args"], {0: "cpu", 1: "cuda:0", 6: "hip:0"}
        name = kind[args["Device Type"]]
        size, after = args["Bytes"], args["Total Allocated"]
        peak, allocated, freed = sums.get(name, (0, 0, 0))
        sums[name] = max(peak, after, after - size), allocated + max(size, 0), freed + max(-size, 0)
        around = [op for low, high, op in outer.get(event["tid"], []) if low <= event["ts"] <= high]
        if size > 0:
            by_op[name, around[0] if around else OUTSIDE] += size
    return sums, by_op


@pytest.mark.parametrize("name", ["h100_bert_small", "h100_qwen_0_5b_chat", "mi300_qwen_0_5b_chat"])
def test_sums_of_real_traces_are_those_of_their_files(merged: Any, name: str) -> None:
    (folder,) = merged(f"device_only/{name}").glob("rank=*")
    sums, by_op = expected(require(DATA / "device_only" / f"{name}.json.gz"))
    table = allocation_statistics([MergedTrace(0, folder)])
    columns = ("peak_bytes", "allocated_bytes", "freed_bytes")
    assert dict(zip(table["allocator"], table.select(columns).rows(), strict=True)) == sums
    ops = allocation_statistics([MergedTrace(0, folder)], by=["op"]).select("allocator", "op", "allocated_bytes").rows()
    assert {(allocator, op): size for allocator, op, size in ops if size} == dict(by_op)


def test_the_command_shows_peaks_or_says_how_to_record_them(tmp_path: Path) -> None:
    folder = small().write(tmp_path / "with")
    assert "1.7 kB" in run("analyze", "allocations", folder).out
    shown = json.loads(run("analyze", "allocations", folder, "--by", "step", "--json").out)
    peaks = {(row["allocator"], row["step"]): row["peak_bytes"] for row in shown["rows"]}
    assert (peaks, shown["notes"]) == ({("cpu", 2): 64, ("cuda:0", 1): 1500, ("cuda:0", 2): 1700}, [])
    timeline = json.loads(run("analyze", "allocations", folder, "--timeline", "--json").out)
    assert [column["name"] for column in timeline["columns"]] == [column.name for column in TIMELINE]
    assert len(timeline["rows"]) == 6
    without = TraceBuilder().op("aten::mm", 5, 20).write(tmp_path / "without")
    shown = json.loads(run("analyze", "allocations", without, "--json").out)
    assert shown["rows"] == []
    assert shown["notes"] == ["rank 0: allocations not recorded, record with profile_memory: true"]
