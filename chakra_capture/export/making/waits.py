"""What waits for what in one window, as pairs of points: segments come first, then items.

A stretch of a thread that waits does not carry the time it waited: it begins when what it waits for has ended.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import polars as pl

from chakra_capture.export.making.items import Items, Operations
from chakra_capture.export.making.segments import Segments
from chakra_capture.merge.rows import CODE
from chakra_capture.merge.segments import NOBODY
from chakra_capture.merge.stretches import Stretches, find_handovers
from chakra_capture.merge.window import Rows
from chakra_capture.trace.columns import Bool, Int64

_US = 1_000
# A launch this long, with so many activities of its stream unfinished, waits for a place in the queue.
_FULL_NS, _FULL_FACTOR, _FULL_FROM = 50 * _US, 5, 512
# The last mark of a thread before an operation of a backend ends may begin the wait for it.
_RETURNS_WITHIN_NS, _SHORTEST_NS = 1_000 * _US, 50 * _US
_WAITING = "_c10d_functional::wait_tensor"


@dataclass(slots=True)
class Waits:
    """Dependencies found so far.

    Attributes:
        begin: by segment, when it goes on after all that it waits for, ns.
        src, dst: points; dst begins after src has ended.
        num: how many of each kind there are.
    """

    segments: Segments
    begin: Int64
    num: dict[str, int] = field(default_factory=dict)
    _src: list[Int64] = field(default_factory=list)
    _dst: list[Int64] = field(default_factory=list)

    @property
    def pairs(self) -> tuple[Int64, Int64]:
        """All pairs found so far, none of a point with itself."""
        src, dst = (np.concatenate([np.zeros(0, dtype=np.int64), *parts]) for parts in (self._src, self._dst))
        return src, dst

    def point(self, item: Int64) -> Int64:
        """Points of items; -1 stays."""
        return np.where(item >= 0, item + len(self.segments), -1)

    def add(self, kind: str, src: Int64, dst: Int64) -> None:
        """Have ``dst`` wait for ``src``, where both are there."""
        is_there = (src >= 0) & (dst >= 0) & (src != dst)
        self._src.append(src[is_there])
        self._dst.append(dst[is_there])
        self.num[kind] = self.num.get(kind, 0) + int(np.count_nonzero(is_there))

    def wait(self, kind: str, track: Int64, span: tuple[Int64, Int64], ready: Int64, source: Int64) -> None:
        """Have stretches of threads wait.

        Args:
            span: begins and ends of the stretches, which are marks.
            ready: when ``source``, a point, has ended.
        """
        begun, done = span
        first, last = self.segments.beginning_from(track, begun), self.segments.ending_by(track, done)
        inside = (first >= 0) & (last >= first)
        late = inside & (ready > begun)
        holds = np.clip(self.segments.ending_by(track, ready) + 1, first, np.maximum(first, last))
        target = np.where(late, holds, np.where(inside, last, first))
        self.add(kind, source, target)
        np.maximum.at(self.begin, target[late], np.minimum(ready, self.segments.end[target])[late])
        waited = _ranges(first[late], holds[late])
        self.begin[waited] = self.segments.end[waited]


def _ranges(first: Int64, until: Int64) -> Int64:
    """All numbers of the ranges, one range after the other."""
    counts = until - first
    starts = np.cumsum(counts) - counts
    shifts: Int64 = np.repeat(first - starts, counts)
    return np.arange(len(shifts)) + shifts


def find_waits(rows: Rows, segments: Segments, items: Items, operations: Operations) -> Waits:
    """Find all dependencies of a window, but those of a thread's segments on each other."""
    waits = Waits(segments, segments.begin.copy())
    waits.add("stream", waits.point(items.follows - 1), waits.point(items.follows))
    _launches(rows, segments, items, waits)
    _edges(rows, segments, items, waits)
    _collectives(rows, segments, items, waits)
    _blocking_copies(rows, segments, items, waits)
    _full_queues(rows, segments, items, waits)
    _between_threads(rows, segments, waits)
    _backend(rows, segments, items, operations, waits)
    _in_order_of_groups(items, operations, waits)
    _in_turn(items, operations, waits)
    return waits


