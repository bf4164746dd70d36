"""Slices of a track in lanes, so that in each lane any two of them nest or lie beside each other.

Viewers draw a track as a stack and drop what crosses; with lanes nothing is lost. Nearly all tracks need one.
"""

import heapq

import numpy as np

from chakra_capture.merge.nest import nest
from chakra_capture.trace.columns import Int64, Ints, Positions

# Beyond this nobody looks for nesting, and a track where everything crosses must not take time without end.
MOST_NESTED = 100


def assign_lanes(track: Ints, ts_ns: Int64, dur_ns: Int64, *, most_nested: int = MOST_NESTED) -> Positions:
    """Number the lane of each slice within its track, 0 first.

    In order of start, the longer first and then as given, a slice goes to the first lane where all that is still open
    holds it to its end. What ends as another begins lies beside it; a slice of no length is inside what begins with it.

    Args:
        track: one number per track.
        ts_ns: starts.
        dur_ns: durations, none negative.
        most_nested: lanes with nesting; what fits in none of them goes to the first further lane that is free.
    """
    order = slice_order(track, ts_ns, dur_ns)
    lane = np.zeros(len(order), dtype=np.int32)
    if not len(order):
        return lane
    left, number = order, 0
    tracks = np.concatenate([[0], np.cumsum(np.diff(track[order]) != 0)]).astype(np.int32)
    while True:
        # A row that is cut at the end of what is around it stays in the way of nothing that this is not: those that
        # are cut are the ones which do not fit, as if they had never been there.
        crosses = nest(tracks, ts_ns[left], dur_ns[left]).clipped
        left, tracks, number = left[crosses], tracks[crosses], number + 1
        if not len(left):
            return lane
        if number >= most_nested:
            lane[left] = number + _free_lanes(tracks, ts_ns[left], dur_ns[left])
            return lane
        lane[left] = number


def slice_order(track: Ints, ts_ns: Int64, dur_ns: Int64) -> Int64:
    """Positions by (track, start, longer first, position): around what begins with it comes what holds it."""
    same = track[1:] == track[:-1]
    later = (ts_ns[1:] > ts_ns[:-1]) | ((ts_ns[1:] == ts_ns[:-1]) & (dur_ns[1:] <= dur_ns[:-1]))
    if np.all((track[1:] > track[:-1]) | (same & later)):  # as the rows of nodes stand
        return np.arange(len(track), dtype=np.int64)
    return np.lexsort((-dur_ns, ts_ns, track))


def _free_lanes(track: Ints, ts_ns: Int64, dur_ns: Int64) -> Positions:
    """The lowest lane in which nothing is open, for slices in order."""
    found = np.empty(len(ts_ns), dtype=np.int32)
    now, free, busy, number = -1, list[int](), list[tuple[int, int]](), 0
    rows = zip(np.asarray(track).tolist(), ts_ns.tolist(), dur_ns.tolist(), strict=True)
    for at, (one, start, length) in enumerate(rows):
        if one != now:
            now, free, busy, number = one, [], [], 0
        while busy and busy[0][0] <= start:
            heapq.heappush(free, heapq.heappop(busy)[1])
        if not free:
            free.append(number)
            number += 1
        found[at] = heapq.heappop(free)
        heapq.heappush(busy, (start + length, int(found[at])))
    return found
