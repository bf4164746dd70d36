"""Spans of a loop against a reading of the same moments by hand, and by brute force, nanosecond by nanosecond."""

import itertools
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chakra_capture.recording.spans import Marks, Spans


class Clock:
    """Time that passes when told to."""

    def __init__(self) -> None:
        self.now = 1000

    def __call__(self) -> int:
        return self.now


class Device:
    """A device that works through its queue later: a mark has a time once ``reached`` is past it."""

    def __init__(self, clock: Clock) -> None:
        self.clock, self.reached, self.is_capturing = clock, 0, False
        self.released: list[int] = []

    def mark(self) -> int | None:
        return None if self.is_capturing else self.clock.now

    def elapsed_ns(self, first: int, last: int) -> int | None:
        return last - first if last <= self.reached else None

    def release(self, mark: int) -> None:
        self.released.append(mark)


def run(moves: list[tuple[str, object]], device: Device | None = None, clock: Clock | None = None):
    """Do the moves, ``("wait", ns)`` among them; returns the stretches that were completed."""
    clock = clock or Clock()
    spans, found = Spans(clock, device), []
    for what, value in moves:
        if what == "wait":
            clock.now += value
        elif what == "step":
            found.append(spans.start_step(value))
        elif what == "done":
            found.append(spans.end_step())
        else:
            getattr(spans, what)(value)
    return found


def totals(stretch) -> dict[str, tuple[int, int]]:
    return {name: (total.ns, total.calls) for name, total in stretch.totals.items()}


def test_a_step_holds_its_phases_and_the_gap_before_it_is_apart():
    gap, step = run(
        [
            ("begin", "validation"), ("wait", 7), ("end", "validation"), ("wait", 1),
            ("step", 0), ("begin", "input_wait"), ("wait", 5), ("end", "input_wait"), ("wait", 2),
            ("begin", "forward"), ("wait", 30), ("end", "forward"), ("wait", 3), ("done", None),
        ]
    )  # fmt: skip
    assert (gap.begin_ns, gap.end_ns, totals(gap)) == (1000, 1008, {"validation": (7, 1)})
    assert (step.begin_ns, step.end_ns) == (1008, 1048)
    assert totals(step) == {"input_wait": (5, 1), "forward": (30, 1)}
    assert step.spans == [("input_wait", 0, 5), ("forward", 7, 37)]


def test_what_a_closure_does_inside_the_optimizer_is_not_the_optimizers():
    moves = [("step", 0), ("begin", "optimizer"), ("wait", 4)]
    for _ in range(2):
        moves += [("begin", "forward"), ("wait", 10), ("end", "forward")]
        moves += [("begin", "backward"), ("wait", 20), ("end", "backward")]
    moves += [("wait", 6), ("end", "optimizer"), ("done", None)]
    assert totals(run(moves)[1]) == {"optimizer": (10, 1), "forward": (20, 2), "backward": (40, 2)}


def test_a_forward_that_backward_computes_again_is_backwards():
    moves = [("step", 0), ("begin", "forward"), ("wait", 10), ("end", "forward"), ("begin", "backward"), ("wait", 5)]
    moves += [("begin", "forward"), ("wait", 10), ("end", "forward"), ("wait", 5), ("end", "backward"), ("done", None)]
    assert totals(run(moves)[1]) == {"forward": (10, 1), "backward": (20, 1)}


def test_an_exception_leaves_phases_open_and_the_outer_end_closes_them():
    moves = [("step", 0), ("begin", "forward"), ("begin", "h2d"), ("wait", 3), ("end", "forward"), ("wait", 1)]
    assert totals(run([*moves, ("end", "h2d"), ("done", None)])[1]) == {"h2d": (3, 1), "forward": (0, 1)}


def test_what_is_open_at_the_end_of_a_step_ends_there():
    _, step, gap, following = run(
        [("step", 0), ("begin", "forward"), ("wait", 3), ("done", None), ("wait", 2), ("end", "forward"), ("step", 1),
         ("wait", 4), ("done", None)]
    )  # fmt: skip
    assert (totals(step), totals(gap), totals(following)) == ({"forward": (3, 1)}, {}, {})


def test_another_thread_changes_nothing():
    clock = Clock()
    spans = Spans(clock)
    spans.start_step(0)
    spans.begin("backward")
    clock.now += 5

    def other() -> None:
        spans.begin("forward")
        spans.end("backward")

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    clock.now += 5
    spans.end("backward")
    assert totals(spans.end_step()) == {"backward": (10, 1)}


def test_memory_is_bounded_by_the_number_of_spans_and_of_names():
    moves = [("step", 0)]
    for number in range(1000):
        moves += [("begin", f"phase {number}"), ("wait", 1), ("end", f"phase {number}")]
    step = run([*moves, ("done", None)])[1]
    assert len(step.totals) == 65
    assert sum(total.ns for total in step.totals.values()) == 1000
    assert len(step.spans) + step.num_spans_left_out == 1000
    assert len(step.spans) == 256


