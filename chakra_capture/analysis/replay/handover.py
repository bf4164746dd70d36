"""Hand-overs between the loop's thread and those of the autograd engine: rule 2.6 of the replay.

What passes until the other thread begins, and until the loop goes on, is work of the engine that no row shows: like any
gap of a thread it costs what it took. (One median for all: steps of the twin pair within 0.03 % still, kernels 18 us
off.)
"""

from chakra_capture.analysis.replay.graph import Graph
from chakra_capture.analysis.replay.rows import Rows, Track
from chakra_capture.analysis.replay.threads import NOBODY, Thread, Threads
from chakra_capture.merge.stretches import Stretches, find_handovers


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
    woken = set()
    for found in find_handovers(_stretches(rows, loop), _stretches(rows, other)):
        begin, end = loop.times[found.at], loop.times[found.at + 1]
        if found.begins is not None:
            wait = other.times[found.begins] - begin
            graph.edge(loop.points[found.at], other.points[found.begins], wait, "hand_over")
            if found.begins:
                other.costs[found.begins - 1] = 0
            else:
                woken.add(other.track)
        if found.ends is not None:
            wait = end - other.times[found.ends]
            graph.edge(other.points[found.ends], loop.points[found.at + 1], wait, "hand_over")
            loop.costs[found.at] = 0
    return woken


def _stretches(rows: Rows, thread: Thread) -> Stretches:
    return Stretches(
        thread.times,
        [owner != NOBODY for owner in thread.owners],
        [owner == NOBODY or rows.kind[owner] != "runtime" for owner in thread.owners],
    )
