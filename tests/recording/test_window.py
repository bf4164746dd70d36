"""The step plan against a written table and against a plain simulation of each step."""

from itertools import product

import pytest

from chakra_capture.config import WindowConfig
from chakra_capture.recording.window import NEVER, Action, StepPlan


def window(start: int, end: int, warmup: int = 0, active: int = 1) -> WindowConfig:
    return WindowConfig(start_step=start, end_step=end, warmup_steps=warmup, active_steps=active)


# start, end, warmup, active -> (warm-up steps, recorded steps) of each file pair
TABLE = [
    (5, 10, 0, 1, [([], [5, 6, 7, 8, 9, 10])]),  # NeMo's documented sample
    (5, 10, 0, 6, [([], [5, 6, 7, 8, 9, 10])]),
    (5, 10, 0, 99, [([], [5, 6, 7, 8, 9, 10])]),
    (2, 2, 0, 1, [([], [2])]),
    (0, 0, 0, 1, [([], [0])]),
    (5, 10, 2, 4, [([5, 6], [7, 8, 9, 10])]),
    (5, 10, 1, 5, [([5], [6, 7, 8, 9, 10])]),
    (5, 10, 3, 2, [([5, 6, 7], [8, 9])]),  # the next cycle would be all warm-up
    (5, 10, 1, 1, [([5], [6]), ([7], [8]), ([9], [10])]),
    (5, 10, 1, 2, [([5], [6, 7]), ([8], [9, 10])]),
    (5, 9, 1, 2, [([5], [6, 7]), ([8], [9])]),  # the last cycle is clipped
    (5, 8, 1, 2, [([5], [6, 7])]),
    (5, 6, 2, 3, []),  # refused by the settings, empty here
    (2, 2, 1, 1, []),
    (5, 10, 5, 7, [([5, 6, 7, 8, 9], [10])]),
]


@pytest.mark.parametrize(("start", "end", "warmup", "active", "cycles"), TABLE)
def test_cycles_are_those_of_the_table(start, end, warmup, active, cycles):
    plan = StepPlan([window(start, end, warmup, active)])

    assert [(list(range(c.prepare_step, c.first_step)), list(c.steps)) for c in plan.cycles] == cycles


def simulated_actions(start: int, end: int, warmup: int, active: int, last: int) -> list[Action]:
    """Say what happens at each step, by walking the window with two counters."""
    actions = []
    position = 0
    for step in range(last + 1):
        if not start <= step <= end:
            actions.append(Action.idle)
            continue
        if warmup == 0:
            actions.append(Action.record)
            continue
        if position < warmup:
            # Warm-up whose cycle ends before its first active step is not begun.
            actions.append(Action.prepare if step + (warmup - position) <= end else Action.idle)
        else:
            actions.append(Action.record)
        position = (position + 1) % (warmup + active)
    return actions


def test_every_small_window_and_entry_step_does_what_a_walk_over_the_steps_says():
    last = 12
    for start, length, warmup, active in product(range(4), range(1, 8), range(5), range(1, 5)):
        end = start + length - 1
        plan = StepPlan([window(start, end, warmup, active)])
        expected = simulated_actions(start, end, warmup, active, last)
        actual = [plan.action(step) for step in range(last + 1)]
        assert actual == expected, (start, end, warmup, active)
        for entry in range(last + 1):
            busy = [s for s in range(entry, last + 1) if expected[s] is not Action.idle]
            assert plan.next_step(entry) == (busy[0] if busy else NEVER), (start, end, warmup, active, entry)


def test_cycles_partition_the_recorded_steps_in_order():
    for start, length, warmup, active in product(range(3), range(1, 8), range(4), range(1, 4)):
        plan = StepPlan([window(start, start + length - 1, warmup, active)])
        recorded = [step for cycle in plan.cycles for step in cycle.steps]
        assert recorded == sorted(set(recorded))
        assert all(plan.cycle_at(step) is cycle for cycle in plan.cycles for step in cycle.steps)
        assert [c.index for c in plan.cycles] == list(range(len(plan.cycles)))


def test_several_windows_are_planned_in_step_order_and_marked_at_their_ends():
    plan = StepPlan([window(20, 21), window(2, 5, 1, 1)])

    assert [(c.first_step, c.last_step, c.opens_window, c.closes_window) for c in plan.cycles] == [
        (3, 3, True, False),
        (5, 5, False, True),
        (20, 21, True, True),
    ]
    assert plan.next_step(6) == 20
    assert plan.next_step(22) == NEVER


def test_no_window_plans_nothing():
    plan = StepPlan([])

    assert plan.next_step(0) == NEVER
    assert plan.action(0) is Action.idle
