"""Which rows of a window become nodes, under which parent, and in which order: only numbers, no text.

The converter walks down from each root of a thread and has every CPU node wait for the one before it. So nodes are
numbered in order of time over all threads: a node that is waited for has the smaller number, and its parent too. The
converter looks for circles by recursion; it meets no more than ``_MOST_BETWEEN`` nodes that it has not seen.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from chakra_capture.export.chakra_json.tables import ACTIVITIES, WindowTables
from chakra_capture.trace.columns import MISSING, Bool, Int64

# An activity that is launched by an op this many nodes after the op began is numbered right after the op: the
# converter comes back from it node by node, and Python allows a recursion of 1000.
_MOST_BETWEEN = 400


@dataclass(frozen=True, slots=True)
class Order:
    """Nodes of one window in the order of their numbers.

    Roots of threads that the host trace lacks come after the rows of the table: row ``num_rows + n`` is the nth.

    Attributes:
        row: of each node.
        number: of each row, from 2 on; 0 where the row is no node. The process is number 1.
        parent: number of each node's parent.
        thread: number of the track of each node; of a device activity that of its launch; -1 if it is not known.
        is_activity: the node ran on a device.
        cpu: rows on CPU threads that are nodes, in order of their numbers.
        owner: of each row of the table the node that it is, or that it is part of; -1 for none.
        num_roots_added: roots of threads that were added.
        num_outside_ops: activities launched outside any op.
        num_without_launch: activities whose launch is not in the trace.
        num_early: activities numbered right after their op instead of at their launch.
    """

    row: Int64
    number: Int64
    parent: Int64
    thread: Int64
    is_activity: Bool
    cpu: Int64
    owner: Int64
    num_roots_added: int
    num_outside_ops: int
    num_without_launch: int
    num_early: int


def order_nodes(tables: WindowTables) -> Order:
    """Number the nodes of a window."""
    parent, launch = tables.rows_of("parent_id"), tables.rows_of("launch_id")
    is_host, is_thread = tables.is_kind("host_op", "annotation"), tables.is_kind("thread")
    owner = _owners(parent, is_host | is_thread)
    activities = np.flatnonzero(tables.is_kind(*ACTIVITIES))
    roots = _Roots(tables, np.flatnonzero(is_thread))
    hosts = np.flatnonzero(is_host)
    parent_of = np.full(tables.num_rows, -1, dtype=np.int64)
    parent_of[hosts] = np.where(parent[hosts] >= 0, owner[parent[hosts]], -1)
    alone = hosts[parent_of[hosts] < 0]
    parent_of[alone] = roots.of(tables.track.code[alone])
    parent_of[activities] = np.where(parent[activities] >= 0, owner[parent[activities]], -1)
    outside = activities[(parent_of[activities] < 0) & (launch[activities] >= 0)]
    parent_of[outside] = roots.of(tables.track.code[launch[outside]])
    lost = activities[parent_of[activities] < 0]
    parent_of[lost] = roots.of(np.full(len(lost), -1))
    parent_of = np.append(parent_of, np.full(roots.num_added, -1))
    begin = _begins(tables, activities, launch)
    cpu = np.concatenate([np.flatnonzero(is_host | is_thread), tables.num_rows + np.arange(roots.num_added)])
    cpu = _in_time(tables, cpu, parent_of, np.append(begin, np.full(roots.num_added, MISSING)), activities)
    place = np.full(len(parent_of), -1, dtype=np.int64)
    place[cpu] = np.arange(len(cpu))
    slot, num_early = _slots(begin, activities, place, parent_of, cpu)
    rows = np.concatenate([cpu, activities])
    on_device = np.append(np.zeros(len(cpu), dtype=bool), np.ones(len(activities), dtype=bool))
    first = np.append(np.zeros(len(cpu), dtype=np.int64), begin[activities])
    then = np.append(np.zeros(len(cpu), dtype=np.int64), tables.integers("ts_ns")[activities])
    # A slot is the place of the CPU node before which an activity stands.
    order = np.lexsort((then, first, ~on_device, np.append(np.arange(len(cpu)), slot)))
    rows, on_device = rows[order], on_device[order]
    number = np.zeros(len(parent_of), dtype=np.int64)
    number[rows] = np.arange(2, len(rows) + 2)
    parent_row = parent_of[rows]
    thread = np.append(tables.track.code, np.array(roots.added, dtype=np.int64))
    thread[activities] = np.where(launch[activities] >= 0, thread[launch[activities]], thread[parent_of[activities]])
    return Order(
        row=rows,
        number=number,
        parent=np.where(parent_row >= 0, number[parent_row], 1),
        thread=thread[rows],
        is_activity=on_device,
        cpu=cpu,
        owner=owner,
        num_roots_added=roots.num_added,
        num_outside_ops=len(outside),
        num_without_launch=int(np.count_nonzero(launch[activities] < 0)),
        num_early=num_early,
    )


def _owners(parent: "np.typing.NDArray[np.int32]", is_node: Bool) -> Int64:
    """The nearest row at or above each that is a node; -1 for none."""
    owner = np.where(is_node, np.arange(len(parent)), parent.astype(np.int64))
    open_ = np.flatnonzero(owner >= 0)
    open_ = open_[~is_node[owner[open_]]]
    while len(open_):
        owner[open_] = parent[owner[open_]]
        open_ = open_[owner[open_] >= 0]
        open_ = open_[~is_node[owner[open_]]]
    return owner


class _Roots:
    """Roots of threads: those of the host trace, and added ones for threads that it has no root of."""

    def __init__(self, tables: WindowTables, rows: Int64) -> None:
        self._next = tables.num_rows
        self._pairs = tables.track.pairs
        codes = tables.track.code[rows].tolist()
        self._row = dict(zip(codes, rows.tolist(), strict=True))
        # Files that were merged by force state two processes; the ids of their threads were matched.
        self._row_of_tid = {self._pairs[code][1]: row for code, row in self._row.items()}
        self.added: list[int] = []

    @property
    def num_added(self) -> int:
        return len(self.added)

    def of(self, tracks: "np.typing.NDArray[np.integer[Any]]") -> Int64:
        """Row of the root of each track; -1 stands for activities of which no launch tells a thread."""
        codes, which = np.unique(tracks, return_inverse=True)
        return np.array([self._root(code) for code in codes.tolist()], dtype=np.int64)[which]

    def _root(self, code: int) -> int:
        row = self._row.get(code)
        if row is None and code >= 0:
            row = self._row_of_tid.get(self._pairs[code][1])
        if row is None:
            row = self._next + len(self.added)
            self.added.append(code)
        self._row[code] = row
        return row


def _begins(tables: WindowTables, activities: Int64, launch: "np.typing.NDArray[np.int32]") -> Int64:
    """When each row began, an activity when it was launched; a host op without a time with the one before it."""
    begin = tables.integers("ts_ns")
    launched = activities[launch[activities] >= 0]
    of_launch = begin[launch[launched]]
    begin[launched] = np.where(of_launch != MISSING, of_launch, begin[launched])
    host_id = tables.integers("host_id")
    rows = np.flatnonzero((host_id != MISSING) & tables.is_kind("host_op", "annotation"))
    rows = rows[np.argsort(host_id[rows], kind="stable")]
    known = begin[rows] != MISSING
    last = np.maximum.accumulate(np.where(known, np.arange(len(rows)), -1))
    begin[rows] = np.where(last >= 0, begin[rows[np.maximum(last, 0)]], MISSING)
    return begin


def _in_time(tables: WindowTables, cpu: Int64, parent_of: Int64, begin: Int64, activities: Int64) -> Int64:
    """CPU nodes in order of time; at one time as the host trace numbers them, and a parent always first."""
    place = np.full(len(parent_of), -1, dtype=np.int64)
    place[cpu] = np.arange(len(cpu))
    up = np.where(parent_of[cpu] >= 0, place[np.maximum(parent_of[cpu], 0)], -1)
    top = _tops(up)
    begin_cpu = begin[cpu]
    # A root has no time: it comes before the first of its nodes.
    first = np.full(len(cpu), np.iinfo(np.int64).max)
    np.minimum.at(first, top, np.where(up >= 0, begin_cpu, np.iinfo(np.int64).max))
    if len(activities):
        np.minimum.at(first, top[place[parent_of[activities]]], begin[activities])
    begin_cpu = np.where(up >= 0, begin_cpu, first)
    host_id = np.append(tables.integers("host_id"), np.full(len(parent_of) - tables.num_rows, MISSING))[cpu]
    same_time = np.where(up >= 0, np.where(host_id != MISSING, host_id, cpu), -1)
    order = np.lexsort((cpu, same_time, begin_cpu))
    when = np.empty(len(cpu), dtype=np.int64)
    when[order] = np.arange(len(cpu))
    if (when[up] <= when)[up >= 0].all():
        return cpu[order]
    latest, depth, above = when, np.zeros(len(cpu), dtype=np.int64), up
    while (above >= 0).any():
        latest = np.where(above >= 0, np.maximum(latest, when[above]), latest)
        depth += above >= 0
        above = np.where(above >= 0, up[above], -1)
    return cpu[np.lexsort((when, depth, latest))]


def _tops(up: Int64) -> Int64:
    """The root above each node."""
    top = np.where(up >= 0, up, np.arange(len(up)))
    while True:
        higher = top[top]
        if np.array_equal(higher, top):
            return top
        top = higher


def _slots(begin: Int64, activities: Int64, place: Int64, parent_of: Int64, cpu: Int64) -> tuple[Int64, int]:
    """The place of the CPU node before which each activity is numbered: the first that began after the launch."""
    times = np.append(begin, np.full(len(parent_of) - len(begin), MISSING))[cpu]
    launched = (
        np.searchsorted(np.maximum.accumulate(times), begin[activities], side="right") if len(cpu) else activities
    )
    after_op = place[parent_of[activities]] + 1
    slot = np.maximum(launched, after_op)
    is_far = slot - after_op > _MOST_BETWEEN
    return np.where(is_far, after_op, slot), int(np.count_nonzero(is_far))
