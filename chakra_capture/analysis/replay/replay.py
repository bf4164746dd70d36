"""A replay of one or several ranks: durations and dependencies in, times of all points out.

CPU segments cost what they took; starts on the device, waits for it, and waits for other ranks are derived (class
mode: one median lag per class and trace). The rules, their order and the constants are those measured on real traces.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from chakra_capture.analysis.replay.activities import Activities, add_launches, read_activities, span
from chakra_capture.analysis.replay.gloo import GlooOperations, add_gloo
from chakra_capture.analysis.replay.graph import Graph
from chakra_capture.analysis.replay.handover import add_handovers
from chakra_capture.analysis.replay.inputs import InputWaits, add_inputs
from chakra_capture.analysis.replay.rows import Rows
from chakra_capture.analysis.replay.streams import StreamWaits, add_stream_waits, read_stream_waits
from chakra_capture.analysis.replay.threads import Threads, read_threads
from chakra_capture.analysis.replay.waits import add_blocking_copies, add_full_queues, add_syncs

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
    def times(self) -> list[int]:
        """When each point is reached, ns on the clock of the recorded times.

        Raises:
            ReplayError: the dependencies go round in a circle.
        """
        return self.graph.solve()


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
    duration: Callable[[Rows, int], int] | None = None,
    inputs: bool = False,
) -> Replay:
    """Replay ranks, together where ``meetings`` says which collectives are one.

    Args:
        clocks: by rank, what to add to its times (ns).
        without: of ``RULES``, those left out.
        duration: ns of a device activity; as recorded if not given.
        inputs: have batches from workers be ready when they were. For what-ifs: those are recorded times, so how well
            a replay gives back what was recorded cannot be told with them.
    """
    graph, built, duration = Graph(), dict[int, RankReplay](), duration or _recorded
    for rank, rows in ranks.items():
        first = len(graph.recorded)
        shift = (clocks or {}).get(rank, 0)
        built[rank] = _Builder(rows, graph, without, duration, inputs).build(shift)
        graph.recorded[first:] = [time + shift for time in graph.recorded[first:]]
        graph.anchors.update({point: time + shift for point, time in graph.anchors.items() if point >= first})
    run_edges = {src: edge for edge, src in enumerate(graph.src) if graph.kind[edge] == "run"} if meetings else {}
    met = [part for meeting in meetings for part in _meet(meeting, built, graph, run_edges, duration)]
    return Replay(graph, built, met)


def _recorded(rows: Rows, row: int) -> int:
    start, end = span(rows, row)
    return end - start


@dataclass(frozen=True, slots=True)
class _Builder:
    rows: Rows
    graph: Graph
    without: frozenset[str]
    duration: Callable[[Rows, int], int]
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
        inputs = add_inputs(rows, threads, graph) if self.inputs else InputWaits()
        woken = set() if "hand_over" in without else add_handovers(rows, threads, graph)
        waits = read_stream_waits(rows, threads, found)
        if "event_wait" not in without:
            add_stream_waits(rows, found, waits, graph, drains="contention" not in without)
        gloo = GlooOperations() if "gloo" in without else add_gloo(rows, threads, graph)
        add_launches(rows, threads, found, graph, in_order="stream_order" not in without)
        for thread in threads.of_track.values():
            graph.chain(thread.points, thread.costs, "thread")
            if thread.track not in woken:
                graph.anchors[thread.points[0]] = thread.times[0]
        return RankReplay(rows, threads, found, waits, gloo, inputs, clock_ns, num_full)


def _meet(
    meeting: Meeting,
    ranks: dict[int, RankReplay],
    graph: Graph,
    run_edges: dict[int, int],
    duration: Callable[[Rows, int], int],
) -> list[Met]:
    """Every rank's part ends when the last has begun and the transfer is over.

    On devices that is the shortest duration, for all of them: that one did not wait. Gloo's threads end on their own:
    of each rank it is what is left of its duration once the last has begun.
    """
    starts, ends, lengths = dict[int, int](), dict[int, int](), dict[int, int]()
    for rank, row in meeting.rows.items():
        for where in (ranks[rank].activities, ranks[rank].gloo):
            if row in where.starts:
                starts[rank], ends[rank] = where.starts[row], where.ends[row]
                lengths[rank] = duration(ranks[rank].rows, row)
    if len(starts) < 2:
        return []
    met = []
    begun = max(graph.recorded[point] for point in starts.values())
    arrived = graph.point(begun)
    for rank in starts:
        own, first = run_edges[starts[rank]], len(graph.src)
        graph.lag[own] = 0  # it holds a wait for the others, which is derived instead
        met.append(Met(rank, meeting.rows[rank], own, first, first + 1))
        graph.edge(starts[rank], arrived, 0, "collective")
        transfer = min(lengths.values())
        if meeting.rows[rank] in ranks[rank].gloo.starts:
            whole = graph.recorded[ends[rank]] - graph.recorded[starts[rank]]
            left = max(graph.recorded[ends[rank]] - begun, 0)
            transfer = left * lengths[rank] // whole if whole else 0
        graph.edge(arrived, ends[rank], transfer, "collective")
    return met
