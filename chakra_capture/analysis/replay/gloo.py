"""Collectives of gloo: each is shown on a thread of gloo's from when it is queued until it is done.

Rule 2.7 of the replay. The last operator of ``c10d`` before it launches it, on whichever thread; a stretch of that
thread that ends shortly after it is done is the wait for it.
"""

from dataclasses import dataclass

import numpy as np

from chakra_capture.analysis.replay.activities import US
from chakra_capture.analysis.replay.arrays import median_of
from chakra_capture.analysis.replay.graph import Graph
from chakra_capture.analysis.replay.threads import Threads
from chakra_capture.merge.rows import CODE
from chakra_capture.merge.segments import NOBODY
from chakra_capture.merge.window import Rows
from chakra_capture.trace.columns import Bool, Int64, Positions

# gloo's own threads show each operation from when it is queued until it is done.
GLOO = "gloo:"
_C10D = "c10d::"
_WAITING = "_c10d_functional::wait_tensor"
_RETURNS_WITHIN_NS = 1_000 * US
_SHORTEST_NS = 50 * US


@dataclass(frozen=True, slots=True)
class GlooOperations:
    """Rows ``gloo:*`` on threads of their own.

    Attributes:
        starts, ends: points of the graph.
        runs: edges from the one to the other.
    """

    rows: Int64
    starts: Positions
    ends: Positions
    runs: Int64

    def __len__(self) -> int:
        return len(self.rows)

    def at(self, row: int) -> int:
        """Place of the operation of a row, -1 for none."""
        at = np.flatnonzero(self.rows == row)
        return int(at[0]) if len(at) else -1


def no_gloo() -> GlooOperations:
    """None at all."""
    none, no_point = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int32)
    return GlooOperations(none, no_point, no_point, none)


def add_gloo(rows: Rows, threads: Threads, graph: Graph) -> GlooOperations:
    """Put the operations and what waits for them into the graph."""
    is_gloo = (rows.kind == CODE["annotation"]) & rows.is_timed & rows.named(lambda name: name.startswith(GLOO))
    row = np.flatnonzero(is_gloo)
    row = row[~np.isin(rows.track[row], threads.track)]
    begin, end = rows.start[row], rows.end[row]
    starts, ends = graph.points(np.stack([begin, end], axis=1).reshape(-1)).reshape(-1, 2).T
    found = GlooOperations(row, starts, ends, graph.edges(starts, ends, end - begin, "run"))
    if not len(row):
        return found
    order = np.lexsort((end, begin, rows.track[row]))
    again = rows.track[row[order]][1:] == rows.track[row[order]][:-1]  # a thread does one after the other
    graph.edges(ends[order][:-1][again], starts[order][1:][again], 0, "thread")
    call = _launches(rows, threads, begin)
    unknown = call == NOBODY
    graph.anchors.update(zip(starts[unknown].tolist(), begin[unknown].tolist(), strict=True))
    told = np.flatnonzero(~unknown)
    lag = median_of(begin[told] - rows.start[call[told]], 0)
    graph.edges(threads.points[threads.begins[call[told]]], starts[told], lag, "launch")
    mark, is_wait = _waits(rows, threads, call[told], end[told])
    told, mark = told[is_wait], mark[is_wait]
    threads.set_costs(mark, mark + 1, np.zeros(len(mark), dtype=np.int64))
    returns = median_of(threads.times[mark + 1] - end[told], 0)
    graph.edges(ends[told], threads.points[mark + 1], returns, "sync")
    return found


def _launches(rows: Rows, threads: Threads, begin: Int64) -> Int64:
    """The last operator of c10d that begins before each operation, -1 for none."""
    calls = threads.rows[rows.named(lambda name: name.startswith(_C10D))[threads.rows]]
    calls = calls[np.lexsort((calls, rows.start[calls]))]
    at = np.searchsorted(rows.start[calls], begin, "right")
    return np.append(NOBODY, calls)[at]


def _waits(rows: Rows, threads: Threads, call: Int64, end: Int64) -> tuple[Int64, Bool]:
    """Segments of the launching threads within which operations end, and whether they are waits for these."""
    thread = np.searchsorted(threads.first, threads.begins[call], "right") - 1
    at = [threads.last_until(*one) for one in zip(thread.tolist(), end.tolist(), strict=True)]
    mark = np.array(at, dtype=np.int64)
    is_there = (mark != NOBODY) & threads.is_segment[mark]
    after = np.minimum(mark + 1, len(threads.times) - 1)
    begun, returned, owner = threads.times[mark], threads.times[after], threads.owners[mark]
    # Python's own time, or an operator that waits: any other computes.
    waits = rows.named(lambda name: name.startswith(_WAITING)) | (rows.kind != CODE["host_op"])
    may_wait = (owner == NOBODY) | waits[owner]
    is_short = (returned - end <= _RETURNS_WITHIN_NS) & (returned - begun > _SHORTEST_NS)
    return mark, is_there & may_wait & is_short
