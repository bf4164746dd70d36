"""Loops over the points of a graph, each of which needs what an earlier one gave."""

import ctypes
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from chakra_capture.trace.columns import Int64, Ints, Positions
from chakra_capture.trace.compiled import load

_LIBRARY, _INTERFACE = Path(__file__).with_name("_loops"), 1


def is_built() -> bool:
    """Say whether the C part is there and fits; without it the Python one gives the same."""
    return load(_LIBRARY, _INTERFACE) is not None


def ordered(first: Positions, following: Positions, num_before: Positions, *, compiled: bool = True) -> Positions:
    """Points, each after those that it waits for; those that wait in a circle are left out.

    Args:
        first: of each point the place in ``following`` where the points begin that wait for it, and the end.
        num_before: how many each point waits for.
        compiled: use the C loop where it is built; the Python one gives the same.
    """
    missing, library = num_before.copy(), load(_LIBRARY, _INTERFACE) if compiled else None
    if library is not None:
        order = np.empty(len(missing), dtype=np.int32)
        count = library.cc_order(_count(len(order)), *map(_pointer, (first, following, missing, order)))
        return order[:count]
    firsts, followers, left = first.tolist(), following.tolist(), missing.tolist()
    found = [point for point, count in enumerate(left) if not count]
    for point in found:  # which grows meanwhile
        for follower in followers[firsts[point] : firsts[point + 1]]:
            left[follower] -= 1
            if not left[follower]:
                found.append(follower)
    return np.array(found, dtype=np.int32)


@dataclass(frozen=True, slots=True)
class Into:
    """Points in an order in which they can be reached, and the edges that lead to them.

    Attributes:
        points: by place in the order.
        first: of each place where the edges to its point begin among ``edges``, and the end.
        edges: by the place that they lead to.
        src: of each of these the point that it leaves.
    """

    points: Positions
    first: Positions
    edges: Positions
    src: Positions


def longest(into: Into, lag: Int64, stands: Int64, *, compiled: bool = True) -> Int64:
    """When each point is reached.

    Args:
        lag: of each edge.
        stands: the earliest time of each point.
        compiled: as for ``ordered``.
    """
    library = load(_LIBRARY, _INTERFACE) if compiled else None
    if library is not None:
        times = stands.copy()
        arrays = (into.points, into.first, into.edges, into.src)
        library.cc_longest(_count(len(times)), *map(_pointer, arrays), _pointer(lag), _pointer(times))
        return times
    first, sources, lags, reached = into.first.tolist(), into.src.tolist(), lag[into.edges].tolist(), stands.tolist()
    for place, point in enumerate(into.points.tolist()):
        time = reached[point]
        for at in range(first[place], first[place + 1]):
            time = max(time, reached[sources[at]] + lags[at])
        reached[point] = time
    return np.array(reached, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class Edges:
    """Edges of a graph: points, and a number for the kind of each."""

    src: Positions
    dst: Positions
    kind: npt.NDArray[np.int8]


def reasons(edges: Edges, lag: Int64, times: Int64, most: int, *, compiled: bool = True) -> Positions:
    """Of the edges to each point the one that its time is least behind, of several that of the first kind; -1 for none.

    Args:
        most: how far its time may be behind, ns.
        compiled: as for ``ordered``.
    """
    src, dst, kind = edges.src, edges.dst, edges.kind
    found, library = np.full(len(times), -1, dtype=np.int32), load(_LIBRARY, _INTERFACE) if compiled else None
    if library is not None:
        arrays, end = (src, dst, kind, lag, times), ctypes.c_int64(most)
        library.cc_reasons(_count(len(src)), *(_pointer(one) for one in arrays), end, _pointer(found))
        return found
    behind = times[dst] - times[src] - lag
    order = np.lexsort((src, kind, behind, dst))
    order = order[behind[order] <= most]
    found[dst[order][::-1]] = order[::-1]  # of several that are written the last one stays
    return found


def walk(before: Positions, times: Int64, end: int, begin_ns: int, *, compiled: bool = True) -> Positions | None:
    """Points from ``end`` back over ``before`` (-1: none) down to a time; None where they go round in a circle."""
    library = load(_LIBRARY, _INTERFACE) if compiled else None
    if library is not None:
        points = np.empty(len(before), dtype=np.int32)
        begin, point = ctypes.c_int64(begin_ns), ctypes.c_int32(end)
        count = library.cc_walk(_pointer(before), _pointer(times), begin, point, _count(len(before)), _pointer(points))
        return points[: int(count)].copy() if count >= 0 else None
    # Views: of many walks each sees a part of the points alone.
    found, earlier, time_of, at = list[int](), before.data, times.data, end
    while at >= 0 and time_of[at] > begin_ns:
        if len(found) == len(earlier):
            return None
        found.append(at)
        at = earlier[at]
    return np.array(found, dtype=np.int32)


def _count(size: int) -> ctypes.c_int64:
    return ctypes.c_int64(size)


def _pointer(array: Ints) -> ctypes.c_void_p:
    assert array.flags.c_contiguous
    return ctypes.c_void_p(array.ctypes.data)
