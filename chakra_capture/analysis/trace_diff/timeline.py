"""The loop's timeline: which row holds each nanosecond of the recorded steps.

An instant belongs to the innermost host op, annotation or runtime call that is open on the loop's thread. Where none
but annotations is, the loop waits, or Python runs: then it belongs to what is open on a thread of autograd, the first
of several; in longer stretches also to a collective that runs on a thread of its backend (gloo). What is left is
Python's: it belongs to the annotation that is open, or to none.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl

from chakra_capture.analysis.loop import PHASES, Segments
from chakra_capture.trace.columns import Bool, Int64

NONE = -1
# Shorter gaps between ops beside a pending collective are not spent waiting for it.
_WAITING_NS = 50_000

SCHEMA = {"at": pl.Int64, "phase": pl.Int64, "row": pl.Int64, "ns": pl.Int64}


@dataclass(frozen=True, slots=True)
class Track:
    """What is open on one thread from each time on: a row, or ``NONE``."""

    times: Int64
    holder: Int64

    def at(self, times: Int64) -> Int64:
        """The row that is open at each time."""
        return np.append(self.holder, NONE)[np.searchsorted(self.times, times, side="right") - 1]


@dataclass(frozen=True, slots=True)
class Tracks:
    """Threads of one window: the loop's, those of autograd, those of a backend of collectives."""

    loop: Track
    autograd: Sequence[Track]
    backend: Sequence[Track]


def track(rows: Int64, start: Int64, end: Int64, parent: Int64) -> Track:
    """Follow the rows of one thread, which nest.

    Args:
        rows: numbers of the rows, outermost first; the other arrays have an entry for every number.
        end: after clipping to the parent's.
        parent: of each row, or ``NONE``.
    """
    own = rows[end[rows] > start[rows]]
    times = np.concatenate([end[own], start[own]])
    holder = np.concatenate([parent[own], own])
    # Of what happens at one time the last counts: ends before starts, of ends the outermost, of starts the innermost.
    kind = np.repeat([0, 1], len(own))
    order = np.lexsort((np.concatenate([-own, own]), kind, times))
    times, holder = times[order], holder[order]
    last = np.append(times[1:] != times[:-1], True)[: len(times)]
    return Track(times[last], holder[last])


def stretches(tracks: Tracks, segments: Segments, *, low: Int64, high: Int64, is_op: Bool) -> pl.DataFrame:
    """Cut the steps into stretches of one row and phase, and sum them up.

    Args:
        low, high: start and end of each step, ascending and disjoint.
        is_op: of each row, whether it is more than an annotation.

    Returns:
        ``at`` (number of the step), ``phase`` (place in ``PHASES``), ``row`` (``NONE``: no row) and ``ns``, which sum
        to the steps.
    """
    every = [tracks.loop, *tracks.autograd, *tracks.backend]
    cuts = np.sort(np.concatenate([low, high, segments.start, segments.end, *(each.times for each in every)]))
    cuts = cuts[np.append(True, cuts[1:] != cuts[:-1])[: len(cuts)]]
    begin, ns = cuts[:-1], np.diff(cuts)
    at = np.searchsorted(low, begin, side="right") - 1
    inside = (at >= 0) & (begin < np.append(high, 0)[at])
    begin, ns, at = begin[inside], ns[inside], at[inside]
    table = pl.DataFrame(
        {"at": at, "phase": phases_at(segments, begin), "row": _holders(tracks, begin, ns, is_op), "ns": ns},
        schema=SCHEMA,
    )
    return table.group_by("at", "phase", "row").agg(pl.col("ns").sum())


def phases_at(segments: Segments, times: Int64) -> Int64:
    """The phase that the loop is in at each time, as its place in ``PHASES``."""
    order = {phase: at for at, phase in enumerate(PHASES)}
    of_segment = np.array([*(order[phase] for phase in segments.phase), order[None]], dtype=np.int64)
    at = np.searchsorted(segments.start, times, side="right") - 1
    known = (at >= 0) & (times < np.append(segments.end, 0)[at])
    return of_segment[np.where(known, at, -1)]


def _holders(tracks: Tracks, begin: Int64, ns: Int64, is_op: Bool) -> Int64:
    holder = tracks.loop.at(begin)
    is_free = ~np.append(is_op, False)[holder]
    for each in tracks.autograd:
        holder, is_free = _filled(holder, is_free, each.at(begin), is_free)
    if tracks.backend:
        is_long = is_free & (_run_lengths(is_free, ns) > _WAITING_NS)
        for each in tracks.backend:
            holder, is_free = _filled(holder, is_free, each.at(begin), is_long)
    return holder


def _filled(holder: Int64, is_free: Bool, other: Int64, may: Bool) -> tuple[Int64, Bool]:
    taken = is_free & may & (other != NONE)
    return np.where(taken, other, holder), is_free & ~taken


def _run_lengths(is_free: Bool, ns: Int64) -> Int64:
    """Of each stretch the length of the run of like stretches that it is in."""
    run = np.cumsum(np.append(True, is_free[1:] != is_free[:-1])[: len(is_free)]) - 1
    return np.bincount(run, weights=ns, minlength=1).astype(np.int64)[run] if len(run) else ns
