"""CPU threads as segments: each stretch between two begins or ends of rows costs what it took, gaps included.

Rules 2.1, 2.2 and 2.9 of the replay: a segment belongs to the innermost row, or to nobody (Python's own time); a
ProfilerStep cuts, and owns nothing; a thread that runs no operator and launches nothing is passive and left out.
"""

from dataclasses import dataclass

import numpy as np

from chakra_capture.analysis.replay.arrays import by_appearance, ranges
from chakra_capture.analysis.replay.graph import Graph
from chakra_capture.merge.segments import NOBODY, Cut, cut
from chakra_capture.merge.window import Rows, on_active_threads
from chakra_capture.trace.columns import MISSING, Bool, Int64, Ints, Positions, pick


@dataclass(frozen=True, slots=True)
class Threads:
    """All active threads: their marks, which are the distinct begins and ends of rows, one thread after the other.

    Segment k lies between the marks k and k + 1. The last mark of a thread has none; it counts as nobody's.

    Attributes:
        track: of each thread, in the order in which they first appear.
        first: of each thread its first mark, and the end.
        times: of each mark, ns.
        owners: innermost row of each segment, or ``NOBODY``.
        costs: what each segment costs in the replay, ns.
        inner: marks inside of stretches whose cost is derived: where they lie within it is not known.
        points: of the graph, one for each mark.
        rows: thread after thread in time order, parents first.
        begins, ends: by row the marks at which it does; -1 of what is on no active thread.
        end_ns: by row, clipped to the end of the row around it; ``MISSING`` of what is on no active thread.
    """

    track: Int64
    first: Int64
    times: Int64
    owners: Positions
    costs: Int64
    inner: Bool
    points: Positions
    rows: Positions
    begins: Positions
    ends: Positions
    end_ns: Int64

    def __len__(self) -> int:
        return len(self.track)

    def marks(self, thread: int) -> slice:
        """Marks of a thread."""
        return slice(int(self.first[thread]), int(self.first[thread + 1]))

    def of_mark(self, mark: int) -> int:
        """Thread of a mark."""
        return int(np.searchsorted(self.first, mark, "right")) - 1

    @property
    def is_segment(self) -> Bool:
        """Marks after which the thread goes on."""
        found = np.ones(len(self.times), dtype=bool)
        found[self.first[1:] - 1] = False
        return found

    def last_until(self, thread: int, time: int) -> int:
        """The last mark of a thread at or before a time, -1 for none."""
        marks = self.marks(thread)
        at = marks.start + int(np.searchsorted(self.times[marks], time, "right")) - 1
        return at if at >= marks.start else NOBODY

    def set_costs(self, begin: Ints, end: Ints, cost: Int64) -> None:
        """Have the segments between two marks cost ``cost`` together."""
        self.costs[ranges(begin, end)] = 0
        is_there = begin < end
        self.costs[begin[is_there]] = cost[is_there]
        self.inner[ranges(begin + 1, end)] = True

    def called(self, rows: Rows, row: Int64) -> Positions:
        """The calls on active threads that launched some rows; -1 for none."""
        call = rows.launch[row]
        return np.where((call >= 0) & (self.begins[call] >= 0), call, np.int32(-1)) if len(rows) else call


def read_threads(rows: Rows, graph: Graph) -> Threads:
    """Cut all active threads into segments and put their points into the graph."""
    chosen = np.flatnonzero(on_active_threads(rows)).astype(np.int32)
    track, thread = by_appearance(rows.track[chosen])
    found = cut(thread, rows.start[chosen], rows.end[chosen], rows.is_step[chosen])
    first_row = np.searchsorted(thread[found.order], np.arange(len(track) + 1))
    first, times = _marks(found, rows.start[chosen][found.order][first_row[:-1]])
    owners, costs = np.full(len(times), NOBODY, dtype=np.int32), np.zeros(len(times), dtype=np.int64)
    segment = np.arange(len(found.track)) + found.track
    owners[segment] = pick(chosen, found.owner, NOBODY)
    costs[segment] = found.end - found.begin
    begins, ends = (np.full(len(rows), NOBODY, dtype=np.int32) for _ in range(2))
    end_ns = np.full(len(rows), MISSING)
    end_ns[chosen] = found.row_end
    ordered = chosen[found.order]
    for number in range(len(track)):
        mine, marks = ordered[first_row[number] : first_row[number + 1]], slice(*first[number : number + 2].tolist())
        for at, when in ((begins, rows.start[mine]), (ends, end_ns[mine])):
            at[mine] = marks.start + np.searchsorted(times[marks], when)
    inner = np.zeros(len(times), dtype=bool)
    return Threads(track, first, times, owners, costs, inner, graph.points(times), ordered, begins, ends, end_ns)


def _marks(found: Cut, starts: Int64) -> tuple[Int64, Int64]:
    """Of each thread its first mark, and the end; times of all marks.

    A thread whose rows have no duration has one mark, when they start, and no segment.
    """
    num_segments = np.bincount(found.track, minlength=len(starts))
    first = np.append(0, np.cumsum(num_segments + 1))
    times = np.empty(first[-1], dtype=np.int64)
    times[first[:-1]] = starts
    segment = np.arange(len(found.track)) + found.track
    times[segment + 1] = found.end
    return first, times
