"""A replay of one or several ranks: durations and dependencies in, times of all points out.

CPU segments cost what they took; starts on the device, waits for it, and waits for other ranks are derived (class
mode: one median lag per class and trace). The rules, their order and the constants are those measured on real traces.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from chakra_capture.analysis.replay.activities import Activities, add_launches, read_activities
from chakra_capture.analysis.replay.gloo import GlooOperations, add_gloo, no_gloo
from chakra_capture.analysis.replay.graph import Graph, Order
from chakra_capture.analysis.replay.handover import add_handovers
from chakra_capture.analysis.replay.inputs import InputWaits, add_inputs, no_inputs
from chakra_capture.analysis.replay.streams import StreamWaits, add_stream_waits, read_stream_waits
from chakra_capture.analysis.replay.threads import Threads, read_threads
from chakra_capture.analysis.replay.waits import add_blocking_copies, add_full_queues, add_syncs
from chakra_capture.annotations import parse_step
from chakra_capture.merge.window import Rows
from chakra_capture.trace.columns import Int64

# How long some rows take, ns.
Durations = Callable[[Rows, Int64], Int64]

# What can be left out, to see what it buys. A graph with a part of them can be worse than one with none.
RULES = ("stream_order", "sync", "blocking_copies", "hand_over", "event_wait", "full_queue", "contention", "gloo")


@dataclass(frozen=True, slots=True)
class RankReplay:
    """One rank in a replay.

    Attributes:
        clock_ns: added to its times, so that those of all ranks are on one clock.
        num_full: launches that found their queue full.
    """

    rows: Rows
    threads: Threads
    activities: Activities
    waits: StreamWaits
    gloo: GlooOperations
    inputs: InputWaits
    clock_ns: int
    num_full: int

    @property
    def points(self) -> Int64:
        """All points that lie on the rank's window."""
        ran = [side for where in (self.activities, self.gloo) for side in (where.starts, where.ends)]
        return np.concatenate([self.threads.points, *ran])

    @property
    def steps(self) -> list[tuple[int, int, int]]:
        """Number, begin and end of the steps, as points; in time order."""
        rows, threads = self.rows, self.threads
        steps = threads.rows[rows.is_step[threads.rows]]
        begins, ends = (threads.points[marks[steps]].tolist() for marks in (threads.begins, threads.ends))
        numbers = [parse_step(name) for name in rows.name.values]
        codes = rows.name.codes[steps].tolist()
        found = [(numbers[code] or 0, *points) for code, *points in zip(codes, begins, ends, strict=True)]
        return sorted(found, key=lambda step: (step[1], step[2]))


@dataclass(frozen=True, slots=True)
class Met:
    """A rank's part in a collective of several ranks: the edges that its start, its end and its wait hang on.

    Attributes:
        own: from its start to its end; holds nothing while the others are waited for.
        arrives: from its start to when the last has come.
        transfer: from then to its end.
    """

    rank: int
    row: int
    own: int
    arrives: int
    transfer: int


@dataclass(frozen=True)
class Replay:
    """Ranks replayed together.

    Attributes:
        met: parts in collectives that several ranks were replayed together in.
    """

    graph: Graph
    ranks: dict[int, RankReplay]
    met: list[Met]

    @cached_property
    def order(self) -> Order:
        """The order in which points are reached.

        Raises:
            ReplayError: the dependencies go round in a circle.
        """
        return Order.of(self.graph)

    @cached_property
    def times(self) -> Int64:
        """When each point is reached, ns on the clock of the recorded times.

        Raises:
            ReplayError: the dependencies go round in a circle.
        """
        return self.order.solve(self.graph.lag)


@dataclass(frozen=True, slots=True)
class Meeting:
    """One collective: rank -> its row there; it is over when the last has come and the transfer is done."""

    rows: dict[int, int]


