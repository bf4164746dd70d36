"""Calls that wait for the device: their wait is derived, and what is left of them costs what it costs without one.

Rules 2.3 to 2.5 of the replay: synchronising calls, copies that block their own call, and launches that find the
queue of their stream full.
"""

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable
from itertools import accumulate
from statistics import median

from chakra_capture.analysis.replay.activities import US, Activities, median_of, span
from chakra_capture.analysis.replay.graph import Graph
from chakra_capture.analysis.replay.rows import Rows, Track
from chakra_capture.analysis.replay.threads import Threads

_DEVICE_WIDE = ("DeviceSynchronize", "CtxSynchronize")
_SYNCS = (*_DEVICE_WIDE, "StreamSynchronize", "EventSynchronize")
_CALL_NS, _RETURN_NS = 6 * US, 8 * US
# An event wait without a record is for what ends so long before it returns.
_NEAR_NS = 30 * US
# 1024 slots, some of which records of events take.
_QUEUE_SLOTS = 1022
_FULL_FROM, _FULL_NS, _FULL_FACTOR, _FREED_NS = 512, 50 * US, 5, 2 * US


def add_syncs(rows: Rows, threads: Threads, found: Activities, graph: Graph) -> None:
    """Have synchronising calls wait for the work they are for."""
    calls = [row for thread in threads.of_track.values() for row in thread.rows if _is_outer_sync(rows, row)]
    read = _Sources(rows, threads, found)
    sources = {call: rows.sync.get(call) or read.of(call) for call in calls}
    free: dict[str, list[int]] = defaultdict(list)
    late: dict[str, list[int]] = defaultdict(list)
    for call in calls:
        begun, done = _call_span(rows, threads, call)
        waited = _latest(rows, found, sources[call])
        if waited is None or waited <= begun:
            free[rows.name[call]].append(done - begun)
        else:
            late[rows.name[call]].append(done - waited)
    for call in calls:
        begun, done = _call_span(rows, threads, call)
        name, waited = rows.name[call], _latest(rows, found, sources[call])
        if waited is None:
            continue
        # With nothing left to wait for it keeps its duration, and the edge: a slower device makes it wait.
        if waited > begun:
            cost = min(free[name]) if free[name] else _CALL_NS
            threads.of(rows, call).set_cost(begun, done, min(cost, done - begun))
        for source in sources[call]:
            if source in found.ends:
                lag = median_of(late[name], _RETURN_NS)
                graph.edge(found.ends[source], threads.end_point(rows, call), lag, "sync")


class _Sources:
    """What a synchronising call waits for where the tables have no edge, by the order of launches."""

    def __init__(self, rows: Rows, threads: Threads, found: Activities) -> None:
        self._rows, self._threads, self._found = rows, threads, found
        self._by_end = sorted((span(rows, row)[1], row) for row in found.rows)
        self._of_thread: dict[Track, list[tuple[int, int]]] = defaultdict(list)
        for row in found.rows:
            if rows.launch[row] in threads.ends:
                self._of_thread[rows.track[rows.launch[row]]].append((rows.launch[row], row))
        for launched in self._of_thread.values():
            launched.sort()
        streams = found.of_stream.values()
        self._of_stream = [(stream, _launch_times(rows, threads, stream)) for stream in streams]

    def of(self, call: int) -> list[int]:
        """The activities whose end lets the call return."""
        begun, done = _call_span(self._rows, self._threads, call)
        name = self._rows.name[call]
        if name.endswith("EventSynchronize"):
            at = bisect_right(self._by_end, (done, len(self._rows))) - 1
            is_near = at >= 0 and self._by_end[at][0] > max(begun, done - _NEAR_NS)
            return [self._by_end[at][1]] if is_near else []
        if name.endswith(_DEVICE_WIDE):
            return self._of_all_streams(begun)
        launched = self._of_thread[self._rows.track[call]]
        at = bisect_left(launched, (call, -1)) - 1
        return [launched[at][1]] if at >= 0 else []

    def _of_all_streams(self, begun: int) -> list[int]:
        last = []
        for stream, launched in self._of_stream:
            at = bisect_left(launched, begun) - 1
            if at >= 0:
                last.append(stream[at])
        return last


