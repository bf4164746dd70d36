"""Unions of half-open intervals in integer nanoseconds."""

import numpy as np

from chakra_capture.trace.columns import Bool, Int64


def union(start: Int64, end: Int64) -> tuple[Int64, Int64]:
    """Merge intervals that overlap or touch; empty ones vanish.

    Returns:
        starts and ends of the disjoint union, ascending.
    """
    some = end > start
    start, end = start[some], end[some]
    if not len(start):
        return start, end
    order = np.argsort(start, kind="stable")
    start, end = start[order], np.maximum.accumulate(end[order])
    begins = np.concatenate([[True], start[1:] > end[:-1]])
    last = np.concatenate([begins[1:], [True]])
    return start[begins], end[last]


def holds(start: Int64, end: Int64, times: Int64) -> Bool:
    """Which times are in one of the intervals, given in any order."""
    starts, ends = union(start, end)
    at = np.searchsorted(starts, times, side="right") - 1
    return np.asarray((at >= 0) & (times < np.append(ends, 0)[at]))


def total(start: Int64, end: Int64) -> int:
    """Length of the union."""
    starts, ends = union(start, end)
    return int((ends - starts).sum())


def covered(start: Int64, end: Int64, low: Int64, high: Int64) -> Int64:
    """Length of a union of intervals within each of the spans [low, high).

    Args:
        start: starts of the union, as ``union`` returns them.
        end: its ends.
        low: starts of the spans.
        high: their ends.
    """
    before = np.concatenate([[0], np.cumsum(end - start)])

    def up_to(time: Int64) -> Int64:
        at = np.searchsorted(start, time, side="right")
        overshoot = np.maximum(end[np.maximum(at - 1, 0)] - time, 0) if len(end) else 0
        return before[at] - np.where(at > 0, overshoot, 0)

    return np.asarray(up_to(high) - up_to(low))


def clip(start: Int64, end: Int64, low: int, high: int) -> tuple[Int64, Int64]:
    """Cut intervals to [low, high)."""
    return np.clip(start, low, high), np.clip(end, low, high)


def joined(first: tuple[Int64, Int64], second: tuple[Int64, Int64]) -> tuple[Int64, Int64]:
    """Intervals of both, to be merged."""
    return np.concatenate([first[0], second[0]]), np.concatenate([first[1], second[1]])
