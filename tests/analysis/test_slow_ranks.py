"""Which rank is named as slow, and by what, on steps made by hand."""

import random

import polars as pl
import pytest

from analysis.series import found, of_kind, pair, plain, said, step
from chakra_capture.analysis.late_ops import Cause, LateOp
from chakra_capture.analysis.own_times import LatePhase
from chakra_capture.analysis.stragglers import FOUND, Stragglers


@pytest.mark.parametrize(
    ("phase", "kind"),
    [
        ("input_wait", "INPUT_STRAGGLER"),
        ("h2d", "H2D_STRAGGLER"),
        ("forward", "COMPUTE_STRAGGLER"),
        ("optimizer", "COMPUTE_STRAGGLER"),
    ],
)
@pytest.mark.parametrize(("excess", "severity"), [(10.1, None), (10.2, "warn"), (20.3, "warn"), (20.4, "crit")])
def test_rank_that_takes_longer_in_a_phase_of_its_own_is_named_from_10_percent_of_a_step(phase, kind, excess, severity):
    finding = of_kind(pair(excess, phase), kind)
    assert (finding and finding.severity.name) == severity
    if finding is not None:
        assert (finding.ranks, finding.phase) == ((1,), phase)
        assert "Rank 1 " in finding.summary
        assert finding.score == pytest.approx(excess / 102)


@pytest.mark.parametrize(("good", "is_named"), [(79, False), (80, True)])
def test_rank_is_named_if_it_is_the_slower_one_in_80_of_100_steps(good, is_named):
    assert (of_kind(pair(30, num=100, good=good), "INPUT_STRAGGLER") is not None) == is_named


@pytest.mark.parametrize(("num", "is_named"), [(9, False), (10, True)])
def test_rank_is_named_from_10_common_steps_on(num, is_named):
    finding = of_kind(pair(30, num=num), "INPUT_STRAGGLER")
    assert (finding and finding.severity.name) == ("warn" if is_named else None)


def test_rank_that_waits_in_forward_for_buffers_is_not_named():
    # DistributedDataParallel broadcasts buffers at the start of forward: there rank 0 waits for rank 1's slow loader.
    waiting = step(4, input_wait=1, forward=57, backward=30, optimizer=2)
    late = step(4, input_wait=28, forward=30, backward=30, optimizer=2)
    diagnosis = found([waiting] * 20, [late] * 20)
    assert [(each.kind, each.ranks) for each in diagnosis.problems] == [("INPUT_STRAGGLER", (1,))]


def test_rank_that_waits_in_forward_for_what_is_in_no_phase_is_not_named_either():
    waiting = step(4, input_wait=1, forward=57, backward=30, optimizer=2)
    late = step(31, input_wait=1, forward=30, backward=30, optimizer=2)
    assert not [each for each in found([waiting] * 20, [late] * 20).findings if each.ranks == (0,)]


def test_rest_of_a_step_names_no_rank():
    apart = [step(40, input_wait=5, forward=30, backward=50, optimizer=10)] * 20
    assert [(each.kind, each.ranks) for each in found([plain()] * 20, apart).problems] == [("RESIDUAL_HEAVY", ())]
    waiting = step(4, input_wait=1, forward=30, backward=63, optimizer=2)
    late = step(34, input_wait=1, forward=30, backward=33, optimizer=2)
    # The others show who is late, and what is in no phase does not.
    assert {each.kind: each.ranks for each in found([waiting] * 20, [late] * 20).problems} == {
        "RESIDUAL_HEAVY": (), "STRAGGLER": (1,),
    }  # fmt: skip


@pytest.mark.parametrize(("lost", "severity"), [(9.9, None), (10, "warn"), (19.9, "warn"), (20, "crit")])
def test_rank_the_others_wait_for_in_backward_without_a_measured_cause_is_a_straggler(lost, severity):
    waiting = step(4, input_wait=1, forward=30, backward=63, optimizer=2)
    late = step(4 + lost, input_wait=1, forward=30, backward=63 - lost, optimizer=2)
    finding = of_kind(found([waiting] * 20, [late] * 20), "STRAGGLER")
    assert (finding and finding.severity.name) == severity
    if finding is not None:
        assert (finding.ranks, finding.phase) == ((1,), "sync")


