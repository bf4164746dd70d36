"""The loops over points of a replay: what they promise, and that the C ones and those in Python agree."""

import networkx as nx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chakra_capture.analysis.replay.loops import is_built, longest, ordered, walk
from chakra_capture.merge import nest

NONE = -1
EDGES = st.lists(st.tuples(st.integers(0, 7), st.integers(0, 7)), max_size=20)
TIMES = st.lists(st.integers(-50, 50), min_size=8, max_size=8)


def firsts(numbers):
    return places(np.searchsorted(np.sort(numbers), np.arange(9)))


def places(numbers):
    return np.array(numbers, dtype=np.int32)


def both(function, *arguments):
    """What the loop gives in C, which must be what it gives in Python."""
    in_c, in_python = (function(*arguments, compiled=compiled) for compiled in (True, False))
    assert (in_c is None) == (in_python is None)
    assert in_c is None or in_c.tolist() == in_python.tolist()
    return in_c


@given(EDGES)
def test_every_point_comes_after_those_it_waits_for_and_those_in_a_circle_are_left_out(edges):
    edges = places(sorted(edges)).reshape(-1, 2)
    src, dst = np.ascontiguousarray(edges.T)
    order = both(ordered, firsts(src), dst, places(np.bincount(dst, minlength=8))).tolist()

    graph = nx.DiGraph(edges.tolist())
    circles = {point for part in nx.strongly_connected_components(graph) if len(part) > 1 for point in part}
    circles |= {src for src, dst in edges.tolist() if src == dst}
    left = circles.union(*(nx.descendants(graph, point) for point in circles))
    assert sorted(order) == [point for point in range(8) if point not in left]
    assert all(order.index(src) < order.index(dst) for src, dst in edges.tolist() if dst not in left)


@given(EDGES, TIMES, st.data())
def test_a_place_is_reached_by_the_latest_of_its_edges_or_stands_later(edges, stands, data):
    edges = sorted((max(pair), min(pair)) for pair in edges if pair[0] != pair[1])
    lags = data.draw(st.lists(st.integers(-9, 9), min_size=len(edges), max_size=len(edges)))
    dst, src = places(edges).reshape(-1, 2).T.copy()
    times = both(longest, firsts(dst), src, np.array(lags, dtype=np.int64), np.array(stands))

    for place, time in enumerate(times.tolist()):
        into = zip(edges, lags, strict=True)
        assert time == max([stands[place], *(int(times[a]) + lag for (b, a), lag in into if b == place)])


@given(st.lists(st.integers(NONE, 7), min_size=8, max_size=8), TIMES, st.integers(NONE, 7), st.integers(-50, 50))
def test_a_walk_goes_back_until_a_time_and_never_in_a_circle(before, times, end, begin):
    found = both(walk, places(before), np.array(times), end, begin)

    expected, at = [], end
    while at != NONE and times[at] > begin and at not in expected:
        expected.append(at)
        at = before[at]
    goes_round = at != NONE and times[at] > begin
    assert found is None if goes_round else found.tolist() == expected


@pytest.mark.skipif(not nest.is_built(), reason="the C parts are not built here")
def test_the_c_loops_are_built_with_the_others():
    assert is_built()
