"""One window of a rank as nodes with times, durations and dependencies: what is written, before it is bytes."""

import heapq
from collections import Counter
from dataclasses import dataclass

import numpy as np
import polars as pl

from chakra_capture.export.making.items import Items, Operations, find_items
from chakra_capture.export.making.segments import Segments, cut_threads
from chakra_capture.export.making.waits import Waits, find_waits
from chakra_capture.merge.segments import NOBODY
from chakra_capture.merge.window import Rows
from chakra_capture.trace.columns import Bool, Int64

_US = 1_000


@dataclass(frozen=True, slots=True)
class Nodes:
    """Nodes in the order of their ids, which is one in which they can run.

    Attributes:
        row: row of the merged nodes; -1 of time in which no row runs.
        start_ns: when it begins to work: of what waits, when the wait is over.
        duration_ns: of communication that shares a kernel, 0 but for the first.
        duration_us: rounding is carried on along each thread and stream.
        lane: thread or stream, as ``Rows.track``.
        on_cpu: runs on a thread.
        operation: number of its communication operation, -1 for none.
        src, dst: nodes; dst begins after src has ended; by dst, then src, each pair once.
    """

    row: Int64
    start_ns: Int64
    duration_ns: Int64
    duration_us: Int64
    lane: Int64
    on_cpu: Bool
    operation: Int64
    src: Int64
    dst: Int64

    def __len__(self) -> int:
        return len(self.row)


@dataclass(frozen=True, slots=True)
class Window:
    """What a window of a rank becomes.

    Attributes:
        counts: what was joined, or left out, and how often.
        num_edges: dependencies found, by kind.
    """

    nodes: Nodes
    segments: Segments
    counts: Counter[str]
    num_edges: dict[str, int]


def make_window(rows: Rows, operations: Operations, *, join: bool) -> Window:
    """Turn the rows of a window into nodes.

    Args:
        join: make one node of the segments of an operator between which nothing else is waited for.
    """
    segments = cut_threads(rows)
    items = find_items(rows, segments, operations)
    waits = find_waits(rows, segments, items, operations)
    counts = Counter[str]()
    first = _first_of_nodes(rows, segments, waits, join=join)
    made = _Made(rows, segments, items, operations, waits, first, counts)
    nodes = made.nodes()
    if join and len(segments) > len(first):
        counts["CPU segments joined to the one before"] = len(segments) - len(first)
    return Window(nodes, segments, counts, waits.num)


def _first_of_nodes(rows: Rows, segments: Segments, waits: Waits, *, join: bool) -> Int64:
    """The segment with which each node of a thread begins."""
    size = len(segments)
    if not join or not size:
        return np.arange(size)
    is_first = np.append(True, segments.track[1:] != segments.track[:-1])
    cuts = is_first.copy()
    src, dst = waits.pairs
    cuts[dst[dst < size]] = True
    after = src[src < size - 1] + 1
    cuts[after[after < size]] = True
    steps = np.flatnonzero(rows.is_step & segments.is_active)
    for time in (rows.start[steps], segments.row_end[steps]):
        at = segments.beginning_from(rows.track[steps], time)
        cuts[at[at >= 0]] = True
    own = _outermost_op(rows, segments)[segments.owner]
    takes_time = (segments.end > waits.begin) | is_first
    own = own[np.maximum.accumulate(np.where(takes_time, np.arange(size), 0))]
    cuts[1:] |= own[1:] != own[:-1]
    return np.flatnonzero(cuts)


def _outermost_op(rows: Rows, segments: Segments) -> Int64:
    """By row, the outermost operator or call around it; of a row in none itself, of Python's functions nobody.

    The last is that of nobody.
    """
    works = rows.is_kind("host_op", "runtime")
    found = np.arange(len(rows))
    at, up = np.flatnonzero(segments.is_active), segments.parent[segments.is_active]
    while len(at):
        inside = up >= 0
        at, up = at[inside], up[inside]
        found[at] = np.where(works[up], up, found[at])
        up = segments.parent[up]
    found[rows.is_kind("python_function")[found]] = NOBODY
    return np.append(found, NOBODY)


