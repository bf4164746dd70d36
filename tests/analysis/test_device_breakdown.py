import json
import tempfile
from pathlib import Path

import pytest
from builder import TraceBuilder, assert_table, merge_files
from commands import run
from handed import DATA, require
from hypothesis import given, settings
from hypothesis import strategies as st

from chakra_capture.analysis.device import SCHEMA, device_breakdown, device_time
from chakra_capture.analysis.hta_breakdown import hta_breakdown
from chakra_capture.trace.discovery import WindowFiles

PARTS = ("span_ns", "compute_ns", "exposed_communication_ns", "exposed_memory_ns", "idle_ns")


def test_without_device_activities_there_is_no_row(tmp_path: Path) -> None:
    trace = TraceBuilder().step(1, 0, 10).op("a", 0, 1).merged(tmp_path)
    table = device_breakdown(trace)
    assert (table.height, table.columns) == (0, [column.name for column in SCHEMA])


def test_a_step_is_broken_down_between_its_own_bounds(tmp_path: Path) -> None:
    # The collective of step 1 runs into step 2, whose kernel hides 10 of its 20 us there.
    trace = TraceBuilder().step(1, 0, 50).step(2, 50, 50)
    trace.launched("gemm", 10, 20, 1, at=0).launched("ncclDevKernel_AllReduce_x", 20, 50, 2, at=1, stream=8)
    trace.launched("gemm", 60, 30, 3, at=55).kernel("Memcpy HtoD (Pinned -> Device)", 95, 5, 4, cat="gpu_memcpy")
    columns = ("device", "step", *PARTS, "overlap", "num_activities")
    assert_table(
        device_breakdown(trace.merged(tmp_path, host=False)).select(columns),
        """
        device,step,span_ns,compute_ns,exposed_communication_ns,exposed_memory_ns,idle_ns,overlap,num_activities
        0,,90000,50000,30000,5000,5000,0.4,4
        0,1,50000,20000,20000,0,10000,0.333333,2
        0,2,50000,30000,10000,5000,5000,0.5,3
        """,
    )


def test_what_lies_between_two_windows_is_no_idle_time(tmp_path: Path) -> None:
    first = TraceBuilder().kernel("k", 0, 10).write_device(tmp_path / "a.json")
    later = TraceBuilder().kernel("k", 9000, 10).kernel("k", 9020, 10).write_device(tmp_path / "b.json")
    trace = merge_files(tmp_path / "out", WindowFiles(None, first), WindowFiles(None, later))
    assert device_breakdown(trace).select("window", "span_ns", "idle_ns").rows() == [(0, 10000, 0), (1, 30000, 10000)]
    assert device_time(trace).select("span_ns", "busy_ns", "idle_ns").rows() == [(40000, 30000, 10000)]


def test_each_device_of_a_process_is_measured_by_itself(tmp_path: Path) -> None:
    trace = TraceBuilder().kernel("k", 0, 10).kernel("k", 30, 10).kernel("k", 10, 20, device=1)
    table = device_breakdown(trace.merged(tmp_path, host=False))
    assert table.select("device", "span_ns", "idle_ns").rows() == [(0, 40000, 20000), (1, 20000, 0)]


SPAN = st.tuples(st.sampled_from(["kernel", "nccl", "gpu_memcpy"]), st.integers(0, 60), st.integers(0, 20))


@settings(max_examples=40, deadline=None)
@given(st.lists(SPAN, min_size=1, max_size=10), st.lists(st.integers(1, 25), max_size=3))
def test_parts_of_steps_are_those_of_counting_instants(spans: list[tuple[str, int, int]], steps: list[int]) -> None:
    trace, low = TraceBuilder(), 5
    sets: dict[str, set[int]] = {"kernel": set(), "nccl": set(), "gpu_memcpy": set()}
    for stream, (what, ts, dur) in enumerate(spans):
        name = "ncclDevKernel_AllReduce_x" if what == "nccl" else "k"
        trace.kernel(name, ts, dur, stream=stream, cat="kernel" if what == "nccl" else what)
        sets[what] |= set(range(ts, ts + dur))
    instants = []
    for number, dur in enumerate(steps):
        trace.step(number, low, dur)
        instants.append(set(range(low, low + dur)))
        low += dur
    with tempfile.TemporaryDirectory() as folder:
        table = device_breakdown(trace.merged(Path(folder), host=False))
    compute, comm, memory = sets.values()
    for number, inside in enumerate(instants):
        (row,) = table.filter(step=number).select(PARTS).rows()
        parts = (compute, comm - compute, memory - compute - comm)
        busy = [1000 * len(part & inside) for part in parts]
        assert row == (1000 * len(inside), *busy, 1000 * len(inside) - sum(busy))
    assert len(table) == 1 + len(steps)


# In ms: idle, compute, non-compute; overlap in percent. What HTA 0.6.1 itself prints on these traces in whole us.
HTA = {
    "hta_trace_diff_control": (62.119, 234.760, 86.525, 47.03),
    "hta_sampled_two_ranks_0": (321.378, 106.252, 172.428, 11.81),
    "hta_sampled_two_ranks_1": (328.671, 135.548, 136.455, 20.05),
}


@pytest.mark.parametrize("name", HTA)
def test_hta_definitions_give_what_hta_prints(name: str, tmp_path: Path) -> None:
    path = require(DATA / "device_only" / f"{name}.json.gz")
    (row,) = hta_breakdown(merge_files(tmp_path, WindowFiles(None, path), force=True)).to_dicts()
    times = [round(row[f"{part}_time_ns"] / 1e6, 3) for part in ("idle", "compute", "non_compute")]
    assert (*times, round(row["comp_comm_overlap_pctg"], 2)) == HTA[name]


def test_the_command_shows_the_breakdown_of_the_steps_asked_for(tmp_path: Path) -> None:
    trace = TraceBuilder().step(5, 0, 50).step(6, 50, 50).launched("gemm", 10, 20, 1, at=0)
    folder = trace.launched("gemm", 60, 40, 2, at=52).write(tmp_path)
    shown = json.loads(run("analyze", "device", folder, "--step", "6", "--json").out)
    assert [(row["step"], row["compute_ns"], row["idle_ns"]) for row in shown["rows"]] == [(6, 40000, 10000)]
    assert "gemm" not in run("analyze", "device", folder).out
    hta = json.loads(run("analyze", "device", folder, "--definitions", "hta", "--json").out)
    assert [row["compute_time_ns"] for row in hta["rows"]] == [20000]
