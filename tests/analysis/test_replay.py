"""Replays against what was recorded: on every handed trace, on falsified ones, and on small ones computed by hand."""

import json
import random
import shutil
from collections import defaultdict
from dataclasses import replace as changed
from itertools import pairwise
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from builder import TraceBuilder
from commands import refused
from commands import run as command
from hypothesis import given
from hypothesis import strategies as st

from chakra_capture.analysis.replay.graph import Graph, ReplayError
from chakra_capture.analysis.replay.replay import RULES, replay
from chakra_capture.analysis.replay.run import replay_run, windows_of
from chakra_capture.analysis.replay.score import score
from chakra_capture.merge.window import read_rows
from chakra_capture.trace.merged import MergedRun, MergedTrace

US = 1000
# Worst error (of the window and each step) that a complete trace may have, and what is known of its device part.
COMPLETE = {
    "pairs/linear_one_of_40_iterations": 0.01,
    "pairs/simple_add_by_order": 0.01,
    "device_only/hta_ns_resolution": 0.01,
    "device_only/hta_trace_diff_control": 0.02,
    "device_only/h100_bert_small": 0.01,
    "device_only/h100_qwen_0_5b_chat": 0.01,
    "device_only/mi300_qwen_0_5b_chat": 0.01,
    "device_only/hta_alexnet_critical_path": 0.01,
    "device_only/hta_simple_add_critical_path": 0.01,
    "device_only/hta_event_sync": 0.01,
    "device_only/hta_event_sync_multi_stream": 0.01,
    "device_only/hta_mi250_minitoy": 0.01,
    "device_only/mi210_gpu_only": 0.01,
    "device_only/torch_compile_triton": 0.01,
    "device_only/vllm_decode_cuda_graph": 0.01,
}
TWIN = "pairs/resnet50_ddp_twin"
THINNED = ["device_only/hta_sampled_two_ranks_0", "device_only/hta_sampled_two_ranks_1"]


def traces_of(folder):
    return [MergedTrace(int(one.name.removeprefix("rank=")), one) for one in sorted(folder.glob("rank=*"))]


def rows_alone(folder):
    (trace,) = traces_of(folder)
    return read_rows(trace, 0)


def scored(rows, **options):
    (found,) = score(replay({0: rows}, **options))
    return found


def test_twin_pair_every_step_every_kernel_and_the_idle_time(merged):
    found = scored(rows_alone(merged(TWIN)))

    assert [step.step for step in found.steps] == [4, 5, 6]
    assert found.worst_error <= 0.001
    assert found.start_error_mean_ns <= 5 * US
    assert found.start_error_p95_ns <= 10 * US
    assert abs(found.idle_predicted_ns / found.idle_measured_ns - 1) <= 0.001
    assert found.unexplained_ns == 0


@pytest.mark.parametrize("name", COMPLETE)
def test_complete_traces_come_out_as_recorded(merged, name):
    found = scored(rows_alone(merged(name)))

    assert found.worst_error <= COMPLETE[name]
    assert found.is_replayable
    assert found.start_error_mean_ns <= 0.005 * found.window.measured_ns


@pytest.mark.parametrize("name", THINNED)
def test_thinned_traces_are_not_replayable_though_their_steps_fit(merged, name):
    done = command("validate", merged(name), "--replay")

    assert done.code == 3
    assert "is not replayable" in done.out
    assert scored(rows_alone(merged(name))).worst_error < 0.01


def test_ranks_of_dlrm_replayed_together(merged):
    folder = merged("pairs/dlrm_8gpu_by_order")
    (window,) = replay_run(MergedRun(folder), traces_of(folder))

    assert (window.num_meetings, len(window.ranks)) == (8, 4)
    for rank in window.ranks:
        assert rank.worst_error <= 0.005


def test_two_ranks_of_gloo_replayed_together(tmp_path):
    shutil.copytree(Path(__file__).parents[2] / "traces" / "digits_ddp2_gloo", tmp_path / "run")
    assert command("merge", tmp_path / "run").code == 0
    done = command("validate", tmp_path / "run", "--replay", "--json")
    (window,) = json.loads(done.out)["windows"]

    assert window["num_meetings"] == 3
    assert [one["worst_error"] <= 0.02 for one in window["ranks"]] == [True, True]
    assert all(one["start_error_mean_ns"] is None for one in window["ranks"])  # no device: not measured