@dataclass(frozen=True, slots=True)
class _Made:
    """Puts nodes together: those of threads first, then those of items."""

    rows: Rows
    segments: Segments
    items: Items
    operations: Operations
    waits: Waits
    first: Int64
    counts: Counter[str]

    def nodes(self) -> Nodes:
        segments, items = self.segments, self.items
        operation, item = self._operations_of_items()
        num_threads = len(self.first)
        is_extra = np.append(False, item[1:] == item[:-1])[: len(item)]
        cost = segments.end - self.waits.begin
        thread_ns = np.add.reduceat(cost, self.first) if num_threads else cost
        item_ns = np.where(is_extra, 0, (items.end - items.start)[item])
        start = np.concatenate([self.waits.begin[self.first], items.start[item]])
        lane = np.concatenate([segments.track[self.first], items.lane[item]])
        duration = np.concatenate([thread_ns, item_ns])
        src, dst = self._dependencies(item, operation)
        order = _running_order(start, start + duration, src, dst, self.counts)
        place = np.empty(len(order), dtype=np.int64)
        place[order] = np.arange(len(order))
        src, dst = place[src], place[dst]
        forward = src < dst
        if not forward.all():
            self.counts["dependencies left out that close a circle"] += int(np.count_nonzero(~forward))
        src, dst = _distinct(src[forward], dst[forward], len(order))
        row = np.concatenate([self._thread_rows(), items.row[item]])
        on_cpu = np.arange(len(row)) < num_threads
        return Nodes(
            row[order],
            start[order],
            duration[order],
            _microseconds(lane[order], duration[order]),
            lane[order],
            on_cpu[order],
            np.concatenate([np.full(num_threads, -1), operation])[order],
            src,
            dst,
        )

    def _thread_rows(self) -> Int64:
        """The row that names each node of a thread: of one segment its owner, of several the operator around them."""
        owner = self.segments.owner[self.first]
        several = np.diff(self.first, append=len(self.segments)) > 1
        return np.where(several, _outermost_op(self.rows, self.segments)[owner], owner)

    def _operations_of_items(self) -> tuple[Int64, Int64]:
        """Operation and item of each node that is no segment: an item with several operations has a node for each."""
        ran = self.operations.row
        item_of = np.where(ran >= 0, self.items.of_row[np.maximum(ran, 0)], -1)
        known = np.flatnonzero(item_of >= 0)
        without = np.setdiff1d(np.arange(len(self.items)), item_of[known])
        if num_lost := len(item_of) - len(known):
            self.counts["communication operations without times, left out"] += num_lost
        item = np.concatenate([without, item_of[known]])
        operation = np.concatenate([np.full(len(without), -1), known])
        order = np.lexsort((operation, item))
        return operation[order], item[order]

    def _dependencies(self, item: Int64, operation: Int64) -> tuple[Int64, Int64]:
        """Pairs of nodes from pairs of points; of an item with several nodes, each waits and each is waited for."""
        size, num_threads = len(self.segments), len(self.first)
        node_of = np.cumsum(np.isin(np.arange(size), self.first)) - 1
        first_of = np.searchsorted(item, np.arange(len(self.items) + 1)) + num_threads
        src, dst = self.waits.pairs
        begin = np.append(node_of, first_of[:-1])
        number = np.append(np.ones(size, dtype=np.int64), np.diff(first_of))
        src_nodes, at = _spread(begin[src], number[src])
        dst = dst[at]
        dst_nodes, at = _spread(begin[dst], number[dst])
        chain = np.flatnonzero(self.segments.track[self.first][1:] == self.segments.track[self.first][:-1])
        together = self._within_items(item, operation) + num_threads
        src = np.concatenate([src_nodes[at], chain, together])
        dst = np.concatenate([dst_nodes, chain + 1, together + 1])
        return src[src != dst], dst[src != dst]

    def _within_items(self, item: Int64, operation: Int64) -> Int64:
        """Nodes that another one of the same kernel waits for: the next collective of the same group."""
        groups = np.append(self.operations.group, -1)[operation]
        same = (item[1:] == item[:-1]) & (groups[1:] == groups[:-1]) & (groups[1:] >= 0)
        return np.flatnonzero(same)


def _spread(first: Int64, number: Int64) -> tuple[Int64, Int64]:
    """All of several ranges of numbers, and of which range each is."""
    at = np.repeat(np.arange(len(first)), number)
    starts = np.cumsum(number) - number
    return first[at] + np.arange(len(at)) - starts[at], at


def _distinct(src: Int64, dst: Int64, size: int) -> tuple[Int64, Int64]:
    pairs = np.unique(dst * max(size, 1) + src)
    return pairs % max(size, 1), pairs // max(size, 1)


def _running_order(start: Int64, end: Int64, src: Int64, dst: Int64, counts: Counter[str]) -> Int64:
    """Nodes in order of time, or, where a dependency goes against it, in one that all dependencies allow."""
    order = np.lexsort((np.arange(len(start)), end, start))
    place = np.empty(len(order), dtype=np.int64)
    place[order] = np.arange(len(order))
    against = np.count_nonzero(place[src] >= place[dst])
    if not against:
        return order
    counts["dependencies against the recorded times"] += int(against)
    return order[_allowed(place[src], place[dst], len(order))]


def _allowed(src: Int64, dst: Int64, size: int) -> Int64:
    """Numbers below ``size``, lowest first as dependencies allow; what is on a circle goes where it stands."""
    by_src = np.argsort(src, kind="stable")
    waiting = dst[by_src].tolist()
    first = np.searchsorted(src[by_src], np.arange(size + 1)).tolist()
    missing = np.bincount(dst, minlength=size).tolist()
    ready = [node for node in range(size) if not missing[node]]
    done, order, stuck = bytearray(size), list[int](), 0
    while len(order) < size:
        if not ready:  # a circle: its first goes without waiting
            while done[stuck]:
                stuck += 1
            ready.append(stuck)
        node = heapq.heappop(ready)
        if done[node]:
            continue
        done[node] = 1
        order.append(node)
        for other in waiting[first[node] : first[node + 1]]:
            missing[other] -= 1
            if not missing[other] and not done[other]:
                heapq.heappush(ready, other)
    return np.array(order, dtype=np.int64)


def _microseconds(lane: Int64, duration_ns: Int64) -> Int64:
    """Durations in us, rounded so that those of a lane add up to what its durations in ns do, to a us."""
    table = pl.DataFrame({"lane": lane, "ns": duration_ns})
    until = pl.col("ns").cum_sum().over("lane")
    rounded = (until + _US // 2) // _US
    before = (until - pl.col("ns") + _US // 2) // _US
    return table.select(rounded - before).to_series().to_numpy()
