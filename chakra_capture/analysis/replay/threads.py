"""CPU threads as segments: each stretch between two begins or ends of rows costs what it took, gaps included.

Rules 2.1, 2.2 and 2.9 of the replay: a segment belongs to the innermost row, or to nobody (Python's own time); a
ProfilerStep cuts, and owns nothing; a thread that runs no operator and launches nothing is passive and left out.
"""

from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field

import numpy as np

from chakra_capture.analysis.replay.graph import Graph
from chakra_capture.analysis.replay.rows import ACTIVITY_KINDS, CPU_KINDS, Rows, Track
from chakra_capture.merge.segments import NOBODY, cut


@dataclass(slots=True)
class Thread:
    """Segments of one thread: segment k lies between the times k and k + 1.

    Attributes:
        rows: in time order, parents first.
        times: distinct begins and ends, ns.
        points: of the graph, one for each time.
        owners: innermost row of each segment, or ``NOBODY``.
        costs: what each segment costs in the replay, ns.
        inner: marks inside of stretches whose cost is derived: where they lie within it is not known.
    """

    track: Track
    rows: list[int]
    times: list[int]
    points: list[int]
    owners: list[int]
    costs: list[int]
    inner: set[int] = field(default_factory=set)

    def at(self, time: int) -> int:
        """Number of the mark at a time that is one."""
        return bisect_left(self.times, time)

    def last_until(self, time: int) -> int:
        """Number of the last mark at or before a time, -1 for none."""
        return bisect_right(self.times, time) - 1

    def is_idle(self, time: int) -> bool:
        """Whether no row runs from a time on."""
        at = self.last_until(time)
        return at < 0 or at >= len(self.owners) or self.owners[at] == NOBODY

    def set_cost(self, begin: int, end: int, cost: int) -> None:
        """Have the segments between two times cost ``cost`` together."""
        first, last = self.at(begin), self.at(end)
        self.costs[first:last] = [0] * (last - first)
        if first < last:
            self.costs[first] = cost
        self.inner.update(range(first + 1, last))


@dataclass(slots=True)
class Threads:
    """All active threads, and where rows begin and end on them (ends clipped to their parent's)."""

    of_track: dict[Track, Thread]
    ends: dict[int, int]

    def of(self, rows: Rows, row: int) -> Thread:
        """The thread of a CPU row that is on one."""
        return self.of_track[rows.track[row]]

    def begin_point(self, rows: Rows, row: int) -> int:
        """Point where a row begins."""
        thread, start = self.of(rows, row), rows.start[row]
        assert start is not None
        return thread.points[thread.at(start)]

    def end_point(self, rows: Rows, row: int) -> int:
        """Point where a row ends."""
        thread = self.of(rows, row)
        return thread.points[thread.at(self.ends[row])]


def read_threads(rows: Rows, graph: Graph) -> Threads:
    """Cut all active threads into segments and put their points into the graph."""
    launching = {rows.launch[row] for row in range(len(rows)) if rows.kind[row] in ACTIVITY_KINDS}
    on_cpu = [row for row in range(len(rows)) if rows.kind[row] in CPU_KINDS and rows.is_timed(row)]
    active = {rows.track[row] for row in on_cpu if rows.kind[row] == "host_op" or row in launching}
    chosen = [row for row in on_cpu if rows.track[row] in active]
    number = {track: place for place, track in enumerate(dict.fromkeys(rows.track[row] for row in chosen))}
    at, start, end = (
        np.array(values, dtype=np.int64)
        for values in (
            [number[rows.track[row]] for row in chosen],
            [rows.start[row] for row in chosen],
            [rows.end[row] for row in chosen],
        )
    )
    found = cut(at, start, end, np.array([rows.step(row) is not None for row in chosen], dtype=bool))
    of_row = np.array([*chosen, NOBODY], dtype=np.int64)  # the last for nobody
    order = of_row[found.order].tolist()
    threads: dict[Track, Thread] = {}
    for track, place in number.items():
        first, last = np.searchsorted(at[found.order], [place, place + 1])
        mine = slice(*np.searchsorted(found.track, [place, place + 1]))
        # A thread whose rows have no duration has one mark, and no segment.
        times = [*found.begin[mine].tolist(), *found.end[mine][-1:].tolist()] or [rows.start[order[first]] or 0]
        costs = (found.end - found.begin)[mine].tolist()
        threads[track] = Thread(
            track, order[first:last], times, graph.points(times), of_row[found.owner[mine]].tolist(), costs
        )
    return Threads(threads, dict(zip(order, found.row_end[found.order].tolist(), strict=True)))