def _launch_times(rows: Rows, threads: Threads, stream: list[int]) -> list[int]:
    """When each activity of a stream was launched at the latest; what has no launch here was before the trace began."""
    calls = (rows.launch[row] for row in stream)
    begun = ((rows.start[call] or 0) if call in threads.ends else -1 for call in calls)
    return [*accumulate(begun, max)]


def add_blocking_copies(rows: Rows, threads: Threads, found: Activities, graph: Graph) -> None:
    """A call that blocks returns when its copy is done."""
    usual: dict[str, list[int]] = defaultdict(list)
    late = []
    for row in found.rows:
        call = rows.launch[row]
        if rows.kind[row] == "memcpy" and call in threads.ends:
            begun, done = _call_span(rows, threads, call)
            if row in found.blocking:
                late.append(done - span(rows, row)[1])
            else:
                usual[rows.name[call]].append(done - begun)
    for row in found.blocking:
        call = rows.launch[row]
        begun, done = _call_span(rows, threads, call)
        cost = min(usual[rows.name[call]], default=2 * US)
        threads.of(rows, call).set_cost(begun, done, min(cost, done - begun))
        graph.edge(found.ends[row], threads.end_point(rows, call), median_of(late, _RETURN_NS), "sync")


def add_full_queues(rows: Rows, threads: Threads, found: Activities, graph: Graph) -> int:
    """A launch on a full queue waits for a slot; returns how many did."""
    usual = _usual_durations(rows, threads, found)
    full: list[tuple[int, int, list[int]]] = []
    seen = []
    for stream in found.of_stream.values():
        ends = [span(rows, row)[1] for row in stream]
        for place, row in enumerate(stream):
            call = rows.launch[row]
            if call not in threads.ends:
                continue
            begun, done = _call_span(rows, threads, call)
            is_long = done - begun > max(_FULL_NS, _FULL_FACTOR * usual[rows.name[call]])
            if is_long and place - bisect_right(ends, begun) >= _FULL_FROM:
                seen.append(place - bisect_right(ends, done))
                full.append((call, place, stream))
    slots = median_of(seen, _QUEUE_SLOTS)
    for call, _, _ in full:
        begun, done = _call_span(rows, threads, call)
        threads.of(rows, call).set_cost(begun, done, usual[rows.name[call]])
    # Where the queue was never full a slower device may fill it; so every launch waits for its slot.
    for stream in found.of_stream.values():
        for place in range(slots, len(stream)):
            call = rows.launch[stream[place]]
            if call in threads.ends:
                freed = found.ends[stream[place - slots]]
                graph.edge(freed, threads.end_point(rows, call), _FREED_NS, "queue")
    return len(full)


def _usual_durations(rows: Rows, threads: Threads, found: Activities) -> dict[str, int]:
    durations: dict[str, list[int]] = defaultdict(list)
    for call in {rows.launch[row] for row in found.rows} & threads.ends.keys():
        begun, done = _call_span(rows, threads, call)
        durations[rows.name[call]].append(done - begun)
    return {name: int(median(found)) for name, found in durations.items()}


def _is_outer_sync(rows: Rows, row: int) -> bool:
    """Whether a call synchronises, and is not the driver's within the runtime's."""
    if rows.kind[row] != "runtime" or not rows.name[row].endswith(_SYNCS):
        return False
    parent = rows.parent[row]
    return not (parent >= 0 and rows.kind[parent] == "runtime" and rows.name[parent].endswith(_SYNCS))


def _call_span(rows: Rows, threads: Threads, call: int) -> tuple[int, int]:
    start = rows.start[call]
    assert start is not None
    return start, threads.ends[call]


def _latest(rows: Rows, found: Activities, sources: Iterable[int]) -> int | None:
    return max((span(rows, row)[1] for row in sources if row in found.ends), default=None)
