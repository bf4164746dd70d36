"""What the loop's thread does in the part of a step that is in no phase."""

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import polars as pl

from chakra_capture.analysis.loop import LoopWindow, Segments, cut_to_steps, loop_windows
from chakra_capture.annotations import BACKWARD, FORWARD
from chakra_capture.merge import intervals
from chakra_capture.trace.merged import MergedTrace
from chakra_capture.trace.schema import Column

SCHEMA = (
    Column("window", pl.Int32, "recorded window"),
    Column("step", pl.Int64, "global step number"),
    Column("part", pl.String, "loss: between forward and backward; zero_grad; copies: between devices or "
           "types; python: between ops; ops: other ops; else the name of an annotation"),
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
    """Time of each part, by step."""
    steps, segments = loop.steps, loop.segments
    found: list[dict[str, int]] = [defaultdict(int, {_PYTHON: dur}) for dur in steps["dur_ns"].to_list()]
    for number, _, begin, stop in cut_to_steps(loop):
        found[number][_PYTHON] -= stop - begin
    number_of = {node: at for at, node in enumerate(steps["node_id"].to_list()) if node is not None}
    timed = pl.col("dur_ns").is_not_null() & pl.col("launch_id").is_null()
    children = loop.nodes.filter(timed & pl.col("parent_id").is_in(list(number_of)))
    for name, kind, parent, ts, dur in children.select("name", "kind", "parent_id", "ts_ns", "dur_ns").iter_rows():
        number = number_of[parent]
        span = np.array([ts, max(min(ts + dur, int(loop.high[number])), ts)], dtype=np.int64)
        outside = int((span[1:] - ts - intervals.covered(segments.start, segments.end, span[:1], span[1:]))[0])
        found[number][_part(name, kind, segments, ts)] += outside
        found[number][_PYTHON] -= outside
    return [dict(parts) for parts in found]


_PYTHON, _LOSS, _ZERO_GRAD, _COPIES, _OPS = "python", "loss", "zero_grad", "copies", "ops"
_COPY_OPS = ("aten::to", "aten::_to_copy", "aten::copy_", "aten::item", "aten::cpu", "aten::cuda")


def _part(name: str, kind: str, segments: Segments, ts: int) -> str:
    """What a row that stands in no phase belongs to."""
    if name.startswith("Optimizer.zero_grad#"):
        return _ZERO_GRAD
    at = int(np.searchsorted(segments.start, ts, side="right"))
    if 0 < at < len(segments.phase) and segments.phase[at - 1] == FORWARD and segments.phase[at] == BACKWARD:
        return _LOSS
    if kind == "annotation":
        return name
    return _COPIES if name in _COPY_OPS else _OPS


def mean_rest_parts(tables: Sequence[pl.DataFrame]) -> pl.DataFrame:
    """Mean of each part over all steps of all ranks that have any, largest first: ``part`` and ``wall_ns``."""
    if not tables:
        return pl.DataFrame(schema={"part": pl.String, "wall_ns": pl.Float64})
    rows = pl.concat([table.with_columns(rank=pl.lit(at)) for at, table in enumerate(tables)], how="diagonal")
    num_steps = rows.n_unique(["rank", "window", "step"])
    sums = rows.group_by("part").agg(pl.col("wall_ns").sum() / max(num_steps, 1))
    return sums.sort("wall_ns", "part", descending=[True, False])
