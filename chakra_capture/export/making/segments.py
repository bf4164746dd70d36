"""The segments of the active CPU threads of a window, as an export writes them."""

from dataclasses import dataclass

import numpy as np

from chakra_capture.merge.segments import NOBODY, cut
from chakra_capture.merge.window import Rows, on_active_threads
from chakra_capture.trace.columns import Bool, Int64, Positions, pick


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
    is_active = on_active_threads(rows)
    chosen = np.flatnonzero(is_active)
    found = cut(rows.track[chosen], rows.start[chosen], rows.end[chosen], rows.is_step[chosen])
    row_end, parent = rows.end.copy(), np.full(len(rows), -1)
    row_end[chosen] = found.row_end
    parent[chosen] = _rows(chosen, found.parent)
    return Segments(found.track, found.begin, found.end, _rows(chosen, found.owner), parent, row_end, is_active)


def _rows(chosen: Int64, places: Positions) -> Int64:
    """Rows by their places among the chosen ones."""
    return pick(chosen, places, NOBODY)
