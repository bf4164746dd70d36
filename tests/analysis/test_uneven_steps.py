"""Steps that are the exception, on both sides of the limits, made by hand."""

import pytest

from analysis.series import found, of_kind, plain, step


def waiting(ms, usual=100.0):
    return step(5, input_wait=ms, forward=30, backward=usual - 40, optimizer=5)


def every(number, of, ms, usual_ms=2.0):
    return [waiting(ms if at % number == number - 1 else usual_ms) for at in range(of)]


def test_every_tenth_step_that_waits_for_data_is_found_with_its_number():
    finding = of_kind(found(every(10, 60, 62)), "INPUT_BURSTS")
    assert finding.summary == "Every 10th step waits 62.0 ms for data, the others 2.0 ms."
    assert finding.evidence["steps"] == [9, 19, 29, 39, 49, 59]
    # 60 ms more in 6 of 60 steps; a step takes 102 with 2 of input, and so 6 more on the mean.
    assert finding.prize.most_ns == pytest.approx(6e6)
    assert finding.prize.step_ns == pytest.approx(108e6)
    assert (finding.severity.name, finding.prize.least_ns) == ("warn", None)


def test_steps_that_wait_now_and_then_are_counted():
    steps = [waiting(62 if at in (3, 4, 20, 37, 51) else 2.0) for at in range(60)]
    assert of_kind(found(steps), "INPUT_BURSTS").summary == ("5 of 60 steps wait 62.0 ms for data, the others 2.0 ms.")


@pytest.mark.parametrize(
    "steps",
    [
        every(10, 60, 9.9),  # not five times as long
        every(30, 60, 62),  # not one in 20
        every(10, 60, 22),  # costs 2 of 104 ms
        every(10, 19, 400),  # too few steps to tell
        every(2, 60, 62),  # as a rule: that is INPUT_BOUND
    ],
)
def test_input_that_is_even_or_costs_little_is_no_burst(steps):
    assert of_kind(found(steps), "INPUT_BURSTS") is None


def test_input_that_is_slow_in_most_steps_is_told_once():
    diagnosis = found(every(10, 60, 262, usual_ms=22))
    assert of_kind(diagnosis, "INPUT_BOUND") is not None
    assert of_kind(diagnosis, "INPUT_BURSTS") is None


def test_a_few_slow_steps_are_found_without_their_input():
    steps = [plain(900 if at in (30, 70) else 100) for at in range(100)]
    finding = of_kind(found(steps), "SLOW_STEPS")
    assert finding.evidence["steps"] == [30, 70]
    # 95 of 100 ms are not input; two steps of 855 are 760 too long each, in 100 steps of 116 ms.
    assert finding.prize.most_ns == pytest.approx(15.2e6)
    assert finding.summary.startswith("2 of 100 steps take 855.0 ms, the others 95.0 ms; that is 13.1 % of the time")


@pytest.mark.parametrize(
    "steps",
    [
        [plain(290 if at in (30, 70) else 100) for at in range(100)],  # not three times as long
        [plain(310 if at == 30 else 100) for at in range(100)],  # costs 2 of 102 ms
        [plain(900 if at == 3 else 100) for at in range(19)],  # too few
        [waiting(902 if at in (30, 70) else 2.0) for at in range(100)],  # input
    ],
)
def test_steps_that_are_little_slower_or_wait_for_input_are_no_slow_steps(steps):
    assert of_kind(found(steps), "SLOW_STEPS") is None


def test_of_several_ranks_the_one_where_it_costs_most_is_told():
    finding = of_kind(found(every(10, 60, 62), every(10, 60, 122)), "INPUT_BURSTS")
    assert finding.evidence["rank"] == 1