def _launches(rows: Rows, segments: Segments, items: Items, waits: Waits) -> None:
    call = rows.launch[items.row]
    launched = np.flatnonzero((call >= 0) & segments.is_active[np.maximum(call, 0)])
    call = call[launched]
    since = np.where(items.blocks[launched], rows.start[call], segments.row_end[call])
    waits.add("launch", segments.ending_by(rows.track[call], since), waits.point(launched))


def _edges(rows: Rows, segments: Segments, items: Items, waits: Waits) -> None:
    """What the table edges says."""
    src, dst = rows.waits["event_wait"]
    waits.add("event_wait", waits.point(items.of_row[src]), waits.point(items.of_row[dst]))
    src, dst = rows.waits["inter_thread"]
    both = segments.is_active[src] & segments.is_active[dst]
    src, dst = src[both], dst[both]
    ended = segments.ending_by(rows.track[src], segments.row_end[src])
    waits.add("inter_thread", ended, segments.beginning_from(rows.track[dst], rows.start[dst]))
    src, dst = rows.waits["sync"]
    known = (items.of_row[src] >= 0) & segments.is_active[dst]
    src, dst = src[known], dst[known]
    span = (rows.start[dst], segments.row_end[dst])
    waits.wait("sync", rows.track[dst], span, rows.end[src], waits.point(items.of_row[src]))


def _collectives(rows: Rows, segments: Segments, items: Items, waits: Waits) -> None:
    """A collective waits for what its thread launched before; what is computed after a wait, for the collective.

    Rule 3.4 of the replay, for traces that say neither stream nor event of these waits.
    """
    call = rows.launch[items.row]
    item = np.flatnonzero((call >= 0) & segments.is_active[np.maximum(call, 0)])
    wait = np.flatnonzero(segments.is_active & rows.named(lambda name: "StreamWaitEvent" in name))
    item, call = np.append(item, np.full(len(wait), -1)), np.append(call[item], wait)
    order = np.lexsort((items.start[item], call, rows.start[call], rows.track[call]))
    item, thread = item[order], rows.track[call[order]]
    is_item, row = item >= 0, items.row[item]
    communicates = is_item & rows.is_kind("kernel")[row] & rows.is_collective[row]
    computes = is_item & ~communicates
    before = _latest(computes, thread)
    asks = np.flatnonzero(communicates & (before >= 0))
    _cross(rows, items, waits, item[before[asks]], item[asks])
    waited = _latest(~is_item, thread)
    behind = np.flatnonzero(computes & (waited > before))
    last = _latest(communicates, thread)[waited[behind]]
    told = last >= 0
    earlier, later = item[last[told]], item[behind[told]]
    fits = items.end[earlier] <= items.start[later]
    _cross(rows, items, waits, earlier[fits], later[fits])


def _cross(rows: Rows, items: Items, waits: Waits, earlier: Int64, later: Int64) -> None:
    """Have items wait for others of the same device on another stream."""
    device = rows.device[items.row]
    crosses = (items.lane[earlier] != items.lane[later]) & (device[earlier] == device[later])
    waits.add("event_wait", waits.point(earlier[crosses]), waits.point(later[crosses]))


def _latest(wanted: Bool, thread: Int64) -> Int64:
    """The last one before each that is wanted, of its thread; -1 for none."""
    latest = np.maximum.accumulate(np.where(wanted, np.arange(len(wanted)), -1))
    before = np.append(-1, latest[:-1])[: len(wanted)]
    return np.where((before >= 0) & (thread[np.maximum(before, 0)] == thread), before, -1)


def _blocking_copies(rows: Rows, segments: Segments, items: Items, waits: Waits) -> None:
    copy = np.flatnonzero(items.blocks)
    call = rows.launch[items.row[copy]]
    span = (rows.start[call], segments.row_end[call])
    waits.wait("blocking_copy", rows.track[call], span, items.end[copy], waits.point(copy))


