"""Critical paths: they sum to what was measured, on every handed trace and on random ones; small ones by hand."""

import json
import tempfile
from collections import Counter
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import polars as pl
import pytest
from builder import TraceBuilder, merge_files
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from merge.test_dependency_properties import NCCL, threads, waits

from analysis.test_replay import COMPLETE, THINNED, TWIN, rows_alone, small, traces_of
from chakra_capture.analysis.critical_path import SCHEMA, Paths, critical_path
from chakra_capture.analysis.replay.calibrated import calibrate
from chakra_capture.analysis.replay.graph import ReplayError
from chakra_capture.analysis.replay.replay import Meeting, replay
from chakra_capture.cli.critical_path import critical_path as command_critical_path
from chakra_capture.cli.subject import Options
from chakra_capture.merge.window import read_rows
from chakra_capture.trace.discovery import WindowFiles
from chakra_capture.trace.merged import MergedRun

US = 1000
DLRM = "pairs/dlrm_8gpu_by_order"


def model_of(ranks, *more):
    return calibrate(replay(ranks, *more, inputs=True))


def listed(parts):
    """The parts of a path as objects."""
    return [SimpleNamespace(**part) for part in parts.iter_rows(named=True)]


def check(path, begin, end):
    """The parts fill a time without a gap, and none is empty."""
    parts = listed(path.parts)
    assert parts[0].begin_ns == begin
    assert parts[-1].end_ns == end
    assert all(one.end_ns == other.begin_ns for one, other in pairwise(parts))
    assert all(one.begin_ns < one.end_ns for one in parts)


@pytest.mark.parametrize("name", [TWIN, DLRM, *COMPLETE, *THINNED])
def test_paths_sum_to_what_every_step_took(merged, name):
    folder = merged(name)
    table = critical_path(MergedRun(folder), traces_of(folder))

    assert (table["total_ns"] > 0).all()
    sums = table.group_by("rank", "step").agg(pl.col("total_ns", "share").sum())
    assert sums["share"].to_list() == pytest.approx([1] * sums.height)
    found = {(rank, step): total for rank, step, total, _ in sums.iter_rows()}
    for trace in traces_of(folder):
        # A step's annotation, as merge read it, says what it took.
        is_step = (pl.col("kind") == "annotation") & pl.col("name").str.starts_with("ProfilerStep#")
        names = trace.nodes.filter(is_step & pl.col("dur_ns").is_not_null()).select("name", "dur_ns")
        assert {(trace.rank, int(text.split("#")[1])): took for text, took in names.iter_rows()} == {
            key: total for key, total in found.items() if key[0] == trace.rank and key[1] is not None
        }
        assert found[trace.rank, None] >= max(names["dur_ns"].to_list(), default=0)


@pytest.mark.parametrize("name", [TWIN, *COMPLETE])
def test_hardly_anything_of_complete_traces_is_unexplained(merged, name):
    folder = merged(name)
    table = critical_path(MergedRun(folder), traces_of(folder)).filter(pl.col("step").is_null())
    share = table.filter(pl.col("category") == "unexplained")["share"].sum()
    assert share <= (0.02 if name == "device_only/mi210_gpu_only" else 0.005)


def shares(merged, name, first_step=None):
    """Percent of the path by category, from the first step's begin to the last one's end."""
    model = model_of({0: rows_alone(merged(name))})
    steps = model.replay.ranks[0].steps
    parts = listed(Paths(model).between(0, steps[0][1], steps[-1][2]))
    total, elapsed = Counter(), parts[-1].end_ns - parts[0].begin_ns
    for part in parts:
        total[part.category] += part.end_ns - part.begin_ns
        total[part.category, part.name] += part.end_ns - part.begin_ns
    return elapsed, {key: 100 * time / elapsed for key, time in total.items()}, parts


# The handed figures: percent of the way from the first step's begin to the last one's end.
CPU = ("op", "runtime", "python", "input")