def test_marks_of_the_device_are_put_at_both_ends_of_a_phase_of_a_step():
    clock = Clock()
    device = Device(clock)
    moves = [("begin", "validation"), ("wait", 1), ("end", "validation"), ("step", 0)]
    moves += [("wait", 2), ("begin", "forward"), ("wait", 10), ("end", "forward"), ("done", None)]
    gap, step = run(moves, device, clock)
    assert gap.marks == []
    assert step.marks == [Marks("forward", 1003, 1013), Marks(None, 1001, 1013)]


def test_a_phase_inside_another_is_marked_as_such():
    clock = Clock()
    moves = [("step", 0), ("begin", "optimizer"), ("begin", "forward"), ("wait", 3), ("end", "forward"), ("wait", 4)]
    _, step = run([*moves, ("end", "optimizer"), ("done", None)], Device(clock), clock)
    assert step.marks[:2] == [Marks("forward", 1000, 1003, "optimizer"), Marks("optimizer", 1000, 1007)]


def test_no_mark_is_put_while_a_stream_is_capturing():
    clock = Clock()
    device = Device(clock)
    device.is_capturing = True
    _, step = run([("step", 0), ("begin", "forward"), ("end", "forward"), ("done", None)], device, clock)
    assert (step.marks, device.released, totals(step)) == ([], [], {"forward": (0, 1)})


def test_a_mark_whose_other_end_falls_into_a_capture_is_given_back():
    clock = Clock()
    device = Device(clock)
    spans = Spans(clock, device)
    spans.start_step(0)
    spans.begin("forward")
    device.is_capturing = True
    spans.end("forward")
    assert (spans.end_step().marks, device.released) == ([], [1000, 1000])


def test_a_phase_that_a_capture_hides_and_the_one_around_it_are_not_known_to_the_device():
    clock = Clock()
    device = Device(clock)
    spans = Spans(clock, device)
    spans.start_step(0)
    for name in ("optimizer", "first", "second"):
        spans.begin(name)
    device.is_capturing = True
    spans.end("second")
    spans.begin("third")
    device.is_capturing = False
    for name in ("third", "first", "optimizer"):
        spans.end(name)
    step = spans.end_step()
    assert step.unmarked == {"first", "second", "third"}
    assert [marks.name for marks in step.marks] == ["first", "optimizer", None]


def test_a_step_of_phases_without_end_puts_a_bounded_number_of_marks():
    clock = Clock()
    moves = [("begin", "mine"), ("end", "mine")] * 5000
    _, step = run([("step", 0), *moves, ("begin", "last"), ("end", "last"), ("done", None)], Device(clock), clock)
    assert (len(step.marks), step.unmarked, totals(step)["mine"]) == (2049, {"mine", "last"}, (0, 5000))


NAMES = ("input_wait", "forward", "backward", "optimizer", "h2d")
MOVES = st.lists(
    st.one_of(
        st.tuples(st.just("begin"), st.sampled_from(NAMES)),
        st.tuples(st.just("end"), st.sampled_from(NAMES)),
        st.tuples(st.just("wait"), st.integers(0, 5)),
        st.tuples(st.sampled_from(("step", "done")), st.integers(0, 3)),
    ),
    max_size=60,
)


def owners(moves: list[tuple[str, object]]) -> list[list[str | None]]:
    """Of every stretch the innermost open phase at each ns: an own reading, one list entry per ns."""
    done: list[list[str | None]] = []
    current: list[str | None] = []
    stack: list[tuple[str, str]] = []  # as named, as it counts
    for what, value in moves:
        if what == "begin":
            counts = "backward" if value == "forward" and "backward" in [c for _, c in stack] else value
            stack.append((value, counts))
        elif what == "end":
            fits = [n for n, (_, c) in enumerate(stack) if c == value or (value == "forward" and c == "backward")]
            del stack[fits[-1] if fits else len(stack) :]
        elif what == "wait":
            current += [stack[-1][1] if stack else None] * value
        else:
            done.append(current)
            current, stack = [], []
    return done


@given(MOVES)
def test_every_nanosecond_counts_for_the_innermost_phase_and_for_no_other(moves):
    found, expected = run(moves), owners(moves)
    assert len(found) == len(expected)
    for stretch, owner in zip(found, expected, strict=True):
        assert stretch.end_ns - stretch.begin_ns == len(owner)
        assert {name: total.ns for name, total in stretch.totals.items() if total.ns} == {
            name: owner.count(name) for name in set(owner) - {None}
        }
        assert all(0 <= begin <= end <= len(owner) for _, begin, end in stretch.spans)


@given(MOVES)
def test_stretches_follow_each_other_without_a_hole(moves):
    found = run(moves)
    assert all(a.end_ns == b.begin_ns for a, b in itertools.pairwise(found))


@pytest.mark.parametrize("name", ["forward", "validation"])
def test_an_end_without_a_begin_is_passed_over(name):
    assert totals(run([("step", 0), ("end", name), ("wait", 1), ("done", None)])[1]) == {}
