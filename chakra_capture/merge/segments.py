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
    changes = np.flatnonzero(np.diff(track[order])) + 1
    threads = np.split(order, changes) if len(order) else []
    after = np.where(is_step, np.int32(_UNCHANGED), parent)
    parts = [_between_marks(rows, start, row_end, after, is_step) for rows in threads]
    sizes = [len(part[0]) for part in parts]
    of_thread = np.repeat(track[order[np.append(0, changes)]] if parts else track, sizes)
    none = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int32)
    begin, end, owner = (np.concatenate(column) for column in zip(none, *parts, strict=True))
    return Cut(order, row_end, parent, of_thread, begin, end, owner)


def _between_marks(
    rows: Positions, start: Int64, row_end: Int64, after: Positions, is_step: Bool
) -> tuple[Int64, Int64, Positions]:
    """Begin, end and owner of each stretch between the marks of a thread.

    A begin makes its row the innermost one, an end the row around it (``after``); of several marks at one time the
    last counts, ends before begins, inner rows' ends first. A row without duration, or a step, marks a time and
    changes nothing.
    """
    is_long = row_end[rows] > start[rows]
    ending = rows[is_long][::-1]
    # In this order already all that is at one time is as it should be, and a stable sort by time has little to do.
    times = np.concatenate([row_end[ending], start[rows]])
    top = np.concatenate([after[ending], np.where(is_long & ~is_step[rows], rows, np.int32(_UNCHANGED))])
    sort = np.argsort(times, kind="stable")
    times, top = times[sort], top[sort]
    told = np.maximum.accumulate(np.where(top == _UNCHANGED, np.int32(NOBODY), np.arange(len(top), dtype=np.int32)))
    top = pick(top, told, NOBODY)
    is_last = np.append(times[1:] != times[:-1], True)
    times, top = times[is_last], top[is_last]
    return times[:-1], times[1:], top[:-1]
