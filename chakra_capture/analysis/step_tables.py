"""The recorded steps of several ranks one by one."""

from collections.abc import Sequence

import polars as pl

from chakra_capture.trace.merged import MergedTrace
from chakra_capture.trace.schema import STEPS, Column

_LEFT_OUT = ("node_id", "pid")
SCHEMA = (
    Column("rank", pl.Int64, "global rank"),
    *(column for column in STEPS.columns if column.name not in _LEFT_OUT),
)


def step_table(traces: Sequence[MergedTrace], *, steps: Sequence[int] | None = None) -> pl.DataFrame:
    """A row per step and rank, in order of window, step and rank; of a window that marks no step one for all of it.

    Args:
        traces: ranks.
        steps: only these.
    """
    tables = [pl.DataFrame(schema={column.name: column.dtype for column in SCHEMA})]
    for trace in traces:
        rows = trace.steps.with_columns(rank=pl.lit(trace.rank, dtype=pl.Int64))
        if steps is not None:
            rows = rows.filter(pl.col("step").is_in(list(steps)))
        tables.append(rows.select(column.name for column in SCHEMA))
    return pl.concat(tables).sort("window", "step", "rank")
