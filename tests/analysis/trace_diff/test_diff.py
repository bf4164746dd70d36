"""Recorded steps of two runs: the right call is to blame, and what stands in its place is found by structure."""

from pathlib import Path

import pytest

from analysis.trace_diff.runs import compared, label, op, phase, recorded, sums, told, worst
from chakra_capture.analysis.trace_diff.measure import t_quantile

LINEAR = op("aten::linear", 5, op("aten::addmm", 40), shapes="[[2,4]]")
RELU = op("aten::relu", 20)


def test_longer_call_is_the_whole_difference_with_the_call_inside_it_that_takes_longer(tmp_path: Path) -> None:
    a = recorded(tmp_path / "a", [[phase("forward", 7, LINEAR, RELU)]] * 2)
    slow = op("aten::linear", 5, op("aten::addmm", 70), shapes="[[2,4]]")
    b = recorded(tmp_path / "b", [[phase("forward", 7, slow, RELU)]] * 2)
    found = worst(a, b)
    assert (found.scale.total_ns, found.scale.exact_difference, found.scale.difference_ns) == ((154, 214), 60, 30.0)
    columns = ("status", "phase", "name", "mostly", "first_ns", "second_ns", "difference_ns", "calls_ns", "longer_ns")
    assert told(found, *columns, "share") == [
        ("matched", "forward", "aten::linear", "aten::addmm", 45.0, 75.0, 30.0, 0.0, 30.0, 1.0)
    ]
    assert told(found, "part", "phase", "exact_difference", table="phases") == [("loop", "forward", 60)]
    # Every ns has an owner: the two ops, Python in the phase, and Python in the step.
    every = told(found, "name", "phase", "second_total_ns", all=True)
    assert set(every) == {
        ("aten::linear", "forward", 150), ("aten::relu", "forward", 40),
        ("(outside any op)", "forward", 14), ("(outside any op)", None, 10),
    }  # fmt: skip


def test_more_calls_and_longer_calls_are_told_apart(tmp_path: Path) -> None:
    a = recorded(tmp_path / "a", [[RELU] * 2])
    b = recorded(tmp_path / "b", [[op("aten::relu", 30)] * 4])
    # (4 - 2) calls of (20 + 30) / 2 ns, and (30 - 20) ns of (2 + 4) / 2 calls.
    columns = ("status", "name", "first_count", "second_count", "difference_ns", "calls_ns", "longer_ns")
    assert told(worst(a, b), *columns) == [("matched", "aten::relu", 2, 4, 80.0, 50.0, 30.0)]


def test_new_call_is_told_with_all_that_is_inside(tmp_path: Path) -> None:
    a = recorded(tmp_path / "a", [[LINEAR, RELU]])
    b = recorded(tmp_path / "b", [[LINEAR, op("aten::gelu", 5, op("aten::erf", 9)), RELU]])
    assert told(worst(a, b), "status", "name", "mostly", "calls_ns") == [("new", "aten::gelu", "aten::erf", 14.0)]
    assert told(worst(b, a), "status", "name", "calls_ns") == [("gone", "aten::gelu", -14.0)]


def test_wider_layer_is_the_same_call_on_other_shapes_and_not_a_new_one(tmp_path: Path) -> None:
    wide = op("aten::linear", 5, op("aten::addmm", 80), shapes="[[2,8]]")
    a = recorded(tmp_path / "a", [[LINEAR, RELU, LINEAR, RELU]])
    b = recorded(tmp_path / "b", [[LINEAR, RELU, wide, RELU]])
    columns = ("status", "name", "input_shapes", "first_shapes", "first_count", "second_count", "difference_ns")
    assert told(worst(a, b), *columns) == [("reshaped", "aten::linear", "[[2,8]]", "[[2,4]]", 1, 1, 40.0)]


def test_renamed_module_is_the_same_one_and_its_calls_are_the_same_calls(tmp_path: Path) -> None:
    slower = op("aten::relu", 25)
    a = recorded(tmp_path / "a", [[label("encoder", 3, LINEAR, RELU), label("head", 1, LINEAR)]])
    b = recorded(tmp_path / "b", [[label("encoder_v2", 4, LINEAR, slower), label("head", 1, LINEAR)]])
    found = worst(a, b)
    assert told(found, "status", "name", "first_name", "parents", "first_parents", "difference_ns") == [
        ("matched", "aten::relu", None, ["encoder_v2"], ["encoder"], 5.0),
        ("renamed", "encoder_v2", "encoder", [], None, 1.0),
    ]
    assert not {"new", "gone"} & {status for (status,) in told(found, "status", all=True)}


