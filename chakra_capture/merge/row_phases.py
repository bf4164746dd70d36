"""The step phase of each row: by the annotations that the recording wrote, else by what autograd and torch mark.

Without annotations, the first rule that fits: input_wait within DataLoader's own annotation; optimizer within
``Optimizer.step#...``, less what a closure runs there; backward on threads of autograd, and on the main thread from the
first to the last function of one backward pass; forward within ``DistributedDataParallel.forward`` and within ops that
some function is the backward of, and between the first and the last of these of one backward pass, where no other
annotation is open. Everything else has no phase: it is not known.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from chakra_capture import annotations
from chakra_capture.merge.intervals import holds
from chakra_capture.merge.nest import innermost_at
from chakra_capture.merge.rows import CPU_KINDS, by_number
from chakra_capture.merge.tables import Columns
from chakra_capture.trace.columns import MISSING, Bool, Coded, Int64

NAMES = (*annotations.PHASE_NAMES, *annotations.BETWEEN_STEPS)
_CODE = {name: code for code, name in enumerate(NAMES)}
_LOADER = re.compile(r"enumerate\(DataLoader\)#.*__next__")
_OPTIMIZER, _ZERO_GRAD = "Optimizer.step#", "Optimizer.zero_grad#"
_AUTOGRAD = "autograd::engine::evaluate_function"
_DDP = "DistributedDataParallel.forward"
# Of an annotation that was still open when the recording ended.
_NEVER = int(np.iinfo(np.int64).max)
# Of whatever wraps a model or what it communicates: open around forward ops, and no work of its own.
_TRANSPARENT = re.compile(rf"gloo:|nccl:|FSDP::|{annotations.STEP_PREFIX}|## forward ##|{re.escape(_DDP)}")


def row_phases(columns: Columns) -> Coded:
    """Phase of every row; null where none is known. A device activity has that of its launch."""
    ends = np.where(columns.dur_ns == MISSING, _NEVER, columns.ts_ns + columns.dur_ns)
    codes = np.full(len(columns), -1, dtype=np.int8)
    timed = columns.is_kind(*CPU_KINDS, "overhead", "other") & (columns.ts_ns != MISSING)
    marks = _of_name(columns, NAMES.__contains__) & columns.is_kind("annotation")
    pids = columns.tracks.pid[columns.track]
    for rows in by_number(np.flatnonzero(timed), pids[timed]):
        mine = rows[marks[rows]]
        codes[rows] = _annotated(columns, ends, rows, mine) if len(mine) else _Inferred.of(columns, ends, rows).codes()
    launched = columns.launch >= 0
    codes[launched] = codes[columns.launch[launched]]
    return Coded(codes, NAMES)


def _of_name(columns: Columns, accept: Callable[[str], bool]) -> Bool:
    """Rows whose name is accepted."""
    return columns.name.mask_of(np.array([bool(accept(name)) for name in columns.name.values], dtype=bool))


def _annotated(columns: Columns, ends: Int64, rows: Int64, marks: Int64) -> "np.typing.NDArray[np.int8]":
    """Phase of the annotation of the process that holds the start of each row, the innermost of several."""
    marks = marks[np.argsort(columns.ts_ns[marks], kind="stable")]
    holder = innermost_at(columns.ts_ns[rows], columns.ts_ns[marks], ends[marks])
    of_name = np.array([_CODE.get(name, -1) for name in columns.name.values] or [-1], dtype=np.int8)
    codes = np.full(len(rows), -1, dtype=np.int8)
    codes[holder >= 0] = of_name[columns.name.codes[marks[holder[holder >= 0]]]]
    return codes


@dataclass(frozen=True, slots=True)
class _Inferred:
    """Rows of one process, and what its traces mark."""

    columns: Columns
    ends: Int64
    rows: Int64
    workers: Bool
    passes: "_Passes"

    @classmethod
    def of(cls, columns: Columns, ends: Int64, rows: Int64) -> "_Inferred":
        is_function = _of_name(columns, lambda name: name.startswith(_AUTOGRAD))[rows]
        functions = rows[is_function]
        steps = rows[_of_name(columns, lambda name: annotations.parse_step(name) is not None)[rows]]
        main = _main_track(columns, rows, steps, functions)
        tracks = np.unique(columns.track[functions])
        workers = np.isin(columns.track[rows], tracks[tracks != main])
        return cls(columns, ends, rows, workers, _Passes.of(columns, ends, rows[~workers], functions))

    def codes(self) -> "np.typing.NDArray[np.int8]":
        """Phase of each of the rows; of several rules that fit the first of the module's list counts."""
        codes = np.full(len(self.rows), -1, dtype=np.int8)
        on_main, times = ~self.workers, self.columns.ts_ns[self.rows]
        optimizer = self._called(lambda name: name.startswith(_OPTIMIZER))
        # A step with a closure (Lightning) runs forward and backward within it: what these rules find there is theirs.
        has_closure = self._count_in(optimizer, self.passes.starts) > 0
        codes[self._inside(optimizer[has_closure])] = _CODE[annotations.OPTIMIZER]
        # What somebody's annotation is around may go on into the next phase; of ops only the start counts.
        last = np.where(self.columns.is_kind("annotation")[self.rows], self.ends[self.rows] - 1, times)
        following = np.append(np.sort(self.passes.backward[0]), _NEVER)
        between = holds(*self.passes.forward, times) & (last < following[np.searchsorted(following[:-1], times)])
        codes[on_main & between & ~self._inside(self._foreign())] = _CODE[annotations.FORWARD]
        codes[self._inside(self.passes.partners)] = _CODE[annotations.FORWARD]
        codes[self._inside(self._called(_DDP.__eq__))] = _CODE[annotations.FORWARD]
        codes[self.workers | (on_main & holds(*self.passes.backward, times))] = _CODE[annotations.BACKWARD]
        codes[self._inside(self._called(lambda name: name.startswith(_ZERO_GRAD)))] = -1
        codes[self._inside(optimizer[~has_closure])] = _CODE[annotations.OPTIMIZER]
        codes[self._inside(self._called(lambda name: bool(_LOADER.fullmatch(name))))] = _CODE[annotations.INPUT_WAIT]
        return codes

    def _called(self, accept: Callable[[str], bool]) -> Int64:
        """Annotations, and ops, of such a name."""
        called = _of_name(self.columns, accept) & self.columns.is_kind("annotation", "host_op")
        return self.rows[called[self.rows]]

    def _foreign(self) -> Int64:
        """Annotations of somebody else's that hold no forward op: input pipelines, metrics."""
        marks = self._called(lambda name: not _TRANSPARENT.match(name))
        marks = marks[self.columns.is_kind("annotation")[marks]]
        foreign: Int64 = marks[self._count_in(marks, np.sort(self.columns.ts_ns[self.passes.partners])) == 0]
        return foreign

    def _count_in(self, marks: Int64, times: Int64) -> Int64:
        """How many of the sorted times are in each mark."""
        ended = np.searchsorted(times, self.ends[marks])
        return np.asarray(ended - np.searchsorted(times, self.columns.ts_ns[marks]))

    def _inside(self, marks: Int64) -> Bool:
        """Rows that begin while one of the marks is open on their thread."""
        track = self.columns.track
        inside = np.zeros(len(self.rows), dtype=bool)
        for mine in by_number(marks, track[marks]):
            thread = np.flatnonzero(track[self.rows] == track[mine[0]])
            times = self.columns.ts_ns[self.rows[thread]]
            inside[thread] = holds(self.columns.ts_ns[mine], self.ends[mine], times)
        return inside


