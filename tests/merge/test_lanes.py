"""Lanes against a reading by definition: pairs of slices of a lane nest or lie beside each other."""

from itertools import combinations
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chakra_capture.merge.lanes import assign_lanes, slice_order


class Slice(NamedTuple):
    track: int
    ts: int
    dur: int


SLICES = st.lists(st.builds(Slice, st.integers(-1, 1), st.integers(0, 20), st.integers(0, 10)), max_size=16)


def crosses(one: Slice, other: Slice) -> bool:
    """Neither inside the other nor beside it."""
    first, second = sorted([one, other], key=lambda s: (s.ts, -s.dur))
    return second.ts < first.ts + first.dur < second.ts + second.dur


def lanes(slices: list[Slice], **options: int) -> list[int]:
    track, ts, dur = (np.array([s[i] for s in slices], dtype=np.int64) for i in range(3))
    return assign_lanes(track, ts, dur, **options).tolist()


def in_order(slices: list[Slice]) -> list[int]:
    return sorted(range(len(slices)), key=lambda i: (slices[i].track, slices[i].ts, -slices[i].dur, i))


def by_definition(slices: list[Slice]) -> list[int]:
    """The first lane whose slices so far are crossed by none."""
    found = [-1] * len(slices)
    for i in in_order(slices):
        lane = 0
        while any(
            found[j] == lane and slices[j].track == slices[i].track and crosses(slices[j], slices[i])
            for j in range(len(slices))
        ):
            lane += 1
        found[i] = lane
    return found


@given(SLICES)
def test_a_slice_is_in_the_first_lane_where_it_crosses_none(slices: list[Slice]) -> None:
    assert lanes(slices) == by_definition(slices)


@given(SLICES, st.integers(0, 2))
def test_lanes_beyond_those_with_nesting_cross_nothing_either(slices: list[Slice], most: int) -> None:
    found = lanes(slices, most_nested=most)
    for (lane, one), (other_lane, other) in combinations(zip(found, slices, strict=True), 2):
        if lane == other_lane and one.track == other.track:
            assert not crosses(one, other)
    whole = by_definition(slices)
    assert [lane for lane, known in zip(found, whole, strict=True) if known < max(most, 1)] == [
        known for known in whole if known < max(most, 1)
    ]


@given(SLICES)
def test_order_is_by_start_then_the_longer_then_as_given(slices: list[Slice]) -> None:
    columns = [np.array([s[i] for s in slices], dtype=np.int64) for i in range(3)]
    assert slice_order(*columns).tolist() == in_order(slices)


@pytest.mark.parametrize(
    ("slices", "expected"),
    [
        ([], []),
        # equal ones lie in each other, as given
        ([Slice(0, 5, 3), Slice(0, 5, 3)], [0, 0]),
        # of no length: inside what begins with it, beside what ends there
        ([Slice(0, 0, 5), Slice(0, 5, 0), Slice(0, 5, 0), Slice(0, 5, 9)], [0, 0, 0, 0]),
        # the second crosses the first; the third crosses both, the fourth lies in the first alone
        ([Slice(0, 0, 10), Slice(0, 5, 10), Slice(0, 8, 20), Slice(0, 6, 1)], [0, 1, 2, 0]),
        # what begins when the first has ended goes back to its lane, though another is open
        ([Slice(0, 0, 10), Slice(0, 5, 50), Slice(0, 10, 90)], [0, 1, 0]),
        # tracks do not see each other
        ([Slice(0, 0, 10), Slice(1, 5, 10)], [0, 0]),
    ],
)
def test_rules(slices: list[Slice], expected: list[int]) -> None:
    assert lanes(slices) == expected


def test_a_track_where_everything_crosses_everything_ends() -> None:
    """Each slice needs a lane of its own; searching all lanes for each would take minutes."""
    size = 200_000
    ts = np.arange(size, dtype=np.int64)
    found = assign_lanes(np.zeros(size, dtype=np.int64), ts, np.full(size, size, dtype=np.int64))
    assert np.array_equal(found, ts)