def test_the_twin_pair_is_bound_by_its_cpu(merged):
    elapsed, share, parts = shares(merged, TWIN)

    assert elapsed / 1e6 == pytest.approx(667.226, abs=0.001)
    for category, handed in (("op", 87.2), ("runtime", 6.7), ("python", 5.9), ("hand_over", 0.3)):
        assert share[category] == pytest.approx(handed, abs=0.06)
    assert share.keys().isdisjoint({"kernel", "communication", "memory", "unexplained"})
    handed = {"aten::empty": 7.8, "DistributedDataParallel.forward": 5.7, "aten::view": 4.6}
    handed |= {"aten::cudnn_batch_norm": 4.3, "aten::convolution_backward": 4.2}
    for name, percent in handed.items():
        assert share["op", name] == pytest.approx(percent, abs=0.06)
    assert {part.on_rank for part in parts} == {0}


@pytest.mark.parametrize(
    ("name", "handed"),
    [
        ("device_only/hta_trace_diff_control", {CPU: 59.3, ("communication",): 17.9}),
        ("device_only/h100_qwen_0_5b_chat", {CPU: 69.8, ("kernel", "memory"): 28.6, ("stream_lag",): 1.5}),
    ],
)
def test_the_handed_shares_of_other_traces(merged, name, handed):
    _, share, _ = shares(merged, name)
    for categories, percent in handed.items():
        assert sum(share.get(one, 0) for one in categories) == pytest.approx(percent, abs=0.4)


def test_ns_resolution_is_bound_by_its_device(merged):
    """To the end of the device's work, which the steps on the CPU do not wait for."""
    folder = merged("device_only/hta_ns_resolution")
    table = critical_path(MergedRun(folder), traces_of(folder)).filter(pl.col("step").is_null())
    share = dict(table.group_by("category").agg(pl.col("share").sum()).iter_rows())
    assert 100 * (share["kernel"] + share["memory"]) == pytest.approx(97.1, abs=0.6)
    assert 100 * share["stream_lag"] == pytest.approx(1.1, abs=0.1)


def test_a_rank_alone_waits_in_its_collective_and_with_others_on_the_rank_that_is_late(merged):
    folder = merged(DLRM)
    traces = traces_of(folder)
    alone = critical_path(MergedRun(folder), [traces[1]]).filter(pl.col("step") == 10)
    together = critical_path(MergedRun(folder), traces).filter((pl.col("step") == 10) & (pl.col("rank") == 1))

    def share(table, *categories):
        return table.filter(pl.col("category").is_in(categories))["share"].sum()

    assert 100 * share(alone, "communication") == pytest.approx(43.5, abs=0.1)
    assert 100 * share(alone, *CPU) == pytest.approx(54.8, abs=0.1)
    assert set(alone["on_rank"]) == {1}
    assert 100 * share(together, "communication") < 3
    assert 100 * together.filter(pl.col("on_rank") == 2)["share"].sum() > 30
    # Rank 2 began to record when rank 1 had waited for it for some time.
    assert together.filter(pl.col("category") == "not_recorded")["on_rank"].to_list() == [2]


