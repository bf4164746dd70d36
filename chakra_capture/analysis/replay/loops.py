"""Loops over the points of a graph, each of which needs what an earlier one gave."""

import ctypes
from pathlib import Path

import numpy as np

from chakra_capture.trace.columns import Int64, Positions
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


def longest(first: Positions, src: Positions, lag: Int64, stands: Int64, *, compiled: bool = True) -> Int64:
    """When each place is reached; all places that it waits for stand before it.

    Args:
        first: of each place its first edge, and the end.
        src: of each edge the place that it leaves.
        stands: the earliest time of each place.
        compiled: as for ``ordered``.
    """
    library = load(_LIBRARY, _INTERFACE) if compiled else None
    if library is not None:
        times = stands.copy()
        library.cc_longest(_count(len(times)), _pointer(first), _pointer(src), _pointer(lag), _pointer(times))
        return times
    firsts, sources, lags, reached = first.tolist(), src.tolist(), lag.tolist(), stands.tolist()
    for place, earliest in enumerate(reached):
        time = earliest
        for edge in range(firsts[place], firsts[place + 1]):
            time = max(time, reached[sources[edge]] + lags[edge])
        reached[place] = time
    return np.array(reached, dtype=np.int64)


def walk(before: Positions, times: Int64, end: int, begin_ns: int, *, compiled: bool = True) -> Positions | None:
    """Points from ``end`` back over ``before`` (-1: none) down to a time; None where they go round in a circle."""
    library = load(_LIBRARY, _INTERFACE) if compiled else None
    if library is not None:
        points = np.empty(len(before), dtype=np.int32)
        begin, point = ctypes.c_int64(begin_ns), ctypes.c_int32(end)
        count = library.cc_walk(_pointer(before), _pointer(times), begin, point, _count(len(before)), _pointer(points))
        return points[: int(count)].copy() if count >= 0 else None
    found, earlier, time_of, at = list[int](), before.tolist(), times.tolist(), end
    while at >= 0 and time_of[at] > begin_ns:
        if len(found) == len(earlier):
            return None
        found.append(at)
        at = earlier[at]
    return np.array(found, dtype=np.int32)


def _count(size: int) -> ctypes.c_int64:
    return ctypes.c_int64(size)


def _pointer(array: Int64 | Positions) -> ctypes.c_void_p:
    assert array.flags.c_contiguous
    return ctypes.c_void_p(array.ctypes.data)