def test_ranks_together_know_what_one_alone_cannot(merged):
    """Half as long collectives: nearly all of rank 1's first one is a wait for rank 2, which stays."""
    folder = merged("pairs/dlrm_8gpu_by_order")
    ranks = {trace.rank: read_rows(trace, 0) for trace in traces_of(folder)}
    (((_, meetings, clocks), _),) = windows_of(MergedRun(folder), traces_of(folder))

    def half(rows, row):
        whole = rows.end[row] - rows.start[row]
        return np.where(rows.is_collective[row], whole // 2, whole)

    alone = scored(ranks[1], duration=half)
    together = {one.rank: one for one in score(replay(ranks, meetings, clocks, duration=half))}
    # The handed figures of the same change, in ms.
    assert alone.window.predicted_ns / 1e6 == pytest.approx(15.56, rel=0.005)
    assert together[1].window.predicted_ns / 1e6 == pytest.approx(19.63, rel=0.005)


def test_a_clock_that_is_off_changes_nothing(merged, tmp_path):
    """Rank 1 again with a clock 50 ms ahead, as the alignment states it."""
    folder = tmp_path / "merged"
    shutil.copytree(merged("pairs/dlrm_8gpu_by_order"), folder)
    ahead = 50_000 * US
    nodes = folder / "rank=1" / "nodes.parquet"
    pl.read_parquet(nodes).with_columns(pl.col("ts_ns") + ahead).write_parquet(nodes)
    alignment = json.loads((folder / "alignment.json").read_text())
    alignment["clocks"]["1"]["offset_ns"] += ahead
    (folder / "alignment.json").write_text(json.dumps(alignment))

    windows = [
        [one.window.predicted_ns for one in next(replay_run(MergedRun(path), traces_of(path))).ranks]
        for path in (folder, merged("pairs/dlrm_8gpu_by_order"))
    ]
    assert windows[0] == windows[1]


@pytest.mark.parametrize("name", [TWIN, "pairs/linear_one_of_40_iterations", "device_only/h100_bert_small"])
def test_a_replay_does_not_follow_falsified_starts(merged, name):
    """Starts moved at random inside the idle slack of their stream: the replay stays with the true ones."""
    rows = rows_alone(merged(name))
    true, chance = rows.start, random.Random(1)
    start, end, streams = rows.start.copy(), rows.end.copy(), defaultdict(list)
    for row in np.flatnonzero(rows.is_activity).tolist():
        streams[rows.track[row]].append(row)
    moved = []
    for stream in streams.values():
        stream.sort(key=lambda row: true[row])
        for row, following in pairwise(stream):
            slack = min(int(true[following] - rows.end[row]), 40 * US)
            if slack > 0 and chance.random() < 0.3:
                by = chance.randint(0, slack)
                start[row], end[row] = true[row] + by, rows.end[row] + by
                moved.append(by)
    assert sum(moved) / len(moved) > 5 * US

    found = replay({0: changed(rows, start=start, end=end)})
    activities = found.ranks[0].activities
    assert np.abs(found.times[activities.starts] - true[activities.rows]).mean() <= 5 * US


def scaled(factor):
    return lambda rows, row: np.rint((rows.end[row] - rows.start[row]) * factor).astype(np.int64)


def test_halving_every_kernel_moves_what_waits_for_the_device_and_nothing_else(merged):
    ratios = {}
    for name in (TWIN, "device_only/hta_ns_resolution", "pairs/linear_one_of_40_iterations"):
        rows = rows_alone(merged(name))
        base, half = scored(rows), scored(rows, duration=scaled(0.5))
        ratios[name] = half.window.predicted_ns / base.window.predicted_ns
    assert 0.50 <= ratios["device_only/hta_ns_resolution"] <= 0.53
    assert ratios[TWIN] == pytest.approx(1, abs=0.001)
    assert ratios["pairs/linear_one_of_40_iterations"] == pytest.approx(1, abs=0.001)


def walked(graph):
    """Longest paths by another way: from the last point backwards, each asked for once."""
    incoming = defaultdict(list)
    for src, dst, lag in zip(*(side.tolist() for side in (graph.src, graph.dst, graph.lag)), strict=True):
        incoming[dst].append((src, lag))
    known, recorded = {}, graph.recorded.tolist()
    for point in range(len(recorded)):
        todo = [point]
        while todo:
            at = todo[-1]
            unknown = [src for src, _ in incoming[at] if src not in known]
            if unknown:
                todo += unknown
                continue
            reached = [known[src] + lag for src, lag in incoming[at]]
            if at in graph.anchors:
                reached.append(graph.anchors[at])
            known[at] = max(reached) if reached else recorded[at]
            todo.pop()
    return [known[point] for point in range(len(recorded))]


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("device_only/h100_bert_small", 0.5),
        ("device_only/h100_qwen_0_5b_chat", 2),
        ("device_only/hta_trace_diff_control", "no communication"),
    ],
)
def test_changed_durations_give_what_an_independent_walk_gives(merged, name, change):
    rows = rows_alone(merged(name))
    duration = (
        scaled(change)
        if change != "no communication"
        else lambda r, row: np.where(r.is_collective[row], 0, r.end[row] - r.start[row])
    )
    found = replay({0: rows}, duration=duration)

    assert found.times.tolist() == walked(found.graph)


