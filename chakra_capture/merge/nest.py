"""Which row encloses which on one thread, and the self time that follows."""

from dataclasses import dataclass

import numpy as np

from chakra_capture.trace.columns import MISSING, Int64


@dataclass(frozen=True, slots=True)
class Nesting:
    """Result of ``nest``; arrays are aligned with its input.

    Attributes:
        parent: row number of the innermost enclosing row, -1 for none.
        end_ns: end after clipping to the parent's end.
        self_ns: clipped duration less the clipped durations of the children; ``MISSING`` for an open row.
        clipped: the row reached past its parent's end.
    """

    parent: Int64
    end_ns: Int64
    self_ns: Int64
    clipped: "np.typing.NDArray[np.bool_]"


def nest(track: Int64, ts_ns: Int64, dur_ns: Int64) -> Nesting:
    """Find parents by containment of half-open intervals.

    Args:
        track: one number per thread; rows must be sorted by (track, ts, -dur), outermost first on a tie.
        ts_ns: starts.
        dur_ns: durations, ``MISSING`` for a row without an end: it closes at its parent's end.

    Rows that cross their parent's end are clipped to it, so that the self times of a thread sum to
    the union of its rows.
    """
    size = len(ts_ns)
    parent = [-1] * size
    starts = ts_ns.tolist()
    is_open = dur_ns == MISSING
    ends = np.where(is_open, ts_ns, ts_ns + np.where(is_open, 0, dur_ns)).tolist()
    opened = is_open.tolist()
    tracks = track.tolist()
    inside = [0] * size
    owner = list(range(size))
    clipped = np.zeros(size, dtype=bool)
    stack: list[int] = []
    for row in range(size):
        start = starts[row]
        while stack and (tracks[stack[-1]] != tracks[row] or ends[stack[-1]] <= start):
            stack.pop()
        if stack:
            top = stack[-1]
            parent[row] = top
            if opened[row]:
                ends[row] = ends[top]
            elif ends[row] > ends[top]:
                ends[row] = ends[top]
                clipped[row] = True
            if not opened[row]:
                inside[owner[top]] += ends[row] - start
            # An open row has no time of its own, so its children take their time from the row around it.
            owner[row] = owner[top] if opened[row] else row
        stack.append(row)
    end_ns = np.array(ends, dtype=np.int64)
    self_ns = np.where(is_open, MISSING, end_ns - ts_ns - np.array(inside, dtype=np.int64))
    return Nesting(np.array(parent, dtype=np.int64), end_ns, self_ns, clipped)


def innermost_at(times: Int64, start_ns: Int64, end_ns: Int64) -> Int64:
    """Position of the interval that holds each time, of several the one that began last; -1 for none.

    Args:
        start_ns: starts, ascending; on a tie the later position counts as inside.
        end_ns: ends, exclusive.
    """
    bounds = np.unique(np.concatenate([start_ns, end_ns]))
    holder = np.full(len(bounds) + 1, -1, dtype=np.int64)
    open_ones: list[int] = []
    following = 0
    for at, bound in enumerate(bounds.tolist()):
        while following < len(start_ns) and start_ns[following] <= bound:
            open_ones.append(following)
            following += 1
        # An interval that ended below one still open is found here later, when the one above it ends.
        while open_ones and end_ns[open_ones[-1]] <= bound:
            open_ones.pop()
        holder[at + 1] = open_ones[-1] if open_ones else -1
    return holder[np.searchsorted(bounds, times, side="right")]
