"""Unions of half-open intervals in integer nanoseconds."""

import numpy as np

from chakra_capture.trace.columns import Int64


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


def total(start: Int64, end: Int64) -> int:
    """Length of the union."""
    starts, ends = union(start, end)
    return int((ends - starts).sum())


def clip(start: Int64, end: Int64, low: int, high: int) -> tuple[Int64, Int64]:
    """Cut intervals to [low, high)."""
    return np.clip(start, low, high), np.clip(end, low, high)


def joined(first: tuple[Int64, Int64], second: tuple[Int64, Int64]) -> tuple[Int64, Int64]:
    """Intervals of both, to be merged."""
    return np.concatenate([first[0], second[0]]), np.concatenate([first[1], second[1]])
