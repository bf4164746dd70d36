"""Host ops, annotations and runtime calls of one rank by name: where the CPU time of the steps goes."""

import polars as pl

from chakra_capture.analysis.shares import share_of
from chakra_capture.annotations import STEP_PREFIX
from chakra_capture.trace.merged import MergedTrace
from chakra_capture.trace.schema import Column

OUTSIDE = "(outside any op)"
PYTHON = "(Python functions)"

SCHEMA = (
    Column("name", pl.String, "name of the host op, annotation or runtime call; in brackets what is none of them"),
    Column("count", pl.Int64, "how often it ran"),
    Column("self_ns", pl.Int64, "summed self time: duration less that of the rows inside", "ns"),
    Column("total_ns", pl.Int64, "summed duration; of recursive ops each level counts", "ns"),
    Column("share", pl.Float64, "self_ns as a part of the self time of all rows of this table"),
)


def operator_summary(trace: MergedTrace) -> pl.DataFrame:
    """Rank by summed self time, longest first, over the whole recorded steps and all threads.

    The self time of ProfilerStep, the time of its thread in which no op runs, is a row of its own, and
    so are recorded Python functions together. A trace without whole steps is summed over all it holds.
    """
    name = pl.col("name")
    rows = _rows_of_steps(trace).filter(
        pl.col("kind").is_in(["host_op", "annotation", "runtime", "python_function"])
        & pl.col("self_dur_ns").is_not_null()
    )
    return (
        rows.with_columns(
            pl.when(pl.col("kind") == "python_function")
            .then(pl.lit(PYTHON))
            .when(name.str.starts_with(STEP_PREFIX))
            .then(pl.lit(OUTSIDE))
            .otherwise(name)
            .alias("name")
        )
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


def _rows_of_steps(trace: MergedTrace) -> pl.DataFrame:
    is_whole = pl.col("step").is_not_null() & pl.col("dur_ns").is_not_null() & ~pl.col("partial").fill_null(False)
    whole = trace.steps.filter(is_whole).select("window", "step").unique()
    return trace.nodes.join(whole, on=["window", "step"], how="semi") if whole.height else trace.nodes
