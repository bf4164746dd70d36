"""Calls that wait for the device: their wait is derived, and what is left of them costs what it costs without one.

Rules 2.3 to 2.5 of the replay: synchronising calls, copies that block their own call, and launches that find the
queue of their stream full.
"""

from collections import defaultdict
from functools import cached_property
from itertools import pairwise

import numpy as np

from chakra_capture.analysis.replay.activities import US, Activities
from chakra_capture.analysis.replay.arrays import look_up, median_of, medians
from chakra_capture.analysis.replay.graph import Graph
from chakra_capture.analysis.replay.threads import Threads
from chakra_capture.merge.rows import CODE
from chakra_capture.merge.window import Rows
from chakra_capture.trace.columns import Int64, Positions

_DEVICE_WIDE = ("DeviceSynchronize", "CtxSynchronize")
_SYNCS = (*_DEVICE_WIDE, "StreamSynchronize", "EventSynchronize")
_CALL_NS, _RETURN_NS = 6 * US, 8 * US
_USUAL_COPY_NS = 2 * US
# An event wait without a record is for what ends so long before it returns.
_NEAR_NS = 30 * US
# 1024 slots, some of which records of events take.
_QUEUE_SLOTS = 1022
_FULL_FROM, _FULL_NS, _FULL_FACTOR, _FREED_NS = 512, 50 * US, 5, 2 * US


def add_syncs(rows: Rows, threads: Threads, found: Activities, graph: Graph) -> None:
    """Have synchronising calls wait for the work they are for."""
    calls = _outer_syncs(rows, threads)
    sources = _Sources(rows, threads, found).of_all(calls.tolist())
    free: dict[int, list[int]] = defaultdict(list)
    late: dict[int, list[int]] = defaultdict(list)
    begun, done, name = (side[calls].tolist() for side in (rows.start, threads.end_ns, rows.name.codes))
    waited = [int(found.end[places].max()) if len(places) else None for places in sources]
    for call, until in enumerate(waited):
        if until is None or until <= begun[call]:
            free[name[call]].append(done[call] - begun[call])
        else:
            late[name[call]].append(done[call] - until)
    lags = {code: median_of(np.array(of_name), _RETURN_NS) for code, of_name in late.items()}
    for call, (row, until) in enumerate(zip(calls.tolist(), waited, strict=True)):
        if until is None:
            continue
        # With nothing left to wait for it keeps its duration, and the edge: a slower device makes it wait.
        if until > begun[call]:
            cost = min(min(free[name[call]], default=_CALL_NS), done[call] - begun[call])
            threads.set_costs(threads.begins[[row]], threads.ends[[row]], np.array([cost]))
        places = sources[call]
        back = np.full(len(places), threads.points[threads.ends[row]])
        graph.edges(found.ends[places], back, lags.get(name[call], _RETURN_NS), "sync")


def _outer_syncs(rows: Rows, threads: Threads) -> Int64:
    """Calls that synchronise, in the order of the threads; not the driver's within the runtime's."""
    is_sync = (rows.kind == CODE["runtime"]) & rows.named(lambda name: name.endswith(_SYNCS))
    calls = threads.rows[is_sync[threads.rows]]
    parent = rows.parent[calls]
    return np.asarray(calls[(parent < 0) | ~is_sync[parent]])