def test_op_in_the_place_of_another_one_is_renamed(tmp_path: Path) -> None:
    a = recorded(tmp_path / "a", [[LINEAR, RELU, LINEAR]])
    b = recorded(tmp_path / "b", [[LINEAR, op("aten::silu", 26), LINEAR]])
    assert told(worst(a, b), "status", "name", "first_name", "difference_ns") == [
        ("renamed", "aten::silu", "aten::relu", 6.0)
    ]


def test_annotation_put_around_calls_is_new_and_the_calls_are_not(tmp_path: Path) -> None:
    a = recorded(tmp_path / "a", [[LINEAR, RELU, LINEAR]])
    b = recorded(tmp_path / "b", [[label("block", 2, LINEAR, RELU), LINEAR]])
    found = worst(a, b)
    assert told(found, "status", "name", "difference_ns") == [("new", "block", 2.0)]
    assert {row for row in told(found, "status", "name", all=True) if row[0] != "matched"} == {("new", "block")}


def test_call_in_another_phase_is_moved(tmp_path: Path) -> None:
    a = recorded(tmp_path / "a", [[phase("forward", 5, LINEAR), phase("backward", 5, RELU, LINEAR)]])
    b = recorded(tmp_path / "b", [[phase("forward", 5, LINEAR, RELU), phase("backward", 5, LINEAR)]])
    found = worst(a, b)
    moved = [row for row in told(found, "status", "name", "phase", "first_phase", all=True) if row[0] != "matched"]
    assert moved == [("moved", "aten::relu", "forward", "backward")]
    assert [*sums(found)] == [0, 0]


def test_what_autograd_runs_meanwhile_is_whose_the_time_is_in_which_the_loop_waits(tmp_path: Path) -> None:
    waits = [[phase("backward", 100)]]
    a = recorded(tmp_path / "a", waits, worker=[[op("AddmmBackward0", 30), op("ReluBackward0", 10, before=20)]])
    b = recorded(tmp_path / "b", waits, worker=[[op("AddmmBackward0", 45), op("ReluBackward0", 10, before=5)]])
    assert told(worst(a, b), "name", "phase", "difference_ns") == [
        ("(outside any op)", "backward", -15.0),
        ("AddmmBackward0", "backward", 15.0),
    ]


def test_kernel_of_the_same_call_is_the_same_kernel_under_another_name(tmp_path: Path) -> None:
    def steps(gemm: str, dur: int) -> list[list[object]]:
        return [
            [op("aten::mm", 100, kernels=((gemm, dur), ("split_k", 5))), op("aten::add", 50, kernels=(("add", 9),))]
        ]

    a = recorded(tmp_path / "a", steps("sgemm_128x64", 40))  # type: ignore[arg-type]
    b = recorded(tmp_path / "b", steps("sgemm_64x64", 60))  # type: ignore[arg-type]
    found = worst(a, b)
    assert told(found, "status", "name", "first_name", "difference_ns", table="kernels") == [
        ("renamed", "sgemm_64x64", "sgemm_128x64", 20.0)
    ]
    # The step is as long, so what the device computes more it idles less.
    assert sorted(told(found, "part", "exact_difference", table="phases")) == [("compute", 20), ("idle", -20)]
    assert [*sums(found)] == [0, 0, 0]


def test_operations_are_matched_by_group_and_size_and_resized_ones_by_order(tmp_path: Path) -> None:
    def operation(size: int, dur: int) -> dict[str, object]:
        return {"collective": "all_reduce", "comm_bytes": size, "dur_ns": dur, "step": 0, "group_ranks": [0, 1]}

    a = recorded(tmp_path / "a", [[RELU]], operations=[operation(4096, 10), operation(1024, 5)])
    b = recorded(tmp_path / "b", [[RELU]], operations=[operation(8192, 18), operation(1024, 5)])
    columns = ("status", "part", "collective", "num_ranks", "comm_bytes", "first_bytes", "difference_ns")
    assert told(worst(a, b), *columns, table="collectives") == [
        ("resized", "time", "all_reduce", 2, 8192, 4096, 8.0),
    ]


def test_sides_of_different_numbers_of_steps_sum_exactly(tmp_path: Path) -> None:
    a = recorded(tmp_path / "a", [[op("aten::relu", own)] for own in (20, 21, 21)])
    b = recorded(tmp_path / "b", [[op("aten::relu", own)] for own in (20, 23)], first=5)
    found = worst(a, b)
    # Means of 62/3 and 43/2 ns: 2 x 62 and 3 x 43 over six steps.
    assert (found.scale.exact_difference, [*sums(found)]) == (5, [5, 5])
    assert told(found, "difference_ns") == [(pytest.approx(5 / 6),)]
    assert "the sides recorded other steps" in compared(a, b).notes[0]


