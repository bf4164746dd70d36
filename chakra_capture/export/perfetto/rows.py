"""The rows of one rank without their texts, and where each is shown: track, lane, from when to when."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import polars as pl

from chakra_capture import layout
from chakra_capture.export.perfetto.cut import Cut, Spans
from chakra_capture.merge.lanes import assign_lanes
from chakra_capture.trace.columns import MISSING, Bool, Int64, Positions
from chakra_capture.trace.merged import MergedTrace
from chakra_capture.trace.schema import KINDS

CODE = {name: number for number, name in enumerate(KINDS)}
ON_DEVICE = ("kernel", "memcpy", "memset", "device_annotation", "sync")
_WITHOUT_TIME = ("process", "thread")
_COLUMNS = ("node_id", "window", "ts_ns", "dur_ns", "launch_id", "step", "sequence_number")
# The device of rows that do not say it.
NO_DEVICE = -1
ROWS_AT_ONCE = 1 << 16


@dataclass(frozen=True, slots=True)
class Rows:
    """Columns of nodes, ``MISSING`` for null; times on the clock that is shown.

    Attributes:
        place, line: of a device row the device and its stream, else process and thread.
        on_device: the row is of a device.
    """

    table: pl.LazyFrame
    node_id: Int64
    window: Int64
    kind: "npt.NDArray[np.uint8]"
    begin: Int64
    dur: Int64
    launch: Int64
    step: Int64
    sequence: Int64
    place: Int64
    line: Int64
    on_device: Bool

    def __len__(self) -> int:
        return len(self.node_id)

    def is_kind(self, *kinds: str) -> Bool:
        return np.isin(self.kind, [CODE[kind] for kind in kinds])

    @property
    def end(self) -> Int64:
        """Ends; starts where there is none."""
        return self.begin + np.where(self.dur == MISSING, 0, self.dur)

    def positions(self, node_ids: Int64) -> Int64:
        """Rows with these ids; -1 for none."""
        if not len(self.node_id):
            return np.full(len(node_ids), -1)
        at = np.minimum(np.searchsorted(self.node_id, node_ids), len(self.node_id) - 1)
        return np.where(self.node_id[at] == node_ids, at, -1)


def read_rows(trace: MergedTrace, shift_ns: int) -> Rows:
    """Read the rows of a rank.

    Args:
        shift_ns: what is to be added to the times of its host.
    """
    table = pl.scan_parquet(trace.folder / layout.NODES_FILE, glob=False)
    numbers = (pl.col(name).cast(pl.Int64).fill_null(MISSING) for name in _COLUMNS)
    sides = (pl.coalesce("device", "pid").alias("device"), pl.coalesce("stream", "tid").alias("stream"))
    narrow = table.select(
        *numbers, pl.col("kind").to_physical().cast(pl.UInt8), pl.col("pid", "tid").fill_null(MISSING),
        *(side.fill_null(MISSING) for side in sides),
    ).collect()  # fmt: skip
    column = {name: narrow[name].to_numpy() for name in narrow.columns}
    on_device = np.isin(column["kind"], [CODE[kind] for kind in ON_DEVICE])
    begin = column["ts_ns"].copy()
    known = begin != MISSING
    offsets = trace.clock_offsets
    for window in np.unique(column["window"]).tolist():
        begin[known & on_device & (column["window"] == window)] += offsets.get(window) or 0
    begin[known] += shift_ns
    device = np.where(column["device"] == MISSING, NO_DEVICE, column["device"])
    return Rows(
        table, column["node_id"], column["window"], column["kind"], begin, column["dur_ns"], column["launch_id"],
        column["step"], column["sequence_number"], np.where(on_device, device, column["pid"]),
        np.where(on_device, column["stream"], column["tid"]), on_device,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Shown:
    """The rows of a rank that are shown.

    Attributes:
        row: their numbers, ascending.
        begin, end: as shown; ``is_cut`` where that is not all of it.
        is_slice: it has a duration; else it is an instant, or a sample of a counter.
        track: number in ``tracks``.
        lane: within its track.
        tracks: whether it is of a device, its place and its line.
        num_lanes: of each track.
        without_time: rows that have none, so they are not shown.
        num_outside: rows that the cut leaves out.
    """

    rows: Rows
    row: Int64
    begin: Int64
    end: Int64
    is_cut: Bool
    is_slice: Bool
    track: Positions
    lane: Positions
    tracks: tuple[tuple[bool, int, int], ...]
    num_lanes: tuple[int, ...]
    without_time: dict[str, int]
    num_outside: int

    def positions(self, rows: Int64) -> Int64:
        """Positions of rows among those shown; -1 for those that are not, and for row -1."""
        if not len(self.row):
            return np.full(len(rows), -1)
        at = np.minimum(np.searchsorted(self.row, rows), len(self.row) - 1)
        return np.where(self.row[at] == rows, at, -1)


def choose(rows: Rows, cut: Cut, spans: Spans) -> Shown:
    """Choose the rows that a cut shows, clip them, and give them lanes."""
    timed = rows.begin != MISSING
    kinds = np.array([cut.shows(kind) for kind in KINDS])[rows.kind]
    clipped = spans.clip(rows.begin, rows.end)
    row = np.flatnonzero(timed & kinds & clipped.kept)
    is_slice = (rows.dur[row] != MISSING) & ~rows.is_kind("memory", "instant")[row]
    begin, end = clipped.begin[row], clipped.end[row]
    track, tracks = _tracks(rows, row)
    lane = np.zeros(len(row), dtype=np.int32)
    lane[is_slice] = assign_lanes(track[is_slice], begin[is_slice], (end - begin)[is_slice])
    num_lanes = np.ones(len(tracks), dtype=np.int64)
    np.maximum.at(num_lanes, track, lane + 1)
    untimed = np.bincount(rows.kind[~timed], minlength=len(KINDS)).tolist()
    without = {kind: count for kind, count in zip(KINDS, untimed, strict=True) if count and kind not in _WITHOUT_TIME}
    return Shown(
        rows, row, begin, end, clipped.is_cut[row], is_slice, track, lane, tracks, tuple(num_lanes.tolist()), without,
        int(np.count_nonzero(timed)) - len(row),
    )  # fmt: skip


def _tracks(rows: Rows, row: Int64) -> tuple[Positions, tuple[tuple[bool, int, int], ...]]:
    """Number of the track of each row, and what the tracks are."""
    keys = rows.on_device[row], rows.place[row], rows.line[row]
    if not len(row):
        return np.zeros(0, dtype=np.int32), ()
    changes = np.zeros(len(row), dtype=bool)
    changes[0] = True
    for key in keys:
        changes[1:] |= key[1:] != key[:-1]
    begins = np.flatnonzero(changes)
    numbers: dict[tuple[bool, int, int], int] = {}
    runs = zip(*(key[begins].tolist() for key in keys), strict=True)
    codes = np.array([numbers.setdefault(run, len(numbers)) for run in runs], dtype=np.int32)
    return np.repeat(codes, np.diff(np.append(begins, len(row)))), tuple(numbers)


def step_spans(rows: Rows, steps: frozenset[int]) -> Spans:
    """Of each step the time from its start to the end of the last row of it, by windows."""
    mine = np.isin(rows.step, [*steps]) & (rows.begin != MISSING)
    if not mine.any():
        nothing = np.zeros(0, dtype=np.int64)
        return Spans(nothing, nothing)
    found, of_step = np.unique(rows.step[mine], return_inverse=True)
    number = rows.window[mine] * len(found) + of_step
    size = int(number.max()) + 1
    low, high = np.full(size, np.iinfo(np.int64).max), np.full(size, np.iinfo(np.int64).min)
    np.minimum.at(low, number, rows.begin[mine])
    np.maximum.at(high, number, rows.end[mine])
    return Spans.of(low, high)  # a window that lacks a step has an empty one, which goes
