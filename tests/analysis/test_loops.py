"""The loops over points of a replay: what they promise, and that the C ones and those in Python agree."""

import networkx as nx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chakra_capture.analysis.replay.loops import Edges, Into, is_built, longest, ordered, reasons, walk
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


@given(EDGES, TIMES, st.permutations(range(8)), st.data())
def test_a_point_is_reached_by_the_latest_of_its_edges_or_stands_later(edges, stands, order, data):
    edges = [tuple(sorted(pair, key=order.index)) for pair in edges if pair[0] != pair[1]]
    lags = data.draw(st.lists(st.integers(-9, 9), min_size=len(edges), max_size=len(edges)))
    src, dst = places(edges).reshape(-1, 2).T.copy()
    at = np.array([order.index(point) for point in dst.tolist()], dtype=np.int64)
    by_place = places(np.argsort(at, kind="stable"))
    into = Into(places(order), firsts(at), by_place, src[by_place])
    times = both(longest, into, np.array(lags, dtype=np.int64), np.array(stands))

    for point, time in enumerate(times.tolist()):
        reached = [int(times[a]) + lag for (a, b), lag in zip(edges, lags, strict=True) if b == point]
        assert time == max([stands[point], *reached])


@given(EDGES, TIMES, st.sampled_from([-3, 0, 50]), st.data())
def test_the_reason_of_a_point_is_the_edge_that_it_is_least_behind(edges, times, most, data):
    each = {"min_size": len(edges), "max_size": len(edges)}
    lags = data.draw(st.lists(st.integers(-9, 9), **each))
    kinds = data.draw(st.lists(st.integers(0, 2), **each))
    src, dst = places(edges).reshape(-1, 2).T.copy()
    kind = np.array(kinds, dtype=np.int8)
    found = both(reasons, Edges(src, dst, kind), np.array(lags, dtype=np.int64), np.array(times), most)

    for point, edge in enumerate(found.tolist()):
        into = [
            (times[point] - times[a] - lag, kind, a, number)
            for number, ((a, b), lag, kind) in enumerate(zip(edges, lags, kinds, strict=True))
            if b == point and times[point] - times[a] - lag <= most
        ]
        assert edge == (min(into)[3] if into else NONE)


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