def test_steps_that_both_have_are_compared_and_no_others(tmp_path: Path) -> None:
    a = recorded(tmp_path / "a", [[op("aten::relu", own)] for own in (500, 20, 20)])
    b = recorded(tmp_path / "b", [[op("aten::relu", own)] for own in (20, 20, 700)], first=1)
    found = worst(a, b)
    assert (found.steps, found.scale.exact_difference) == (((1, 2), (1, 2)), 0)


NOISY = (20, 22, 19, 21, 23, 20)


@pytest.mark.parametrize(
    ("owns", "change"),
    [(NOISY[::-1], "within_noise"), ([own + 2 for own in NOISY], "within_noise"),
     ([own + 30 for own in NOISY], "slower"), ([own - 15 for own in NOISY], "faster"),
     ([own + 30 for own in NOISY[:4]], "not_judged")],
)  # fmt: skip
def test_call_is_changed_only_beyond_what_steps_differ_by(owns: list[int], change: str, tmp_path: Path) -> None:
    a = recorded(tmp_path / "a", [[op("aten::relu", own)] for own in NOISY])
    b = recorded(tmp_path / "b", [[op("aten::relu", own)] for own in owns], first=20)
    rows = dict(told(worst(a, b), "name", "change", all=True))
    assert rows["aten::relu"] == change


@pytest.mark.parametrize(
    # Two-sided critical values of Student's t as tables print them.
    ("degrees", "tail", "value"),
    [(1, 0.05, 12.706), (2, 0.001, 31.599), (4, 0.05, 2.776), (4, 0.001, 8.610), (5, 0.001, 6.869), (9, 0.05, 2.262),
     (30, 0.01, 2.750)],
)  # fmt: skip
def test_quantiles_of_students_t_are_those_of_the_tables(degrees: int, tail: float, value: float) -> None:
    assert t_quantile(degrees, tail) == pytest.approx(value, abs=5e-4)


def test_ranks_are_compared_with_the_same_rank_and_the_one_that_differs_most_is_shown(tmp_path: Path) -> None:
    a = [recorded(tmp_path / "a", [[op("aten::relu", 20)]], rank=rank) for rank in range(4)]
    b = [recorded(tmp_path / "b", [[op("aten::relu", 20 + 10 * rank)]], rank=rank) for rank in range(1, 5)]
    found = compared(a, b)
    assert found.ranks.select("rank", "difference_ns").rows() == [(3, 30.0), (2, 20.0), (1, 10.0)]
    assert found.worst is not None
    assert found.median is not None
    assert (found.worst.rank, found.median.rank) == (3, 2)
    assert found.notes[:2] == ("not compared, of A alone: rank 0", "not compared, of B alone: rank 4")


def test_windows_without_marked_steps_are_compared_as_wholes(tmp_path: Path) -> None:
    a = recorded(tmp_path / "a", [[LINEAR, RELU]], is_marked=False)
    b = recorded(tmp_path / "b", [[LINEAR, op("aten::relu", 29)]], is_marked=False)
    assert told(worst(a, b), "name", "phase", "difference_ns") == [("aten::relu", None, 9.0)]
    assert "no step is marked: whole windows are compared" in compared(a, b).notes
    marked = recorded(tmp_path / "marked", [[LINEAR, RELU]])
    assert compared(marked, b).reason == "B marks no steps (ProfilerStep), the other side does"


def test_shapes_that_only_one_side_recorded_tell_no_calls_apart(tmp_path: Path) -> None:
    bare = op("aten::linear", 5, op("aten::addmm", 40))
    a, b = recorded(tmp_path / "a", [[LINEAR, RELU]]), recorded(tmp_path / "b", [[bare, RELU]])
    assert told(worst(a, b), "name") == []
    assert {status for (status,) in told(worst(a, b), "status", all=True)} == {"matched"}


def test_sides_without_anything_in_common_are_not_compared_and_say_why(tmp_path: Path) -> None:
    a = [recorded(tmp_path / "a", [[RELU]], rank=rank) for rank in (0, 1)]
    b = [recorded(tmp_path / "b", [[RELU]], rank=rank) for rank in (2, 3)]
    assert (compared(a, b).worst, compared(a, b).reason) == (None, "the runs have no rank in common")
    alone = compared(a[0], b[0])
    assert alone.worst is not None
    assert alone.notes[0] == "rank 2 of B is compared with rank 0 of A: the runs have no rank in common"
    empty = recorded(tmp_path / "empty", [])
    assert compared(a[0], empty).reason == "no step of B was recorded whole, with times"