def _full_queues(rows: Rows, segments: Segments, items: Items, waits: Waits) -> None:
    """A launch on a full queue waits until the activity ends that frees a place (rule 2.5 of the replay)."""
    call = rows.launch[items.row]
    item = np.flatnonzero((call >= 0) & segments.is_active[np.maximum(call, 0)])
    call = call[item]
    begun, done = rows.start[call], segments.row_end[call]
    usual = _median_of_name(rows.name.codes[call], done - begun)
    first_of_lane = np.searchsorted(items.lane, items.lane[item])
    place = item - first_of_lane
    is_long = done - begun > np.maximum(_FULL_NS, _FULL_FACTOR * usual)
    asked = np.flatnonzero(is_long & (place >= _FULL_FROM))
    ended = {name: _num_ended(items, item[asked], when[asked]) for name, when in (("begun", begun), ("done", done))}
    full = place[asked] - ended["begun"] >= _FULL_FROM
    slots = np.median(place[asked][full] - ended["done"][full]) if full.any() else 0
    chosen = asked[full & (place[asked] >= slots)]
    freed = item[chosen] - int(slots)
    call = call[chosen]
    span = (rows.start[call], segments.row_end[call])
    waits.wait("full_queue", rows.track[call], span, items.end[freed], waits.point(freed))


def _median_of_name(name: "np.typing.NDArray[np.signedinteger[Any]]", length: Int64) -> Int64:
    table = pl.DataFrame({"name": name, "length": length})
    return table.select(pl.col("length").median().over("name").cast(pl.Int64)).to_series().to_numpy()


def _num_ended(items: Items, item: Int64, time: Int64) -> Int64:
    """How many items of the lane of each have ended by a time."""
    found = np.zeros(len(item), dtype=np.int64)
    for lane in np.unique(items.lane[item]):
        on_lane = items.lane[item] == lane
        ends = np.maximum.accumulate(items.end[items.lane == lane])
        found[on_lane] = np.searchsorted(ends, time[on_lane], "right")
    return found


def _between_threads(rows: Rows, segments: Segments, waits: Waits) -> None:
    """Hand-overs that only times show, between threads with steps and the others of their process."""
    threads = np.unique(segments.track)
    pid = dict(zip(rows.track[segments.is_active].tolist(), rows.pid[segments.is_active].tolist(), strict=True))
    loops = np.unique(rows.track[rows.is_step & segments.is_active])
    if not len(loops) and len(threads):
        sizes = np.bincount(rows.track[segments.is_active])
        loops = np.array([np.argmax(sizes)])
    stretches = {track: _stretches(rows, segments, track) for track in threads.tolist()} if len(threads) > 1 else {}
    for loop in loops.tolist():
        for other in threads.tolist():
            if other != loop and pid[other] == pid[loop] and loop in stretches:
                _hand_over(waits, stretches, loop, other)


def _stretches(rows: Rows, segments: Segments, track: int) -> Stretches:
    part = _of_thread(segments, track)
    owner = segments.owner[part]
    is_call = (owner != NOBODY) & (rows.kind[np.maximum(owner, 0)] == CODE["runtime"])
    times = np.append(segments.begin[part], segments.end[part.stop - 1])
    return Stretches(times, owner != NOBODY, ~is_call)


def _of_thread(segments: Segments, track: int) -> slice:
    first, last = np.searchsorted(segments.track, [track, track + 1]).tolist()
    return slice(first, last)


def _hand_over(waits: Waits, stretches: dict[int, Stretches], loop: int, other: int) -> None:
    first = {track: _of_thread(waits.segments, track).start for track in (loop, other)}
    pairs = []
    for found in find_handovers(stretches[loop], stretches[other]):
        here = first[loop] + found.at
        if found.begins is not None:
            before = here - 1 if found.at else -1
            gap = first[other] + found.begins - 1
            if found.begins:  # what passes until it goes on stays with it
                waits.begin[gap] = max(waits.begin[gap], stretches[loop].times[found.at])
            pairs.append((before, gap if found.begins else gap + 1))
        if found.ends:
            waits.begin[here] = max(waits.begin[here], stretches[other].times[found.ends])
            pairs.append((first[other] + found.ends - 1, here))
    src, dst = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
    waits.add("hand_over", src, dst)