@pytest.mark.parametrize(("excess", "kind"), [(7.9, "STRAGGLER"), (8, "INPUT_STRAGGLER")])
def test_a_cause_is_named_if_it_explains_80_percent_of_what_the_others_lose(excess, kind):
    waiting = step(4, input_wait=1, forward=30, backward=63, optimizer=2)
    late = step(4 + 10 - excess, input_wait=1 + excess, forward=30, backward=53, optimizer=2)
    assert found([waiting] * 20, [late] * 20).step_time[0].kind == kind


def test_rank_that_is_held_up_in_one_step_alone_is_not_waited_for():
    usual = {"input_wait": 1.0, "forward": 30.0, "optimizer": 2.0}
    # A little earlier in every step, and once by much.
    waiting, late = (step(4, backward=63 + more, **usual) for more in (0.2, 0.0))
    once = step(4, backward=363, **usual), step(304, backward=63, **usual)
    diagnosis = found([*[waiting] * 19, once[0]], [*[late] * 19, once[1]])
    assert not [each for each in diagnosis.findings if "STRAGGLER" in each.kind]


def test_ranks_that_do_not_keep_step_do_not_wait_for_the_one_that_has_less_to_do():
    busy = step(4, input_wait=1, forward=30, backward=63, optimizer=2)
    idle = step(4, input_wait=1, forward=30, backward=13, optimizer=2)
    diagnosis = found([busy] * 20, [idle] * 20)
    assert not [each for each in diagnosis.findings if each.ranks == (1,) and "STRAGGLER" in each.kind]
    assert [(each.kind, each.ranks) for each in diagnosis.problems] == [("COMPUTE_STRAGGLER", (0,))]


def test_one_of_eight_ranks_is_named_and_input_is_not_blamed_on_all():
    ranks = [[plain()] * 20 for _ in range(8)]
    ranks[5] = [step(5, input_wait=35, forward=30, backward=20, optimizer=10)] * 20
    assert [(each.kind, each.ranks) for each in found(*ranks).problems] == [("INPUT_STRAGGLER", (5,))]


def test_all_ranks_with_a_slow_loader_are_input_bound_and_nobody_is_named():
    ranks = [[step(input_wait=30, forward=68, backward=1, optimizer=1)] * 20] * 2
    assert said(found(*ranks)) == [("INPUT_BOUND", "crit")]


def test_no_rank_is_named_among_ranks_that_are_all_alike():
    alarms = 0
    for seed in range(20):
        rng = random.Random(seed)
        ranks = [
            [plain(100) | {"phases": {name: ms * rng.uniform(0.8, 1.6) for name, ms in plain()["phases"].items()}}
             for _ in range(40)]
            for _ in range(2)
        ]  # fmt: skip
        for steps in ranks:
            for each in steps:
                each["ms"] = sum(each["phases"].values()) + 5
        alarms += any("STRAGGLER" in each.kind for each in found(*ranks).findings)
    assert alarms == 0


def test_rank_with_few_steps_is_left_out_and_counted():
    steps = [plain()] * 20
    diagnosis = found(steps, steps, [plain()] * 9)
    assert (diagnosis.window.ranks, diagnosis.window.num_steps) == ((0, 1), 20)
    assert diagnosis.coverage["forward"]["ranks"] == "2/3"
    assert found(steps, [plain()] * 10).window.num_steps == 10


