"""Which row encloses which on one thread, and the self time that follows."""

import ctypes
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from chakra_capture.trace.columns import MISSING, Bool, Int64, Ints, Positions
from chakra_capture.trace.compiled import load

_LIBRARY, _INTERFACE = Path(__file__).with_name("_nest"), 2


def is_built() -> bool:
    """Say whether the C part is there and fits; without it the Python one gives the same."""
    return load(_LIBRARY, _INTERFACE) is not None


@dataclass(frozen=True, slots=True)
class Nesting:
    """Result of ``nest``; arrays are aligned with its input.

    Attributes:
        parent: row number of the innermost enclosing row, -1 for none.
        end_ns: end after clipping to the parent's end.
        self_ns: clipped duration less the clipped durations of the children; ``MISSING`` for an open row.
        clipped: the row reached past its parent's end.
    """

    parent: Positions
    end_ns: Int64
    self_ns: Int64
    clipped: Bool


def nest(track: Ints, ts_ns: Int64, dur_ns: Int64, *, compiled: bool = True) -> Nesting:
    """Find parents by containment of half-open intervals.

    Args:
        track: one number per thread; rows must be sorted by (track, ts, -dur), outermost first on a tie.
        ts_ns: starts.
        dur_ns: durations, ``MISSING`` for a row without an end: it closes at its parent's end.
        compiled: use the C loop where it is built; the Python one gives the same.

    Rows that cross their parent's end are clipped to it, so that the self times of a thread sum to
    the union of its rows.
    """
    size = len(ts_ns)
    is_open = dur_ns == MISSING
    state = _State(
        track=np.ascontiguousarray(track, dtype=np.int32),
        starts=np.ascontiguousarray(ts_ns),
        ends=np.where(is_open, ts_ns, ts_ns + np.where(is_open, 0, dur_ns)),
        is_open=is_open,
        parent=np.full(size, -1, dtype=np.int32),
        inside=np.zeros(size, dtype=np.int64),
        clipped=np.zeros(size, dtype=bool),
    )
    library = load(_LIBRARY, _INTERFACE) if compiled else None
    if library is None or not _in_c(library, state):
        _in_python(state)
    self_ns = np.where(is_open, MISSING, state.ends - ts_ns - state.inside)
    return Nesting(state.parent, state.ends, self_ns, state.clipped)


@dataclass(frozen=True, slots=True)
class _State:
    """Arrays that the loop reads, and those that it fills: ends, parent, inside, clipped."""

    track: Positions
    starts: Int64
    ends: Int64
    is_open: Bool
    parent: Positions
    inside: Int64
    clipped: Bool


def _in_c(library: ctypes.CDLL, state: _State) -> bool:
    arrays = (state.track, state.starts, state.ends, state.is_open, state.parent, state.inside, state.clipped)
    pointers = [ctypes.c_void_p(array.ctypes.data) for array in arrays]
    return int(library.cc_nest(ctypes.c_int64(len(state.starts)), *pointers)) == 0


def _in_python(state: _State) -> None:
    tracks, starts, opened = state.track.tolist(), state.starts.tolist(), state.is_open.tolist()
    ends, parent, inside = state.ends.tolist(), state.parent.tolist(), state.inside.tolist()
    owner = list(range(len(starts)))
    stack: list[int] = []
    for row, start in enumerate(starts):
        while stack and (tracks[stack[-1]] != tracks[row] or ends[stack[-1]] <= start):
            stack.pop()
        if stack:
            top = stack[-1]
            parent[row] = top
            if opened[row]:
                # An open row has no time of its own, so its children take their time from the row around it.
                ends[row] = ends[top]
                owner[row] = owner[top]
            else:
                if ends[row] > ends[top]:
                    ends[row] = ends[top]
                    state.clipped[row] = True
                inside[owner[top]] += ends[row] - start
        stack.append(row)
    state.ends[:], state.parent[:], state.inside[:] = ends, parent, inside


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
