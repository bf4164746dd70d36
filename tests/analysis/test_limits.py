"""Limits of the rules that other tests pass by: each just inside and just outside."""

from typing import Any

import pytest

from analysis.series import plain, records, step
from chakra_capture.analysis.diagnosis import Diagnosis, diagnose
from chakra_capture.analysis.findings import Finding

GIB = 1 << 30


def found(*ranks: list[dict[str, Any]], untimed: dict[str, str] | None = None) -> Diagnosis:
    return diagnose({rank: records(steps, untimed) for rank, steps in enumerate(ranks)})


def of_kind(diagnosis: Diagnosis, kind: str) -> Finding | None:
    return next((each for each in diagnosis.findings if each.kind == kind), None)


def severity(finding: Finding | None) -> str | None:
    return None if finding is None else finding.severity.name


# Input takes most of a step, and is not seen in others.
LOUD, UNSEEN = step(5, input_wait=60, forward=20, backward=10, optimizer=5), step(65, forward=20, backward=10)


@pytest.mark.parametrize(("seen", "expected"), [(1, None), (2, "warn"), (19, "warn"), (20, "crit")])
def test_A6_a_part_speaks_from_2_steps_in_which_it_was_seen_and_is_critical_from_20(seen, expected):
    diagnosis = found([LOUD] * seen + [UNSEEN] * (40 - seen))
    assert severity(of_kind(diagnosis, "INPUT_BOUND")) == expected
    assert diagnosis.coverage["input_wait"] == {"ranks": "1/1", "steps": f"{seen}/40"}


def test_A6_share_of_a_step_is_that_of_the_median_rank():
    # Five steps name no rank; the shares of the ranks are 5, 5 and 60 %, and then 5, 60 and 60 %.
    ranks = [[plain()] * 5, [plain()] * 5, [LOUD] * 5, [LOUD] * 5]
    assert of_kind(found(*ranks[:3]), "INPUT_BOUND") is None
    assert of_kind(found(*ranks[1:]), "INPUT_BOUND").share == pytest.approx(0.6)


def test_A6_compute_of_90_percent_is_not_said_beside_input_of_10():
    edge = step(input_wait=10, forward=40, backward=40, optimizer=10)
    assert [each.kind for each in found([edge] * 20).findings] == ["INPUT_BOUND"]


def test_A3_coverage_is_that_of_the_best_rank_and_counts_ranks_without_any():
    some, none = [LOUD] * 15 + [UNSEEN] * 5, [UNSEEN] * 20
    coverage = found(some, [LOUD] * 3 + [UNSEEN] * 17, none, [plain()] * 3).coverage["input_wait"]
    assert coverage == {"ranks": "2/4", "steps": "15/20"}


@pytest.mark.parametrize("missing", ["input_wait", "forward", "backward", "optimizer"])
def test_A7_each_signal_that_one_rank_of_two_lacks_makes_the_data_incomplete(missing):
    def rank(phases: tuple[str, ...]) -> Any:
        # Each phase 6 %, the rest below 10 %: no rule speaks on what is there.
        return records([step(8, **dict.fromkeys(phases, 23))] * 5, {missing: "not wrapped"})

    names = ("forward", "backward", "optimizer", "h2d")
    whole = records([step(8, input_wait=8, forward=28, backward=28, optimizer=28)] * 5)
    diagnosis = diagnose({0: whole, 1: rank(tuple(name for name in names if name != missing))})
    wanted = sorted({missing, "input_wait"}, key=["input_wait", *names].index)
    assert [each.kind for each in diagnosis.step_time] == ["INCOMPLETE_DATA"]
    assert diagnosis.step_time[0].evidence == {
        "missing_signals": wanted,
        "signal_coverage": dict.fromkeys(wanted, "1/2"),
    }


# Slow ranks.


def late(excess: float = 0, *, seen: bool = True) -> dict[str, Any]:
    phases = {"input_wait": 2.0 + excess, "forward": 30.0, "backward": 60.0 - excess, "optimizer": 5.0}
    if not seen:
        del phases["input_wait"]
    return step(3, **phases) | {"ms": 100}


@pytest.mark.parametrize(("seen", "expected"), [(9, None), (10, "INPUT_STRAGGLER")])
def test_A6_rank_is_named_by_a_phase_that_10_steps_of_all_ranks_have(seen, expected):
    slow = [late(30)] * seen + [late(seen=False)] * (40 - seen)
    kinds = [each.kind for each in found([late()] * 40, slow).problems if each.phase == "input_wait"]
    assert kinds == ([] if expected is None else [expected])


@pytest.mark.parametrize(("apart", "expected"), [(4.9, "STRAGGLER"), (5.1, None)])
def test_A6_ranks_keep_step_if_their_steps_differ_by_less_than_half_of_what_is_lost(apart, expected):
    waiting = step(4, input_wait=1, forward=32, backward=61, optimizer=2)
    early = step(4 + 10 - apart, input_wait=1, forward=32, backward=51, optimizer=2)
    finding = of_kind(found([waiting] * 20, [early] * 20), "STRAGGLER")
    assert (finding and finding.ranks) == (expected and (1,))


