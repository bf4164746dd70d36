"""Device activities: order on their stream, the launch they wait for, and what that takes: one median per class.

Rules 3.1 to 3.3 and 3.7 of the replay. A kernel's launch latency is counted from the end of its launch call, that of a
copy that blocks its call from the begin. Which class an activity is in: its kind, the name of the call, and whether it
is a collective. Never the recorded lag of the activity itself: with those any graph gives back what it was made from.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from chakra_capture.analysis.replay.arrays import by_appearance, look_up, median_of, medians
from chakra_capture.analysis.replay.graph import Graph
from chakra_capture.analysis.replay.threads import Threads
from chakra_capture.merge.rows import CODE
from chakra_capture.merge.window import Rows
from chakra_capture.trace.columns import MISSING, Bool, Int64, Positions

US = 1_000
# What is launched so long before its predecessor ends has waited for that alone.
_LAUNCHED_BEFORE_NS = 20 * US
# The first activity of a stream that starts later waits for something launched before the window.
BACKLOG_NS = 200 * US
_DEFAULT_LAUNCH_NS, _DEFAULT_GAP_NS = 2 * US, 1 * US
_BLOCKING_CALLS = frozenset({"cudaMemcpy", "hipMemcpy", "hipMemcpyWithStream"})
_RETURN_NS = 10 * US


@dataclass(frozen=True, slots=True)
class Activities:
    """The activities of a window by place: stream after stream, in time order; times in ns.

    Attributes:
        rows: of each activity.
        place: by row that of its activity, -1 for none.
        stream: number of each one's stream, in the order in which they first appear.
        begin, end: as recorded.
        starts, ends: points of the graph.
        runs: edges from the one to the other.
        follows: whether the one before is on the same stream.
        call: row of the call that launched it, on an active thread; -1 for none.
        blocking: copies whose launch call returns when they are done.
        since: when its launch latency counts from; ``MISSING`` without a launch.
        lag: launch latency of its class.
        stream_gap_ns: between two activities of a stream that were both launched long before.
    """

    rows: Int64
    place: Int64
    stream: Int64
    begin: Int64
    end: Int64
    starts: Positions
    ends: Positions
    runs: Int64
    follows: Bool
    call: Positions
    blocking: Bool
    since: Int64
    lag: Int64
    stream_gap_ns: int

    def __len__(self) -> int:
        return len(self.rows)

    def at(self, row: int) -> int:
        """Place of the activity of a row, -1 for none."""
        return int(self.place[row])

    @property
    def firsts(self) -> Int64:
        """Place of the first activity of each stream, and the end."""
        return np.append(np.flatnonzero(~self.follows), len(self))


def read_activities(rows: Rows, threads: Threads, graph: Graph, duration: Callable[[Int64], Int64]) -> Activities:
    """Put all activities into the graph, each with its duration, and learn the lags of the trace."""
    row = np.flatnonzero(rows.is_activity & rows.is_timed)
    stream = by_appearance(rows.track[row])[1]
    order = np.lexsort((rows.start[row], stream))
    row, stream = row[order], stream[order]
    begin, end = rows.start[row], rows.end[row]
    starts, ends = graph.points(np.stack([begin, end], axis=1).reshape(-1)).reshape(-1, 2).T
    runs = graph.edges(starts, ends, duration(row), "run")
    place = np.full(len(rows), -1)
    place[row] = np.arange(len(row))
    follows = np.append(False, stream[1:] == stream[:-1])[: len(row)]
    call = threads.called(rows, row)
    blocking = _blocking(rows, threads, row, call)
    since = np.full(len(row), MISSING)
    since[call >= 0] = np.where(blocking, rows.start[call], threads.end_ns[call])[call >= 0]
    lag = _lags(_classes(rows, row, call, blocking), begin, np.roll(end, 1), since, follows)
    gap = _gap(threads, begin, end, follows, call)
    return Activities(row, place, stream, begin, end, starts, ends, runs, follows, call, blocking, since, lag, gap)


def add_launches(threads: Threads, found: Activities, graph: Graph, *, in_order: bool = True) -> None:
    """Have every activity wait for its launch, and with ``in_order`` for the one before it on its stream."""
    known = np.flatnonzero(found.call >= 0)
    call = found.call[known]
    mark = np.where(found.blocking[known], threads.begins[call], threads.ends[call])
    graph.edges(threads.points[mark], found.starts[known], found.lag[known], "launch")
    if in_order:
        after = np.flatnonzero(found.follows)
        graph.edges(found.ends[after - 1], found.starts[after], found.stream_gap_ns, "stream_order")


def _blocking(rows: Rows, threads: Threads, row: Int64, call: Positions) -> Bool:
    may_block = rows.named(lambda name: "Pageable" in name)[row]
    found = (rows.kind[row] == CODE["memcpy"]) & (call >= 0)
    found &= may_block | rows.named(_BLOCKING_CALLS.__contains__)[call]
    found &= rows.end[row] <= threads.end_ns[call] + _RETURN_NS
    return np.asarray(found & (threads.end_ns[call] - rows.start[call] > rows.end[row] - rows.start[row]))


def _classes(rows: Rows, row: Int64, call: Positions, blocking: Bool) -> Int64:
    """Number of each activity's class; those of one kind that block, or do not, are alike in the lowest digits."""
    name = np.where(call >= 0, rows.name.codes[call].astype(np.int64) + 1, 0)
    kind = rows.kind[row].astype(np.int64)
    return ((name * 2 + rows.is_collective[row]) * len(CODE) + kind) * 2 + blocking


def _gap(threads: Threads, begin: Int64, end: Int64, follows: Bool, call: Positions) -> int:
    after = np.flatnonzero(follows & (call >= 0))
    done = end[after - 1]
    waited = threads.end_ns[call[after]] < done - _LAUNCHED_BEFORE_NS
    return median_of((begin[after] - done)[waited], _DEFAULT_GAP_NS)


def _lags(classes: Int64, begin: Int64, before: Int64, since: Int64, follows: Bool) -> Int64:
    """Launch latency of each activity's class, learned from those that found their stream idle.

    Args:
        before: when the activity before each was over.
    """
    is_idle = (since != MISSING) & ~(follows & (before > since))
    lag = np.where(since != MISSING, begin - np.where(since != MISSING, since, 0), 0)
    seen = np.flatnonzero(is_idle & (follows | (lag <= BACKLOG_NS)))
    known, usual = medians(classes[seen], lag[seen])
    wide = 2 * len(CODE)
    alike, alike_usual = medians(known % wide, usual)
    others = look_up(alike, alike_usual, classes % wide, _DEFAULT_LAUNCH_NS)
    return np.where(np.isin(classes, known), look_up(known, usual, classes, 0), others)
