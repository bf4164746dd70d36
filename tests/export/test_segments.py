"""Segments of CPU threads against a reader that asks for every single nanosecond; order and rounding by definition."""

from collections import Counter, defaultdict

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from chakra_capture.export.making.segments import Segments, cut_threads
from chakra_capture.export.making.window import _allowed, _microseconds, _running_order
from chakra_capture.merge.rows import CODE
from chakra_capture.merge.segments import NOBODY
from chakra_capture.merge.window import Rows
from chakra_capture.trace.columns import coded, nulls

KINDS = ("host_op", "annotation", "python_function", "runtime")


def rows_of(spans, launch=()) -> Rows:
    """Rows of spans (thread, begin, end, kind, is a step)."""
    thread, begin, end, kind, step = (list(column) for column in zip(*spans, strict=True)) if spans else ([],) * 5
    size = len(thread)
    none, zeros = np.full(size, -1), np.zeros(size, dtype=np.int64)
    return Rows(
        first=0,
        kind=np.array([CODE[one] for one in kind], dtype=np.int8),
        name=coded(map(str, range(size))),
        parent=none,
        launch=none.copy(),
        start=np.array(begin, dtype=np.int64),
        end=np.array(end, dtype=np.int64),
        pid=zeros,
        tid=np.array(thread, dtype=np.int64),
        device=zeros,
        stream=zeros,
        track=np.array(thread, dtype=np.int64),
        is_collective=np.zeros(size, dtype=bool),
        is_timed=np.ones(size, dtype=bool),
        is_step=np.array(step, dtype=bool),
        is_activity=np.zeros(size, dtype=bool),
        phase=nulls(size),
        waits={},
    )


@st.composite
def spans(draw):
    """Properly nested spans on up to three threads, some empty, some equal, steps outermost."""
    found = []
    for thread in range(draw(st.integers(0, 3))):
        at = draw(st.integers(0, 5))
        for _ in range(draw(st.integers(0, 4))):
            at = _nested(draw, found, thread, at, 0) + draw(st.integers(0, 3))
    return found


def _nested(draw, found, thread, begin, depth):
    kind, is_step = draw(st.sampled_from(KINDS)), depth == 0 and draw(st.booleans())
    place, at = len(found), begin
    found.append(None)
    for _ in range(draw(st.integers(0, 2)) if depth < 3 else 0):
        at = _nested(draw, found, thread, at + draw(st.integers(0, 2)), depth + 1)
    end = at + draw(st.integers(0, 3))
    found[place] = (thread, begin, end, "annotation" if is_step else kind, is_step)
    return end


def innermost(rows: Rows, thread: int, time: int) -> int:
    """The row that began last of those around a nanosecond; of several that began together the innermost."""
    around = [
        (rows.start[row], -rows.end[row], row)
        for row in range(len(rows))
        if rows.track[row] == thread and rows.start[row] <= time < rows.end[row] and not rows.is_step[row]
    ]
    return max(around)[2] if around else NOBODY


@given(spans())
def test_every_nanosecond_of_an_active_thread_is_the_innermost_rows(given_):
    rows = rows_of(given_)
    segments = cut_threads(rows)

    owners = defaultdict(dict)
    for track, begin, end, owner in zip(segments.track, segments.begin, segments.end, segments.owner, strict=True):
        assert begin < end
        owners[track].update(dict.fromkeys(range(begin, end), owner))
    active = {thread for thread, *_, kind, _ in given_ if kind == "host_op"}
    for thread in active:
        own = [span for span in given_ if span[0] == thread]
        whole = range(min(span[1] for span in own), max(span[2] for span in own))
        assert owners.pop(thread, {}) == {time: innermost(rows, thread, time) for time in whole}
    assert not owners, "threads that run no operator"


@given(spans())
def test_every_begin_and_end_is_a_mark_and_steps_cut(given_):
    rows = rows_of(given_)
    segments = cut_threads(rows)

    marks = defaultdict(set)
    for track, begin, end in zip(segments.track, segments.begin, segments.end, strict=True):
        marks[track] |= {begin, end}
    for thread, found in marks.items():
        assert found == {time for span in given_ if span[0] == thread for time in span[1:3]}


@given(spans(), st.integers(0, 2), st.integers(-2, 60))
def test_segments_are_found_by_thread_and_time(given_, thread, time):
    segments = cut_threads(rows_of(given_))
    track, when = np.array([thread]), np.array([time])

    own = [at for at in range(len(segments)) if segments.track[at] == thread]
    ended = [at for at in own if segments.end[at] <= time]
    later = [at for at in own if segments.begin[at] >= time]
    assert segments.ending_by(track, when).tolist() == [max(ended, default=-1)]
    assert segments.beginning_from(track, when).tolist() == [min(later, default=-1)]


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 5_000)), max_size=40))
def test_rounded_durations_of_a_lane_add_up_to_a_microsecond(lanes):
    lane, ns = (np.array([one[at] for one in lanes], dtype=np.int64) for at in (0, 1))
    us = _microseconds(lane, ns)

    for number in set(lane.tolist()):
        until_us, until_ns = np.cumsum(us[lane == number]), np.cumsum(ns[lane == number])
        assert (np.abs(until_us * 1_000 - until_ns) <= 500).all()
        assert (us >= 0).all()


@given(st.integers(1, 12).flatmap(
    lambda size: st.tuples(st.just(size), st.lists(st.tuples(*[st.integers(0, size - 1)] * 2), max_size=20))
))  # fmt: skip
def test_order_keeps_every_dependency_that_is_on_no_circle(graph):
    size, pairs = graph
    src, dst = (np.array([pair[at] for pair in pairs], dtype=np.int64) for at in (0, 1))
    order = _allowed(src, dst, size).tolist()

    assert sorted(order) == list(range(size))
    place = {node: at for at, node in enumerate(order)}
    reach = {node: {node} for node in range(size)}
    for _ in range(size):
        for one, other in pairs:
            reach[one] |= reach[other]
    for one, other in pairs:
        behind_circle = any(
            a != b and b in reach[a] and a in reach[b] and one in reach[a] for a in reach for b in reach
        )
        own_circle = any((a, a) in pairs and one in reach[a] for a in range(size))
        if not behind_circle and not own_circle:
            assert place[one] < place[other]


def test_order_of_time_is_kept_where_dependencies_allow():
    start, end = np.array([5, 0, 0, 3]), np.array([6, 4, 2, 3])
    counts = Counter()

    assert _running_order(start, end, np.array([2]), np.array([0]), counts).tolist() == [2, 1, 3, 0]
    assert not counts
    assert _running_order(start, end, np.array([0]), np.array([1]), counts).tolist() == [2, 3, 0, 1]
    assert counts == {"dependencies against the recorded times": 1}


def test_no_rows_have_no_segments():
    segments = cut_threads(rows_of([]))

    assert isinstance(segments, Segments)
    assert len(segments) == 0
    assert segments.ending_by(np.array([0]), np.array([7])).tolist() == [-1]
