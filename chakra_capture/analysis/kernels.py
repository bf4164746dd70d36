"""Kernels, copies and memsets by name: how often, how long, and how the durations are spread.

Every statistic is of the single durations, also over several ranks; a quantile is a duration that occurred: the
shortest that so large a part of the activities does not exceed. An activity counts up to the next start on its stream.
"""

from collections.abc import Sequence

import polars as pl

from chakra_capture.analysis.activities import device_activities
from chakra_capture.analysis.shares import quantile_of, share_of
from chakra_capture.trace.merged import MergedTrace
from chakra_capture.trace.schema import KINDS, Column

_NAME = Column("name", pl.String, "name of the device activity")
_KIND = Column("kind", pl.Enum(KINDS), "kernel, memcpy or memset")
_COUNT = Column("count", pl.Int64, "how often it ran")
_TOTAL = Column("total_ns", pl.Int64, "sum of its durations, each up to the next start on its stream", "ns")
_MEAN = Column("mean_ns", pl.Float64, "mean duration", "ns")
_SHARE = Column("share", pl.Float64, "total_ns as a part of the summed durations of all device activities")

SCHEMA = (
    Column("rank", pl.Int64, "global rank; null: all ranks together"),
    Column("phase", pl.String, "phase of the step that launched it; null: not known, or all together"),
    _NAME,
    _KIND,
    _COUNT,
    _TOTAL,
    _SHARE,
    _MEAN,
    Column("min_ns", pl.Int64, "shortest duration", "ns"),
    Column("p50_ns", pl.Int64, "median duration", "ns"),
    Column("p90_ns", pl.Int64, "duration that 9 of 10 do not exceed", "ns"),
    Column("max_ns", pl.Int64, "longest duration", "ns"),
    Column("num_clipped", pl.Int64, "of them reach past the next start on their stream, as recorded"),
    Column("raw_total_ns", pl.Int64, "sum of the durations as recorded", "ns"),
    Column("num_in_graphs", pl.Int64, "of them launched by a CUDA or HIP graph, which no op can be told for"),
)
SUMMARY = (_NAME, _KIND, _COUNT, _TOTAL, _MEAN, _SHARE)
# Columns that may tell rows of one name apart.
KEYS = ("rank", "phase")


def kernel_statistics(
    traces: Sequence[MergedTrace], *, by: Sequence[str] = (), steps: Sequence[int] | None = None
) -> pl.DataFrame:
    """Rank device activities by their summed duration, longest first.

    Args:
        traces: ranks, taken together.
        by: of ``KEYS``, what makes rows of their own.
        steps: only what these steps launched.
    """
    keys = [*by, "name", "kind"]
    found = [_durations(trace, by, steps) for trace in traces]
    rows = pl.concat(found) if found else pl.DataFrame(schema={"name": pl.String})
    if rows.is_empty():
        return pl.DataFrame(schema={column.name: column.dtype for column in SCHEMA})
    ns = pl.col("self_dur_ns")
    return (
        rows.group_by(keys)
        .agg(
            ns.count().alias("count"), ns.sum().alias("total_ns"), ns.mean().alias("mean_ns"), ns.min().alias("min_ns"),
            quantile_of("self_dur_ns", 1, 2).alias("p50_ns"), quantile_of("self_dur_ns", 9, 10).alias("p90_ns"),
            ns.max().alias("max_ns"), (ns < pl.col("dur_ns")).sum().alias("num_clipped"),
            pl.col("dur_ns").sum().alias("raw_total_ns"), pl.col("in_graph").sum().alias("num_in_graphs"),
        )
        .with_columns(share=share_of("total_ns"))
        .with_columns(pl.lit(None).alias(key) for key in KEYS if key not in by)
        .sort("total_ns", *keys, descending=[True, *[False] * len(keys)])
        .select(pl.col(column.name).cast(column.dtype) for column in SCHEMA)
    )  # fmt: skip


def kernel_summary(trace: MergedTrace) -> pl.DataFrame:
    """The same of one rank in fewer columns, for an overview."""
    return kernel_statistics([trace]).select(column.name for column in SUMMARY)


def _durations(trace: MergedTrace, by: Sequence[str], steps: Sequence[int] | None) -> pl.DataFrame:
    rows = device_activities(trace, "name", "phase", "step")
    if steps is not None:
        rows = rows.filter(pl.col("step").is_in(list(steps)))
    calls = trace.some_of_nodes("node_id", "kind", "name").filter(pl.col("kind") == "runtime")
    graphs = calls.filter(pl.col("name").str.ends_with("GraphLaunch"))["node_id"]
    kept = [key for key in by if key != "rank"]
    rows = rows.select(
        *kept, "name", "kind", "self_dur_ns", "dur_ns", in_graph=pl.col("launch_id").is_in(graphs.implode())
    )
    return rows.with_columns(rank=pl.lit(trace.rank, dtype=pl.Int64))
