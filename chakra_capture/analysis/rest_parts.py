"""What the loop's thread does in the part of a step that is in no phase."""

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import polars as pl

from chakra_capture.analysis.loop import LoopWindow, Segments, cut_to_steps, loop_windows
from chakra_capture.annotations import BACKWARD, FORWARD, is_handler
from chakra_capture.merge import intervals
from chakra_capture.trace.merged import MergedTrace
from chakra_capture.trace.schema import Column

SCHEMA = (
    Column("window", pl.Int32, "recorded window"),
    Column("step", pl.Int64, "global step number"),
    Column("part", pl.String, "loss: between forward and backward; zero_grad; copies: between devices or "
           "types; python: between ops; ops: other ops; else the innermost annotation, of handlers with handler:"),
    Column("wall_ns", pl.Int64, "time of the loop's thread", "ns"),
)  # fmt: skip


def rest_parts(trace: MergedTrace, *, windows: Sequence[LoopWindow] | None = None) -> pl.DataFrame:
    """Split what ``phase_times`` finds in no phase by what the loop's thread does meanwhile.

    Args:
        windows: ``loop_windows`` of the trace, where they are at hand.

    Returns:
        a table of ``SCHEMA``; the parts of a step sum to its rest.
    """
    rows = []
    for loop in loop_windows(trace) if windows is None else windows:
        for number, parts in enumerate(_of_window(loop)):
            rows += [(loop.window, loop.steps["step"][number], part, ns) for part, ns in parts.items() if ns]
    return pl.DataFrame(rows, schema={column.name: column.dtype for column in SCHEMA}, orient="row")


def _of_window(loop: LoopWindow) -> list[dict[str, int]]:
    """Time of each part, by step: of the step itself, then of what is in it, in that, and so on."""
    found: list[dict[str, int]] = [defaultdict(int, {_PYTHON: dur}) for dur in loop.steps["dur_ns"].to_list()]
    for number, _, begin, stop in cut_to_steps(loop):
        found[number][_PYTHON] -= stop - begin
    rows = loop.nodes.filter(pl.col("dur_ns").is_not_null() & pl.col("launch_id").is_null()).select(
        "node_id", "parent_id", "name", "kind", "ts_ns", end=pl.col("ts_ns") + pl.col("dur_ns")
    )
    steps = loop.steps.select("node_id").with_row_index("number")
    outer = steps.with_columns(pl.Series("end", loop.high), part=pl.lit(_PYTHON)).filter(
        pl.col("node_id").is_not_null()
    )
    while outer.height:
        outer = _count_inside(found, _inside(loop.segments, rows, outer))
    return [dict(parts) for parts in found]


def _inside(segments: Segments, rows: pl.DataFrame, outer: pl.DataFrame) -> pl.DataFrame:
    """The rows right inside others, cut to their ends, with the time that is in no phase: where there is any."""
    inside = rows.join(outer, left_on="parent_id", right_on="node_id", suffix="_outer")
    inside = inside.with_columns(end=pl.max_horizontal("ts_ns", pl.min_horizontal("end", "end_outer")))
    low, high = inside["ts_ns"].to_numpy(), inside["end"].to_numpy()
    in_phases = intervals.covered(segments.start, segments.end, low, high)
    at = np.searchsorted(segments.start, low, side="right")
    names = np.array([_NONE, *segments.phase, _NONE])
    after_forward = (names[at] == FORWARD) & (names[at + 1] == BACKWARD)
    inside = inside.with_columns(pl.Series("own_ns", high - low - in_phases), pl.Series("is_loss", after_forward))
    return inside.filter(pl.col("own_ns") > 0)


def _count_inside(found: list[dict[str, int]], inside: pl.DataFrame) -> pl.DataFrame:
    """Count rows to the parts they belong to; returns the annotations among them, to be looked into."""
    parts = []
    columns = inside.select("name", "kind", "part", "is_loss", "number", "own_ns")
    for name, kind, outer, is_loss, number, own_ns in columns.iter_rows():
        part = _part(name, kind, outer, is_loss=is_loss)
        parts.append(part)
        found[number][outer] -= own_ns
        found[number][part] += own_ns
    return (
        inside.with_columns(pl.Series("part", parts, dtype=pl.String))
        .filter(pl.col("kind") == "annotation")
        .select("number", "node_id", "end", "part")
    )


_PYTHON, _LOSS, _ZERO_GRAD, _COPIES, _OPS = "python", "loss", "zero_grad", "copies", "ops"
_COPY_OPS = ("aten::to", "aten::_to_copy", "aten::copy_", "aten::item", "aten::cpu", "aten::cuda")
_NONE = ""


def _part(name: str, kind: str, outer: str, *, is_loss: bool) -> str:
    """What a row that stands in no phase belongs to; ``outer`` is what the row around it does."""
    if is_handler(name):
        return name
    if is_handler(outer):
        return outer
    if name.startswith("Optimizer.zero_grad#"):
        return _ZERO_GRAD
    if is_loss:
        return _LOSS
    if kind == "annotation":
        return name
    if outer != _PYTHON:
        return outer
    return _COPIES if name in _COPY_OPS else _OPS


def mean_rest_parts(tables: Sequence[pl.DataFrame]) -> pl.DataFrame:
    """Mean of each part over all steps of all ranks that have any, largest first: ``part`` and ``wall_ns``."""
    if not tables:
        return pl.DataFrame(schema={"part": pl.String, "wall_ns": pl.Float64})
    rows = pl.concat([table.with_columns(rank=pl.lit(at)) for at, table in enumerate(tables)], how="diagonal")
    num_steps = rows.n_unique(["rank", "window", "step"])
    sums = rows.group_by("part").agg(pl.col("wall_ns").sum() / max(num_steps, 1))
    return sums.sort("wall_ns", "part", descending=[True, False])
