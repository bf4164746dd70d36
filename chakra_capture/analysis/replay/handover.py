"""Hand-overs between the loop's thread and those of the autograd engine: rule 2.6 of the replay.

What passes until the other thread begins, and until the loop goes on, is work of the engine that no row shows: like any
gap of a thread it costs what it took. (One median for all: steps of the twin pair within 0.03 % still, kernels 18 us
off.)
"""

from chakra_capture.analysis.replay.graph import Graph
from chakra_capture.analysis.replay.rows import Rows, Track
from chakra_capture.analysis.replay.threads import Thread, Threads
from chakra_capture.merge.segments import NOBODY
from chakra_capture.merge.stretches import Stretches, find_handovers


def add_handovers(rows: Rows, threads: Threads, graph: Graph) -> set[Track]:
    """Join the threads; returns those whose first row something wakes."""
    woken, loops = set(), _loops(rows, threads)
    for track in loops:
        for other in threads.of_track.values():
            if other.track != track and other.track[0] == track[0] and len(other.times) > 1:
                woken |= _join(rows, threads.of_track[track], other, graph)
    return woken | _begun(threads, loops, woken, graph)


def _begun(threads: Threads, loops: list[Track], woken: set[Track], graph: Graph) -> set[Track]:
    """Threads that nothing is seen to wake begin their work after what the loop did last, as long as they did."""
    found = set()
    for track, thread in threads.of_track.items():
        loop = next((one for one in loops if one[0] == track[0]), None)
        if track in woken or track in loops or loop is None:
            continue
        since = threads.of_track[loop].last_until(thread.times[0] - 1)
        if since >= 0:
            lag = thread.times[0] - threads.of_track[loop].times[since]
            graph.edge(threads.of_track[loop].points[since], thread.points[0], lag, "begin")
            found.add(track)
    return found


def _loops(rows: Rows, threads: Threads) -> list[Track]:
    """Threads that hold the steps; without steps the process's main thread, or else the one that works first."""
    found = [
        track for track, thread in threads.of_track.items() if any(rows.step(row) is not None for row in thread.rows)
    ]
    return (
        found or sorted(threads.of_track, key=lambda track: (track[0] != track[1], threads.of_track[track].times))[:1]
    )


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
