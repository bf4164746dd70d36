"""One side of a comparison: the steps of a rank that count, the calls in them, and whose time is whose."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import polars as pl

from chakra_capture.analysis.loop import PHASES, LoopWindow, Segments, is_step, loop_windows
from chakra_capture.analysis.phase_times import phase_times
from chakra_capture.analysis.trace_diff.timeline import NONE, SCHEMA, Tracks, phases_at, stretches, track
from chakra_capture.annotations import BACKWARD
from chakra_capture.merge.nest import nest
from chakra_capture.trace.columns import Int64
from chakra_capture.trace.merged import MergedTrace

# Rows that time is told to; Python functions are not among them, so that runs with and without stacks compare.
KINDS = ("host_op", "annotation", "runtime")
_KIND = pl.Enum(KINDS)
_ROWS: dict[str, pl.DataType | type[pl.DataType]] = {
    "node_id": pl.Int64, "kind": _KIND, "name": pl.String, "input_shapes": pl.String, "phase": pl.Int64,
    "begin_phase": pl.Int64, "at": pl.Int64, "is_loop": pl.Boolean, "is_mark": pl.Boolean, "parent": pl.Int64,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Side:
    """Steps of one rank.

    Attributes:
        steps: their numbers; None for a window that marks none.
        durations: of the steps, ns.
        rows: calls that start in them, outermost first: ``node_id``, ``kind``, ``token``, ``phase``
            (place in ``PHASES``, as merge labels it), ``begin_phase`` (that the loop is in then), ``at`` (which step),
            ``is_loop`` (on the loop's thread), ``is_mark`` (only marks a step or a phase of it), ``parent`` (a row,
            -1 for none).
        tokens: ``name`` and ``input_shapes`` of each ``token``.
        times: ``at``, ``phase``, ``row`` and ``ns``; see ``timeline``.
        phases: of the steps, as ``phase_times`` gives them.
        places: ``window`` and ``step`` of each step, and ``at``, its number here.
    """

    trace: MergedTrace
    steps: tuple[int | None, ...]
    durations: Int64
    rows: pl.DataFrame
    tokens: pl.DataFrame
    times: pl.DataFrame
    phases: pl.DataFrame
    places: pl.DataFrame

    @property
    def num_steps(self) -> int:
        return len(self.steps)

    @property
    def total_ns(self) -> int:
        return int(self.durations.sum())


def whole_steps(trace: MergedTrace) -> list[int | None]:
    """Numbers of the steps that were recorded whole; None for each whole window without marked steps."""
    timed = trace.steps.filter(pl.col("dur_ns").is_not_null() & ~pl.col("partial").fill_null(False))
    marked = timed["step"].drop_nulls().unique().sort().to_list()
    return marked or [None] * timed.height


def read_side(trace: MergedTrace, steps: Sequence[int | None]) -> Side:
    """Read what counts of a rank.

    Args:
        steps: of ``whole_steps``.
    """
    marked = [_with_steps(each, steps) for each in loop_windows(trace)]
    windows = [each for each in marked if each.steps.height] if marked else _unmarked(trace)
    shapes = trace.some_of_nodes("node_id", "input_shapes").filter(pl.col("input_shapes").is_not_null())
    rows, times, durations = [pl.DataFrame(schema=_ROWS)], [pl.DataFrame(schema=SCHEMA)], []
    numbers: list[int | None] = []
    for window in windows:
        num_rows, num_steps = sum(each.height for each in rows), len(numbers)
        mine, own = _of_window(window)
        mine = mine.join(shapes, on="node_id", how="left", validate="m:1", maintain_order="left")
        moved = pl.when(pl.col("parent") >= 0).then(pl.col("parent") + num_rows).otherwise(NONE)
        rows.append(mine.with_columns(pl.col("at") + num_steps, parent=moved).select(*_ROWS))
        row = pl.when(pl.col("row") >= 0).then(pl.col("row") + num_rows).otherwise(NONE)
        times.append(own.with_columns(pl.col("at") + num_steps, row=row))
        durations.append(window.high - window.low)
        numbers += window.steps["step"].to_list()
    spans = np.concatenate([np.zeros(0, dtype=np.int64), *durations])
    own, tokens = _with_tokens(pl.concat(rows))
    places = pl.concat([window.steps.select("window", "step") for window in windows]).with_row_index("at")
    return Side(
        trace=trace,
        steps=tuple(numbers),
        durations=spans,
        rows=own,
        tokens=tokens,
        times=pl.concat(times),
        phases=phase_times(trace, windows=windows),
        places=places.with_columns(pl.col("at").cast(pl.Int64)),
    )


def _with_tokens(rows: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Rows with numbers for their texts, of which there are few, and these texts."""
    keys = ["name", "input_shapes"]
    tokens = rows.select(keys).unique(maintain_order=True).with_row_index("token")
    rows = rows.join(tokens, on=keys, how="left", nulls_equal=True, validate="m:1", maintain_order="left")
    return rows.drop(keys).with_columns(pl.col("token").cast(pl.Int64)), tokens


def _with_steps(window: LoopWindow, steps: Sequence[int | None]) -> LoopWindow:
    """A window with the steps that count, of one process: where several mark steps, the one with most."""
    kept = window.steps.filter(pl.col("step").is_in(list(steps)) & ~pl.col("partial").fill_null(False))
    kept = kept.filter(pl.col("pid") == kept["pid"].mode().sort().first()).sort("ts_ns").unique("step", keep="first")
    kept = kept.sort("ts_ns")
    low = kept["ts_ns"].to_numpy()
    return replace(window, steps=kept, low=low, high=low + kept["dur_ns"].to_numpy())