@pytest.mark.parametrize(("good", "is_named"), [(79, False), (80, True)])
def test_A6_others_wait_in_backward_in_80_of_100_steps(good, is_named):
    # Rank 1 makes rank 0 wait by 20 ms in what no phase has; in the other steps rank 0 makes rank 1 wait by 1 ms.
    waiting, slow = ([step(3 + more, input_wait=2, forward=30, backward=60 - more, optimizer=5)] for more in (0, 20))
    bit = [step(4, input_wait=2, forward=30, backward=59, optimizer=5)]
    other = 100 - good
    diagnosis = found(waiting * good + bit * other, slow * good + waiting * other)
    assert (of_kind(diagnosis, "STRAGGLER") is not None) == is_named


@pytest.mark.parametrize(("slow", "num_named"), [(16, 16), (17, 16)])
def test_A8_every_slow_rank_is_named_up_to_16(slow, num_named):
    ranks = [[late(30 if at < slow else 0)] * 10 for at in range(36)]
    named = [each.ranks for each in found(*ranks).problems if each.kind == "INPUT_STRAGGLER"]
    assert sorted(named) == [(at,) for at in range(num_named)]


def test_A6_rank_is_named_with_half_of_the_steps_and_compared_over_those_that_all_have():
    short = [late(30) | {"step": number} for number in range(8, 18)]
    window = found([late()] * 20, short).window
    assert (window.ranks, window.keys["step"].to_list()) == ((0, 1), list(range(8, 18)))


@pytest.mark.parametrize(("other", "is_alone"), [(19.9, True), (20.1, False)])
def test_A6_rank_is_named_for_its_checkpoints_if_the_others_have_less_than_half_of_its_share(other, is_alone):
    # 50 of 150 ms are a third, 20 of 120 ms a sixth.
    ranks = [[plain(gap={"checkpoint": ms})] * 20 for ms in (50.0, other)]
    assert of_kind(found(*ranks), "CHECKPOINT_HEAVY").ranks == ((0,) if is_alone else ())


# Over time.


def batches(order: list[int], num: int, growth: float = 0.5) -> list[dict[str, Any]]:
    """Steps in eight batches whose lengths are so ordered, from 100 ms to 1 + growth times that."""
    return [plain(100 * (1 + growth * order[at * 8 // num] / 7)) for at in range(num)]


def test_A6_a_trend_needs_100_steps():
    for num, is_said in ((99, False), (100, True)):
        assert (of_kind(found(batches(list(range(8)), num)), "STEPS_SLOW_DOWN") is not None) == is_said


@pytest.mark.parametrize(
    ("order", "is_said"),
    [([0, 3, 2, 1, 5, 4, 6, 7], True), ([0, 3, 2, 1, 5, 4, 7, 6], False)],
)
def test_A6_a_trend_needs_24_of_28_pairs_of_batches_that_rise(order, is_said):
    pairs = sum(a < b for at, a in enumerate(order) for b in order[at + 1 :])
    assert pairs == (24 if is_said else 23)
    assert (of_kind(found(batches(order, 104)), "STEPS_SLOW_DOWN") is not None) == is_said


# Memory.


def creeps(values: list[int], column: str = "memory") -> list[str]:
    steps = [plain() | ({"rss": value} if column == "rss" else {"memory": (value, None, None, None)})
             for value in values]  # fmt: skip
    return [each.kind for each in found(steps).memory]


def test_A6_memory_needs_50_steps():
    for num, kinds in ((49, []), (50, ["CREEP_EARLY"])):
        assert creeps([GIB + at for at in range(num)]) == kinds


def test_A6_memory_needs_20_values():
    for num, kinds in ((19, []), (20, ["CREEP_EARLY"])):
        steps = [plain() | ({"memory": (GIB + at, None, None, None)} if at < num else {}) for at in range(60)]
        assert [each.kind for each in found(steps).memory] == kinds


@pytest.mark.parametrize(
    ("start", "end", "kinds"),
    [
        (0, 15, ["CREEP_EARLY"]), (0, 16, []), (24, 25, []), (25, 45, ["CREEP_EARLY"]),
        (54, 55, []), (80, 90, ["CREEP_EARLY"]), (80, 91, []), (90, 100, []),
    ],
)  # fmt: skip
def test_A6_memory_is_looked_at_from_15_to_25_45_to_55_and_90_to_100_percent(start, end, kinds):
    # It grows byte by byte; a stretch that stands out by much breaks the order if a band holds a part of it.
    values = [GIB + at for at in range(100)]
    much = -GIB // 2 if start >= 54 else GIB // 2
    for at in range(start, end):
        values[at] += much
    assert creeps(values) == kinds


def test_A6_growth_that_is_done_by_the_middle_is_none():
    assert creeps([GIB + (10**9 if at >= 30 else 0) for at in range(100)]) == []
