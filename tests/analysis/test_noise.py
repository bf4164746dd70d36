"""Whether two series differ: noise of several kinds, on a fake clock, against what was planted."""

from collections import Counter

import numpy as np
import pytest

from chakra_capture.analysis.noise import FEWEST_STEPS, Verdict, compare_runs, compare_series, student_quantile

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
    steady = np.full(FEWEST_STEPS, 1e7)
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
    assert found[3] >= SEEDS * 0.5
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
