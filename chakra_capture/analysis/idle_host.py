"""What the host does at an instant at which the device has nothing to do.

The thread that is asked is the one whose launch ends the gap; the main thread where that one shows nothing; another one
with an op open where the main thread shows none either (it waits in backward). Of what is open there the first that
fits counts: waiting for input, a call that waits for the device, communication on the host, allocation, an op, another
runtime call; else the time lies between ops, and within backward that is autograd's engine and hooks, not Python.
"""

from dataclasses import dataclass

import numpy as np
import polars as pl

from chakra_capture.analysis.ancestry import all_around, nearest
from chakra_capture.analysis.host_threads import HostThreads, ascending, picked
from chakra_capture.annotations import BACKWARD
from chakra_capture.merge import intervals
from chakra_capture.trace.columns import Bool, Int64

INPUT = "input wait"
SYNC = "synchronisation"
COMMUNICATION = "communication on the host"
ALLOCATION = "allocation"
OP = "host in op"
CALL = "other runtime call"
BETWEEN = "between ops"
IN_ENGINE = "between ops in backward"
STATES = (INPUT, SYNC, COMMUNICATION, ALLOCATION, OP, CALL, BETWEEN, IN_ENGINE)
_CODE = {state: code for code, state in enumerate(STATES)}


@dataclass(frozen=True, slots=True)
class HostStates:
    """Of each instant the state (index into ``STATES``), and rows that name it.

    Attributes:
        name: row that is the name of it, -1 for none; ``detail`` a row inside.
        after, before: of what lies between ops, the op before it and after it; -1 for none.
    """

    state: Int64
    name: Int64
    detail: Int64
    after: Int64
    before: Int64


def host_states(threads: HostThreads, track: Int64, times: Int64, phases: "PhaseRuns") -> HostStates:
    """What the host does at some times, asked from the threads that launch next (-1: the busiest main thread)."""
    main = _main_of_tracks(threads)
    asked = np.where(track >= 0, track, _busiest_main(threads))
    row = threads.innermost(asked, times)
    fallback = (row < 0) & (asked != main[asked])
    asked_main = np.where(fallback, main[asked], asked)
    row = np.where(fallback, threads.innermost(asked_main, times), row)
    open_rows = _open_rows(threads, row)
    is_free = (open_rows["op"] < 0) & (open_rows["call"] < 0) & (open_rows["loader"] < 0)
    other = _of_other_threads(threads, times, asked_main, is_free & (asked_main == main[asked]))
    changed = np.flatnonzero(other >= 0)
    for kind, rows in _open_rows(threads, other[changed]).items():
        open_rows[kind][changed] = rows
    outer, inner, call, annotation = (open_rows[kind] for kind in ("outer", "op", "call", "annotation"))
    loader, blocking, allocation, barrier = (
        open_rows[kind] for kind in ("loader", "blocking", "allocation", "barrier")
    )
    pending = _pending(threads, times) & (outer < 0) & (call < 0)
    in_backward = phases.is_backward(times)
    rules = (
        (loader >= 0, INPUT, loader, -1),
        (blocking >= 0, SYNC, np.where(outer >= 0, outer, annotation), blocking),
        ((barrier >= 0) | pending, COMMUNICATION, np.where(barrier >= 0, barrier, annotation), -1),
        (allocation >= 0, ALLOCATION, np.where(outer >= 0, outer, annotation), allocation),
        (outer >= 0, OP, outer, inner),
        (call >= 0, CALL, call, -1),
        (in_backward, IN_ENGINE, annotation, -1),
    )
    tests = [rule[0] for rule in rules]
    state = np.select(tests, [_CODE[rule[1]] for rule in rules], default=_CODE[BETWEEN])
    name = np.select(tests, [rule[2] for rule in rules], default=annotation)
    detail = np.select(tests, [np.broadcast_to(rule[3], len(times)) for rule in rules], default=-1)
    is_between = state >= _CODE[BETWEEN]
    after, before = _neighbours(threads, np.where(in_backward, asked, asked_main), times, is_between)
    return HostStates(state, name, detail, after, before)


def _main_of_tracks(threads: HostThreads) -> Int64:
    first = np.searchsorted(threads.track, np.arange(int(threads.track.max(initial=0)) + 1))
    pids = threads.pid[np.minimum(first, max(len(threads.pid) - 1, 0))]
    return np.array([threads.main_of[pid] for pid in pids.tolist()], dtype=np.int64)


def _busiest_main(threads: HostThreads) -> int:
    pids, counts = np.unique(threads.pid, return_counts=True)
    return threads.main_of[int(pids[counts.argmax()])]