def _backend(rows: Rows, segments: Segments, items: Items, operations: Operations, waits: Waits) -> None:
    """Communication that a backend runs on threads of its own, or on the thread that asks (rule 2.7 of the replay)."""
    item = np.where(operations.row >= 0, items.of_row[np.maximum(operations.row, 0)], -1)
    on_cpu = np.flatnonzero((item >= 0) & ~rows.is_activity[np.maximum(operations.row, 0)])
    item, row, host = item[on_cpu], operations.row[on_cpu], operations.host_row[on_cpu]
    # Gloo says of a send or recv on the thread that asks how long it takes; the call itself returns before it ends.
    goes_on = (host >= 0) & (rows.track[row] == rows.track[host]) & (rows.end[row] > segments.row_end[row])
    takes_place = segments.is_active[row] & ~goes_on
    _on_active_threads(rows, segments, waits, item[takes_place], (row[takes_place], host[takes_place]))
    asked = (host >= 0) & segments.is_active[np.maximum(host, 0)] & (goes_on | (rows.track[row] != rows.track[host]))
    item, track = item[asked], rows.track[host[asked]]
    waits.add("launch", segments.ending_by(track, rows.start[row[asked]]), waits.point(item))
    ended = items.end[item]
    at = segments.ending_by(track, ended) + 1
    is_there = (at > 0) & (at < len(segments))
    at = np.where(is_there, at, 0)
    owner = segments.owner[at]
    computes = rows.is_kind("host_op") & ~rows.named(lambda name: name.startswith(_WAITING))
    may_wait = (owner == NOBODY) | ~computes[np.maximum(owner, 0)]
    begin, end = segments.begin[at], segments.end[at]
    is_wait = is_there & (segments.track[at] == track) & may_wait
    is_wait &= (end - ended <= _RETURNS_WITHIN_NS) & (end - begin > _SHORTEST_NS)
    chosen = np.flatnonzero(is_wait)
    waits.wait("backend", track[chosen], (begin[chosen], end[chosen]), ended[chosen], waits.point(item[chosen]))


def _on_active_threads(
    rows: Rows, segments: Segments, waits: Waits, item: Int64, ran_and_asked: tuple[Int64, Int64]
) -> None:
    """An operation that runs on a thread with segments takes the place of its own there.

    A backend's thread does nothing until it is given an operation: the time before is no work either.
    """
    row, host = ran_and_asked
    track, begin, end = rows.track[row], rows.start[row], segments.row_end[row]
    asks = (host < 0) | (rows.track[np.maximum(host, 0)] == track)
    before = segments.ending_by(track, begin)
    waits.add("own_thread", before, waits.point(item))
    first, last = segments.beginning_from(track, begin), segments.ending_by(track, end)
    inside = (first >= 0) & (last >= first)
    waited = _ranges(first[inside], last[inside] + 1)
    waits.begin[waited] = segments.end[waited]
    idle = before[(before >= 0) & ~asks]
    idle = idle[segments.owner[idle] == NOBODY]
    waits.begin[idle] = segments.end[idle]
    waits.add("own_thread", waits.point(item), segments.beginning_from(track, end))


def _in_order_of_groups(items: Items, operations: Operations, waits: Waits) -> None:
    """Collectives of a process group run one after the other, as they were issued."""
    known = np.flatnonzero((operations.row >= 0) & (operations.group >= 0))
    known = known[np.argsort(operations.group[known], kind="stable")]
    item = items.of_row[operations.row[known]]
    again = operations.group[known][1:] == operations.group[known][:-1]
    src, dst = item[:-1][again], item[1:][again]
    waits.add("group", waits.point(src), waits.point(dst))


def _in_turn(items: Items, operations: Operations, waits: Waits) -> None:
    """Communication of all groups runs one after the other, where a simulator needs that."""
    known = np.flatnonzero((operations.row >= 0) & (operations.turn >= 0))
    known = known[np.argsort(operations.turn[known], kind="stable")]
    item = items.of_row[operations.row[known]]
    item = item[item >= 0]
    # Of operations that share a kernel the first one counts.
    item = item[np.sort(np.unique(item, return_index=True)[1])]
    waits.add("turn", waits.point(item[:-1]), waits.point(item[1:]))