def _main_track(columns: Columns, rows: Int64, steps: Int64, functions: Int64) -> int:
    """The thread with the steps; without any, the busiest one where autograd does not work."""
    if len(steps):
        return int(np.bincount(columns.track[steps]).argmax())
    counts = np.bincount(columns.track[rows])
    free = counts.copy()
    free[np.unique(columns.track[functions])] = 0
    return int((free if free.any() else counts).argmax())


@dataclass(frozen=True, slots=True)
class _Passes:
    """Backward passes: from the first to the last function of each, and from the first to the last op they are of.

    Attributes:
        partners: forward ops that some function is the backward of.
        starts: of all functions, ascending.
    """

    backward: tuple[Int64, Int64]
    forward: tuple[Int64, Int64]
    partners: Int64
    starts: Int64

    @classmethod
    def of(cls, columns: Columns, ends: Int64, rows: Int64, functions: Int64) -> "_Passes":
        functions = functions[np.argsort(columns.ts_ns[functions], kind="stable")]
        partner = _partners(columns, rows, functions)
        partners = np.unique(partner[partner >= 0])
        if not len(functions):
            nothing = np.zeros(0, dtype=np.int64)
            return cls((nothing, nothing), (nothing, nothing), partners, nothing)
        starts, stops = columns.ts_ns[functions], np.maximum.accumulate(ends[functions])
        forward_starts = np.sort(columns.ts_ns[partners])
        # A forward op between two functions ends the pass.
        between = np.searchsorted(forward_starts, starts[1:]) > np.searchsorted(forward_starts, stops[:-1])
        number = np.concatenate([[0], np.cumsum(between)])
        first = np.flatnonzero(np.concatenate([[True], between]))
        last = np.append(first[1:], len(functions)) - 1
        known = partner >= 0
        low = np.full(len(first), np.iinfo(np.int64).max)
        high = np.full(len(first), MISSING)
        np.minimum.at(low, number[known], columns.ts_ns[partner[known]])
        np.maximum.at(high, number[known], ends[partner[known]])
        has = low < high
        return cls((starts[first], stops[last]), (low[has], high[has]), partners, starts)


def _partners(columns: Columns, rows: Int64, functions: Int64) -> Int64:
    """The forward op of each function: the last one with its sequence number before it; -1 for none.

    Ops that need no gradient look at the number without taking it, so several ops have one.
    """
    is_op = columns.is_kind("host_op")[rows] & ~_of_name(columns, lambda name: name.startswith(_AUTOGRAD))[rows]
    ops = rows[is_op]
    number = columns.integers("sequence_number", ops)
    ops, number = ops[number != MISSING], number[number != MISSING]
    order = np.lexsort((columns.ts_ns[ops], number))
    ops, number = ops[order], number[order]
    wanted = columns.integers("sequence_number", functions)
    # Both sorted by number and time: the position of a function among the ops is one past its partner.
    keys = np.concatenate([number, wanted])
    times = np.concatenate([columns.ts_ns[ops], columns.ts_ns[functions]])
    is_function = np.concatenate([np.zeros(len(ops), dtype=np.int8), np.ones(len(functions), dtype=np.int8)])
    merged = np.lexsort((is_function, times, keys))
    latest = np.maximum.accumulate(np.where(is_function[merged] == 0, np.arange(len(merged)), -1))
    found = np.full(len(merged), -1, dtype=np.int64)
    found[merged] = np.where(latest >= 0, merged[np.maximum(latest, 0)], -1)
    at = found[len(ops) :]
    same = (at >= 0) & (wanted != MISSING)
    same[same] &= number[at[same]] == wanted[same]
    return np.where(same, ops[np.maximum(at, 0)] if len(ops) else -1, -1)
