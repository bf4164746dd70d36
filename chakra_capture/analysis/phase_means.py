"""Where the time of recorded steps goes by phase: the mean over steps of each rank."""

from collections.abc import Sequence

import polars as pl

from chakra_capture.analysis import phase_times
from chakra_capture.trace.merged import MergedTrace
from chakra_capture.trace.schema import Column

_MEANS = tuple(
    Column(column.name, pl.Float64, f"mean of: {column.meaning}", column.unit) for column in phase_times.SCHEMA[3:]
)
SCHEMA = (
    Column("rank", pl.Int64, "global rank"),
    Column("phase", pl.String, "phase; null: the rest of the step, in no phase that is known"),
    Column("num_steps", pl.Int64, "steps that have it; a step without it counts as 0 in the means"),
    *_MEANS,
)


def phase_means(traces: Sequence[MergedTrace], *, steps: Sequence[int] | None = None) -> pl.DataFrame:
    """A row per rank and phase; the wall times of a rank sum to its mean step, and so do the four times of the device.

    Args:
        traces: ranks.
        steps: only these.
    """
    tables = [pl.DataFrame(schema={column.name: column.dtype for column in SCHEMA})]
    for trace in traces:
        times = phase_times.phase_times(trace)
        if steps is not None:
            times = times.filter(pl.col("step").is_in(list(steps)))
        means = phase_times.mean_phase_times([times]).with_columns(rank=pl.lit(trace.rank))
        tables.append(means.select(pl.col(column.name).cast(column.dtype) for column in SCHEMA))
    return pl.concat(tables)
