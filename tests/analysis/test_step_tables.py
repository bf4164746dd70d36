import json
from pathlib import Path

import polars as pl
import pytest
from builder import TraceBuilder, assert_table
from commands import run

from chakra_capture import layout
from chakra_capture.analysis.input_waits import input_waits
from chakra_capture.analysis.phase_means import phase_means
from chakra_capture.analysis.step_tables import step_table
from chakra_capture.trace.merged import MergedRun, MergedTrace
from chakra_capture.trace.schema import COLLECTIVES


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


def ranks(tmp_path: Path, waits: dict[int, tuple[int, int]], *, inputs: dict[int, int]) -> MergedRun:
    """Two steps of 1000 us on ranks that wait for their input in the second one, and an all_reduce of each step.

    Args:
        waits: arrival in the all_reduce of the second step and wait there, by rank, us.
        inputs: input_wait of the second step, by rank, us.
    """
    rows = []
    for rank, (arrival, wait) in waits.items():
        builder = TraceBuilder().step(1, 0, 1000).annotation("input_wait", 0, 10).annotation("forward", 20, 900)
        builder.step(2, 1000, 1000).annotation("input_wait", 1000, inputs[rank]).annotation("forward", 1600, 300)
        folder = tmp_path / f"rank={rank}"
        builder.merged(tmp_path / f"made-{rank}").folder.rename(folder)
        for step, start, waited in ((1, 900, 0), (2, arrival, wait)):
            rows.append({
                "collective_id": step, "rank": rank, "window": 0, "step": step, "order": step,
                "collective": "all_reduce", "num_found": len(waits), "transfer_ns": 0,
                "arrival_ns": start * 1000, "wait_ns": waited * 1000,
                "last_rank": max(waits, key=lambda each: waits[each][0]),
            })  # fmt: skip
    pl.DataFrame(rows, schema=COLLECTIVES.schema).write_parquet(tmp_path / layout.COLLECTIVES_FILE)
    return MergedRun(tmp_path)


def test_input_wait_of_the_rank_that_comes_last_is_beside_what_the_others_wait_for_it(tmp_path: Path) -> None:
    # 2 comes last, after waiting 500 us for its input. 0 waits 470 us for it, 1 only 100: it was slow itself.
    # 3 waits 460, of which 100 at most are the input of 2: its own took 400.
    waits = {0: (1430, 470), 1: (1800, 100), 2: (1900, 0), 3: (1440, 460)}
    run = ranks(tmp_path, waits, inputs={0: 20, 1: 20, 2: 500, 3: 400})
    traces = [MergedTrace(rank, tmp_path / f"rank={rank}") for rank in waits]
    found = input_waits(traces, run)
    assert_table(
        found.select("rank", "step", "input_wait_ns", "peers_wait_ns", "num_peers"),
        """
        rank,step,input_wait_ns,peers_wait_ns,num_peers
        0,1,10000,0,0
        1,1,10000,0,0
        2,1,10000,0,0
        3,1,10000,0,0
        0,2,20000,0,0
        1,2,20000,0,0
        2,2,500000,670000,3
        3,2,400000,0,0
        """,
    )
    assert input_waits(traces[2:3], run).rows() == found.filter(rank=2).rows()
    unmatched = input_waits(traces).select("peers_wait_ns", "num_peers")
    assert set(unmatched.rows()) == {(None, None)}


def test_late_rank_with_no_more_input_than_the_others_costs_them_nothing_by_it(tmp_path: Path) -> None:
    run = ranks(tmp_path, {0: (1430, 470), 1: (1900, 0)}, inputs={0: 100, 1: 100})
    found = input_waits([MergedTrace(1, tmp_path / "rank=1")], run, steps=[2])
    assert found.select("rank", "peers_wait_ns", "num_peers").rows() == [(1, 0, 0)]
