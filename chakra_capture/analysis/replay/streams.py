"""What an activity waits for on other streams: events, the drain of a large kernel; and what no rule explains.

Rules 3.4, 3.5 and 3.9 of the replay. The tables' edges say of some events what they are for; where they do not, a
collective waits for what its thread computed before, and what is computed after a wait, for the collective before it.
"""

from bisect import bisect_left, bisect_right
from collections import defaultdict
from dataclasses import dataclass, field

from chakra_capture.analysis.replay.activities import BACKLOG_NS, US, Activities, lag_of, launched_at, span
from chakra_capture.analysis.replay.graph import Graph
from chakra_capture.analysis.replay.rows import Rows
from chakra_capture.analysis.replay.threads import Threads

_EVENT_NS = 1 * US
_UNEXPLAINED_NS = 50 * US
_INFERRED_NS = 8 * US
_DRAIN_READY_NS, _DRAIN_NS, _DRAIN, _DRAIN_MOST_NS = 20 * US, 10 * US, 0.05, 400 * US


@dataclass(slots=True)
class StreamWaits:
    """What the activities of a window wait for on other streams.

    Attributes:
        events: activity -> those whose end it waits for.
        drains: activity -> the kernel of another stream that had to end first, though nothing says so (contention).
        anchored: activities that nothing in the window explains, and that stand where they were recorded.
        unexplained_ns: by activity, how much later it starts than all it waits for.
        num_inferred: events that are taken from times alone.
    """

    events: dict[int, list[int]]
    drains: dict[int, int] = field(default_factory=dict)
    anchored: set[int] = field(default_factory=set)
    unexplained_ns: dict[int, int] = field(default_factory=dict)
    num_inferred: int = 0


def read_stream_waits(rows: Rows, threads: Threads, found: Activities) -> StreamWaits:
    """Find the waits, and what is left without one."""
    waits = StreamWaits(defaultdict(list, {row: [*before] for row, before in rows.event_wait.items()}))
    _collectives(rows, threads, found, waits.events)
    ends = sorted((span(rows, row)[1], row) for row in found.rows)
    for row in found.rows:
        _explain(rows, threads, found, waits, ends, row)
    for stream in found.of_stream.values():
        since = launched_at(rows, threads, found, stream[0])
        is_backlog = since is not None and span(rows, stream[0])[0] - since > BACKLOG_NS
        if is_backlog and stream[0] not in waits.drains:
            waits.anchored.add(stream[0])
            waits.unexplained_ns.pop(stream[0], None)
    return waits


def add_stream_waits(rows: Rows, found: Activities, waits: StreamWaits, graph: Graph, *, drains: bool = True) -> None:
    """Put them into the graph."""
    for row, sources in waits.events.items():
        for source in sources:
            if source in found.ends and row in found.starts:
                lag = max(min(_EVENT_NS, span(rows, row)[0] - span(rows, source)[1]), 0)
                graph.edge(found.ends[source], found.starts[row], lag, "event_wait")
    for row, source in waits.drains.items() if drains else ():
        graph.edge(found.ends[source], found.starts[row], 0, "contention")
    for row in waits.anchored:
        graph.anchors[found.starts[row]] = span(rows, row)[0]


def _collectives(rows: Rows, threads: Threads, found: Activities, events: dict[int, list[int]]) -> None:
    """A collective waits for the computation launched before it; what is computed after a wait, for the collective."""
    launched: dict[int, list[int]] = defaultdict(list)
    for row in found.rows:
        if rows.launch[row] in threads.ends:
            launched[rows.launch[row]].append(row)
    for thread in threads.of_track.values():
        computed: int | None = None
        communicated: list[int] = []
        wait: int | None = None
        for call in thread.rows:
            if rows.kind[call] != "runtime":
                continue
            if "StreamWaitEvent" in rows.name[call]:
                wait = call
            for row in sorted(launched.get(call, ()), key=lambda row: span(rows, row)):
                if rows.kind[row] == "kernel" and rows.is_collective[row]:
                    if computed is not None and rows.track[computed] != rows.track[row]:
                        events[row].append(computed)
                    communicated.append(row)
                    continue
                computed = row
                if wait is not None:
                    before = [one for one in communicated if rows.launch[one] < wait and _crosses(rows, one, row)]
                    if before and span(rows, before[-1])[1] <= span(rows, row)[0]:
                        events[row].append(before[-1])
                    wait = None


def _crosses(rows: Rows, one: int, other: int) -> bool:
    """Whether two activities are on two streams of one device."""
    return rows.track[one] != rows.track[other] and rows.track[one][0] == rows.track[other][0]


def _explain(
    rows: Rows, threads: Threads, found: Activities, waits: StreamWaits, ends: list[tuple[int, int]], row: int
) -> None:
    reasons = []
    since, before = launched_at(rows, threads, found, row), found.before.get(row)
    if since is not None:
        reasons.append(since + lag_of(rows, found, row))
    if before is not None:
        reasons.append(span(rows, before)[1] + found.stream_gap_ns)
    reasons += [span(rows, source)[1] + _EVENT_NS for source in waits.events.get(row, ()) if source in found.ends]
    if not reasons:
        waits.anchored.add(row)
        return
    start, ready = span(rows, row)[0], max(reasons)
    if start - ready > _DRAIN_READY_NS and (drained := _drain(rows, ends, row, ready)) is not None:
        waits.drains[row] = drained
    elif start - ready > _INFERRED_NS and (source := _ended_just_now(rows, ends, row)) is not None:
        waits.events[row].append(source)
        waits.num_inferred += 1
    elif start - ready > _UNEXPLAINED_NS:
        waits.unexplained_ns[row] = start - ready


def _drain(rows: Rows, ends: list[tuple[int, int]], row: int, ready: int) -> int | None:
    """A kernel of another stream that ran since the activity was ready, and ends about where it starts."""
    start = span(rows, row)[0]
    at = bisect_left(ends, (start - _DRAIN_MOST_NS, -1))
    while at < len(ends) and ends[at][0] <= start + _DRAIN_MOST_NS:
        end, kernel = ends[at]
        at += 1
        if rows.kind[kernel] != "kernel" or rows.is_collective[kernel] or not _crosses(rows, kernel, row):
            continue
        begun = span(rows, kernel)[0]
        is_near = abs(end - start) <= max(_DRAIN_NS, _DRAIN * (end - begun))
        if is_near and begun <= ready + _DRAIN_NS and begun < start:
            return kernel
    return None


def _ended_just_now(rows: Rows, ends: list[tuple[int, int]], row: int) -> int | None:
    """What ended last on another stream, shortly before the activity starts."""
    start = span(rows, row)[0]
    at = bisect_right(ends, (start, len(rows))) - 1
    while at >= 0 and ends[at][0] >= start - _INFERRED_NS:
        if ends[at][1] != row and _crosses(rows, ends[at][1], row):
            return ends[at][1]
        at -= 1
    return None
