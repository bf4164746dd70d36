"""Dependencies between rows: launches, order on a thread, order on a stream, waits, hand-overs between threads."""

from dataclasses import dataclass

import numpy as np
import polars as pl

from chakra_capture.merge.handover import find_handovers
from chakra_capture.merge.rows import ACTIVITY_KINDS, CPU_KINDS, climb, group_numbers
from chakra_capture.merge.tables import Columns
from chakra_capture.merge.waits import find_waits
from chakra_capture.trace.columns import MISSING, Bool, Int64, Positions
from chakra_capture.trace.schema import EDGE_KINDS, EDGES, SIDES

_LARGEST_OFFSET_NS = 1_000_000_000
_SIDE, _KIND = pl.Enum(SIDES), pl.Enum(EDGE_KINDS)


@dataclass(frozen=True, slots=True)
class Edges:
    """Edges of one window, and what was left out.

    Attributes:
        rows: ``src``, ``src_at``, ``dst``, ``dst_at``, ``kind`` as in the table, ends as row numbers.
        clock_offset_ns: added to device times so that no activity starts before its launch call does.
        num_backward: edges per kind that pointed back in time even so, or joined moments that may be one; left out.
        num_unresolved: waits and hand-overs, by name, of which the trace does not show the other side.
    """

    rows: pl.DataFrame
    clock_offset_ns: int
    num_backward: dict[str, int]
    num_unresolved: dict[str, int]

    def table(self, window: int, first: int) -> pl.LazyFrame:
        """The table edges of ``window``, whose first row has the node_id ``first``."""
        numbers = (pl.col(column).cast(pl.Int64) + first for column in ("src", "dst"))
        return self.rows.lazy().with_columns(*numbers, window=pl.lit(window, dtype=pl.Int32)).select(*EDGES.schema)


@dataclass(frozen=True, slots=True)
class _Part:
    kind: str
    src: Int64 | Positions
    src_at: str
    dst: Int64 | Positions
    dst_at: str


def find_edges(columns: Columns) -> Edges:
    """All edges of one window."""
    launched = _timed_launches(columns)
    offset = _clock_offset(columns, launched)
    on_device = columns.is_kind(*ACTIVITY_KINDS)
    start = columns.ts_ns + np.where(on_device & (columns.ts_ns != MISSING), offset, 0)
    has_end = (columns.ts_ns != MISSING) & (columns.dur_ns != MISSING)
    end = np.where(has_end, start + np.where(has_end, columns.dur_ns, 0), MISSING)
    parts = [
        _launches(columns, start, end, launched),
        *_thread_order(columns, has_end),
        _stream_order(columns, start, has_end),
    ]
    waits, handovers = find_waits(columns), find_handovers(columns, end)
    backward: dict[str, int] = {}
    parts += [
        _between_tracks(columns, "sync", _pairs(waits.sync), (end, end), backward),
        _between_tracks(columns, "event_wait", _pairs(waits.event), (end, start), backward),
        _between_tracks(columns, "inter_thread", (handovers.src, handovers.dst), (end, start), backward),
    ]
    if handovers.num_ambiguous:
        waits.unresolved["autograd::engine"] = handovers.num_ambiguous
    frames = []
    for part in parts:
        times = {"start": start, "end": end}
        forward = times[part.src_at][part.src] <= times[part.dst_at][part.dst]
        _count(backward, part.kind, ~forward)
        frames.append(_frame(part, forward))
    return Edges(pl.concat(frames), offset, backward, waits.unresolved)


def _pairs(pairs: list[tuple[int, int]]) -> tuple[Int64, Int64]:
    src, dst = np.array(sorted(set(pairs)), dtype=np.int64).reshape(-1, 2).T
    return src, dst


def _count(backward: dict[str, int], kind: str, left_out: Bool) -> None:
    if left_out.any():
        backward[kind] = backward.get(kind, 0) + int(np.count_nonzero(left_out))


def _clock_offset(columns: Columns, launched: Int64) -> int:
    """Smallest shift of the device clock, ns, under which no activity starts before its launch call; 0 if none.

    An activity that starts a second or more before its launch has a wrong time: no clock is that far off.
    """
    lag = columns.ts_ns[launched] - columns.ts_ns[columns.launch[launched]]
    lag = lag[lag > -_LARGEST_OFFSET_NS]
    return max(0, -int(lag.min())) if len(lag) else 0


def _timed_launches(columns: Columns) -> Int64:
    """Activities whose own start and that of their launch are known."""
    has_launch = (columns.launch >= 0) & columns.is_kind(*ACTIVITY_KINDS)
    known = (columns.ts_ns != MISSING) & (columns.ts_ns[np.maximum(columns.launch, 0)] != MISSING)
    return np.flatnonzero(has_launch & known)


def _launches(columns: Columns, start: Int64, end: Int64, rows: Int64) -> _Part:
    """One edge per activity whose launch is not implied by that of an earlier one, which it follows on its stream."""
    if not len(rows):
        return _Part("launch", rows, "start", rows, "start")
    call = columns.launch[rows]
    call_track = columns.track[call]
    run = _stream_runs(columns, start, end)[rows]
    order = np.lexsort((rows, start[rows], run, call_track))
    rows, call, group = rows[order], call[order], group_numbers(call_track[order], run[order])
    begun = columns.ts_ns[call]
    backward = begun > start[rows]  # has no edge, so it implies none
    latest = _running_max(np.where(backward, MISSING, begun), group)
    keep = backward | (begun > latest)
    return _Part("launch", call[keep], "start", rows[keep], "start")


