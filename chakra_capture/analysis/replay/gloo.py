"""Collectives of gloo: each is shown on a thread of gloo's from when it is queued until it is done.

Rule 2.7 of the replay. The last operator of ``c10d`` before it launches it, on whichever thread; a stretch of that
thread that ends shortly after it is done is the wait for it.
"""

from bisect import bisect_right
from dataclasses import dataclass, field
from itertools import pairwise

from chakra_capture.analysis.replay.activities import US, median_of, span
from chakra_capture.analysis.replay.graph import Graph
from chakra_capture.analysis.replay.rows import GLOO, Rows
from chakra_capture.analysis.replay.threads import Threads
from chakra_capture.merge.segments import NOBODY

_C10D = "c10d::"
_WAITING = "_c10d_functional::wait_tensor"
_RETURNS_WITHIN_NS = 1_000 * US
_SHORTEST_NS = 50 * US


@dataclass(slots=True)
class GlooOperations:
    """Rows ``gloo:*`` on threads of their own, with the points where they begin and end."""

    starts: dict[int, int] = field(default_factory=dict)
    ends: dict[int, int] = field(default_factory=dict)


def add_gloo(rows: Rows, threads: Threads, graph: Graph) -> GlooOperations:
    """Put the operations and what waits for them into the graph."""
    found = GlooOperations()
    for row in range(len(rows)):
        is_gloo = rows.kind[row] == "annotation" and rows.name[row].startswith(GLOO) and rows.is_timed(row)
        if is_gloo and rows.track[row] not in threads.of_track:
            start, end = span(rows, row)
            found.starts[row], found.ends[row] = graph.point(start), graph.point(end)
    if not found.starts:
        return found
    calls = sorted((span(rows, row)[0], row) for row in threads.ends if rows.name[row].startswith(_C10D))
    launches = {row: _launch(rows, calls, row) for row in found.starts}
    lags = [span(rows, row)[0] - span(rows, call)[0] for row, call in launches.items() if call is not None]
    waits = {row: _wait(rows, threads, row, call) for row, call in launches.items() if call is not None}
    returns = [end - span(rows, row)[1] for row, wait in waits.items() if wait is not None for end in [wait[1]]]
    for before, after in pairwise(sorted(found.starts, key=lambda row: (rows.track[row], span(rows, row)))):
        if rows.track[before] == rows.track[after]:  # a thread of gloo's does one after the other
            graph.edge(found.ends[before], found.starts[after], 0, "thread")
    for row, call in launches.items():
        graph.edge(found.starts[row], found.ends[row], span(rows, row)[1] - span(rows, row)[0], "run")
        if call is None:
            graph.anchors[found.starts[row]] = span(rows, row)[0]
            continue
        graph.edge(threads.begin_point(rows, call), found.starts[row], median_of(lags, 0), "launch")
        wait = waits[row]
        if wait is not None:
            thread = threads.of(rows, call)
            thread.set_cost(*wait, 0)
            graph.edge(found.ends[row], thread.points[thread.at(wait[1])], median_of(returns, 0), "sync")
    return found


def _launch(rows: Rows, calls: list[tuple[int, int]], row: int) -> int | None:
    at = bisect_right(calls, (span(rows, row)[0], len(rows))) - 1
    return calls[at][1] if at >= 0 else None


def _wait(rows: Rows, threads: Threads, row: int, call: int) -> tuple[int, int] | None:
    """Begin and end of the segment of the launching thread in which an operation is waited for."""
    thread, end = threads.of(rows, call), span(rows, row)[1]
    at = thread.last_until(end)
    if not 0 <= at < len(thread.costs):
        return None
    begin, returned, owner = thread.times[at], thread.times[at + 1], thread.owners[at]
    # Python's own time, or an operator that waits: any other computes.
    may_wait = owner == NOBODY or rows.kind[owner] != "host_op" or rows.name[owner].startswith(_WAITING)
    is_wait = may_wait and returned - end <= _RETURNS_WITHIN_NS and returned - begin > _SHORTEST_NS
    return (begin, returned) if is_wait else None