NODES = st.integers(1, 12)


@given(NODES, st.data())
def test_each_point_stands_at_the_end_of_its_longest_path(num_points, data):
    graph = Graph()
    for _ in range(num_points):
        graph.point(data.draw(st.integers(0, 100)))
    pairs = st.tuples(st.integers(0, num_points - 1), st.integers(0, num_points - 1), st.integers(-5, 50))
    order = data.draw(st.permutations(range(num_points)))
    for first, second, lag in data.draw(st.lists(pairs, max_size=30)):
        if first != second:
            src, dst = sorted((first, second), key=order.index)
            graph.edge(src, dst, lag, "run")
    for point in data.draw(st.sets(st.integers(0, num_points - 1), max_size=3)):
        graph.anchors[point] = data.draw(st.integers(0, 100))

    assert graph.solve().tolist() == walked(graph)


def test_a_circle_is_named_by_its_edges():
    graph = Graph()
    one, other = graph.point(0), graph.point(1)
    graph.edge(one, other, 1, "launch")
    graph.edge(other, one, 1, "sync")

    with pytest.raises(ReplayError, match=r"2 of 2 points .* launch \(1\), sync \(1\)"):
        graph.solve()


def small(tmp_path):
    """By hand, in us: a step of 100 launches two kernels of 30 and waits for them; then 10 us of Python."""
    builder = TraceBuilder()
    builder.step(5, 0, 100).op("aten::one", 5, 20).op("aten::two", 30, 10)
    builder.runtime("cudaLaunchKernel", 10, 5, 1).runtime("cudaLaunchKernel", 32, 5, 2)
    builder.runtime("cudaStreamSynchronize", 50, 39, 3)
    builder.kernel("first", 17, 30, 1).kernel("second", 48, 35, 2)
    return read_rows(builder.merged(tmp_path), 0)


def start_of(found, name):
    """When the activity of a name starts in a replay."""
    one = found.ranks[0]
    (place,) = np.flatnonzero(one.rows.name.mask((name,))[one.activities.rows])
    return found.times[one.activities.starts[place]]


def test_small_trace_by_hand(tmp_path):
    # The first kernel starts 2 us after its launch call returns (17), the second when the first is done (47) and
    # the gap of a stream has passed; the call returns 6 us after the second is done.
    rows = small(tmp_path)
    found = replay({0: rows})
    at = start_of(found, "first")
    begin = min(found.graph.recorded)
    assert at - begin == 17 * US
    base = scored(rows)
    assert base.steps[0].predicted_ns == base.steps[0].measured_ns == 100 * US
    # Both kernels in no time: the second starts 2 us after its launch (39), the wait is what such a call takes (6 us).
    none = scored(rows, duration=scaled(0))
    assert none.steps[0].predicted_ns == (50 + 6 + 100 - 89) * US


def test_a_thread_that_is_woken_earlier_begins_earlier(tmp_path):
    """A kernel of 500 us is waited for, then the engine's thread works 380 of 400 us: half of it is 250 us less."""
    builder = TraceBuilder()
    builder.step(1, 0, 1200).op("aten::first", 2, 10, tid=12).op("aten::forward", 20, 30)
    builder.runtime("cudaLaunchKernel", 30, 5, 1).kernel("large", 37, 500, 1)
    builder.runtime("cudaDeviceSynchronize", 60, 485, 2).op("aten::backward", 600, 400)
    builder.op("aten::engine", 610, 380, tid=12).op("aten::last", 1050, 20)
    rows = read_rows(builder.merged(tmp_path), 0)

    base, half = scored(rows), scored(rows, duration=scaled(0.5))
    assert base.steps[0].predicted_ns == 1200 * US
    assert half.steps[0].predicted_ns == 950 * US


def test_without_a_rule_it_is_worse(merged):
    rows = rows_alone(merged("device_only/h100_qwen_0_5b_chat"))
    base, alone = scored(rows), scored(rows, without=frozenset({"stream_order"}))
    assert alone.start_error_mean_ns > 5 * base.start_error_mean_ns
    # Pinned waits: no error at all, and no use for any what-if.
    pinned = frozenset({"sync"})
    ratio = [
        scored(rows, without=without, duration=scaled(0.5)).window.predicted_ns / base.window.predicted_ns
        for without in (pinned, frozenset())
    ]
    assert ratio[0] > 0.99
    assert ratio[1] == pytest.approx(0.818, abs=0.01)  # the handed figure


