"""What the rules of the replay ask of arrays: medians, by class too, and tracks numbered as they appear."""

import numpy as np

from chakra_capture.trace.columns import Int64, Ints


def median_of(values: Int64, default: int) -> int:
    """Median, ns; ``default`` of nothing."""
    return int(np.median(values)) if len(values) else default


def medians(group: Int64, values: Int64) -> tuple[Int64, Int64]:
    """Groups that have values, ascending, and the median of each."""
    order = np.lexsort((values, group))
    groups, first, count = np.unique(group[order], return_index=True, return_counts=True)
    low, high = order[first + (count - 1) // 2], order[first + count // 2]
    return groups, ((values[low] + values[high]) / 2).astype(np.int64)


def look_up(known: Int64, values: Int64, wanted: Int64, default: int) -> Int64:
    """Of each wanted key its value; ``known`` keys ascend."""
    if not len(known):
        return np.full(len(wanted), default, dtype=np.int64)
    at = np.minimum(np.searchsorted(known, wanted), len(known) - 1)
    return np.where(known[at] == wanted, values[at], default)


def by_appearance(track: Int64) -> tuple[Int64, Int64]:
    """Tracks in the order in which each is first seen, and of each row the number of its track there."""
    first = np.full(int(track.max(initial=-1)) + 1, len(track))
    first[track[::-1]] = np.arange(len(track))[::-1]  # of several the last one written is the first
    seen = np.argsort(first, kind="stable")[: np.count_nonzero(first < len(track))]
    number = np.empty(len(first), dtype=np.int64)
    number[seen] = np.arange(len(seen))
    return seen, number[track]


def ranges(first: Ints, until: Ints) -> Int64:
    """All numbers of the ranges, one range after the other."""
    counts = np.maximum(until - first, 0)
    shifts: Int64 = np.repeat(first - (np.cumsum(counts) - counts), counts)
    return np.arange(len(shifts)) + shifts
