"""CPU threads cut into segments: each stretch between two begins or ends of rows is the innermost row's, or nobody's.

A step cuts, and owns nothing: it may begin within a call of the profiler and go on after it.
"""

from dataclasses import dataclass

import numpy as np

from chakra_capture.merge.nest import nest
from chakra_capture.trace.columns import Bool, Int64, Positions, pick

NOBODY = -1
_UNCHANGED = -2


@dataclass(frozen=True, slots=True)
class Cut:
    """Rows of threads, and segments in order of thread and time; those of a thread follow each other without a gap.

    Attributes:
        order: places of the rows by thread and time, parents first.
        row_end: of each row, its end clipped to that of the row around it.
        parent: of each row the place of the row around it, -1 for none; no step's.
        track, begin, end, owner: of each segment; ``owner`` is the place of its innermost row, or ``NOBODY``.
    """

    order: Positions
    row_end: Int64
    parent: Positions
    track: Int64
    begin: Int64
    end: Int64
    owner: Positions


def cut(track: Int64, start: Int64, end: Int64, is_step: Bool) -> Cut:
    """Cut threads at all begins and ends of their rows; times in ns.

    Args:
        track: number of each row's thread.
        is_step: rows that stand for a step.
    """
    order = np.lexsort((-end, start, track)).astype(np.int32)
    within = order[~is_step[order]]
    nested = nest(track[within], start[within], end[within] - start[within])
    row_end, parent = end.copy(), np.full(len(track), NOBODY, dtype=np.int32)
    row_end[within] = nested.end_ns
    parent[within] = pick(within, nested.parent, NOBODY)
    return Cut(order, row_end, parent, *_between_marks(track, start, row_end, parent, is_step, order))


def _between_marks(
    track: Int64, start: Int64, row_end: Int64, parent: Positions, is_step: Bool, order: Positions
) -> tuple[Int64, Int64, Int64, Positions]:
    """Thread, begin, end and owner of each stretch between marks.

    A begin makes its row the innermost one, an end the row around it; of several marks at one time the last counts,
    ends before begins, inner rows' ends first. A row without duration, or a step, marks a time and changes nothing.
    """
    is_long = row_end[order] > start[order]
    ending = order[is_long][::-1]
    # In this order already all that is at one time is as it should be, and a stable sort by time has little to do.
    times = np.concatenate([row_end[ending], start[order]])
    tracks = np.concatenate([track[ending], track[order]])
    top = np.concatenate(
        [
            np.where(is_step[ending], np.int32(_UNCHANGED), parent[ending]),
            np.where(is_long & ~is_step[order], order, np.int32(_UNCHANGED)),
        ]
    )
    sort = np.lexsort((times, tracks))
    times, tracks, top = times[sort], tracks[sort], top[sort]
    told = np.maximum.accumulate(np.where(top == _UNCHANGED, np.int32(-1), np.arange(len(top), dtype=np.int32)))
    told_here = (told >= 0) & (tracks[np.maximum(told, 0)] == tracks)
    top = np.where(told_here, top[np.maximum(told, 0)], np.int32(NOBODY))
    is_last = np.append((times[1:] != times[:-1]) | (tracks[1:] != tracks[:-1]), True)[: len(times)]
    times, tracks, top = times[is_last], tracks[is_last], top[is_last]
    inside = tracks[1:] == tracks[:-1]
    return tracks[:-1][inside], times[:-1][inside], times[1:][inside], top[:-1][inside]