def test_the_command_shows_every_step_and_what_each_rule_buys(merged):
    folder = merged("pairs/dlrm_8gpu_by_order")
    done = command("validate", folder, "--replay", "--rules", "--json")
    said = json.loads(done.out)

    assert (done.code, said["is_replayable"], said["schema_version"]) == (0, True, 1)
    (window,) = said["windows"]
    assert [one["rank"] for one in window["ranks"]] == [0, 1, 2, 3]
    assert [step["step"] for step in window["ranks"][0]["steps"]] == [10]
    assert window["without"].keys() == {*RULES}
    assert min(one["worst_error"] for one in window["without"]["event_wait"]) > 0.02
    text = command("validate", folder, "--replay").out
    for part in ("step 10", "14.46 ms", "start error", "8 collectives of several"):
        assert part in text


def test_what_cannot_be_replayed_is_one_sentence(tmp_path):
    refused(command("validate", tmp_path, "--replay"), "holds no traces")
    TraceBuilder().step(1, 0, 10).op("aten::one", 1, 2).write(tmp_path)
    refused(command("validate", tmp_path, "--replay"), "has no merged ranks")
    assert command("merge", tmp_path).code == 0
    assert command("validate", tmp_path, "--replay").code == 0
    refused(command("validate", tmp_path, "--replay", "--rank", 3), "no merged rank 3")
    refused(command("validate", tmp_path), "holds no Chakra trace", "--replay")


def test_a_rank_without_times_is_left_out_and_said(tmp_path):
    """Rank 1 has a host trace alone, which has no times."""
    for rank in (0, 1):
        TraceBuilder(pid=100 + rank).step(1, 0, 10).op("aten::one", 1, 2).write(tmp_path / "two", rank)
    (tmp_path / "two" / "0_kineto" / "rank-1.json").unlink()
    assert command("merge", tmp_path / "two").code == 0
    said = json.loads(command("validate", tmp_path / "two", "--replay", "--json").out)["windows"][0]
    assert ([one["rank"] for one in said["ranks"]], said["without_times"]) == ([0], [1])
    assert "no times: rank 1." in command("validate", tmp_path / "two", "--replay").out
    refused(command("validate", tmp_path / "two", "--replay", "--rank", 1), "nothing that has a time")


def test_a_device_wide_wait_is_for_what_was_launched_before_it(tmp_path):
    """A kernel that the next step launches beside it is none of it, and one from before the trace is."""
    builder = TraceBuilder().step(1, 0, 400).op("aten::one", 1, 300).runtime("cudaDeviceSynchronize", 10, 195, 2)
    builder.kernel("of before", 2, 198, 77).launched("of after", 212, 50, 3, at=210)
    (waits,) = replay({0: read_rows(builder.merged(tmp_path), 0)}).ranks.values()
    ends = {
        point: waits.rows.name[row] for row, point in zip(waits.activities.rows, waits.activities.ends, strict=True)
    }
    graph = replay({0: waits.rows}).graph
    assert [ends[src] for src in graph.src[graph.is_kind("sync")]] == ["of before"]


def test_an_event_that_the_trace_records_is_waited_for_once_that_matters(tmp_path):
    """Kernel b is launched long after a is done; were a five times as long, b would wait for it."""
    builder = TraceBuilder().step(1, 0, 500).op("aten::one", 1, 300).launched("a", 20, 20, 1, at=5)
    builder.runtime("cudaEventRecord", 12, 1, 3).runtime("cudaStreamWaitEvent", 14, 1, 4)
    known = {"cuda_sync_kind": "Stream Wait Event", "stream": 20, "device": 0, "correlation": 4}
    known |= {"wait_on_stream": 7, "wait_on_cuda_event_record_corr_id": 3}
    builder.event(ph="X", cat="cuda_sync", name="Stream Wait Event", pid=0, tid=20, ts=90, dur=1, args=known)
    rows = read_rows(builder.launched("b", 81, 10, 5, at=66, stream=20).merged(tmp_path), 0)

    def begin_of_b(**options):
        found = replay({0: rows}, **options)
        return start_of(found, "b") - min(found.graph.recorded)

    assert begin_of_b() == 81 * US
    later = begin_of_b(duration=lambda rows, row: np.where(rows.name.mask(("a",))[row], 100 * US, 10 * US))
    assert 120 * US <= later <= 121 * US  # when a is done, or the class's time of an event after that
    assert begin_of_b(duration=scaled(5), without=frozenset({"event_wait"})) == 81 * US