def _open_rows(threads: HostThreads, row: Int64) -> dict[str, Int64]:
    """The open rows of each kind, given the innermost one: the innermost of a kind, of ops also the outermost."""
    marked = threads.marked
    inner = {
        "op": marked.op, "call": marked.runtime, "annotation": marked.annotation, "loader": marked.loader,
        "blocking": marked.blocking, "allocation": marked.allocation, "barrier": marked.barrier,
    }  # fmt: skip
    some = {kind: rows for kind, rows in inner.items() if rows.any()}
    found = all_around(threads.parent, row, some, {"outer": marked.op})
    return found | {kind: np.full(len(row), -1, dtype=np.int64) for kind in inner if kind not in some}


def _of_other_threads(threads: HostThreads, times: Int64, main: Int64, wanted: Bool) -> Int64:
    """The row of another thread of the process with an op open, where one is wanted and there is one; else -1."""
    row = np.full(len(times), -1, dtype=np.int64)
    marked = threads.marked
    has_op = marked.op | marked.runtime
    counts = np.bincount(threads.track[marked.op], minlength=1)
    mains = set(threads.main_of.values())
    for track in np.argsort(-counts, kind="stable").tolist():
        at = np.flatnonzero(wanted)
        if not counts[track] or not len(at):
            break
        if track in mains:
            continue
        found = threads.innermost(np.full(len(at), track), times[at])
        shows = nearest(threads.parent, found, has_op) >= 0
        same = threads.pid[np.maximum(found, 0)] == _pid_of_track(threads, main[at])
        taken = at[shows & same]
        row[taken] = found[shows & same]
        wanted = wanted.copy()
        wanted[taken] = False
    return row


def _pid_of_track(threads: HostThreads, track: Int64) -> Int64:
    return np.asarray(threads.pid[np.searchsorted(threads.track, track)])


def _pending(threads: HostThreads, times: Int64) -> Bool:
    """Whether gloo has an operation under way."""
    rows = np.flatnonzero(threads.marked.gloo)
    return intervals.holds(threads.start[rows], threads.end[rows], times)


def _neighbours(threads: HostThreads, track: Int64, times: Int64, wanted: Bool) -> tuple[Int64, Int64]:
    """The op that ended last on a thread before each time, and the one that begins next."""
    ops = threads.outer_ops
    after, before = (np.full(len(times), -1, dtype=np.int64) for _ in range(2))
    if not len(ops):
        return after, before
    at = np.flatnonzero(wanted)
    # What starts at the very time is the next one: a piece begins where the op before it ends.
    place = threads.before(ops, track[at], times[at])
    after[at] = np.where(place >= 0, ops[np.maximum(place, 0)], -1)
    keys = threads.before(ops, track[at], np.full(len(at), threads.end.max()))
    first = np.where(place >= 0, place + 1, np.searchsorted(threads.track[ops], track[at]))
    before[at] = np.where((keys >= 0) & (first <= keys), ops[np.minimum(first, len(ops) - 1)], -1)
    return after, before


class PhaseRuns:
    """In which phase of a step the loop is when: rows of its thread, and of autograd's, that follow each other."""

    def __init__(self, threads: HostThreads) -> None:
        mains = list(threads.main_of.values())
        known = threads.table["phase"]
        rows = np.flatnonzero(
            (np.isin(threads.track, mains) & ~threads.marked.step)
            | (known == BACKWARD).fill_null(value=False).to_numpy()
        )
        rows = rows[np.argsort(threads.start[rows], kind="stable")]
        # What the main thread does of no known phase while autograd works does not end backward.
        known = known.gather(rows)
        around = known.fill_null(strategy="forward")
        is_inside = (around == known.fill_null(strategy="backward")) & (around == BACKWARD)
        phase = known.zip_with(~is_inside.fill_null(value=False), around).fill_null("").to_numpy()
        begins = np.flatnonzero(np.append(True, phase[1:] != phase[:-1])) if len(rows) else rows
        self._start = threads.start[rows[begins]]
        ends = np.maximum.reduceat(threads.end[rows], begins) if len(rows) else self._start
        self._end = np.minimum(ends, np.append(self._start[1:], np.iinfo(np.int64).max)) if len(rows) else ends
        self._phase = pl.Series(phase[begins].tolist(), dtype=pl.String).replace({"": None}).cast(pl.Categorical)

    @property
    def bounds(self) -> Int64:
        """All times at which one begins or ends, ascending."""
        return ascending(self._start, self._end)

    def at(self, times: Int64) -> pl.Series:
        """Phase at each time; null for none."""
        return picked(self._phase, self._place(times))

    def is_backward(self, times: Int64) -> Bool:
        """Which times are in backward."""
        is_backward = np.append((self._phase == BACKWARD).fill_null(value=False).to_numpy(), False)
        return np.asarray(is_backward[self._place(times)])

    def _place(self, times: Int64) -> Int64:
        place = np.searchsorted(self._start, times, side="right") - 1
        return np.where((place >= 0) & (times < np.append(self._end, 0)[place]), place, -1)
