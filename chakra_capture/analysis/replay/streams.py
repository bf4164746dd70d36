"""What an activity waits for on other streams: events, the drain of a large kernel; and what no rule explains.

Rules 3.4, 3.5 and 3.9 of the replay. The tables' edges say of some events what they are for; where they do not, a
collective waits for what its thread computed before, and what is computed after a wait, for the collective before it.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from chakra_capture.analysis.replay.activities import BACKLOG_NS, US, Activities
from chakra_capture.analysis.replay.graph import Graph
from chakra_capture.analysis.replay.threads import Threads
from chakra_capture.merge.rows import CODE
from chakra_capture.merge.window import Rows
from chakra_capture.trace.columns import MISSING, Bool, Int64

_EVENT_NS = 1 * US
_UNEXPLAINED_NS = 50 * US
_INFERRED_NS = 8 * US
_DRAIN_READY_NS, _DRAIN_NS, _DRAIN, _DRAIN_MOST_NS = 20 * US, 10 * US, 0.05, 400 * US


@dataclass(slots=True)
class StreamWaits:
    """What the activities of a window wait for on other streams, by their place.

    Attributes:
        events: activities whose end is waited for, and those that wait.
        has_event: whether each waits for one, also for what is no activity.
        drains: activity -> the kernel of another stream that had to end first, though nothing says so (contention).
        anchored: activities that nothing in the window explains, and that stand where they were recorded.
        unexplained_ns: by activity, how much later it starts than all it waits for.
        num_inferred: events that are taken from times alone.
    """

    events: tuple[Int64, Int64]
    has_event: Bool
    drains: dict[int, int] = field(default_factory=dict)
    anchored: set[int] = field(default_factory=set)
    unexplained_ns: dict[int, int] = field(default_factory=dict)
    num_inferred: int = 0


def read_stream_waits(rows: Rows, threads: Threads, found: Activities) -> StreamWaits:
    """Find the waits, and what is left without one."""
    src, dst = (found.place[side] for side in rows.waits["event_wait"])
    has_event = np.zeros(len(found), dtype=bool)
    has_event[dst[dst >= 0]] = True
    inferred = [*_collectives(rows, threads, found)]
    told = np.array(inferred, dtype=np.int64).reshape(-1, 2).T
    known = (src >= 0) & (dst >= 0)
    events = np.append(src[known], told[0]), np.append(dst[known], told[1])
    has_event[told[1]] = True
    waits = StreamWaits(events, has_event)
    _explain(rows, found, waits)
    for first in found.firsts[:-1].tolist():
        since = int(found.since[first])
        if since != MISSING and found.begin[first] - since > BACKLOG_NS and first not in waits.drains:
            waits.anchored.add(first)
            waits.unexplained_ns.pop(first, None)
    return waits


def add_stream_waits(found: Activities, waits: StreamWaits, graph: Graph, *, drains: bool = True) -> None:
    """Put them into the graph."""
    src, dst = waits.events
    lag = np.clip(found.begin[dst] - found.end[src], 0, _EVENT_NS)
    graph.edges(found.ends[src], found.starts[dst], lag, "event_wait")
    if drains:
        after, before = (np.array([*side], dtype=np.int64) for side in (waits.drains.keys(), waits.drains.values()))
        graph.edges(found.ends[before], found.starts[after], 0, "contention")
    anchored = np.array([*waits.anchored], dtype=np.int64)
    graph.anchors.update(zip(found.starts[anchored].tolist(), found.begin[anchored].tolist(), strict=True))


def _collectives(rows: Rows, threads: Threads, found: Activities) -> Iterator[tuple[int, int]]:
    """A collective waits for the computation launched before it; what is computed after a wait, for the collective."""
    row = found.rows
    is_collective = rows.is_collective[row] & (rows.kind[row] == CODE["kernel"])
    place, call, thread = _in_order_of_calls(rows, threads, found)
    is_item = place >= 0
    communicates = is_item & is_collective[place] if len(found) else is_item
    if not communicates.any():
        return
    before = _latest(is_item & ~communicates, thread)
    asks = np.flatnonzero(communicates & (before >= 0))
    earlier, later = place[before[asks]], place[asks]
    crosses = found.stream[earlier] != found.stream[later]
    yield from zip(earlier[crosses].tolist(), later[crosses].tolist(), strict=True)
    waited, communicated = _latest(~is_item, thread), np.flatnonzero(communicates)
    for at in np.flatnonzero(is_item & ~communicates & (waited > before)).tolist():
        one, wait = place[at], call[waited[at]]
        for last in communicated[: np.searchsorted(communicated, at)][::-1].tolist():
            if thread[last] != thread[at]:
                break
            if call[last] < wait and _crosses(rows, found, int(place[last]), int(one)):
                if found.end[place[last]] <= found.begin[one]:
                    yield int(place[last]), int(one)
                break


def _in_order_of_calls(rows: Rows, threads: Threads, found: Activities) -> tuple[Int64, Int64, Int64]:
    """Activities (-1: none, a wait for an event), the calls that launch them and their threads, as the calls follow."""
    is_call = (rows.kind == CODE["runtime"]) & (threads.begins >= 0)
    wait = np.flatnonzero(is_call & rows.named(lambda name: "StreamWaitEvent" in name))
    launched = np.flatnonzero((found.call >= 0) & is_call[found.call]) if len(rows) else found.rows
    place = np.append(np.full(len(wait), -1), launched)
    call = np.append(wait, found.call[launched].astype(np.int64))
    turn = np.empty(len(rows), dtype=np.int64)
    turn[threads.rows] = np.arange(len(threads.rows))
    is_item = place >= 0
    begin, end = (np.append(np.zeros(len(wait), dtype=np.int64), side[launched]) for side in (found.begin, found.end))
    order = np.lexsort((end, begin, is_item, turn[call]))
    call = call[order]
    return place[order], call, np.searchsorted(threads.first, threads.begins[call], "right")


def _latest(wanted: Bool, thread: Int64) -> Int64:
    """The last one before each that is wanted, of its thread; -1 for none."""
    latest = np.maximum.accumulate(np.where(wanted, np.arange(len(wanted)), -1))
    before = np.append(-1, latest[:-1])[: len(wanted)]
    return np.where((before >= 0) & (thread[np.maximum(before, 0)] == thread), before, -1)


def _crosses(rows: Rows, found: Activities, one: int, other: int) -> bool:
    """Whether two activities are on two streams of one device."""
    is_one_device = rows.device[found.rows[one]] == rows.device[found.rows[other]]
    return bool(found.stream[one] != found.stream[other] and is_one_device)


def _explain(rows: Rows, found: Activities, waits: StreamWaits) -> None:
    ready = np.where(found.since != MISSING, found.since + np.where(found.since != MISSING, found.lag, 0), MISSING)
    after = np.flatnonzero(found.follows)
    ready[after] = np.maximum(ready[after], found.end[after - 1] + found.stream_gap_ns)
    src, dst = waits.events
    np.maximum.at(ready, dst, found.end[src] + _EVENT_NS)
    is_told = ready != MISSING
    waits.anchored.update(np.flatnonzero(~is_told).tolist())
    late = np.where(is_told, found.begin - np.where(is_told, ready, 0), 0)
    others, more = _Others(rows, found), list[tuple[int, int]]()
    for place in np.flatnonzero(late > _INFERRED_NS).tolist():
        drained = others.drained(place, int(ready[place])) if late[place] > _DRAIN_READY_NS else None
        if drained is not None:
            waits.drains[place] = drained
        elif (source := others.ended_just_now(place)) is not None:
            more.append((source, place))
        elif late[place] > _UNEXPLAINED_NS:
            waits.unexplained_ns[place] = int(late[place])
    waits.num_inferred = len(more)
    told = np.array(more, dtype=np.int64).reshape(-1, 2).T
    waits.events = np.append(src, told[0]), np.append(dst, told[1])
    waits.has_event[told[1]] = True


class _Others:
    """Activities of a device in the order in which they end: what one of another stream of it may have waited for."""

    def __init__(self, rows: Rows, found: Activities) -> None:
        self._found = found
        self._by_end = np.lexsort((found.rows, found.end))
        row = found.rows[self._by_end]
        self._begin, self._end, self._stream = rows.start[row], rows.end[row], found.stream[self._by_end]
        self._device = rows.device[row]
        self._computes = (rows.kind[row] == CODE["kernel"]) & ~rows.is_collective[row]
        self._of_place = rows.device[found.rows]

    def drained(self, place: int, ready: int) -> int | None:
        """A kernel of another stream that ran since an activity was ready, and ends about where it starts."""
        start = int(self._found.begin[place])
        near = self._between(start - _DRAIN_MOST_NS, start + _DRAIN_MOST_NS)
        begin, end = self._begin[near], self._end[near]
        is_near = np.abs(end - start) <= np.maximum(_DRAIN_NS, _DRAIN * (end - begin))
        fits = self._computes[near] & self._crosses(near, place) & is_near & (begin <= ready + _DRAIN_NS)
        at = np.flatnonzero(fits & (begin < start))
        return int(self._by_end[near][at[0]]) if len(at) else None

    def ended_just_now(self, place: int) -> int | None:
        """What ended last on another stream, shortly before an activity starts."""
        start = int(self._found.begin[place])
        near = self._between(start - _INFERRED_NS, start)
        at = np.flatnonzero(self._crosses(near, place))
        return int(self._by_end[near][at[-1]]) if len(at) else None

    def _between(self, first: int, last: int) -> slice:
        return slice(int(np.searchsorted(self._end, first)), int(np.searchsorted(self._end, last, "right")))

    def _crosses(self, near: slice, place: int) -> Bool:
        return np.asarray(
            (self._stream[near] != self._found.stream[place]) & (self._device[near] == self._of_place[place])
        )