def test_small_trace_by_hand(tmp_path):
    model = model_of({0: small(tmp_path)})
    ((_, begin, end),) = model.replay.ranks[0].steps
    parts = listed(Paths(model).between(0, begin, end))

    assert [(part.category, part.name, (part.end_ns - part.begin_ns) // US) for part in parts] == [
        ("python", None, 5),
        ("op", "aten::one", 5),
        ("runtime", "cudaLaunchKernel", 5),
        ("launch_lag", "first", 2),
        ("kernel", "first", 30),
        ("stream_lag", "second", 1),
        ("kernel", "second", 35),
        ("sync_lag", "cudaStreamSynchronize", 6),
        ("python", None, 11),
    ]


def two_ranks(tmp_path):
    """Rank 1 computes 40 us longer before a collective that both launch and wait for, in us."""
    ranks, row = {}, {}
    for rank, late in ((0, 0), (1, 40)):
        builder = TraceBuilder(pid=100 + rank).step(1, 0, 100).op("aten::compute", 0, 5 + late)
        builder.runtime("cudaLaunchKernel", 5 + late, 1, 1).kernel(NCCL, 8 + late, 52 - late, 1)
        builder.runtime("cudaStreamSynchronize", 6 + late, 57 - late, 2)
        ranks[rank] = read_rows(builder.merged(tmp_path / str(rank)), 0)
        row[rank] = int(np.flatnonzero(ranks[rank].name.mask((NCCL,)))[0])
    return ranks, [Meeting(row)]


def test_the_path_goes_on_with_the_rank_that_comes_last(tmp_path):
    model = model_of(*two_ranks(tmp_path))
    paths = {(path.rank, path.step): path for path in Paths(model).all()}

    expected = [
        ("op", 1, 45), ("runtime", 1, 1), ("launch_lag", 1, 2), ("communication", 0, 12), ("sync_lag", 0, 3),
        ("python", 0, 37),
    ]  # fmt: skip
    of_rank_0 = listed(paths[0, 1].parts)
    assert [(part.category, part.on_rank, (part.end_ns - part.begin_ns) // US) for part in of_rank_0] == expected
    assert {part.on_rank for part in listed(paths[1, 1].parts)} == {1}


def test_a_part_is_never_negative_though_a_kernel_starts_before_its_launch_call_returns(tmp_path):
    builder = TraceBuilder().step(1, 0, 60).op("aten::one", 0, 20).runtime("cudaLaunchKernel", 5, 10, 1)
    builder.kernel("k", 12, 30, 1).runtime("cudaDeviceSynchronize", 20, 25, 2)
    model = model_of({0: read_rows(builder.merged(tmp_path), 0)})
    ((_, begin, end),) = model.replay.ranks[0].steps
    parts = listed(Paths(model).between(0, begin, end))
    # The call is the shorter: the kernel starts 3 us before it returns.
    assert [(part.category, (part.end_ns - part.begin_ns) // US) for part in parts] == [
        ("op", 5), ("runtime", 7), ("kernel", 30), ("sync_lag", 3), ("python", 15),
    ]  # fmt: skip


@settings(max_examples=40, deadline=None)
@given(st.one_of(threads(), waits(records=True), waits(records=False)), st.integers(1, 3))
def test_paths_of_random_traces_sum_to_their_time(trace, num_steps):
    for number in range(num_steps):
        trace.step(number, number * 20, 20)
    with tempfile.TemporaryDirectory() as folder:
        rows = read_rows(trace.merged(Path(folder), host=False), 0)
    assume(rows.has_times)
    try:
        model = model_of({0: rows})
        solved = model.solve(model.lag)
    except ReplayError:
        assume(False)
    assert solved.tolist() == model.times.tolist()
    points = {path.step: path for path in Paths(model).all()}
    for step, begin, end in model.replay.ranks[0].steps:
        assert model.times[end] - model.times[begin] == 20 * US
        check(points[step], model.times[begin], model.times[end])


def test_the_command_explains_its_columns_and_states_what_is_unexplained(merged, capsys):
    folder = merged(DLRM)
    assert command_critical_path(folder, options=Options(json=True)) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["schema_version"], said["name"]) == (1, "critical-path")
    assert [column["name"] for column in said["columns"]] == [column.name for column in SCHEMA]
    assert all(column["meaning"] for column in said["columns"])
    assert sum(row["total_ns"] for row in said["rows"] if row["rank"] == 1 and row["step"] == 10) == 19_901_000
    assert any("of the path is unexplained" in note for note in said["notes"])
    assert command_critical_path(folder, options=Options(rank=["1"])) == 0
    assert "communication" in capsys.readouterr().out


def test_a_run_without_times_has_no_paths(tmp_path):
    host = WindowFiles(TraceBuilder().op("aten::one", 1, 2).write_host(tmp_path / "h.json"), None)
    table = critical_path(MergedRun(tmp_path), [merge_files(tmp_path / "out", host)])
    assert table.height == 0
    assert table.columns == [column.name for column in SCHEMA]
