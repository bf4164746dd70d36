"""Where one CPU thread hands over to another, as far as the trace names both sides.

Backward of a device runs on threads of the autograd engine. Two things recorded there tell what they wait for:

* the sequence number: an op of the engine runs the backward of the forward op with its number, which ended before;
* the call ``run_backward`` (recorded with stacks): the engine begins after it was called, and it returns after the
  engine has ended.

A DataLoader's worker or pin-memory thread leaves no mark of the batch it hands over, nor does a thread pool: those
are left out, and nothing is taken from times that happen to be near.
"""

from dataclasses import dataclass

import numpy as np

from chakra_capture.merge.rows import CODE, group_numbers
from chakra_capture.merge.tables import Columns
from chakra_capture.trace.columns import MISSING, Bool, Int64

_ENGINE = "autograd::engine::evaluate_function"
_BACKWARD_CALL = "<built-in method run_backward"


@dataclass(frozen=True, slots=True)
class Handovers:
    """Rows on two threads of one process: ``dst`` starts after ``src`` ended.

    Attributes:
        num_ambiguous: ops of the engine, and calls of ``run_backward``, that fit several threads.
    """

    src: Int64
    dst: Int64
    num_ambiguous: int


def find_handovers(columns: Columns, end: Int64) -> Handovers:
    """Hand-overs between CPU threads that the trace shows; ``end`` is the end of each row, ``MISSING`` for none."""
    timed = (columns.ts_ns != MISSING) & (end != MISSING)
    ops = np.flatnonzero((columns.kind == CODE["host_op"]) & timed)
    ops = ops[columns.name.accepted(ops, lambda name: name.startswith(_ENGINE))]
    engine = np.zeros(len(columns), dtype=bool)
    engine[ops] = True
    if not len(ops):
        return Handovers(ops, ops, 0)
    src, dst, num_unclear = _by_sequence(columns, end, engine, timed)
    calls, num_unclear_calls = _backward_calls(columns, end, engine, timed)
    pairs = _by_call(columns, end, calls, ops[np.argsort(columns.ts_ns[ops], kind="stable")], timed)
    more = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
    return Handovers(np.concatenate([src, more[0]]), np.concatenate([dst, more[1]]), num_unclear + num_unclear_calls)


def _by_sequence(columns: Columns, end: Int64, engine: Bool, timed: Bool) -> tuple[Int64, Int64, int]:
    """Forward op and op of the engine with one sequence number, where it stands on one other thread alone.

    Every row with a number runs before, or around, the op that takes it; so of several the last to end counts.
    """
    sequence, track, pid = columns.integers("sequence_number"), columns.track, columns.tracks.pid
    numbered = np.flatnonzero((sequence >= 0) & timed)
    numbered = numbered[columns.kind[numbered] == CODE["host_op"]]
    parent = columns.parent[numbered]
    is_forward = ~engine[numbered] & ~((parent >= 0) & engine[np.maximum(parent, 0)])
    forward, backward = numbered[is_forward], numbered[engine[numbered]]
    both, width = np.concatenate([forward, backward]), np.int64(len(pid))
    family = group_numbers(pid[track[both]], sequence[both]) * width
    key = family + track[both]
    order = np.lexsort((end[forward], key[: len(forward)]))
    last = order[np.append(np.diff(key[order]) > 0, True)[: len(order)]]  # to end, of one thread and number
    threads, wanted, own = key[last], family[len(forward) :], key[len(forward) :]
    first, after = np.searchsorted(threads, wanted), np.searchsorted(threads, wanted + width)
    at = np.searchsorted(threads, own)
    on_own = np.searchsorted(threads, own, side="right") - at
    num_threads = after - first - on_own
    clear = np.flatnonzero(num_threads == 1)
    other = first[clear] + on_own[clear] * (at[clear] == first[clear])
    return forward[last[other]], backward[clear], int(np.count_nonzero(num_threads > 1))


def _backward_calls(columns: Columns, end: Int64, engine: Bool, timed: Bool) -> tuple[Int64, int]:
    """Calls of ``run_backward`` beside which no other thread of the process runs one, and the number of the others.

    A call within an op of the engine is part of the backward around it.
    """
    calls = np.flatnonzero((columns.kind == CODE["python_function"]) & timed)
    calls = calls[columns.name.accepted(calls, lambda name: name.startswith(_BACKWARD_CALL))]
    inside, at = np.zeros(len(calls), dtype=bool), columns.parent[calls]
    while (at >= 0).any():
        inside |= (at >= 0) & engine[np.maximum(at, 0)]
        at = np.where(at >= 0, columns.parent[np.maximum(at, 0)], -1)
    calls = calls[~inside]
    pid = columns.integers("pid", calls)
    order = np.lexsort((columns.ts_ns[calls], pid))
    calls, pid = calls[order], pid[order]
    alone = np.ones(len(calls), dtype=bool)
    latest = -1  # position of the call, of those seen, that ends last
    for at_call, call in enumerate(calls.tolist()):
        same = latest >= 0 and pid[latest] == pid[at_call]
        if same and columns.ts_ns[call] < end[calls[latest]]:
            alone[latest] = alone[at_call] = False
        if not same or end[call] > end[calls[latest]]:
            latest = at_call
    return calls[alone], int(np.count_nonzero(~alone))


def _by_call(columns: Columns, end: Int64, calls: Int64, ops: Int64, timed: Bool) -> list[tuple[int, int]]:
    """What came before each call to the first op of each thread of the engine, the last op to what comes after it.

    Args:
        ops: ops of the engine in time order.
    """
    starts, pid, pairs = columns.ts_ns[ops], columns.tracks.pid, []
    orders = timed & columns.is_kind("annotation", "host_op", "python_function", "runtime") if len(calls) else timed
    for thread in np.unique(columns.track[calls]):
        rows = np.flatnonzero(orders & (columns.track == thread))
        by_end = rows[np.argsort(end[rows], kind="stable")]
        begins, ends = columns.ts_ns[rows], end[by_end]
        for call in calls[columns.track[calls] == thread].tolist():
            begun, done = columns.ts_ns[call], end[call]
            inside = ops[np.searchsorted(starts, begun) : np.searchsorted(starts, done)]
            inside = inside[(pid[columns.track[inside]] == pid[thread]) & (columns.track[inside] != thread)]
            inside = inside[end[inside] <= done]
            before = int(np.searchsorted(ends, begun, side="right")) - 1
            after = int(np.searchsorted(begins, done))
            for track in np.unique(columns.track[inside]):
                run = inside[columns.track[inside] == track]
                if before >= 0:
                    pairs.append((int(by_end[before]), int(run[0])))
                if after < len(rows):
                    pairs.append((int(run[np.argmax(end[run])]), int(rows[after])))
    return pairs
