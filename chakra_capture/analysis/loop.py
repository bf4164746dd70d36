"""The loop's thread in the recorded steps: in which phase it is when."""

from dataclasses import dataclass

import numpy as np
import polars as pl

from chakra_capture.annotations import BACKWARD, BETWEEN_STEPS, PHASE_NAMES, STEP_PREFIX
from chakra_capture.merge.nest import innermost_at
from chakra_capture.trace.columns import Int64
from chakra_capture.trace.merged import MergedTrace

PHASES = (*PHASE_NAMES, *BETWEEN_STEPS, None)
_NEEDED = (
    "node_id", "kind", "name", "parent_id", "launch_id", "ts_ns", "dur_ns", "self_dur_ns", "pid", "tid", "step",
    "phase", "collective",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Segments:
    """Stretches of the loop's thread, each in one phase, disjoint and ascending."""

    start: Int64
    end: Int64
    phase: list[str]


@dataclass(frozen=True, slots=True)
class LoopWindow:
    """One window: its steps that have a duration, its rows without the texts that make up most of the table.

    Attributes:
        low, high: start and end of each step, ns.
    """

    window: int
    nodes: pl.DataFrame
    steps: pl.DataFrame
    segments: Segments
    low: Int64
    high: Int64


def loop_windows(trace: MergedTrace) -> list[LoopWindow]:
    """The windows of a trace that have such steps, in order."""
    steps = trace.steps.filter(pl.col("step").is_not_null() & pl.col("dur_ns").is_not_null())
    nodes = window_nodes(trace) if steps.height else trace.steps
    found = []
    for window in steps["window"].unique().sort().to_list():
        mine, rows = (table.filter(pl.col("window") == window) for table in (steps, nodes))
        low = mine["ts_ns"].to_numpy()
        segments = _segments(rows, mine)
        found.append(LoopWindow(window, rows, mine, segments, low, low + mine["dur_ns"].to_numpy()))
    return found


def window_nodes(trace: MergedTrace) -> pl.DataFrame:
    """What ``LoopWindow`` has of the rows of all windows."""
    return trace.some_of_nodes("window", *_NEEDED)


def _segments(nodes: pl.DataFrame, steps: pl.DataFrame) -> Segments:
    """By the recording's annotations, the innermost of several; without any, by rows that follow each other."""
    pids = steps["pid"].unique()
    marks = nodes.filter(
        (pl.col("kind") == "annotation")
        & pl.col("name").is_in([p for p in PHASES if p])
        & pl.col("pid").is_in(pids.implode())
        & pl.col("dur_ns").is_not_null()
    ).sort("ts_ns", "dur_ns", descending=[False, True])
    if marks.is_empty():
        return _runs(nodes, steps)
    start = marks["ts_ns"].to_numpy()
    end = start + marks["dur_ns"].to_numpy()
    bounds = np.unique(np.concatenate([start, end]))
    holder = innermost_at(bounds[:-1], start, end)
    some = holder >= 0
    return Segments(bounds[:-1][some], bounds[1:][some], [marks["name"][int(at)] for at in holder[some]])


def _runs(nodes: pl.DataFrame, steps: pl.DataFrame) -> Segments:
    """Rows of the loop's thread in order, while they are of one phase; while autograd works it waits in backward."""
    own = nodes.filter(pl.col("node_id").is_in(steps["node_id"].drop_nulls().implode())).select("pid", "tid").unique()
    timed = pl.col("self_dur_ns").is_not_null() & pl.col("dur_ns").is_not_null() & ~is_step()
    is_loop = [
        (pl.col("pid") == pid) & ((pl.col("tid") == tid) | (pl.col("phase") == BACKWARD).fill_null(value=False))
        for pid, tid in own.iter_rows()
    ]
    rows = (
        nodes.filter(timed & pl.col("launch_id").is_null() & pl.any_horizontal(pl.lit(value=False), *is_loop))
        .sort("ts_ns")
        .with_columns(run=pl.col("phase").fill_null("").rle_id())
        .group_by("run", maintain_order=True)
        .agg(pl.col("phase").first(), start=pl.col("ts_ns").min(), end=(pl.col("ts_ns") + pl.col("dur_ns")).max())
        .with_columns(end=pl.min_horizontal("end", pl.col("start").shift(-1)))
        .filter(pl.col("phase").is_not_null())
    )
    return Segments(rows["start"].to_numpy(), rows["end"].to_numpy(), rows["phase"].to_list())


def is_step() -> pl.Expr:
    """Rows that are the annotation of a step."""
    return pl.col("name").str.starts_with(STEP_PREFIX)


def cut_to_steps(loop: LoopWindow) -> list[tuple[int, str, int, int]]:
    """The parts of the segments within each step: number of the step, phase, start, end."""
    segments = loop.segments
    found = []
    for number, (begin, stop) in enumerate(zip(loop.low.tolist(), loop.high.tolist(), strict=True)):
        first, last = np.searchsorted(segments.end, begin, side="right"), np.searchsorted(segments.start, stop)
        for at in range(int(first), int(last)):
            part = max(int(segments.start[at]), begin), min(int(segments.end[at]), stop)
            found.append((number, segments.phase[at], *part))
    return found
