"""The CPU threads of one window: which row is innermost on a thread at an instant, and what kind of row it is.

Recorded Python functions are left out: they are there all the time and say nothing about who keeps the device waiting.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import polars as pl

from chakra_capture.analysis.ancestry import positions
from chakra_capture.annotations import BACKWARD, INPUT_WAIT, STEP_PREFIX
from chakra_capture.trace.columns import Bool, Int64

NEEDED = ("node_id", "kind", "name", "parent_id", "ts_ns", "dur_ns", "pid", "tid", "phase")
ENGINE_PREFIX = "autograd::engine::evaluate_function: "
# Calls that wait for the device.
BLOCKING = r"((Device|Ctx|Stream|Event)Synchronize|^(cuda|hip)Memcpy(WithStream)?)$"
_ROWS = ("host_op", "annotation", "runtime")
# By name. Recording, querying and timing an event does not block.
_MARKS = {
    "loader": rf"^({INPUT_WAIT}|enumerate\(DataLoader\)#.*__next__)$",
    "blocking": BLOCKING,
    "allocation": r"(Malloc|Free|HostAlloc|HostRegister|MemCreate|MemMap)",
    "barrier": r"^c10d::barrier",
    "gloo": r"^gloo:",
    "step": rf"^{STEP_PREFIX}",
}


@dataclass(frozen=True, slots=True)
class Marked:
    """Which rows are what."""

    op: Bool
    annotation: Bool
    runtime: Bool
    loader: Bool
    blocking: Bool
    allocation: Bool
    barrier: Bool
    gloo: Bool
    step: Bool


class HostThreads:
    """Rows are numbered in the order of their ``node_id``: by thread, then by start, the outer one first."""

    def __init__(self, nodes: pl.DataFrame) -> None:
        """Take the rows of one window with the columns ``NEEDED``; those of other kinds are passed over."""
        is_cpu = pl.col("kind").is_in([*_ROWS, "python_function"])
        nodes = nodes.filter(is_cpu & pl.col("ts_ns").is_not_null())
        nodes = nodes if nodes["node_id"].is_sorted() else nodes.sort("node_id")
        kept, parent = _without_python(nodes)
        self.table = nodes.filter(pl.Series(kept))
        self.ids = self.table["node_id"].to_numpy()
        self.parent = parent
        self.start = self.table["ts_ns"].to_numpy()
        self.end = self._ends()
        self.track, self.pid = _tracks(self.table)

    @cached_property
    def marked(self) -> Marked:
        kind, name = pl.col("kind"), pl.col("name")
        shown = self.table.select(
            op=kind == "host_op", annotation=kind == "annotation", runtime=kind == "runtime",
            name=name.fill_null(""),
        )  # fmt: skip
        # Each name is looked at once, however many rows have it.
        names = shown.select(name.unique()).with_columns(name.str.contains(text).alias(m) for m, text in _MARKS.items())
        table = shown.join(names, on="name", how="left", validate="m:1", maintain_order="left")
        found = {mark: table[mark].to_numpy() for mark in _MARKS}
        kinds = {mark: table[mark].to_numpy() for mark in ("op", "annotation", "runtime")}
        for mark in ("blocking", "allocation"):
            found[mark] = found[mark] & kinds["runtime"]
        return Marked(**found, **kinds)

    @cached_property
    def outer_ops(self) -> Int64:
        """Host ops that no other is around, by thread and start."""
        ops = np.flatnonzero(self.marked.op)
        around = self.parent[ops]
        inside = np.zeros(len(ops), dtype=bool)
        while (some := (around >= 0) & ~inside).any():
            inside[some] = self.marked.op[around[some]]
            around = np.where(some, self.parent[np.maximum(around, 0)], -1)
        return ops[~inside]

    @cached_property
    def main_of(self) -> dict[int, int]:
        """The main thread of each process: the one with the steps, else the busiest where autograd does not work."""
        in_backward = (self.table["phase"] == BACKWARD).fill_null(value=False).to_numpy()
        found = {}
        for pid in np.unique(self.pid).tolist():
            mine = self.pid == pid
            counts = np.bincount(self.track[mine & self.marked.step], minlength=1)
            if not counts.any():
                counts = np.bincount(self.track[mine])
                free = counts.copy()
                free[np.unique(self.track[mine & in_backward])] = 0
                counts = free if free.any() else counts
            found[pid] = int(counts.argmax())
        return found

    def place(self, node_ids: Int64) -> Int64:
        """Numbers of rows; -1 for one that is not here."""
        return positions(self.ids, node_ids)

    def innermost(self, track: Int64, times: Int64) -> Int64:
        """The innermost row that is open on each thread at each time; -1 for none."""
        keys, states = self._timeline
        if not len(keys):
            return np.full(len(times), -1, dtype=np.int64)
        at = np.searchsorted(keys, self._key(track, times), side="right") - 1
        state = np.where(at >= 0, states[np.maximum(at, 0)], -1)
        return np.where((state >= 0) & (self.track[np.maximum(state, 0)] == track), state, -1)

    @cached_property
    def changes(self) -> Int64:
        """All times at which some thread begins or ends a row, ascending."""
        return ascending(self.start, self.end)

    def before(self, rows: Int64, track: Int64, times: Int64) -> Int64:
        """Position among ``rows`` (ascending) of the last one of each thread that starts before each time, or -1."""
        keys = self._key(self.track[rows], self.start[rows])
        at = np.searchsorted(keys, self._key(track, times), side="left") - 1
        known = at >= 0
        if not len(rows):
            return at
        return np.where(known & (self.track[rows[np.maximum(at, 0)]] == track), at, -1)

    def names(self, rows: Int64) -> pl.Series:
        """Name of each row without what autograd's engine puts before that of an op; null for -1."""
        return picked(self._names, rows)

    @cached_property
    def _names(self) -> pl.Series:
        # By number: what follows groups millions of them.
        return self.table["name"].str.strip_prefix(ENGINE_PREFIX).cast(pl.Categorical)

    def _key(self, track: Int64, times: Int64) -> Int64:
        low, width = self._range
        return np.asarray(track * width + np.clip(times - low, 0, width - 1))

    @cached_property
    def _range(self) -> tuple[int, int]:
        if not len(self.start):
            return 0, 1
        return int(self.start.min()) - 1, int(self.end.max() - self.start.min()) + 3

    @cached_property
    def _timeline(self) -> tuple[Int64, Int64]:
        """Times at which the innermost row of a thread changes, by thread, and the row from then on (-1: none)."""
        rows = np.flatnonzero(self.end > self.start)
        # Of one instant the ends come first, inner ones before outer ones, then the starts, outer ones first.
        track = np.concatenate([self.track[rows[::-1]], self.track[rows]])
        keys = self._key(track, np.concatenate([self.end[rows[::-1]], self.start[rows]]))
        states = np.concatenate([self.parent[rows[::-1]], rows])
        order = np.argsort(keys, kind="stable")
        return keys[order], states[order]

    def _ends(self) -> Int64:
        """Ends, of what reaches past the row around it or was still open: the end of that."""
        dur = self.table["dur_ns"]
        never = np.iinfo(np.int64).max // 4
        end = np.where(dur.is_null().to_numpy(), never, self.start + dur.fill_null(0).to_numpy())
        around = np.maximum(self.parent, 0)
        while len(end) and (late := (self.parent >= 0) & (end > end[around])).any():
            end[late] = end[around[late]]
        last = end[end < never].max(initial=int(self.start.max(initial=0)))
        return np.asarray(np.where(end == never, last, end))


