"""Hand-overs between the loop's thread and those of the autograd engine: no event marks them.

Rule 2.6 of the replay. A long stretch of the loop's thread in which another thread of its process is busy most of the
time is a wait for it: the other one begins at the start of the stretch, and its latest mark before the end ends it.
What passes until the other begins, and until the loop goes on, is work of the engine that no row shows: like any gap of
a thread it costs what it took. (One median for all: steps of the twin pair within 0.03 % still, kernels 18 us off.)
"""

from bisect import bisect_left, bisect_right
from itertools import accumulate

from chakra_capture.analysis.replay.activities import US
from chakra_capture.analysis.replay.graph import Graph
from chakra_capture.analysis.replay.rows import Rows, Track
from chakra_capture.analysis.replay.threads import NOBODY, Thread, Threads

_SHORTEST_NS = 150 * US
_BEGINS_WITHIN_NS, _BEGINS_WITHIN = 500 * US, 0.20
_ENDS_WITHIN_NS, _ENDS_WITHIN = 400 * US, 0.05


def add_handovers(rows: Rows, threads: Threads, graph: Graph) -> set[Track]:
    """Join the threads; returns those whose first row something wakes."""
    woken = set()
    for track in _loops(rows, threads):
        for other in threads.of_track.values():
            if other.track != track and other.track[0] == track[0] and len(other.times) > 1:
                woken |= _join(rows, threads.of_track[track], other, graph)
    return woken


def _loops(rows: Rows, threads: Threads) -> list[Track]:
    """Threads that hold the steps; without steps the one with the most rows."""
    found = [
        track for track, thread in threads.of_track.items() if any(rows.step(row) is not None for row in thread.rows)
    ]
    largest = sorted(threads.of_track, key=lambda track: -len(threads.of_track[track].rows))
    return found or largest[:1]


def _join(rows: Rows, loop: Thread, other: Thread, graph: Graph) -> set[Track]:
    woken, busy = set(), _Busy(other)
    for at, (begin, end) in enumerate(zip(loop.times, loop.times[1:], strict=False)):
        length, owner = end - begin, loop.owners[at]
        is_call = owner != NOBODY and rows.kind[owner] == "runtime"
        if length <= _SHORTEST_NS or is_call or busy.between(begin, end) <= length / 2:
            continue
        first = bisect_left(other.times, begin)
        wakes = other.is_idle(begin) and first < len(other.times)
        if wakes and other.times[first] - begin <= max(_BEGINS_WITHIN_NS, _BEGINS_WITHIN * length):
            graph.edge(loop.points[at], other.points[first], other.times[first] - begin, "hand_over")
            if first:
                other.costs[first - 1] = 0
            else:
                woken.add(other.track)
        last = other.last_until(end)
        ends = last >= 0 and other.times[last] > begin
        if ends and end - other.times[last] <= max(_ENDS_WITHIN_NS, _ENDS_WITHIN * length):
            graph.edge(other.points[last], loop.points[at + 1], end - other.times[last], "hand_over")
            loop.costs[at] = 0
    return woken


class _Busy:
    """How long a thread runs rows between two times."""

    def __init__(self, thread: Thread) -> None:
        self._times = thread.times
        lengths = [
            after - before if owner != NOBODY else 0
            for before, after, owner in zip(thread.times, thread.times[1:], thread.owners, strict=False)
        ]
        self._until = [0, *accumulate(lengths)]
        self._owners = thread.owners

    def between(self, begin: int, end: int) -> int:
        return self._before(end) - self._before(begin)

    def _before(self, time: int) -> int:
        at = bisect_right(self._times, time) - 1
        if at < 0:
            return 0
        if at >= len(self._owners):
            return self._until[-1]
        return self._until[at] + (time - self._times[at] if self._owners[at] != NOBODY else 0)
