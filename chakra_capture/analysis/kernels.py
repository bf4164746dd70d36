"""Kernels, copies and memsets of one rank by name."""

import polars as pl

from chakra_capture.analysis.shares import share_of
from chakra_capture.trace.merged import MergedTrace
from chakra_capture.trace.schema import KINDS, Column

SCHEMA = (
    Column("name", pl.String, "name of the device activity"),
    Column("kind", pl.Enum(KINDS), "kernel, memcpy or memset"),
    Column("count", pl.Int64, "how often it ran"),
    Column("total_ns", pl.Int64, "sum of its durations, each up to the next start on its stream", "ns"),
    Column("mean_ns", pl.Float64, "mean duration", "ns"),
    Column("share", pl.Float64, "total_ns as a part of the summed durations of all device activities"),
)


def kernel_summary(trace: MergedTrace) -> pl.DataFrame:
    """Rank device activities by their summed duration, longest first."""
    return (
        trace.device_activities.group_by("name", "kind")
        .agg(
            pl.len().cast(pl.Int64).alias("count"),
            pl.col("self_dur_ns").sum().alias("total_ns"),
            pl.col("self_dur_ns").mean().alias("mean_ns"),
        )
        .with_columns(share=share_of("total_ns"))
        .sort("total_ns", "name", descending=[True, False])
        .select([column.name for column in SCHEMA])
    )
