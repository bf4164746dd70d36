"""One window of a rank's merged rows as arrays: what replays and exports need to tell what runs and what waits."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import polars as pl
from numpy.typing import NDArray

from chakra_capture.annotations import parse_step
from chakra_capture.merge.rows import ACTIVITY_KINDS, group_numbers, of_kind
from chakra_capture.trace.columns import MISSING, Bool, Coded, Int64, Positions
from chakra_capture.trace.merged import MergedTrace

_ON_THREAD = ("annotation", "host_op", "python_function", "runtime")
_WAITS = ("event_wait", "sync", "inter_thread")


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of a window by number; times in ns, ``MISSING`` for none.

    Attributes:
        first: ``node_id`` of row 0.
        kind: as ``merge.rows.CODE``.
        parent, launch: numbers of rows, -1 for none.
        start, end: as recorded; of device activities see ``on_cpu_clock``.
        track: of a CPU row the number of its (pid, tid), of a device activity that of its (device, stream).
        is_timed: start and end are known.
        is_step: the annotation around a step.
        waits: kind of edge -> rows that are waited for, and rows that wait.
    """

    first: int
    kind: NDArray[np.int8]
    name: Coded
    parent: Positions
    launch: Positions
    start: Int64
    end: Int64
    pid: Int64
    tid: Int64
    device: Int64
    stream: Int64
    track: Int64
    is_collective: Bool
    is_timed: Bool
    is_step: Bool
    is_activity: Bool
    phase: Coded
    waits: dict[str, tuple[Int64, Int64]]

    def __len__(self) -> int:
        return len(self.kind)

    @property
    def has_times(self) -> bool:
        """Whether anything that a replay goes by has a time: work of an active thread, or of a device."""
        return bool((self.is_timed & (self.is_activity | self.is_kind("host_op"))).any())

    def is_kind(self, *kinds: str) -> Bool:
        """Rows of these kinds."""
        return of_kind(self.kind, kinds)

    def named(self, accept: Callable[[str], bool]) -> Bool:
        """Rows with a name that ``accept`` takes."""
        return self.name.mask_of(np.array([accept(name) for name in self.name.values], dtype=bool))

    def on_cpu_clock(self, offset_ns: int) -> "Rows":
        """The same with the times of device activities moved by the offset of their clock."""
        start = np.where(self.is_activity & (self.start != MISSING), self.start + offset_ns, self.start)
        end = np.where(self.is_activity & self.is_timed, self.end + offset_ns, self.end)
        return replace(self, start=start, end=end)


def read_rows(trace: MergedTrace, window: int) -> Rows:
    """Read one window of a merged rank, column by column: all at once would take several times the memory.

    Raises:
        TraceFileError: a table cannot be read.
    """
    columns = _Columns(trace, window)
    ids, kind = columns.series("node_id"), columns.series("kind").to_physical().to_numpy().astype(np.int8)
    first = int(ids[0]) if len(ids) else 0
    name, is_activity = coded_series(columns.series("name")), of_kind(kind, ACTIVITY_KINDS)
    start, duration = columns.numbers("ts_ns"), columns.numbers("dur_ns")
    is_timed = (start != MISSING) & (duration != MISSING)
    end = np.where(is_timed, start, MISSING)
    end[is_timed] += duration[is_timed]
    steps = np.array([parse_step(text) is not None for text in name.values], dtype=bool)
    pid, tid, device, stream = (columns.numbers(name) for name in ("pid", "tid", "device", "stream"))
    left, right = np.where(is_activity, device, pid), np.where(is_activity, stream, tid)
    return Rows(
        first=first,
        kind=kind,
        name=name,
        parent=columns.rows("parent_id", first),
        launch=columns.rows("launch_id", first),
        start=start,
        end=end,
        pid=pid,
        tid=tid,
        device=device,
        stream=stream,
        track=group_numbers(is_activity.astype(np.int8), group_numbers(left, right)),
        is_collective=columns.series("collective").is_not_null().to_numpy(),
        is_timed=is_timed,
        is_step=of_kind(kind, ("annotation",)) & name.mask_of(steps),
        is_activity=is_activity,
        phase=coded_series(columns.series("phase")),
        waits=_waits(trace, window, first),
    )


class _Columns:
    """Columns of the nodes of a window."""

    def __init__(self, trace: MergedTrace, window: int) -> None:
        self._trace = trace
        windows = trace.some_of_nodes("window")["window"]
        self._mine = None if windows.min() == window == windows.max() else windows == window

    def series(self, name: str) -> pl.Series:
        column = self._trace.some_of_nodes(name)[name]
        return column if self._mine is None else column.filter(self._mine)

    def numbers(self, name: str) -> Int64:
        """A column of integers, ``MISSING`` for none."""
        return self.series(name).fill_null(MISSING).to_numpy()

    def rows(self, name: str, first: int) -> Positions:
        """A column of ids as numbers of rows, -1 for none."""
        return (self.series(name) - first).fill_null(-1).cast(pl.Int32).to_numpy()


def on_active_threads(rows: Rows) -> Bool:
    """Timed rows on CPU threads that run an operator or launch something.

    Any other thread is passive: gloo's, a watchdog's, the profiler's.
    """
    on_thread = rows.is_kind(*_ON_THREAD) & rows.is_timed
    calls = rows.launch[rows.is_activity & (rows.launch >= 0)]
    works = on_thread & rows.is_kind("host_op")
    works[calls] |= on_thread[calls]
    is_active = np.zeros(int(rows.track.max(initial=-1)) + 1, dtype=bool)
    is_active[rows.track[works]] = True
    return on_thread & is_active[rows.track]


def coded_series(texts: pl.Series) -> Coded:
    """A column of texts in dictionary form."""
    values = texts.drop_nulls().unique(maintain_order=True)
    codes = texts.cast(pl.Enum(values)).to_physical().cast(pl.Int32).fill_null(-1)
    return Coded(codes.to_numpy(), values.to_list()).narrowed()


def _waits(trace: MergedTrace, window: int, first: int) -> dict[str, tuple[Int64, Int64]]:
    edges = trace.edges_of(*_WAITS).filter(pl.col("window") == window)
    found = {}
    for kind in _WAITS:
        part = edges.filter(pl.col("kind") == kind)
        found[kind] = (part["src"].to_numpy() - first, part["dst"].to_numpy() - first)
    return found
