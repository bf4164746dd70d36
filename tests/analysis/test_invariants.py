"""What sums must hold on every handed trace, asked as a user asks: breakdown, idle causes, phases, critical path.

The same on random traces stands beside each analysis (test_device_breakdown, test_idle, test_phase_times,
test_critical_path).
"""

import json
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from commands import run
from handed import expected_breakdown

from chakra_capture.trace.merged import MergedTrace

DEVICE = (
    "h100_bert_small", "h100_qwen_0_5b_chat", "hta_alexnet_critical_path", "hta_event_sync",
    "hta_event_sync_multi_stream", "hta_mi250_minitoy", "hta_ns_resolution", "hta_sampled_two_ranks_0",
    "hta_sampled_two_ranks_1", "hta_simple_add_critical_path", "hta_trace_diff_control", "hta_triton", "mi210_gpu_only",
    "mi300_qwen_0_5b_chat", "torch_compile_triton", "vllm_decode_cuda_graph",
)  # fmt: skip
PAIRS = ("dlrm_8gpu_by_order", "linear_one_of_40_iterations", "resnet50_ddp_twin", "simple_add_by_order")
WITH_DEVICE = (*(f"device_only/{name}" for name in DEVICE), *(f"pairs/{name}" for name in PAIRS))
ON_CPU = (
    "device_only/hta_cpu_only", "device_only/hta_rank_non_gpu", "samples_torch213/single_rank",
    "samples_torch213/grad_accum3", "samples_torch213/with_stack", "samples_torch213/profile_memory",
)  # fmt: skip
# Most of the idle time that nothing recorded explains, where that is more than 5 %.
UNEXPLAINED = {
    # Most kernels were taken out of these files.
    "device_only/hta_sampled_two_ranks_0": 0.58,
    "device_only/hta_sampled_two_ranks_1": 0.51,
    # The window opened after a third of its kernels had been launched.
    "device_only/h100_qwen_0_5b_chat": 0.19,
    # The same; and five gaps of 25 to 57 us where every launch takes 31 us to start.
    "device_only/mi300_qwen_0_5b_chat": 0.053,
    # Two of its four kernels start milliseconds after a launch without any work before it.
    "pairs/simple_add_by_order": 0.076,
}
PARTS = ("compute_ns", "exposed_communication_ns", "exposed_memory_ns", "idle_ns")
UNKNOWN = ("launch not recorded", "unexplained: queued, not started", "unexplained: launched, not started")


def asked(name: str, folder: Path, *args: str) -> tuple[list[dict[str, Any]], list[str]]:
    done = run("analyze", name, folder, *args, "--json")
    assert done.code == 0, done.err
    shown = json.loads(done.out)
    return shown["rows"], shown["notes"]


@pytest.mark.parametrize("name", WITH_DEVICE)
def test_breakdown_of_a_device_is_its_span_and_idle_causes_are_its_idle_time(merged: Any, name: str) -> None:
    folder = merged(name)
    rows, _ = asked("device", folder)
    assert rows
    for row in rows:
        assert sum(row[part] for part in PARTS) == row["span_ns"]
        assert min(row[part] for part in PARTS) >= 0
    idle = {(row["rank"], row["window"], row["device"], row["step"]): row["idle_ns"] for row in rows}
    causes, notes = asked("idle", folder, "--by", "step")
    by_step: Counter[Any] = Counter()
    inner: Counter[Any] = Counter()
    unknown: Counter[int] = Counter()
    for row in causes:
        place = row["rank"], row["window"], row["device"]
        by_step[*place, row["step"]] += row["total_ns"]
        if row["position"] == "inner":
            inner[place] += row["total_ns"]
            unknown[row["rank"]] += row["total_ns"] if row["cause"] in UNKNOWN else 0
    # A device without any gap has no row in idle.
    assert all(inner[place[:-1]] == total for place, total in idle.items() if place[-1] is None)
    assert all(by_step[place] == total for place, total in idle.items() if place[-1] is not None)
    of_rank = Counter[int]()
    for (rank, *_), total in inner.items():
        of_rank[rank] += total
    for rank, total in of_rank.items():
        share = unknown[rank] / total if total else 0
        assert share <= UNEXPLAINED.get(name, 0.05)
        gated = any(f"of the idle time of rank {rank} has no recorded reason: draw no conclusion" in n for n in notes)
        assert gated == (share > 0.10)


