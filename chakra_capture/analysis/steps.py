"""Step times of one rank over its recorded steps."""

import polars as pl

from chakra_capture.trace.merged import MergedTrace
from chakra_capture.trace.schema import Column

SCHEMA = (
    Column("num_steps", pl.Int64, "recorded whole steps"),
    Column("num_partial", pl.Int64, "recorded steps that were cut short; not in the times"),
    Column("first_step", pl.Int64, "smallest step number"),
    Column("last_step", pl.Int64, "largest step number"),
    Column("mean_ns", pl.Float64, "mean step time", "ns"),
    Column("median_ns", pl.Float64, "median step time", "ns"),
    Column("min_ns", pl.Int64, "shortest step", "ns"),
    Column("max_ns", pl.Int64, "longest step", "ns"),
)


def step_summary(trace: MergedTrace) -> pl.DataFrame:
    """Summarise the recorded steps; one row, no row without steps.

    The steps were recorded under the profiler, which slows small CPU ops down (about 2x for host and
    device trace together on CPU), so these are profiled step times.
    """
    is_partial = pl.col("partial").fill_null(False)
    num_partial = trace.steps.filter(is_partial).height
    is_step = pl.col("step").is_not_null()  # the row of a window without marked steps is no step
    timed = trace.steps.filter(is_step & pl.col("dur_ns").is_not_null() & ~is_partial)
    schema = pl.Schema({column.name: column.dtype for column in SCHEMA})
    if timed.is_empty():
        return pl.DataFrame(schema=schema)
    dur = pl.col("dur_ns")
    return timed.select(
        pl.len().cast(pl.Int64).alias("num_steps"),
        pl.lit(num_partial).alias("num_partial"),
        pl.col("step").min().alias("first_step"),
        pl.col("step").max().alias("last_step"),
        dur.mean().alias("mean_ns"),
        dur.median().alias("median_ns"),
        dur.min().alias("min_ns"),
        dur.max().alias("max_ns"),
    ).cast({c.name: c.dtype for c in SCHEMA})
