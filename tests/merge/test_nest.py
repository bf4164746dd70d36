"""Containment on a thread against a reading by definition, row by row."""

from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chakra_capture.merge import nest as nest_module
from chakra_capture.merge.nest import innermost_at, nest
from chakra_capture.trace.columns import MISSING
from chakra_capture.trace.compiled import load


class Span(NamedTuple):
    track: int
    ts: int
    dur: int | None


def sort_key(span: Span) -> tuple[int, int, float]:
    return (span.track, span.ts, float("-inf") if span.dur is None else -span.dur)


def by_definition(spans: list[Span]) -> tuple[list[int], list[int], list[int | None]]:
    """Parents, clipped ends and self times: the parent is the last row before that still holds the start."""
    parents, ends = [], []
    for row, span in enumerate(spans):
        around = [r for r in range(row) if spans[r].track == span.track and ends[r] > span.ts]
        parent = max(around, default=-1)
        end = span.ts + (span.dur or 0)
        if parent >= 0 and (span.dur is None or end > ends[parent]):
            end = ends[parent]
        parents.append(parent)
        ends.append(end)
    own: list[int | None] = []
    for row, span in enumerate(spans):
        if span.dur is None:
            own.append(None)
            continue
        # Instants of the row in which it is the innermost one; rows without an end take no time themselves.
        inner = [r for r in range(row + 1, len(spans)) if spans[r].track == span.track and spans[r].dur is not None]
        own.append(sum(all(not (spans[r].ts <= t < ends[r]) for r in inner) for t in range(span.ts, ends[row])))
    return parents, ends, own


SPANS = st.lists(
    st.builds(Span, st.integers(0, 2), st.integers(0, 25), st.none() | st.integers(0, 12)), max_size=14
).map(lambda spans: sorted(spans, key=sort_key))


def nested(spans: list[Span]) -> tuple[list[int], list[int], list[int | None], list[bool]]:
    """Nest with both loops, which must agree."""
    columns = (
        np.array([s.track for s in spans], dtype=np.int64),
        np.array([s.ts for s in spans], dtype=np.int64),
        np.array([MISSING if s.dur is None else s.dur for s in spans], dtype=np.int64),
    )
    result = nest(*columns, compiled=False)
    in_c = nest(*columns)
    for name in ("parent", "end_ns", "self_ns", "clipped"):
        assert np.array_equal(getattr(result, name), getattr(in_c, name)), name
    own = [None if v == MISSING else v for v in result.self_ns.tolist()]
    return result.parent.tolist(), result.end_ns.tolist(), own, result.clipped.tolist()


@given(SPANS)
def test_parents_ends_and_self_times_are_those_of_the_definition(spans: list[Span]) -> None:
    parents, ends, own, _ = nested(spans)
    assert (parents, ends, own) == by_definition(spans)


@given(SPANS)
def test_self_times_of_a_thread_sum_to_its_covered_time(spans: list[Span]) -> None:
    _, _, own, _ = nested(spans)
    for track in {span.track for span in spans}:
        covered = {t for s in spans if s.track == track for t in range(s.ts, s.ts + (s.dur or 0))}
        clipped = sum(v or 0 for v, s in zip(own, spans, strict=True) if s.track == track)
        top = covered_by_top(spans, track)
        assert clipped == len(top)
        assert top <= covered


def covered_by_top(spans: list[Span], track: int) -> set[int]:
    """What the rows cover after clipping each to the one around it."""
    _, ends, _ = by_definition(spans)
    return {t for row, s in enumerate(spans) if s.track == track and s.dur is not None for t in range(s.ts, ends[row])}


@given(SPANS)
def test_no_self_time_is_negative_and_clipped_rows_are_marked(spans: list[Span]) -> None:
    parents, ends, own, clipped = nested(spans)
    assert all(v is None or v >= 0 for v in own)
    for row, span in enumerate(spans):
        crosses = span.dur is not None and parents[row] >= 0 and span.ts + span.dur > ends[parents[row]]
        assert clipped[row] == crosses


@pytest.mark.parametrize(
    ("spans", "parents", "own"),
    [
        # the longer of two that begin together lies outside
        ([Span(0, 0, 30), Span(0, 0, 20)], [-1, 0], [10, 20]),
        # what begins where the other ends lies beside it, also with no length
        ([Span(0, 0, 10), Span(0, 10, 5), Span(0, 15, 0)], [-1, -1, -1], [10, 5, 0]),
        # a row of no length holds nothing
        ([Span(0, 0, 10), Span(0, 5, 0), Span(0, 5, 0)], [-1, 0, 0], [10, 0, 0]),
        # crossing: inner is clipped at 100, what begins after that is not inside it
        ([Span(0, 0, 100), Span(0, 50, 80), Span(0, 110, 5)], [-1, 0, -1], [50, 50, 5]),
        # a row without an end closes with the one around it and has no time of its own
        ([Span(0, 0, 100), Span(0, 10, None), Span(0, 20, 30), Span(0, 60, 10)], [-1, 0, 1, 1], [60, None, 30, 10]),
        # without one around it, it closes where it begins
        ([Span(0, 10, None), Span(0, 20, 30)], [-1, -1], [None, 30]),
        # threads do not see each other
        ([Span(0, 0, 100), Span(1, 10, 20)], [-1, -1], [100, 20]),
        ([], [], []),
    ],
)
def test_rules(spans: list[Span], parents: list[int], own: list[int | None]) -> None:
    seen, _, seen_own, _ = nested(spans)
    assert (seen, seen_own) == (parents, own)


@given(
    st.lists(st.tuples(st.integers(0, 15), st.integers(0, 8)), max_size=6).map(sorted),
    st.lists(st.integers(-1, 25), max_size=10),
)
def test_holder_of_a_time_is_the_last_begun_of_those_still_open(marks: list[tuple[int, int]], times: list[int]) -> None:
    start = np.array([ts for ts, _ in marks], dtype=np.int64)
    end = start + np.array([dur for _, dur in marks], dtype=np.int64)
    expected = [max((p for p, (ts, dur) in enumerate(marks) if ts <= t < ts + dur), default=-1) for t in times]
    assert innermost_at(np.array(times, dtype=np.int64), start, end).tolist() == expected


def test_the_c_loop_is_built_here() -> None:
    """Without it the comparison of both loops would compare Python with itself."""
    assert load(nest_module._LIBRARY, nest_module._INTERFACE) is not None