def _unmarked(trace: MergedTrace) -> list[LoopWindow]:
    """Windows without marked steps, each as if it were one."""
    from chakra_capture.analysis.loop import window_nodes

    nothing = np.zeros(0, dtype=np.int64)
    rows, found = window_nodes(trace), []
    for window in trace.steps.filter(pl.col("step").is_null() & pl.col("dur_ns").is_not_null()).partition_by("window"):
        number, low = window["window"][0], window["ts_ns"].to_numpy()
        nodes, high = rows.filter(pl.col("window") == number), low + window["dur_ns"].to_numpy()
        found.append(LoopWindow(number, nodes, window, Segments(nothing, nothing, []), low, high))
    return found


def _of_window(window: LoopWindow) -> tuple[pl.DataFrame, pl.DataFrame]:
    """The rows of one window, and whose the time of its steps is."""
    pid, tid = _loop_thread(window)
    on_cpu = pl.col("kind").is_in(KINDS) & pl.col("ts_ns").is_not_null() & pl.col("dur_ns").is_not_null()
    needed = ("node_id", "kind", "name", "phase", "collective", "tid", "ts_ns", "dur_ns")
    rows = _in_steps(window.nodes.filter(on_cpu & (pl.col("pid") == pid)).select(needed), window)
    is_loop = pl.col("tid") == tid
    workers = rows.filter(~is_loop & (pl.col("phase") == BACKWARD))["tid"].unique()
    of_worker = ~is_loop & pl.col("tid").is_in(workers.implode())
    order = {"thread": pl.when(is_loop).then(0).when(of_worker).then(1).otherwise(2)}
    rows = (
        rows.filter(is_loop | of_worker | pl.col("collective").is_not_null())
        .with_columns(**order)
        .sort("thread", "tid", "ts_ns", "dur_ns", "node_id", descending=[False, False, False, True, False])
    )
    thread = rows["tid"].rle_id().to_numpy()
    start, dur = rows["ts_ns"].to_numpy(), rows["dur_ns"].to_numpy()
    nesting = nest(thread, start, dur)
    parent = nesting.parent.astype(np.int64)
    tracks = _tracks(rows, (thread, start, nesting.end_ns, parent))
    is_op = (rows["kind"] != "annotation").to_numpy()
    times = stretches(tracks, window.segments, low=window.low, high=window.high, is_op=is_op)
    phases = {phase: at for at, phase in enumerate(PHASES)}
    is_phase = pl.col("name").is_in([phase for phase in PHASES if phase])
    rows = rows.with_columns(
        pl.col("phase").replace_strict(phases, default=phases[None], return_dtype=pl.Int64),
        begin_phase=pl.Series(phases_at(window.segments, start)),
        is_loop=pl.col("thread") == 0,
        is_mark=(pl.col("kind") == "annotation") & (is_step() | is_phase),
        parent=pl.Series(parent),
    )
    return rows, times


def _in_steps(rows: pl.DataFrame, window: LoopWindow) -> pl.DataFrame:
    """Rows that start in a step, with ``at``."""
    start = rows["ts_ns"].to_numpy()
    at = np.searchsorted(window.low, start, side="right") - 1
    inside = (at >= 0) & (start < np.append(window.high, 0)[at])
    kind = pl.col("kind").cast(pl.String).cast(_KIND)
    return rows.with_columns(at=pl.Series(at.astype(np.int64))).filter(pl.Series(inside)).with_columns(kind)


def _tracks(rows: pl.DataFrame, nested: tuple[Int64, Int64, Int64, Int64]) -> Tracks:
    thread, start, end, parent = nested
    found: dict[int, list[tuple[int, Int64]]] = {0: [], 1: [], 2: []}
    kinds = rows["thread"].to_numpy()
    for number in np.unique(thread):
        own = np.flatnonzero(thread == number)
        found[int(kinds[own[0]])].append((int(start[own[0]]), own))
    tracks = {
        kind: [track(own, start, end, parent) for _, own in sorted(threads, key=lambda each: each[0])]
        for kind, threads in found.items()
    }
    nothing = track(np.zeros(0, dtype=np.int64), start, end, parent)
    return Tracks(tracks[0][0] if tracks[0] else nothing, tracks[1], tracks[2])


def _loop_thread(window: LoopWindow) -> tuple[int | None, int | None]:
    """The thread that marks the steps; where none does, that with most time in calls which are not autograd's."""
    marks = window.nodes.filter(pl.col("node_id").is_in(window.steps["node_id"].drop_nulls().implode()))
    if not marks.is_empty():
        return marks["pid"][0], marks["tid"][0]
    own = window.nodes.filter(pl.col("kind").is_in(KINDS) & pl.col("self_dur_ns").is_not_null())
    busy = (
        own.group_by("pid", "tid")
        .agg((pl.col("phase") == BACKWARD).any().fill_null(False).alias("back"), pl.col("self_dur_ns").sum())
        .sort("back", "self_dur_ns", "pid", "tid", descending=[False, True, False, False])
    )
    return (None, None) if busy.is_empty() else (busy["pid"][0], busy["tid"][0])
