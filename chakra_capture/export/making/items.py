"""What runs beside the CPU threads: device activities, and communication that a backend runs on threads of its own."""

from dataclasses import dataclass

import numpy as np

from chakra_capture.export.making.segments import Segments
from chakra_capture.merge.window import Rows
from chakra_capture.trace.columns import Bool, Int64, missing


@dataclass(frozen=True, slots=True)
class Operations:
    """Communication operations of a window that become nodes of their own, in order of issue.

    Attributes:
        row: the row that ran it; several may share a kernel.
        host_row: the host op that asked for it, -1 for none.
        group: number of its process group; -1 of a send or recv.
        turn: place in an order that all ranks keep; -1 for none.
    """

    row: Int64
    host_row: Int64
    group: Int64
    turn: Int64

    def __len__(self) -> int:
        return len(self.row)


@dataclass(frozen=True, slots=True)
class Items:
    """What runs beside the threads, in order of lane and start.

    Attributes:
        row: row of nodes.
        lane: stream, or thread of a backend, as ``Rows.track``: one item after the other.
        start, end: ns, on the clock of the CPU; communication on threads begins when what it waits for has ended.
        blocks: a copy whose launch call returns when it is done.
        of_row: by row, its item; -1 for none.
    """

    row: Int64
    lane: Int64
    start: Int64
    end: Int64
    blocks: Bool
    of_row: Int64

    def __len__(self) -> int:
        return len(self.row)

    @property
    def follows(self) -> Int64:
        """Items that come after another one on their lane, which is the one before in number."""
        return np.flatnonzero(self.lane[1:] == self.lane[:-1]) + 1


def find_items(rows: Rows, segments: Segments, operations: Operations) -> Items:
    """Find all items of a window."""
    ran = operations.row[operations.row >= 0]
    chosen = rows.is_timed & rows.is_activity
    chosen[ran] |= rows.is_timed[ran]
    row = np.flatnonzero(chosen)
    row = row[np.lexsort((row, rows.end[row], rows.start[row], rows.track[row]))]
    of_row = np.full(len(rows), -1)
    of_row[row] = np.arange(len(row))
    start = _one_after_the_other(rows, operations)[row]
    return Items(row, rows.track[row], start, rows.end[row], _blocks(rows, segments, row), of_row)


def _one_after_the_other(rows: Rows, operations: Operations) -> Int64:
    """Starts of all rows, those of communication on threads moved to the end of what comes before it in its order.

    Gloo has two operations of a group in work at once: how long the second waits for the first is no time of its own.
    """
    start = rows.start.copy()
    ran = operations.row
    on_cpu = np.flatnonzero((ran >= 0) & rows.is_timed[ran] & ~rows.is_activity[ran])
    in_turn = on_cpu[operations.turn[on_cpu] >= 0]
    orders = [in_turn[np.argsort(operations.turn[in_turn], kind="stable")]]
    without = on_cpu[(operations.turn[on_cpu] < 0) & (operations.group[on_cpu] >= 0)]
    orders += [without[operations.group[without] == group] for group in np.unique(operations.group[without])]
    for order in orders:
        row = ran[order]
        ended = np.append(rows.start[row[:1]], np.maximum.accumulate(rows.end[row])[:-1])[: len(row)]
        start[row] = np.minimum(np.maximum(rows.start[row], ended), rows.end[row])
    return start


_BLOCKING_CALLS = frozenset({"cudaMemcpy", "hipMemcpy", "hipMemcpyWithStream"})
_RETURN_NS = 10_000


def _blocks(rows: Rows, segments: Segments, row: Int64) -> Bool:
    """Copies that end about when their call returns, which took longer than they (rule 2.4 of the replay)."""
    call = rows.launch[row]
    is_copy = rows.is_kind("memcpy")[row] & (call >= 0)
    call = np.maximum(call, 0)
    may_block = rows.named(lambda name: "Pageable" in name)[row] | rows.named(_BLOCKING_CALLS.__contains__)[call]
    begun, returned = rows.start[call], segments.row_end[call]
    is_copy &= may_block & segments.is_active[call]
    fits = np.where(is_copy, rows.end[row] <= returned + _RETURN_NS, False)
    return fits & (returned - begun > rows.end[row] - rows.start[row])


def no_operations() -> Operations:
    """Of a window that communicates nothing."""
    return Operations(missing(0), missing(0), missing(0), missing(0))