def _stream_runs(columns: Columns, start: Int64, end: Int64) -> Int64:
    """Number of the run of each activity: those that edges of their stream lead from one to the next.

    What begins before the one ahead of it has ended begins a run; what has no end is a run of its own.
    """
    rows = np.flatnonzero(columns.is_kind(*ACTIVITY_KINDS) & (end != MISSING))
    stream = _streams(columns, rows)
    order = np.lexsort((rows, start[rows], stream))  # as stream_order has it
    rows, stream = rows[order], stream[order]
    follows = (stream[1:] == stream[:-1]) & (end[rows[:-1]] <= start[rows[1:]])
    run = len(columns) + np.arange(len(columns))
    run[rows] = np.append(0, np.cumsum(~follows))[: len(rows)]
    return run


def _running_max(values: Int64, group: Int64) -> Int64:
    """Largest value before each row within its group, ``MISSING`` for the first; rows sorted by group."""
    ordered, rank = np.unique(values, return_inverse=True)
    rank = rank.reshape(-1)
    width = len(values) + 1
    running = np.maximum.accumulate(group * width + rank)
    first = np.concatenate([[True], group[1:] != group[:-1]])
    before = np.concatenate([[0], running[:-1]]) - group * width
    return np.where(first, MISSING, ordered[np.clip(before, 0, len(ordered) - 1)])


def _thread_order(columns: Columns, has_end: Bool) -> list[_Part]:
    """Siblings in order; parent to its first child; last child to its parent."""
    timed = columns.is_kind(*CPU_KINDS) & has_end & ~columns.is_kind("memory", "instant")
    rows = np.flatnonzero(timed)
    # A row without an end orders nothing; what ran inside it is ordered by the row around it.
    parent = climb(columns.parent[rows], columns.parent, timed)
    # The outermost rows of a thread are siblings too; rows are in time order as they stand.
    family = np.where(parent >= 0, parent, -1 - columns.track[rows])
    order = np.argsort(family, kind="stable")
    rows, parent, family = rows[order], parent[order], family[order]
    same = family[1:] == family[:-1]
    first = np.concatenate([[True], ~same]) if len(rows) else np.zeros(0, dtype=bool)
    last = np.concatenate([~same, [True]]) if len(rows) else np.zeros(0, dtype=bool)
    has_parent = parent >= 0
    return [
        _Part("thread_order", rows[:-1][same], "end", rows[1:][same], "start"),
        _Part("thread_order", parent[first & has_parent], "start", rows[first & has_parent], "start"),
        _Part("thread_order", rows[last & has_parent], "end", parent[last & has_parent], "end"),
    ]


def _stream_order(columns: Columns, start: Int64, has_end: Bool) -> _Part:
    rows = np.flatnonzero(columns.is_kind(*ACTIVITY_KINDS) & has_end)
    stream = _streams(columns, rows)
    order = np.lexsort((rows, start[rows], stream))
    rows, stream = rows[order], stream[order]
    same = stream[1:] == stream[:-1]
    return _Part("stream_order", rows[:-1][same], "end", rows[1:][same], "start")


def _between_tracks(
    columns: Columns,
    kind: str,
    pairs: tuple[Int64, Int64],
    times: tuple[Int64, Int64],
    backward: dict[str, int],
) -> _Part:
    """Edges of one kind, from the end of a row, without those that another one between the same two tracks implies.

    Args:
        pairs: rows where each edge begins and ends.
        times: of each row, the time at which an edge from it, or to it, stands.
    """
    (src, dst), (src_time, dst_time), track = pairs, times, columns.track
    known = (src_time[src] != MISSING) & (dst_time[dst] != MISSING)
    src, dst = src[known], dst[known]
    forward = src_time[src] < dst_time[dst]
    if kind != "inter_thread":
        # Two moments at one time may close a circle, but not through the end of an activity that took some.
        forward |= (src_time[src] == dst_time[dst]) & (columns.dur_ns[src] > 0)
    _count(backward, kind, ~forward)
    src, dst = src[forward], dst[forward]
    order = np.lexsort((-src_time[src], dst_time[dst], track[dst], track[src]))
    src, dst = src[order], dst[order]
    if len(src):
        keep = src_time[src] > _running_max(src_time[src], group_numbers(track[src], track[dst]))
        src, dst = src[keep], dst[keep]
    return _Part(kind, src, "end", dst, "end" if kind == "sync" else "start")


def _streams(columns: Columns, rows: Int64) -> Int64:
    return group_numbers(columns.integers("device", rows), columns.integers("stream", rows))


def _frame(part: _Part, keep: Bool) -> pl.DataFrame:
    src, dst = (pl.Series(rows[keep].astype(np.int32, copy=False)) for rows in (part.src, part.dst))
    return pl.DataFrame({"src": src, "dst": dst}).with_columns(
        src_at=pl.lit(part.src_at, dtype=_SIDE),
        dst_at=pl.lit(part.dst_at, dtype=_SIDE),
        kind=pl.lit(part.kind, dtype=_KIND),
    )
