"""How the self times of operators are spread: an operator that was interrupted is far above its median."""

from collections.abc import Sequence

import polars as pl

from chakra_capture.analysis.shares import quantile_of
from chakra_capture.trace.merged import MergedTrace
from chakra_capture.trace.schema import Column

SCHEMA = (
    Column("name", pl.String, "name of the host op, annotation or runtime call"),
    Column("p50_ns", pl.Int64, "median self time of one call, of the recorded steps", "ns"),
    Column("max_ns", pl.Int64, "longest self time of one call", "ns"),
)


def operator_spread(traces: Sequence[MergedTrace], names: Sequence[str]) -> pl.DataFrame:
    """Median and longest self time of operators of some names, all ranks together, in the recorded steps if any."""
    tables = [pl.DataFrame(schema={"name": pl.String, "self_dur_ns": pl.Int64})]
    for trace in traces:
        rows = trace.some_of_nodes("kind", "name", "self_dur_ns", "step").filter(
            pl.col("kind").is_in(["host_op", "annotation", "runtime"]) & pl.col("name").is_in(list(names))
        )
        in_steps = rows.filter(pl.col("step").is_not_null())
        tables.append((in_steps if in_steps.height else rows).select("name", "self_dur_ns"))
    rows = pl.concat(tables).filter(pl.col("self_dur_ns").is_not_null())
    found = rows.group_by("name").agg(p50_ns=quantile_of("self_dur_ns", 1, 2), max_ns=pl.col("self_dur_ns").max())
    return found.sort("name").select(pl.col(column.name).cast(column.dtype) for column in SCHEMA)
