import json
from pathlib import Path

import pytest
from builder import TraceBuilder, assert_table
from commands import run

from chakra_capture.analysis.input_waits import input_waits
from chakra_capture.analysis.phase_means import phase_means
from chakra_capture.analysis.step_tables import step_table
from chakra_capture.trace.merged import MergedTrace


def two_steps(folder: Path) -> MergedTrace:
    """Step 1 waits 20 of 50 us for its input, of which the device works 5; step 2 does not wait."""
    trace = TraceBuilder().step(1, 0, 50).annotation("input_wait", 0, 20).annotation("forward", 20, 20)
    trace.launched("k", 0, 5, 1, at=0).launched("k", 30, 10, 2, at=25)
    trace.step(2, 50, 30).annotation("forward", 50, 30).launched("k", 60, 20, 3, at=55)
    return trace.merged(folder, host=False)


def test_without_ranks_or_steps_there_is_no_row(tmp_path: Path) -> None:
    loose = TraceBuilder().op("a", 0, 5).merged(tmp_path)
    assert (phase_means([]).height, input_waits([]).height, step_table([]).height) == (0, 0, 0)
    assert (phase_means([loose]).height, input_waits([loose]).height) == (0, 0)


def test_input_waits_of_each_step_with_the_device_idle_meanwhile(tmp_path: Path) -> None:
    merged = two_steps(tmp_path)
    assert_table(
        input_waits([merged]).select("step", "dur_ns", "input_wait_ns", "share", "device_idle_ns"),
        """
        step,dur_ns,input_wait_ns,share,device_idle_ns
        1,50000,20000,0.4,15000
        2,30000,0,0,0
        """,
    )
    assert input_waits([merged], steps=[2])["step"].to_list() == [2]


def test_a_trace_that_marks_no_input_does_not_say_it_took_no_time(tmp_path: Path) -> None:
    table = input_waits([TraceBuilder().step(1, 0, 50).op("a", 0, 5).merged(tmp_path)])
    assert table.select("input_wait_ns", "share", "device_idle_ns").rows() == [(None, None, None)]


def test_phases_of_a_rank_sum_to_its_mean_step_on_both_sides(tmp_path: Path) -> None:
    merged = two_steps(tmp_path)
    table = phase_means([merged, MergedTrace(1, merged.folder)]).filter(rank=1)
    wall = dict(table.select("phase", "wall_ns").rows())
    assert wall == {"input_wait": 10000, "forward": 25000, None: 5000}
    device = table.select("compute_ns", "exposed_communication_ns", "exposed_memory_ns", "device_idle_ns").sum()
    assert sum(device.row(0)) == sum(wall.values()) == 40000
    assert device["compute_ns"][0] == pytest.approx((15000 + 20000) / 2)


def test_steps_come_in_order_and_only_those_asked_for(tmp_path: Path) -> None:
    merged = two_steps(tmp_path)
    rows = step_table([merged, MergedTrace(1, merged.folder)]).select("step", "rank", "dur_ns").rows()
    assert rows == [(1, 0, 50000), (1, 1, 50000), (2, 0, 30000), (2, 1, 30000)]
    assert step_table([merged], steps=[2])["step"].to_list() == [2]


def slow_rank(folder: Path) -> Path:
    """Twelve steps of 1000 us in which rank 1 comes 300 us later to the reduction than rank 0."""
    for rank in (0, 1):
        trace = TraceBuilder(rank=rank, world_size=2, pid=100 + rank, base_ns=10**18)
        for step in range(12):
            at = 1000 * step
            trace.step(step, at, 1000).annotation("forward", at, 500 if rank else 200)
            comes = at + (510 if rank else 210)
            facts = {"Collective name": "allreduce", "Process Group Name": "0", "Group size": 2, "In msg nelems": 256,
                     "Out msg nelems": 256, "dtype": "Float", "Process Group Ranks": "[0, 1]"}  # fmt: skip
            trace.runtime("cudaLaunchKernel", comes - 5, 1, step + 1)
            trace.kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL(x)", comes, at + 700 - comes, step + 1, **facts)
        trace.write(folder, rank)
    return folder


def test_the_commands_name_the_rank_that_the_others_wait_for(tmp_path: Path) -> None:
    shown = json.loads(run("analyze", "stragglers", slow_rank(tmp_path), "--json").out)
    assert [(row["rank"], row["is_straggler"]) for row in shown["rows"]] == [(0, False), (1, True)]
    assert shown["rows"][1]["delay_ns"] == pytest.approx(300_000, rel=0.05)
    assert any(note.startswith("the others wait for rank 1") for note in shown["notes"])
    few = json.loads(run("analyze", "stragglers", tmp_path, "--step", "3", "--json").out)
    assert not any(row["is_straggler"] for row in few["rows"])
    assert any(note.startswith("no rank is named") for note in few["notes"])