def ascending(*times: Int64) -> Int64:
    """All times once, ascending; numpy's own ``unique`` takes ten times as long for millions of them."""
    values = np.sort(np.concatenate(times))
    return values[np.append(True, values[1:] != values[:-1])] if len(values) else values


def picked(values: pl.Series, at: Int64) -> pl.Series:
    """The values at some places, null for -1."""
    if not len(values):
        return pl.Series(values.name, [None] * len(at), dtype=values.dtype)
    return values.gather(pl.Series(at).set(pl.Series(at < 0), None))


def _without_python(nodes: pl.DataFrame) -> tuple[Bool, Int64]:
    """Which rows are no Python functions, and the innermost such row around each of these."""
    parent = positions(nodes["node_id"].to_numpy(), nodes["parent_id"].fill_null(-1).to_numpy())
    is_python = (nodes["kind"] == "python_function").to_numpy()
    number = np.cumsum(~is_python) - 1
    around = parent[~is_python]
    while (hidden := (around >= 0) & is_python[np.maximum(around, 0)]).any():
        around[hidden] = parent[around[hidden]]
    return ~is_python, np.where(around >= 0, number[np.maximum(around, 0)] if len(number) else -1, -1)


def _tracks(table: pl.DataFrame) -> tuple[Int64, Int64]:
    """Number of the thread of each row, and its process."""
    pid, tid = (table[name].fill_null(-1).to_numpy() for name in ("pid", "tid"))
    changes = (np.diff(pid, prepend=pid[:1]) != 0) | (np.diff(tid, prepend=tid[:1]) != 0)
    return np.cumsum(changes), pid
