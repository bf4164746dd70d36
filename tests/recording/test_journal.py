"""What is noted and replayed later is what would have been summed up at once."""

import json
import threading
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from chakra_capture.recording.journal import MOST_MOVES, Journal
from chakra_capture.recording.shapes import BEGIN, END, END_STEP, START_STEP, Shapes
from chakra_capture.recording.spans import Spans, Stretch
from recording.loops import Clock

NAMES = ("input_wait", "forward", "backward", "callbacks")
MOVES = st.lists(
    st.one_of(
        st.tuples(st.just("begin"), st.sampled_from(NAMES)),
        st.tuples(st.just("end"), st.sampled_from(NAMES)),
        st.tuples(st.just("step"), st.none()),
        st.tuples(st.just("take"), st.none()),
        st.tuples(st.just("catch up"), st.none()),
    ),
    max_size=60,
)
NAMED = st.tuples(st.sampled_from((BEGIN, END)), st.sampled_from((*NAMES, 'a "%d" {0}')))
# What happens before a step and in it.
ORDERS = st.tuples(st.lists(NAMED, max_size=4), st.lists(NAMED, max_size=12)).map(
    lambda parts: [*parts[0], (START_STEP, None), *parts[1]]
)


def content(stretch: Stretch) -> tuple[Any, ...]:
    totals = {name: (total.ns, total.calls) for name, total in stretch.totals.items()}
    return stretch.begin_ns, stretch.end_ns, totals, stretch.spans, stretch.num_spans_left_out


def taken(journal: Journal) -> list[tuple[Any, ...]]:
    return [(note, content(found[1]), content(found[0])) for note, found in journal.take(None)]


@given(MOVES)
def test_taken_at_any_time_the_steps_are_those_of_spans_that_are_told_at_once(moves):
    # Each move reads its clock once in both.
    journal, now = Journal(Clock(), lambda: None), Clock()
    spans, number, found, expected = Spans(now), 0, [], []
    journal.spans.stretch.begin_ns = spans.stretch.begin_ns = 0
    journal._clock.now = now.now = 0
    for kind, name in moves:
        if kind == "step":
            journal.moves += START_STEP, None, journal._clock()
            gap = spans.start_step(number)
            journal.notes.append(number)
            journal.moves += END_STEP, None, journal._clock()
            expected.append((number, content(spans.end_step()), content(gap)))
            number += 1
        elif kind == "take":
            found += taken(journal)
        elif kind == "catch up":
            found += taken(journal)
            journal.catch_up()
            assert not journal.moves
        else:
            getattr(journal, kind)(name)
            getattr(spans, kind)(name)
    found += taken(journal)
    assert found == expected


@given(st.lists(ORDERS, min_size=1, max_size=4), st.lists(st.integers(0, 3), max_size=12), st.randoms())
def test_the_text_of_a_step_is_the_same_from_its_template_as_from_its_spans(orders, which, random):
    # Orders come several times, with other times in between, so that most are written by a template.
    journal, other = Journal(lambda: 0, lambda: None), Journal(lambda: 0, lambda: None)
    shapes, found, expected = Shapes(journal.spans), [], []
    now = 0
    for number, chosen in enumerate([*which, *which, *which]):
        for kind, name in [*orders[chosen % len(orders)], (END_STEP, None)]:
            now += random.choice([0, 1, 7, 10**9])
            for each in (journal, other):
                each.moves += kind, name, now
        journal.notes.append(number)
        other.notes.append(number)
        if random.random() < 0.5:
            found += journal.take(shapes)
    found += journal.take(shapes)
    for _, (gap, step) in other.take(None):
        expected.append(shapes.text_of(step, gap))
    texts = [each if isinstance(each, str) else shapes.text_of(each[1], each[0]) for _, each in found]
    assert texts == expected
    assert len(which) < 3 or any(isinstance(each, str) for _, each in found)
    for text in texts:
        record = json.loads(f"{{{text}}}")
        parts = [ns for ns, _ in record["phases"].values()]
        assert all(ns >= 0 for ns in parts)
        assert sum(parts) <= record["ns"]


def test_orders_that_never_come_again_are_forgotten():
    journal = Journal(Clock(), lambda: None)
    shapes = Shapes(journal.spans)
    for number in range(1000):
        journal.moves += START_STEP, None, number
        for bit in range(10):
            journal.moves += (BEGIN, "a" if number >> bit & 1 else "b", number)
        journal.moves += END_STEP, None, number
        journal.notes.append(number)
    assert len(list(journal.take(shapes))) == 1000
    assert len(shapes._known) <= 64


def test_what_another_thread_does_is_not_noted_and_any_thread_may_take_it():
    clock = Clock()
    journal = Journal(clock, lambda: None)
    journal.thread = threading.get_ident()
    journal.moves += START_STEP, None, clock()
    journal.begin("backward")
    found: list[Any] = []

    def other() -> None:
        journal.begin("forward")
        journal.end("backward")
        clock.now += 10

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    journal.end("backward")
    journal.notes.append("note")
    journal.moves += END_STEP, None, clock()
    thread = threading.Thread(target=lambda: found.extend(journal.take(None)))
    thread.start()
    thread.join()
    ((note, (_, step)),) = found
    assert (note, {name: (total.ns, total.calls) for name, total in step.totals.items()}) == (
        "note", {"backward": (11, 1)}
    )  # fmt: skip


def test_a_step_without_end_is_summed_up_in_between():
    calls = []

    def when_full() -> None:
        calls.append(list(journal.take(None)))
        journal.catch_up()

    journal = Journal(Clock(), when_full)
    journal.moves += START_STEP, None, 0
    for _ in range(10_000):
        journal.begin("forward")
        journal.end("forward")
        assert len(journal.moves) <= MOST_MOVES
    assert len(calls) == 4
    journal.notes.append(None)
    journal.moves += END_STEP, None, 0
    assert [step.totals["forward"].calls for _, (_, step) in journal.take(None)] == [10_000]
