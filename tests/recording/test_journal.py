"""What is noted and replayed later is what would have been summed up at once."""

import threading
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from chakra_capture.recording.journal import END_STEP, START_STEP, Journal
from chakra_capture.recording.spans import Spans, Stretch
from recording.loops import Clock

NAMES = ("input_wait", "forward", "backward", "callbacks")
MOVES = st.lists(
    st.one_of(
        st.tuples(st.just("begin"), st.sampled_from(NAMES)),
        st.tuples(st.just("end"), st.sampled_from(NAMES)),
        st.tuples(st.just("step"), st.none()),
        st.tuples(st.just("replay"), st.none()),
    ),
    max_size=60,
)


def content(stretch: Stretch) -> tuple[Any, ...]:
    totals = {name: (total.ns, total.calls) for name, total in stretch.totals.items()}
    return stretch.begin_ns, stretch.end_ns, totals, stretch.spans, stretch.num_spans_left_out


@given(MOVES)
def test_replayed_at_any_time_the_steps_are_those_of_spans_that_are_told_at_once(moves):
    # Each move reads its clock once in both.
    journal, now = Journal(Clock(), lambda: None), Clock()
    spans, number, found, expected = Spans(now), 0, [], []
    journal.spans.stretch.begin_ns = spans.stretch.begin_ns = 0
    journal._clock.now = now.now = 0
    for kind, name in moves:
        if kind == "step":
            journal.moves.append((START_STEP, number, journal._clock()))
            gap = spans.start_step(number)
            journal.moves.append((END_STEP, number, journal._clock()))
            expected.append((number, content(spans.end_step()), content(gap)))
            number += 1
        elif kind == "replay":
            before = journal._clock.now
            found += [(note, content(step), content(gap)) for note, step, gap in journal.replay()]
            journal._clock.now = before  # looking at the clock for the present moves no time here
        else:
            getattr(journal, kind)(name)
            getattr(spans, kind)(name)
    found += [(note, content(step), content(gap)) for note, step, gap in journal.replay()]
    assert found == expected


def test_what_another_thread_does_is_not_noted_and_any_thread_may_replay():
    clock = Clock()
    journal = Journal(clock, lambda: None)
    journal.thread = threading.get_ident()
    journal.moves.append((START_STEP, 0, clock()))
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
    journal.moves.append((END_STEP, "note", clock()))
    thread = threading.Thread(target=lambda: found.extend(journal.replay()))
    thread.start()
    thread.join()
    ((note, step, _),) = found
    assert (note, {name: (total.ns, total.calls) for name, total in step.totals.items()}) == (
        "note", {"backward": (11, 1)}
    )  # fmt: skip


def test_a_step_without_end_is_summed_up_in_between():
    calls = []

    def when_full() -> None:
        calls.append(list(journal.replay()))

    journal = Journal(Clock(), when_full)
    journal.moves.append((START_STEP, 0, 0))
    for _ in range(10_000):
        journal.begin("forward")
        journal.end("forward")
        assert len(journal.moves) <= 4096
    assert len(calls) == 4
    journal.moves.append((END_STEP, None, 0))
    assert [step.totals["forward"].calls for _, step, _ in journal.replay()] == [10_000]
