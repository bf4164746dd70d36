"""Host ops, annotations and runtime calls of one rank by name: where the CPU time goes."""

import polars as pl

from chakra_capture.analysis.shares import share_of
from chakra_capture.annotations import STEP_PREFIX
from chakra_capture.trace.merged import MergedTrace
from chakra_capture.trace.schema import Column

SCHEMA = (
    Column("name", pl.String, "name of the host op, annotation or runtime call"),
    Column("count", pl.Int64, "how often it ran"),
    Column("self_ns", pl.Int64, "summed self time: duration less that of the rows inside", "ns"),
    Column("total_ns", pl.Int64, "summed duration; of recursive ops each level counts", "ns"),
    Column("share", pl.Float64, "self_ns as a part of the self time of all rows that count here"),
)


def operator_summary(trace: MergedTrace) -> pl.DataFrame:
    """Rank them by their summed self time, longest first; ProfilerStep itself is left out."""
    is_op = pl.col("kind").is_in(["host_op", "annotation", "runtime"]) & ~pl.col("name").str.starts_with(STEP_PREFIX)
    return (
        trace.nodes.filter(is_op & pl.col("self_dur_ns").is_not_null())
        .group_by("name")
        .agg(
            pl.len().cast(pl.Int64).alias("count"),
            pl.col("self_dur_ns").sum().alias("self_ns"),
            pl.col("dur_ns").sum().alias("total_ns"),
        )
        .with_columns(share=share_of("self_ns"))
        .sort("self_ns", "name", descending=[True, False])
        .select([column.name for column in SCHEMA])
    )
