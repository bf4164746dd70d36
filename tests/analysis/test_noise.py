"""Whether two series differ: noise of several kinds, on a fake clock, against what was planted."""

from collections import Counter

import numpy as np
import pytest

from chakra_capture.analysis.noise import Verdict, compare_runs, compare_series, student_quantile

SEEDS, STEPS = 200, 200


def drift(rng, size, scale):
    """A walk that forgets: each step keeps 97 % of what the one before was off by."""
    values = np.zeros(size)
    for at in range(1, size):
        values[at] = 0.97 * values[at - 1] + rng.normal(0, scale)
    return values


KINDS = {
    "independent": lambda rng, n: rng.normal(0, 0.03, n),
    "outliers": lambda rng, n: rng.normal(0, 0.02, n) + np.log(np.where(rng.random(n) < 0.05, rng.uniform(2, 5, n), 1)),
    "periodic": lambda rng, n: rng.normal(0, 0.02, n) + np.log(np.where(np.arange(n) % 10 == 0, 1.5, 1)),
    "mild drift": lambda rng, n: rng.normal(0, 0.02, n) + drift(rng, n, 0.004),
    "strong drift": lambda rng, n: rng.normal(0, 0.02, n) + drift(rng, n, 0.01),
}


def verdicts(kind: str, factor: float) -> Counter:
    """Verdicts in percent over the seeds."""
    found = Counter()
    for seed in range(SEEDS):
        rng = np.random.default_rng(seed)
        first, second = (np.exp(KINDS[kind](rng, STEPS)) * 1e7 for _ in range(2))
        found[compare_series(first, factor * second).verdict] += 100 / SEEDS
    return found


@pytest.mark.parametrize(
    ("kind", "most_different", "least_found"),
    [("independent", 2, 95), ("outliers", 2, 95), ("periodic", 2, 95), ("mild drift", 4, 85), ("strong drift", 15, 0)],
)
def test_identical_runs_are_rarely_called_different_and_five_percent_are_found(
    kind: str, most_different: float, least_found: float
) -> None:
    same = verdicts(kind, 1.0)
    assert same[Verdict.slower] + same[Verdict.faster] <= most_different
    slower = verdicts(kind, 1.05)
    assert slower[Verdict.slower] >= least_found
    assert slower[Verdict.faster] <= 1


def test_strong_drift_is_mostly_inconclusive() -> None:
    assert verdicts("strong drift", 1.0)[Verdict.inconclusive] >= 50


def test_direction_and_size_are_those_planted() -> None:
    rng = np.random.default_rng(1)
    first = np.exp(rng.normal(0, 0.01, 200)) * 1e7
    change = compare_series(first, first * 0.8)
    assert (change.verdict, change.change) == (Verdict.faster, pytest.approx(-0.2))
    assert change.low <= -0.2 <= change.high


@pytest.mark.parametrize(
    ("factor", "verdict"),
    [
        (1.029, Verdict.same),
        (1.031, Verdict.slower),
        (0.971, Verdict.same),
        (0.969, Verdict.faster),
        (1.0, Verdict.same),
    ],
)
def test_three_percent_is_the_smallest_change(factor: float, verdict: Verdict) -> None:
    steady = np.full(100, 1e7)
    assert compare_series(steady, steady * factor).verdict is verdict


def test_few_steps_and_missing_ones_are_inconclusive_with_the_reason() -> None:
    steady = np.full(24, 1e7)
    assert compare_series(steady, steady).verdict is Verdict.same
    few = compare_series(steady, steady[1:])
    assert (few.verdict, few.change) == (Verdict.inconclusive, 0.0)
    assert "too few" in few.reason
    assert compare_series(steady, []).change is None
    assert compare_series(steady, [float("nan"), 0.0, -1.0]).reason == "not measured on both sides"


