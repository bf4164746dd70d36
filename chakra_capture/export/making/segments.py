"""CPU threads cut into segments: each stretch between two begins or ends of rows is the innermost row's, or nobody's.

A thread that runs no operator and launches nothing is passive and left out: gloo's threads, watchdogs, the profiler.
"""

from dataclasses import dataclass

import numpy as np

from chakra_capture.export.making.rows import ON_THREAD, Rows
from chakra_capture.merge.nest import nest
from chakra_capture.trace.columns import Bool, Int64

NOBODY = -1


@dataclass(frozen=True, slots=True)
class Segments:
    """Segments in order of thread and time; those of a thread follow each other without a gap.

    Attributes:
        track: number of the thread, as in ``Rows``.
        begin, end: ns.
        owner: innermost row, or ``NOBODY`` (Python's own time).
        parent: by row, the row around it on its thread, without steps; -1 for none.
        row_end: by row, its end clipped to that of the row around it.
        is_active: by row, whether it is on a thread that has segments.
    """

    track: Int64
    begin: Int64
    end: Int64
    owner: Int64
    parent: Int64
    row_end: Int64
    is_active: Bool

    def __len__(self) -> int:
        return len(self.track)

    def ending_by(self, track: Int64, time: Int64) -> Int64:
        """The last segment of each thread that ends at or before a time; -1 for none."""
        return self._same(
            track, np.searchsorted(self._keys(self.track, self.end), self._keys(track, time), "right") - 1
        )

    def beginning_from(self, track: Int64, time: Int64) -> Int64:
        """The first segment of each thread that begins at or after a time; -1 for none."""
        return self._same(track, np.searchsorted(self._keys(self.track, self.begin), self._keys(track, time), "left"))

    def _same(self, track: Int64, at: Int64) -> Int64:
        if not len(self):
            return np.full(len(at), -1)
        is_there = (at >= 0) & (at < len(self))
        at = np.where(is_there, at, 0)
        return np.where(is_there & (self.track[at] == track), at, -1)

    def _keys(self, track: Int64, time: Int64) -> Int64:
        """Numbers that sort as (thread, time): times that no segment reaches count as its ends."""
        if not len(self):
            return track
        low, high = int(self.begin.min()), int(self.end.max())
        return track * (high - low + 3) + np.clip(time - low + 1, 0, high - low + 2)


def cut_threads(rows: Rows) -> Segments:
    """Cut all active threads of a window into segments."""
    on_thread = rows.is_kind(*ON_THREAD) & rows.is_timed
    calls = rows.launch[rows.is_activity & (rows.launch >= 0)]
    works = on_thread & rows.is_kind("host_op")
    works[calls] |= on_thread[calls]
    is_active = on_thread & np.isin(rows.track, np.unique(rows.track[works]))
    chosen = np.flatnonzero(is_active)
    order = chosen[np.lexsort((chosen, -rows.end[chosen], rows.start[chosen], rows.track[chosen]))]
    nested = nest(rows.track[order], rows.start[order], rows.end[order] - rows.start[order])
    row_end, parent = rows.end.copy(), np.full(len(rows), -1)
    row_end[order] = nested.end_ns
    around = nested.parent.astype(np.int64)
    parent[order] = np.where(around >= 0, order[around], -1)
    parent = _without_steps(rows, parent)
    track, begin, end, owner = _between_marks(rows, order, row_end, parent)
    return Segments(track, begin, end, owner, parent, row_end, is_active)


def _without_steps(rows: Rows, parent: Int64) -> Int64:
    """A step cuts, and owns nothing."""
    while len(of_step := np.flatnonzero((parent >= 0) & rows.is_step[np.maximum(parent, 0)])):
        parent[of_step] = parent[parent[of_step]]
    return parent


def _between_marks(rows: Rows, order: Int64, row_end: Int64, parent: Int64) -> tuple[Int64, Int64, Int64, Int64]:
    """Thread, begin, end and owner of each stretch between marks.

    A begin makes its row the innermost one, an end the row around it; of several marks at one time the last counts,
    ends before begins, inner rows' ends first. A row without duration marks a time and changes nothing.
    """
    place = np.arange(len(order))
    is_long = row_end[order] > rows.start[order]
    outer = np.where(rows.is_step[order], parent[order], order)
    times = np.concatenate([rows.start[order], row_end[order[is_long]]])
    track = np.concatenate([rows.track[order], rows.track[order[is_long]]])
    begins = np.append(np.ones(len(order), dtype=bool), np.zeros(np.count_nonzero(is_long), dtype=bool))
    tie = np.concatenate([place, -place[is_long]])
    top = np.concatenate([np.where(is_long, outer, _UNCHANGED), parent[order[is_long]]])
    sort = np.lexsort((tie, begins, times, track))
    times, track, top = times[sort], track[sort], top[sort]
    told = np.maximum.accumulate(np.where(top == _UNCHANGED, -1, np.arange(len(top))))
    told_here = (told >= 0) & (track[np.maximum(told, 0)] == track)
    top = np.where(told_here, top[np.maximum(told, 0)], NOBODY)
    is_last = np.append((times[1:] != times[:-1]) | (track[1:] != track[:-1]), True)[: len(times)]
    times, track, top = times[is_last], track[is_last], top[is_last]
    within = track[1:] == track[:-1]
    return track[:-1][within], times[:-1][within], times[1:][within], top[:-1][within]


_UNCHANGED = -2