def replay(
    ranks: dict[int, Rows],
    meetings: Sequence[Meeting] = (),
    clocks: dict[int, int] | None = None,
    *,
    without: frozenset[str] = frozenset(),
    duration: Durations | None = None,
    inputs: bool = False,
) -> Replay:
    """Replay ranks, together where ``meetings`` says which collectives are one.

    Args:
        clocks: by rank, what to add to its times (ns).
        without: of ``RULES``, those left out.
        duration: ns of device activities; as recorded if not given.
        inputs: have batches from workers be ready when they were. For what-ifs: those are recorded times, so how well
            a replay gives back what was recorded cannot be told with them.
    """
    graph, built, duration = Graph(), dict[int, RankReplay](), duration or _recorded
    for rank, rows in ranks.items():
        first, shift = graph.num_points, (clocks or {}).get(rank, 0)
        built[rank] = _Builder(rows, graph, without, duration, inputs).build(shift)
        graph.shift(first, shift)
    met = [part for meeting in meetings for part in _meet(meeting, built, graph, duration)]
    for part in met:
        graph.lag[part.own] = 0  # it holds a wait for the others, which is derived instead
    return Replay(graph, built, met)


def _recorded(rows: Rows, row: Int64) -> Int64:
    return rows.end[row] - rows.start[row]


@dataclass(frozen=True, slots=True)
class _Builder:
    rows: Rows
    graph: Graph
    without: frozenset[str]
    duration: Durations
    inputs: bool

    def build(self, clock_ns: int) -> RankReplay:
        """Put a rank into the graph."""
        rows, graph, without = self.rows, self.graph, self.without
        threads = read_threads(rows, graph)
        found = read_activities(rows, threads, graph, lambda row: self.duration(rows, row))
        num_full = 0 if "full_queue" in without else add_full_queues(rows, threads, found, graph)
        if "sync" not in without:
            add_syncs(rows, threads, found, graph)
        if "blocking_copies" not in without:
            add_blocking_copies(rows, threads, found, graph)
        inputs = add_inputs(rows, threads, graph) if self.inputs else no_inputs()
        woken = set() if "hand_over" in without else add_handovers(rows, threads, graph)
        waits = read_stream_waits(rows, threads, found)
        if "event_wait" not in without:
            add_stream_waits(found, waits, graph, drains="contention" not in without)
        gloo = no_gloo() if "gloo" in without else add_gloo(rows, threads, graph)
        add_launches(threads, found, graph, in_order="stream_order" not in without)
        goes_on = np.flatnonzero(threads.is_segment)
        graph.edges(threads.points[goes_on], threads.points[goes_on + 1], threads.costs[goes_on], "thread")
        for thread, mark in enumerate(threads.first[:-1].tolist()):
            if thread not in woken:
                graph.anchors[int(threads.points[mark])] = int(threads.times[mark])
        return RankReplay(rows, threads, found, waits, gloo, inputs, clock_ns, num_full)


def _meet(meeting: Meeting, ranks: dict[int, RankReplay], graph: Graph, duration: Durations) -> list[Met]:
    """Every rank's part ends when the last has begun and the transfer is over.

    On devices that is the shortest duration, for all of them: that one did not wait. Gloo's threads end on their own:
    of each rank it is what is left of its duration once the last has begun.
    """
    parts = {rank: part for rank, row in meeting.rows.items() if (part := _part(ranks[rank], row, duration))}
    if len(parts) < 2:
        return []
    met, begun = [], max(part.begin_ns for part in parts.values())
    arrived = graph.point(begun)
    for rank, part in parts.items():
        arrives = graph.edge(part.start, arrived, 0, "collective")
        transfer = min(other.length for other in parts.values())
        if part.is_gloo:
            whole, left = part.end_ns - part.begin_ns, max(part.end_ns - begun, 0)
            transfer = left * part.length // whole if whole else 0
        transfers = graph.edge(arrived, part.end, transfer, "collective")
        met.append(Met(rank, meeting.rows[rank], part.run, arrives, transfers))
    return met


@dataclass(frozen=True, slots=True)
class _Part:
    """What a rank does in a collective: points, the edge between them, when it was, and how long it takes."""

    start: int
    end: int
    run: int
    begin_ns: int
    end_ns: int
    length: int
    is_gloo: bool


def _part(one: RankReplay, row: int, duration: Durations) -> _Part | None:
    for where in (one.activities, one.gloo):
        at = where.at(row)
        if at >= 0:
            points = int(where.starts[at]), int(where.ends[at]), int(where.runs[at])
            begin, end = (int(side[row]) + one.clock_ns for side in (one.rows.start, one.rows.end))
            return _Part(*points, begin, end, int(duration(one.rows, np.array([row]))[0]), where is one.gloo)
    return None
