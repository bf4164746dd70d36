"""Right values of handed cases (device traces, 010 to 029), asked through ``merge`` and ``analyze NAME --json``.

Busy and idle times of all of them, and the names of communication kernels, stand in test_analyze.
"""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from commands import run
from handed import CASES, load_json, require

Rows = list[dict[str, Any]]
Ask = Callable[..., Rows]


@pytest.fixture
def ask(request: pytest.FixtureRequest, tmp_path: Path) -> Ask:
    """Merge the case of this test; returns what answers an analysis of it with rows."""
    case = require(CASES / request.param)
    assert run("merge", "--device", case / "rank-0.json", "-o", tmp_path).code == 0

    def answer(name: str, *args: str) -> Rows:
        done = run("analyze", name, tmp_path, *args, "--json")
        assert done.code == 0, done.err
        return json.loads(done.out)["rows"]  # type: ignore[no-any-return]

    answer.expected = load_json(case / "expect.json")  # type: ignore[attr-defined]
    answer.folder = tmp_path  # type: ignore[attr-defined]
    return answer


def case(name: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("ask", [name], indirect=True, ids=[name[:3]])


def us(value: Any) -> float:
    """Microseconds of a case as ns."""
    return float(1000 * value)


@case("010-sub-microsecond-kernels")
def test_durations_below_a_microsecond_are_neither_lost_nor_negative(ask: Any) -> None:
    rows, expected = ask("kernels"), ask.expected
    assert sum(row["count"] for row in rows) == expected["kernels"]
    assert sum(row["total_ns"] for row in rows) == us(expected["kernel_time_us"])
    assert min(row["min_ns"] for row in rows) == us(expected["min_kernel_us"])
    assert all(row["mean_ns"] > 0 for row in rows)


@case("011-events-without-args")
def test_a_kernel_without_arguments_counts_and_its_launch_is_missing(ask: Any) -> None:
    rows, expected = ask("launches"), ask.expected
    assert sum(row["num_activities"] for row in rows if row["call"] is None) == expected["orphans"]
    kernels = [row for row in ask("kernels") if row["kind"] == "kernel"]
    assert sum(row["count"] for row in kernels) == expected["kernels"]
    assert not any("PyTorch Profiler" in row["name"] for row in ask("operators"))


NAMES = (
    "allocations", "communication", "device", "idle", "input", "kernels", "launches", "memory", "modules", "operators",
    "phases", "spotted", "steps",
)  # fmt: skip


@case("013-negative-and-zero-dur")
def test_no_analysis_has_a_negative_time(ask: Any) -> None:
    for name in NAMES:
        for row in ask(name):
            assert all(value is None or value >= 0 for key, value in row.items() if key.endswith("_ns")), (name, row)
    rows = {row["name"]: row for row in ask("operators")}
    for name in ask.expected["zero_dur_kept"]:
        assert (rows[name]["count"], rows[name]["total_ns"]) == (1, 0)
    # The op that was still open lasts to the end of what is around it, so its time counts.
    assert sum(row["count"] for row in ask("kernels") if row["kind"] == "kernel") == ask.expected["kernels"]


@case("014-duration-overflows-next-slice")
def test_what_reaches_past_the_next_start_counts_up_to_it_and_both_sums_are_told(ask: Any) -> None:
    rows, expected = ask("kernels"), ask.expected
    assert sum(row["raw_total_ns"] for row in rows) == us(expected["raw_kernel_sum_us"])
    assert sum(row["total_ns"] for row in rows) == us(expected["clipped_kernel_sum_us"])
    assert sum(row["num_clipped"] for row in rows) == expected["clipped_slices"]
    notes = json.loads(run("analyze", "kernels", ask.folder, "--json").out)["notes"]
    assert any("1 activities reach past the next start on their stream" in note for note in notes)


@case("016-duplicate-launch-correlation")
def test_a_launch_within_a_launch_launches_once(ask: Any) -> None:
    launches, expected = ask("launches"), ask.expected
    assert sum(row["num_activities"] for row in launches) == expected["linked_gpu_events"]
    assert all(row["call"] is not None for row in launches)
    rows = {row["name"]: row for row in ask("operators")}
    assert rows[expected["parent_of_kernel"]]["device_self_ns"] > 0
    assert sum(row["device_self_ns"] for row in rows.values()) == sum(row["total_ns"] for row in ask("kernels"))


@case("017-cuda-graph-one-launch-many-kernels")
def test_kernels_of_a_graph_are_told_by_launch_kernel_and_share(ask: Any) -> None:
    streams, expected = ask("launches"), ask.expected
    # Its call counts once on each stream that it launches on.
    assert {row["num_launches"] for row in streams} == {expected["launches"]}
    assert sum(row["num_activities"] for row in streams) == expected["kernels"]
    assert sum(row["num_in_graphs"] for row in ask("kernels")) == expected["kernels"]
    graph = next(row for row in ask("spotted") if row["what"] == "graph" and row["name"])
    assert graph["name"] == streams[0]["call"]
    assert (graph["count"], graph["device_share"]) == (
        expected["launches"],
        float(expected["graph_share_of_gpu_time"]),
    )
    # Between them nothing else can run: no idle time is anybody's fault.
    assert {row["cause"] for row in ask("idle") if row["position"] == "inner"} <= {"inside a graph"}


@case("018-launch-outside-window")
def test_work_launched_before_the_window_counts_and_nobody_is_guessed_for_it(ask: Any) -> None:
    launches, expected = ask("launches"), ask.expected
    assert sum(row["num_activities"] for row in launches if row["call"] is None) == expected["orphans"]
    linked = [row for row in launches if row["call"] is not None]
    assert sum(row["num_activities"] for row in linked) == expected["linked_gpu_events"]
    assert all(row["queue_p50"] > expected["min_queue_length"] for row in linked)
    of_ops = sum(row["device_self_ns"] for row in ask("operators"))
    assert of_ops < sum(row["total_ns"] for row in ask("kernels")) == us(expected["gpu_busy_us"])
    # The gaps before activities whose launch is not recorded are said to be just that.
    assert "launch not recorded" in {row["cause"] for row in ask("idle")}


@case("019-hip-launch-names")
def test_calls_of_hip_launch_on_stream_0_of_device_2(ask: Any) -> None:
    rows, expected = ask("launches"), ask.expected
    assert sum(row["num_activities"] for row in rows) == expected["linked_gpu_events"]
    assert all(row["call"].startswith("hip") for row in rows)
    assert {(row["device"], row["stream"]) for row in rows} == {(expected["device"], expected["stream"])}
    kinds: Counter[str] = Counter()
    for row in ask("kernels"):
        kinds[row["kind"]] += row["count"]
    assert kinds == {"kernel": expected["kernels"], "memcpy": expected["memcpy"], "memset": expected["memset"]}


@pytest.mark.parametrize(
    "ask", ["021-gpu-user-annotations", "022-cuda-sync-not-compute"], indirect=True, ids=["021", "022"]
)
def test_labels_and_waits_on_a_stream_are_no_work(ask: Any) -> None:
    expected = ask.expected
    counts = {kind: sum(r["count"] for r in ask("kernels") if r["kind"] == kind) for kind in ("kernel", "memcpy")}
    assert counts == {"kernel": expected["kernels"], "memcpy": expected["memcpy"]}
    assert {row["stream"] for row in ask("launches")} == set(expected.get("streams", [7]))
    step = next(row for row in ask("device") if row["step"] is not None)
    assert step["communication_ns"] == 0
    assert step["compute_ns"] + step["exposed_memory_ns"] == us(expected["gpu_busy_us"])
    assert sum(r["total_ns"] for r in ask("idle", "--by", "step") if r["step"] is not None) == us(
        expected["gpu_idle_in_step_us"]
    )


@case("023-communication-kernel-names")
def test_communication_is_told_by_argument_then_name_then_op(ask: Any) -> None:
    expected = ask.expected
    types = Counter(name for name in expected["types_in_order"] if name != "not_comm")
    rows = ask("communication", "--by", "operation")
    assert {row["collective"]: row["count"] for row in rows} == types
    assert sum(row["total_ns"] for row in rows) == us(expected["comm_time_us"])
    kernels = sum(row["count"] for row in ask("kernels"))
    assert kernels == expected["comm_kernels"] + expected["compute_kernels"]


@case("024-no-profilerstep")
def test_without_steps_the_window_is_one_row(ask: Any) -> None:
    rows, expected = ask("steps"), ask.expected
    assert [row["step"] for row in rows] == [None] * expected["fallback_windows"]
    assert rows[0]["dur_ns"] == us(expected["window_us"])
    (whole,) = ask("device")
    assert (whole["step"], whole["busy_ns"]) == (None, us(expected["gpu_busy_us"]))
    assert ask("phases") == []
    assert sum(row["count"] for row in ask("kernels") if row["kind"] == "kernel") == expected["kernels"]


def test_ranks_come_in_order_of_their_number_and_a_copied_file_is_not_taken_for_one(tmp_path: Path) -> None:
    folder = require(CASES / "026-rank-order-and-conflict")
    expected = load_json(folder / "expect.json")
    (conflict,) = expected["conflicts"]
    done = run("merge", folder / "kineto", "-o", tmp_path)
    assert done.code == 1
    assert f"rank {conflict['name_rank']} expected, device trace of rank {conflict['content_rank']}" in done.err
    rows = json.loads(run("analyze", "device", tmp_path, "--json").out)["rows"]
    order = list(dict.fromkeys(row["rank"] for row in rows))
    assert order == [rank for rank in expected["order"] if rank != conflict["name_rank"]]


@case("027-two-processes-same-tid")
def test_stacks_are_of_one_process(ask: Any) -> None:
    rows, expected = {row["name"]: row for row in ask("operators")}, ask.expected["self_us"]
    assert rows["aten::to"]["self_ns"] == us(expected["aten::to"])
    assert rows["(outside any op)"]["self_ns"] == us(expected["ProfilerStep#3"])


@case("028-partially-overlapping-cpu-ops")
def test_self_times_of_ops_that_cross_sum_to_their_union(ask: Any) -> None:
    rows = {row["name"]: row["self_ns"] for row in ask("operators")}
    assert {name: rows[name] for name in ask.expected["self_us"]} == {
        name: us(value) for name, value in ask.expected["self_us"].items()
    }