class _Sources:
    """What synchronising calls wait for: as the tables say, or else by the order of launches."""

    def __init__(self, rows: Rows, threads: Threads, found: Activities) -> None:
        self._rows, self._threads, self._found = rows, threads, found

    def of_all(self, calls: list[int]) -> list[Int64]:
        """Places of the activities whose end lets each call return."""
        told: dict[int, list[int]] = defaultdict(list)
        for src, dst in zip(*(side.tolist() for side in self._rows.waits["sync"]), strict=True):
            told[dst].append(src)
        known = {call: self._found.place[np.array(rows)] for call, rows in told.items()}
        return [known[call][known[call] >= 0] if call in known else np.array(self._of(call), int) for call in calls]

    def _of(self, call: int) -> list[int]:
        begun, done = int(self._rows.start[call]), int(self._threads.end_ns[call])
        name = self._rows.name[call] or ""
        if name.endswith("EventSynchronize"):
            at = int(np.searchsorted(self._ends, done, "right")) - 1
            is_near = at >= 0 and self._ends[at] > max(begun, done - _NEAR_NS)
            return [int(self._by_end[at])] if is_near else []
        if name.endswith(_DEVICE_WIDE):
            return self._of_all_streams(begun)
        launches, places = self._of_thread[int(self._rows.track[call])]
        at = int(np.searchsorted(launches, call)) - 1
        return [int(places[at])] if at >= 0 else []

    @cached_property
    def _by_end(self) -> Int64:
        return np.lexsort((self._found.rows, self._found.end))

    @cached_property
    def _ends(self) -> Int64:
        return self._found.end[self._by_end]

    @cached_property
    def _of_thread(self) -> dict[int, tuple[Int64, Int64]]:
        """By track the launch calls, in order of their rows, and the places of what they launch."""
        rows, found = self._rows, self._found
        known = np.flatnonzero(found.call >= 0)
        known = known[np.lexsort((found.rows[known], found.call[known]))]
        track = rows.track[found.call[known]]
        mine = {one: known[track == one] for one in self._threads.track.tolist()}
        return {one: (found.call[places], places) for one, places in mine.items()}

    @cached_property
    def _launched(self) -> list[tuple[int, Int64]]:
        """Of each stream its first place, and when each of its activities was launched at the latest.

        What has no launch here was launched before the trace began.
        """
        found, firsts = self._found, self._found.firsts.tolist()
        begun = np.where(found.call >= 0, self._rows.start[found.call], -1)
        return [(first, np.maximum.accumulate(begun[first:end])) for first, end in pairwise(firsts)]

    def _of_all_streams(self, begun: int) -> list[int]:
        at = [(first, int(np.searchsorted(launched, begun)) - 1) for first, launched in self._launched]
        return [first + last for first, last in at if last >= 0]


def add_blocking_copies(rows: Rows, threads: Threads, found: Activities, graph: Graph) -> None:
    """A call that blocks returns when its copy is done."""
    copies = np.flatnonzero((rows.kind[found.rows] == CODE["memcpy"]) & (found.call >= 0))
    call, blocking = found.call[copies], found.blocking[copies]
    took = threads.end_ns[call] - rows.start[call]
    usual = np.full(len(rows.name.values) + 1, np.iinfo(np.int64).max)
    np.minimum.at(usual, rows.name.codes[call[~blocking]], took[~blocking])
    usual[usual == np.iinfo(np.int64).max] = _USUAL_COPY_NS
    copies, call, took = copies[blocking], call[blocking], took[blocking]
    late = median_of(threads.end_ns[call] - found.end[copies], _RETURN_NS)
    threads.set_costs(threads.begins[call], threads.ends[call], np.minimum(usual[rows.name.codes[call]], took))
    graph.edges(found.ends[copies], threads.points[threads.ends[call]], late, "sync")


def add_full_queues(rows: Rows, threads: Threads, found: Activities, graph: Graph) -> int:
    """A launch on a full queue waits for a slot; returns how many did."""
    known = np.flatnonzero(found.call >= 0)
    call = found.call[known]
    place = known - found.firsts[found.stream[known]]
    begun, done = rows.start[call], threads.end_ns[call]
    usual = _usual_durations(rows, threads, call)
    is_long = done - begun > np.maximum(_FULL_NS, _FULL_FACTOR * usual)
    asked = np.flatnonzero(is_long & (place >= _FULL_FROM))
    full = asked[place[asked] - _num_ended(found, known[asked], begun[asked]) >= _FULL_FROM]
    slots = median_of(place[full] - _num_ended(found, known[full], done[full]), _QUEUE_SLOTS)
    threads.set_costs(threads.begins[call[full]], threads.ends[call[full]], usual[full])
    # Where the queue was never full a slower device may fill it; so every launch waits for its slot.
    later = np.flatnonzero(place >= slots)
    freed = found.ends[known[later] - slots]
    graph.edges(freed, threads.points[threads.ends[call[later]]], _FREED_NS, "queue")
    return len(full)


def _usual_durations(rows: Rows, threads: Threads, calls: Positions) -> Int64:
    """Of each call the median of those of its name that launch anything."""
    is_call = np.zeros(len(rows), dtype=bool)
    is_call[calls] = True
    distinct = np.flatnonzero(is_call)
    name, took = rows.name.codes.astype(np.int64), threads.end_ns[distinct] - rows.start[distinct]
    return look_up(*medians(name[distinct], took), name[calls], 0)


def _num_ended(found: Activities, places: Int64, times: Int64) -> Int64:
    """How many activities of the stream of each have ended by a time."""
    firsts, number = found.firsts, np.zeros(len(places), dtype=np.int64)
    for stream in np.unique(found.stream[places]).tolist():
        mine = found.stream[places] == stream
        ends = np.maximum.accumulate(found.end[firsts[stream] : firsts[stream + 1]])
        number[mine] = np.searchsorted(ends, times[mine], "right")
    return number
