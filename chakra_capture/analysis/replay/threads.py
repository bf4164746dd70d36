"""CPU threads as segments: each stretch between two begins or ends of rows costs what it took, gaps included.

Rules 2.1, 2.2 and 2.9 of the replay: a segment belongs to the innermost row, or to nobody (Python's own time); a
ProfilerStep cuts, and owns nothing; a thread that runs no operator and launches nothing is passive and left out.
"""

from bisect import bisect_left, bisect_right
from collections import defaultdict
from dataclasses import dataclass, field
from itertools import pairwise

from chakra_capture.analysis.replay.graph import Graph
from chakra_capture.analysis.replay.rows import ACTIVITY_KINDS, CPU_KINDS, Rows, Track

NOBODY = -1


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
    of_track: dict[Track, list[int]] = defaultdict(list)
    for row in range(len(rows)):
        if rows.kind[row] in CPU_KINDS and rows.is_timed(row):
            of_track[rows.track[row]].append(row)
    threads: dict[Track, Thread] = {}
    ends: dict[int, int] = {}
    for track, found in of_track.items():
        if any(rows.kind[row] == "host_op" or row in launching for row in found):
            threads[track] = _segments(rows, track, found, ends, graph)
    return Threads(threads, ends)


def _segments(rows: Rows, track: Track, found: list[int], ends: dict[int, int], graph: Graph) -> Thread:
    begin, end = rows.start, rows.end
    found.sort(key=lambda row: (begin[row], -(end[row] or 0), row))
    inside: list[int] = []
    for row in found:
        start, stop = begin[row], end[row]
        assert start is not None
        assert stop is not None
        if rows.step(row) is not None:
            ends[row] = stop  # a step begins within a call of the profiler, and goes on after it
            continue
        while inside and ends[inside[-1]] <= start:
            inside.pop()
        ends[row] = min(stop, ends[inside[-1]]) if inside else stop
        inside.append(row)
    times = sorted({begin[row] or 0 for row in found} | {ends[row] for row in found})
    return Thread(
        track,
        found,
        times,
        [graph.point(time) for time in times],
        _owners(rows, found, ends, times),
        [after - before for before, after in pairwise(times)],
    )


def _owners(rows: Rows, found: list[int], ends: dict[int, int], times: list[int]) -> list[int]:
    owners, inside, following = [], list[int](), 0
    for time in times[:-1]:
        while inside and ends[inside[-1]] <= time:
            inside.pop()
        while following < len(found) and (rows.start[found[following]] or 0) <= time:
            row = found[following]
            following += 1
            if ends[row] > time and rows.step(row) is None:
                inside.append(row)
        owners.append(inside[-1] if inside else NOBODY)
    return owners