@pytest.mark.parametrize(("degrees", "known"), [(5, 2.571), (7, 2.365), (14, 2.145), (30, 2.042)])
def test_students_quantiles_are_those_of_the_tables(degrees: float, known: float) -> None:
    assert student_quantile(degrees) == pytest.approx(known, rel=0.003)


def side(rng, runs: int, factor: float = 1.0) -> list:
    """Runs of one program on a shared machine: each is slower by what others did meanwhile."""
    return [np.exp(rng.normal(0, 0.03, 100)) * factor * (1 + rng.exponential(0.06)) * 1e7 for _ in range(runs)]


def test_three_runs_a_side_are_better_than_one_on_each() -> None:
    wrong, found = Counter(), Counter()
    for seed in range(SEEDS):
        rng = np.random.default_rng(seed)
        for runs in (1, 3, 5):
            identical = compare_runs(side(rng, runs), side(rng, runs))
            wrong[runs] += identical.verdict in (Verdict.slower, Verdict.faster)
            found[runs] += compare_runs(side(rng, runs), side(rng, runs, 1.15)).verdict is Verdict.slower
    assert wrong[3] <= SEEDS * 0.05
    assert wrong[3] < wrong[1] / 4
    assert found[3] >= max(found[1], SEEDS * 0.9)
    assert found[5] >= SEEDS * 0.9


def test_no_change_is_seen_within_what_runs_of_one_side_differ_by() -> None:
    # 10th percentiles in ms of one program that was run three times twice, beside other work.
    first, second = ([np.full(11, low * 1e6) for low in lows] for lows in ([194, 427, 252], [165, 295, 208]))
    change = compare_runs(first, second)
    assert (change.verdict, change.change) == (Verdict.inconclusive, pytest.approx(165 / 194 - 1))
    assert "runs of one side differ by 29.9%" in change.reason
    for seed in range(SEEDS):
        rng = np.random.default_rng(seed)
        sides = [[np.full(11, 1e7 * (1 + rng.exponential(0.5))) for _ in range(3)] for _ in range(2)]
        change = compare_runs(*sides)
        assert change.verdict in (Verdict.same, Verdict.inconclusive) or change.low > 0 or change.high < 0


def test_two_runs_on_a_side_are_too_few() -> None:
    steady = [np.full(50, 1e7)]
    assert "too few" in compare_runs(steady * 2, steady * 3).reason
    assert compare_runs(steady * 3, steady * 3).verdict is Verdict.same
    assert compare_runs([], steady).verdict is Verdict.inconclusive


