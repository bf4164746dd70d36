"""Hand-overs between the loop's thread and those of the autograd engine: rule 2.6 of the replay.

What passes until the other thread begins, and until the loop goes on, is work of the engine that no row shows: like any
gap of a thread it costs what it took. (One median for all: steps of the twin pair within 0.03 % still, kernels 18 us
off.)
"""

import numpy as np

from chakra_capture.analysis.replay.graph import Graph
from chakra_capture.analysis.replay.threads import Threads
from chakra_capture.merge.rows import CODE
from chakra_capture.merge.segments import NOBODY
from chakra_capture.merge.stretches import Stretches, find_handovers
from chakra_capture.merge.window import Rows
from chakra_capture.trace.columns import Int64


def add_handovers(rows: Rows, threads: Threads, graph: Graph) -> set[int]:
    """Join the threads; returns those whose first row something wakes."""
    pid, tid = (side[threads.rows[_first_rows(threads)]].tolist() for side in (rows.pid, rows.tid))
    woken, loops = set[int](), _loops(rows, threads, pid, tid)
    stretches = [_stretches(rows, threads, thread) for thread in range(len(threads))] if len(threads) > 1 else []
    for loop in loops:
        for other in range(len(threads)):
            if other != loop and pid[other] == pid[loop] and len(stretches[other].times) > 1:
                woken |= _join(threads, graph, (loop, other), (stretches[loop], stretches[other]))
    return woken | _begun(threads, loops, woken, pid, graph)


def _first_rows(threads: Threads) -> Int64:
    """Of each thread the place of its first row."""
    return np.searchsorted(threads.begins[threads.rows], threads.first[:-1])


def _begun(threads: Threads, loops: list[int], woken: set[int], pid: list[int], graph: Graph) -> set[int]:
    """Threads that nothing is seen to wake begin their work after what the loop did last, as long as they did."""
    found = set()
    for thread, mark in enumerate(threads.first[:-1].tolist()):
        loop = next((one for one in loops if pid[one] == pid[thread]), None)
        if thread in woken or thread in loops or loop is None:
            continue
        begun = int(threads.times[mark])
        since = threads.last_until(loop, begun - 1)
        if since >= 0:
            lag = begun - int(threads.times[since])
            graph.edge(int(threads.points[since]), int(threads.points[mark]), lag, "begin")
            found.add(thread)
    return found


def _loops(rows: Rows, threads: Threads, pid: list[int], tid: list[int]) -> list[int]:
    """Threads that hold the steps; without steps the process's main thread, or else the one that works first."""
    steps = threads.rows[rows.is_step[threads.rows]]
    found = np.unique(np.searchsorted(threads.first, threads.begins[steps], "right") - 1).tolist()
    times = [threads.times[threads.marks(thread)].tolist() for thread in range(len(threads))] if not found else []
    return found or sorted(range(len(threads)), key=lambda one: (pid[one] != tid[one], times[one]))[:1]


def _join(threads: Threads, graph: Graph, pair: tuple[int, int], stretches: tuple[Stretches, Stretches]) -> set[int]:
    woken = set()
    first, first_other = (threads.marks(thread).start for thread in pair)
    for found in find_handovers(*stretches):
        at = first + found.at
        if found.begins is not None:
            begins = first_other + found.begins
            wait = int(threads.times[begins] - threads.times[at])
            graph.edge(int(threads.points[at]), int(threads.points[begins]), wait, "hand_over")
            if found.begins:
                threads.costs[begins - 1] = 0
            else:
                woken.add(pair[1])
        if found.ends is not None:
            ends = first_other + found.ends
            wait = int(threads.times[at + 1] - threads.times[ends])
            graph.edge(int(threads.points[ends]), int(threads.points[at + 1]), wait, "hand_over")
            threads.costs[at] = 0
    return woken


def _stretches(rows: Rows, threads: Threads, thread: int) -> Stretches:
    marks = threads.marks(thread)
    owners = threads.owners[marks][:-1]
    is_call = (owners != NOBODY) & (rows.kind[np.maximum(owners, 0)] == CODE["runtime"])
    return Stretches(threads.times[marks], owners != NOBODY, ~is_call)