@pytest.mark.parametrize(("share", "severity"), [(0.099, None), (0.10, "warn"), (0.20, "crit")])
def test_rank_that_only_collectives_show_to_be_late_is_named(share, severity):
    table = pl.DataFrame(
        [(0, 30, 0, -1e6, 9e6, -share, False), (1, 30, 30, share * 1e8, 0.0, share, True)],
        schema={column.name: column.dtype for column in FOUND},
        orient="row",
    )
    late = Stragglers(table, (1,), None, 30, True, 1e8)
    finding = of_kind(found([plain()] * 20, [plain()] * 20, collectives=late), "STRAGGLER")
    assert (finding and finding.severity.name) == severity


@pytest.mark.parametrize(
    ("late", "kind", "phase"),
    [
        (LatePhase("backward", 40e6, 10e6), "COMPUTE_STRAGGLER", "backward"),
        (LatePhase("input_wait", 40e6, 10e6), "INPUT_STRAGGLER", "input_wait"),
        (LatePhase(None, 40e6, 10e6), "STRAGGLER", "sync"),
        (LatePhase("checkpoint", 40e6, 10e6), "STRAGGLER", "sync"),
        (None, "STRAGGLER", "sync"),
    ],
)
def test_rank_that_collectives_show_to_be_late_is_late_in_the_phase_that_its_own_time_shows(late, kind, phase):
    table = pl.DataFrame(
        [(0, 30, 0, -1e6, 9e6, -0.3, False), (1, 30, 30, 3e7, 0.0, 0.3, True)],
        schema={column.name: column.dtype for column in FOUND},
        orient="row",
    )
    stragglers = Stragglers(table, (1,), None, 30, True, 1e8, {} if late is None else {1: late})
    (finding,) = found([plain()] * 20, [plain()] * 20, collectives=stragglers).problems
    assert (finding.kind, finding.phase, finding.ranks, finding.score) == (kind, phase, (1,), 0.3)
    if kind != "STRAGGLER":
        assert finding.summary.startswith("Rank 1 ")
        assert "40.0 ms" in finding.summary
        assert finding.summary.endswith("the others 10.0 ms.")


@pytest.mark.parametrize(("phase", "is_said"), [("backward", True), (None, True), ("backward", False)])
def test_op_that_makes_a_rank_slow_is_said_beside_the_phase_that_it_is_of(phase, is_said):
    table = pl.DataFrame(
        [(0, 30, 0, -1e6, 9e6, -0.3, False), (1, 30, 30, 3e7, 0.0, 0.3, True)],
        schema={column.name: column.dtype for column in FOUND},
        orient="row",
    )
    what = LateOp(Cause.OP, "aten::mm", 26e6, 1e6, ("SlowBackward",))
    stragglers = Stragglers(table, (1,), None, 30, True, 1e8, {1: LatePhase(phase, 40e6, 10e6, what)})
    # By the phases of all steps it is its input that is slow, or nothing is.
    slow = step(4, input_wait=31, forward=30, backward=50, optimizer=2)
    ranks = (plain(), plain() if is_said else slow)
    diagnosis = found(*([each] * 20 for each in ranks), collectives=stragglers)
    (finding,) = [each for each in diagnosis.problems if "STRAGGLER" in each.kind]
    assert (finding.evidence.get("op"), finding.evidence.get("call_path")) == (
        ("aten::mm", ["SlowBackward"]) if is_said else (None, None)
    )
    assert finding.summary.endswith("; aten::mm takes 25.0 ms longer.") == is_said


def test_longer_forward_of_a_rank_is_not_its_own_where_another_rank_is_late_by_as_much():
    waiting = step(4, input_wait=1, forward=57, backward=30, optimizer=2)
    late = step(4, input_wait=31, forward=30, backward=52, optimizer=2)
    diagnosis = found([waiting] * 20, [late] * 20)
    assert [each.ranks for each in diagnosis.problems if "STRAGGLER" in each.kind] == [(1,)]


def test_one_of_three_ranks_with_less_to_do_is_not_waited_for():
    busy, idle = (step(4, input_wait=1, forward=30, backward=ms, optimizer=2) for ms in (63, 50))
    assert not [each for each in found([busy] * 20, [busy] * 20, [idle] * 20).findings if "STRAGGLER" in each.kind]