def around(change: float, spread: float, num: int = 200) -> tuple[np.ndarray, np.ndarray]:
    """Two series of which the log of the second lies higher by that of 1 + change, in batches that alternate."""
    batch = np.repeat([spread if at % 2 else -spread for at in range(8)], num // 8)
    return np.full(num, 1e7), np.exp(np.log(1e7) + np.log(1 + change) + batch)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize(("end", "verdict"), [(0.0495, Verdict.same), (0.0505, Verdict.inconclusive)])
def test_same_is_said_of_an_interval_within_five_percent(sign: int, end: float, verdict: Verdict) -> None:
    # The interval by hand: eight batch medians that alternate correlate by -7/8, so that nothing widens it; the other
    # side has no spread, so there are 7 degrees of freedom, whose quantile is 2.3646 in tables.
    spread = 0.03
    half = 2.3646 * spread * (8 / 7) ** 0.5 / 8**0.5
    middle = np.expm1(np.log1p(sign * end) - sign * half)
    change = compare_series(*around(middle, spread))
    assert (change.high if sign > 0 else -change.low) == pytest.approx(end, abs=2e-4)
    assert change.verdict is verdict


@pytest.mark.parametrize(("end", "verdict"), [(0.0495, Verdict.same), (0.0505, Verdict.inconclusive)])
def test_interval_that_is_as_wide_as_batches_that_rise_make_it(end: float, verdict: Verdict) -> None:
    # Batches that rise evenly: -3.5 .. 3.5 times a slope; lag-1 products sum to 26.25 of 42, and 0.1 is put on top.
    correlation = 26.25 / 42 + 0.1
    widened = ((1 + correlation) / (1 - correlation)) ** 0.5
    per_slope = 2.3646 * widened * (42 / 7 / 8) ** 0.5
    rising = np.exp(np.log(1e7) + np.log1p(end) / per_slope * np.repeat(np.arange(8) - 3.5, 25))
    change = compare_series(np.full(200, 1e7), rising)
    assert (change.high, change.low) == (pytest.approx(end, abs=3e-4), pytest.approx(1 / (1 + end) - 1, abs=3e-4))
    assert change.verdict is verdict


def test_middle_is_the_change_of_the_second_against_the_first() -> None:
    first, second = np.full(100, 1e7), np.full(100, 1.25e7)
    assert compare_series(first, second).change == pytest.approx(0.25)
    assert compare_series(second, first).change == pytest.approx(-0.2)
    assert compare_series(first[:9], second[:9]).change == pytest.approx(0.25)
    assert compare_series(second[:9], first[:9]).change == pytest.approx(-0.2)


def test_zeros_are_no_times() -> None:
    steady = np.full(50, 1e7)
    assert compare_series(steady, [0.0, -1.0, float("inf"), *steady]).change == 0.0
    assert compare_series(steady, [0.0] * 60).change is None


def runs(*lows: float) -> list[np.ndarray]:
    """Runs of so many ms a step at their 10th percentile; half of the steps take twice as long."""
    return [np.array([low] * 6 + [2 * low] * 5) * 1e6 for low in lows]


@pytest.mark.parametrize(
    ("num", "change", "verdict"),
    [
        (3, 1.099, "same"), (3, 1.101, "slower"), (3, 0.901, "same"), (3, 0.899, "faster"),
        (4, 1.099, "same"), (4, 1.101, "slower"),
        (5, 1.049, "same"), (5, 1.051, "slower"), (5, 0.951, "same"), (5, 0.949, "faster"),
    ],
)  # fmt: skip
def test_several_runs_differ_from_10_percent_on_and_five_from_5(num: int, change: float, verdict: str) -> None:
    assert compare_runs(runs(*[100] * num), runs(*[100 * change] * num)).verdict == verdict
    # The smaller side counts.
    assert compare_runs(runs(*[100] * (num + 3)), runs(*[100 * change] * num)).verdict == verdict


@pytest.mark.parametrize(
    ("num", "noise", "verdict"),
    [(3, 4.9, "same"), (3, 5.1, "inconclusive"), (5, 2.4, "same"), (5, 2.6, "inconclusive")],
)
def test_no_change_is_said_if_runs_of_a_side_differ_by_no_more_than_half_the_limit(
    num: int, noise: float, verdict: str
) -> None:
    noisy = runs(100, *[100 + noise] * (num - 1))
    for sides in ((noisy, runs(*[100] * num)), (runs(*[100] * num), noisy)):
        assert compare_runs(*sides).verdict == verdict


def test_a_side_is_its_fastest_run() -> None:
    change = compare_runs(runs(100, 101, 300), runs(120, 121, 122))
    assert (change.verdict, change.change) == (Verdict.slower, pytest.approx(0.2))
    assert compare_runs(runs(100, 101), runs(120, 121, 122)).verdict is Verdict.inconclusive
    assert compare_runs(runs(100, 101, 102), runs(120, 121, 122)).verdict is Verdict.slower


def test_a_run_is_its_10th_percentile_however_many_steps_others_on_the_machine_slowed() -> None:
    quiet, busy = ([np.array([100] * num + [200] * (11 - num)) * 1e6] * 3 for num in (9, 4))
    change = compare_runs(quiet, busy)
    assert (change.verdict, change.change) == (Verdict.same, 0.0)
