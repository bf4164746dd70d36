"""What nodes wait for beside their own thread, and the time that is their own: from edges and rows to nodes."""

from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from chakra_capture.export.chakra_json.order import Order
from chakra_capture.export.chakra_json.tables import ACTIVITIES, WindowTables
from chakra_capture.trace.columns import MISSING, Int64


@dataclass(frozen=True, slots=True)
class Waits:
    """By number of the node that waits.

    Attributes:
        inter_thread: the node of another thread that it starts after.
        sync: device activities that had ended before it started, as a call before it waited for them.
        num_unplaced: waits for the device after which nothing more happens on the thread.
        num_dropped: waits of threads whose nodes cannot be in that order (equal times).
    """

    inter_thread: dict[int, int]
    sync: dict[int, list[int]]
    num_unplaced: int
    num_dropped: int


def find_waits(tables: WindowTables, order: Order) -> Waits:
    """Take the edges of the tables to the nodes that are written."""
    start = tables.integers("ts_ns")
    length = tables.integers("dur_ns")
    end = np.where((start != MISSING) & (length != MISSING), start + np.maximum(length, 0), start)
    threads = _Threads(tables, order, start)
    sync: dict[int, set[int]] = defaultdict(set)
    num_unplaced = num_dropped = 0
    for src, dst in zip(*(side.tolist() for side in tables.edges("sync")), strict=True):
        waiting = threads.after(dst, int(end[dst]))
        if waiting is None:
            num_unplaced += 1
        elif order.number[src]:
            sync[int(order.number[waiting])].add(int(order.number[src]))
    inter_thread: dict[int, int] = {}
    ends: dict[int, int] = {}
    for src, dst in zip(*(side.tolist() for side in tables.edges("inter_thread")), strict=True):
        # Calls of the runtime and of Python are no nodes: what follows one waits, what began last before it ended is
        # waited for.
        waiting = dst if order.number[dst] else threads.after(dst, int(start[dst]))
        before = src if order.number[src] else threads.before(src, int(end[src]))
        if waiting is None or before is None or order.number[before] >= order.number[waiting]:
            num_dropped += 1
            continue
        number = int(order.number[waiting])
        if number not in ends or ends[number] < end[src]:
            ends[number], inter_thread[number] = int(end[src]), int(order.number[before])
    return Waits(inter_thread, {number: sorted(found) for number, found in sync.items()}, num_unplaced, num_dropped)


class _Threads:
    """The nodes of each thread by their starts."""

    def __init__(self, tables: WindowTables, order: Order, start: Int64) -> None:
        self._track, self._start = tables.track.code, start
        self._cpu = order.cpu[order.cpu < tables.num_rows]
        self._cpu = self._cpu[start[self._cpu] != MISSING]
        self._rows: dict[int, Int64] = {}

    def after(self, row: int, time: int) -> int | None:
        """The first node that starts at that time or later on the thread of a row."""
        rows = self._of(row)
        at = int(np.searchsorted(self._start[rows], time))
        return int(rows[at]) if at < len(rows) else None

    def before(self, row: int, time: int) -> int | None:
        """The last node that starts at that time or before it."""
        rows = self._of(row)
        at = int(np.searchsorted(self._start[rows], time, side="right"))
        return int(rows[at - 1]) if at else None

    def _of(self, row: int) -> Int64:
        track = int(self._track[row])
        if track not in self._rows:
            rows = self._cpu[self._track[self._cpu] == track]
            self._rows[track] = rows[np.argsort(self._start[rows], kind="stable")]
        return self._rows[track]


def own_times(tables: WindowTables, order: Order) -> Int64:
    """Time of each row that is in none of the nodes within it: what has no node counts for the node around it."""
    own = tables.integers("self_dur_ns")
    own[own == MISSING] = 0
    rows = np.arange(tables.num_rows)
    inside = np.flatnonzero((order.owner >= 0) & (order.owner != rows) & ~tables.is_kind(*ACTIVITIES))
    np.add.at(own, order.owner[inside], own[inside])
    return own
