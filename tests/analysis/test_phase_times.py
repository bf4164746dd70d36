"""Recorded steps by phase: hand-computed, summing to the step, and on real traces."""

from pathlib import Path

import polars as pl
import pytest
from builder import TraceBuilder, merge_files
from handed import DATA, require
from hypothesis import given, settings
from hypothesis import strategies as st

from chakra_capture.analysis.phase_times import SCHEMA, mean_phase_times, phase_times
from chakra_capture.trace.discovery import WindowFiles

DEVICE_TIMES = ("compute_ns", "exposed_communication_ns", "exposed_memory_ns", "device_idle_ns")
REDUCE = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(x)"


def test_whole_table_of_a_small_step(tmp_path: Path) -> None:
    builder = TraceBuilder().step(1, 0, 100)
    builder.annotation("forward", 10, 30).op("mm", 12, 20).launched("gemm", 20, 30, 1, at=14)
    builder.annotation("backward", 50, 40).op("b", 52, 10, tid=12).launched("gemm2", 60, 10, 2, at=54, tid=12)
    builder.launched(REDUCE, 65, 20, 3, at=70, stream=8)
    table = phase_times(builder.merged(tmp_path))
    # The device: gemm 20-50, gemm2 60-70, communication 65-85 (70-85 exposed), idle 0-20, 50-60, 85-100.
    # The loop: forward 10-40, backward 50-90. Idle: forward 10-20, backward 50-60 and 85-90, the rest 0-10 and 90-100.
    assert table.drop("window", "step", "exposed_memory_ns").rows() == [
        ("forward", 30_000, 30_000, 1, 30_000, 0, 10_000),
        ("backward", 40_000, 50_000, 2, 10_000, 15_000, 15_000),
        (None, 30_000, 0, 0, 0, 0, 20_000),
    ]
    assert table.columns == [column.name for column in SCHEMA]


def test_of_phases_in_one_another_the_time_is_the_inner_ones(tmp_path: Path) -> None:
    builder = TraceBuilder().step(1, 0, 100).annotation("optimizer", 10, 60).annotation("forward", 20, 30)
    table = phase_times(builder.merged(tmp_path))
    assert table.select("phase", "wall_ns").rows() == [("forward", 30_000), ("optimizer", 30_000), (None, 40_000)]
    assert table["compute_ns"].null_count() == 3


def test_a_phase_that_reaches_out_of_the_step_counts_within_it(tmp_path: Path) -> None:
    builder = TraceBuilder().annotation("input_wait", 0, 30).step(1, 20, 50)
    assert phase_times(builder.merged(tmp_path)).select("phase", "wall_ns").rows() == [
        ("input_wait", 10_000),
        (None, 40_000),
    ]


def test_trace_without_steps_has_no_rows(tmp_path: Path) -> None:
    assert phase_times(TraceBuilder().op("a", 0, 5).merged(tmp_path)).height == 0


NAMES, KERNELS = st.sampled_from(["forward", "backward", "optimizer"]), st.sampled_from(["gemm", REDUCE])


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 95), st.integers(1, 30), NAMES), max_size=5),
    st.lists(st.tuples(st.integers(0, 99), st.integers(1, 40), KERNELS, st.integers(7, 8)), max_size=5),
)
def test_times_of_a_step_sum_to_it(tmp_path_factory, marks, kernels) -> None:
    builder = TraceBuilder().step(1, 0, 100)
    for start, length, name in marks:
        builder.annotation(name, start, min(length, 100 - start))
    for number, (start, length, name, stream) in enumerate(kernels):
        builder.launched(name, start, length, number + 1, at=start, stream=stream)
    table = phase_times(builder.merged(tmp_path_factory.mktemp("t")))
    assert table["wall_ns"].sum() == 100_000
    assert table.filter(pl.col("phase").is_not_null())["wall_ns"].min() in (None, *range(100_001))
    if kernels:
        assert sum(table[name].sum() for name in DEVICE_TIMES) == 100_000
        assert min(table[name].min() for name in DEVICE_TIMES) >= 0


@pytest.mark.parametrize("host", [True, False])
def test_twin_pair_sums_to_its_steps_and_to_their_device_time(host: bool, tmp_path: Path) -> None:
    folder = require(DATA / "pairs" / "resnet50_ddp_twin")
    files = WindowFiles(folder / "host" / "rank-0.json.gz" if host else None, folder / "device" / "rank-0.json.gz")
    trace = merge_files(tmp_path, files, force=True)
    busy = pl.sum_horizontal(DEVICE_TIMES[:3])
    sums = phase_times(trace).group_by("step").agg(pl.col("wall_ns", "device_idle_ns").sum(), busy.sum().alias("busy"))
    joined = trace.steps.join(sums, on="step", suffix="_sum").sort("step")
    assert joined.height == 3
    assert (joined["dur_ns"] == joined["wall_ns"]).all()
    assert (joined["device_busy_ns"] == joined["busy"]).all()
    assert (joined["device_idle_ns"] == joined["device_idle_ns_sum"]).all()
    # report.md: step 4 has 38.51 ms compute, 10.16 exposed communication, 0.77 exposed copies.
    step = phase_times(trace).filter(step=4)
    found = [round(step[name].sum() / 1e6, 2) for name in DEVICE_TIMES[:3]]
    assert found == [38.51, 10.16, 0.77]


def test_means_are_over_all_steps_of_all_ranks(tmp_path: Path) -> None:
    with_device = (
        TraceBuilder().step(1, 0, 100).annotation("forward", 0, 40).launched("k", 10, 30, 1, at=5).step(2, 200, 100)
    )
    without = TraceBuilder().step(1, 0, 100).annotation("forward", 0, 20)
    tables = [phase_times(b.merged(tmp_path / str(at))) for at, b in enumerate((with_device, without))]
    means = mean_phase_times(tables)
    assert means.select("phase", "num_steps", "wall_ns", "compute_ns", "device_idle_ns").rows() == [
        ("forward", 2, 20_000, 15_000, 5_000),  # 60 us over three steps; the device over two
        (None, 3, 80_000, 0, 80_000),
    ]
    assert mean_phase_times([]).height == 0