@pytest.mark.parametrize("name", [*WITH_DEVICE, *ON_CPU])
def test_phases_of_steps_are_the_steps(merged: Any, name: str) -> None:
    folder = merged(name)
    rows, notes = asked("phases", folder)
    took: dict[int, list[int]] = defaultdict(list)
    for rank in sorted(folder.glob("rank=*")):
        # What a step took is what its annotation says, as merge read it.
        is_step = (pl.col("kind") == "annotation") & pl.col("name").str.contains(r"^ProfilerStep#\d+$")
        nodes = MergedTrace(0, rank).nodes.filter(is_step & pl.col("dur_ns").is_not_null())
        took[int(rank.name.removeprefix("rank="))] += nodes["dur_ns"].to_list()
    assert {row["rank"] for row in rows} == {rank for rank, durations in took.items() if durations}
    for rank in {row["rank"] for row in rows}:
        mine, mean = [row for row in rows if row["rank"] == rank], sum(took[rank]) / len(took[rank])
        assert sum(row["wall_ns"] for row in mine) == pytest.approx(mean, rel=1e-12)
        times = [row[part.replace("idle", "device_idle")] for row in mine for part in PARTS]
        on_device = name in WITH_DEVICE
        assert (None not in times) == on_device
        assert not on_device or sum(times) == pytest.approx(mean, rel=1e-12)
    assert rows or any("no step is marked" in note for note in notes)


# Those with a device stand in test_critical_path. (In hta_triton the step is of a process that nothing else is of.)
@pytest.mark.parametrize("name", ON_CPU)
def test_critical_path_of_the_rest_of_the_traces_is_the_time_that_passed(merged: Any, name: str) -> None:
    folder = merged(name)
    rows, _ = asked("critical-path", folder)
    steps = {(row["rank"], row["step"]): row["dur_ns"] for row in asked("steps", folder)[0]}
    sums: Counter[Any] = Counter()
    unexplained = 0
    for row in rows:
        sums[row["rank"], row["step"]] += row["total_ns"]
        if row["step"] is None and row["category"] == "unexplained":
            unexplained += row["total_ns"]
    assert {place: total for place, total in sums.items() if place[1] is not None} == {
        place: total for place, total in steps.items() if place[1] is not None and total is not None
    }
    whole = sum(total for (_, step), total in sums.items() if step is None)
    assert unexplained <= 0.10 * whole


@pytest.mark.parametrize("name", WITH_DEVICE)
def test_breakdown_is_the_handed_one_to_the_nanosecond(merged: Any, name: str) -> None:
    stated = expected_breakdown().get(name.removeprefix("device_only/"))
    if stated is None:
        assert name.rpartition("/")[2] in NOT_STATED
        return
    rows, _ = asked("device", merged(name))
    whole = [row for row in rows if row["step"] is None]
    names = {
        "num_activities": "num_device_activities", "span_ns": "span_ns", "busy_ns": "busy_ns", "idle_ns": "idle_ns",
        "compute_ns": "compute_ns", "communication_ns": "comm_ns", "memory_ns": "mem_ns",
        "exposed_communication_ns": "exposed_comm_ns", "exposed_memory_ns": "exposed_mem_ns",
    }  # fmt: skip
    found = {ours: sum(row[ours] for row in whole) + OFF.get((name, ours), 0) for ours in names}
    assert found == {ours: stated[key] for ours, key in names.items()}
    overlap = stated["comm_comp_overlap_pct"]
    shown = [None if row["overlap"] is None else 100 * row["overlap"] for row in whole]
    assert shown == [None if overlap is None else pytest.approx(overlap)]


# The handed figures of this file are those of float64, whose ends are off (tests/merge/test_handed.py shows it).
OFF = dict.fromkeys((("device_only/hta_ns_resolution", "span_ns"), ("device_only/hta_ns_resolution", "idle_ns")), 48)
NOT_STATED = ("dlrm_8gpu_by_order", "simple_add_by_order", "hta_triton", "torch_compile_triton")
