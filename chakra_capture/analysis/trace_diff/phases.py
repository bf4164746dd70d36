"""The difference of a step by phase: on the loop's thread, and on the device. Either sums to it exactly."""

import polars as pl

from chakra_capture.analysis.trace_diff.measure import COLUMNS, Scale, measured
from chakra_capture.analysis.trace_diff.side import Side
from chakra_capture.trace.schema import Column

LOOP = "loop"
# Parts of a step, and the column of ``phase_times`` that holds each.
PARTS = {
    LOOP: "wall_ns", "compute": "compute_ns", "exposed_communication": "exposed_communication_ns",
    "exposed_memory": "exposed_memory_ns", "idle": "device_idle_ns",
}  # fmt: skip

SCHEMA = (
    Column("part", pl.Enum([*PARTS]), "loop: time of the loop's thread; the others: what the device does meanwhile. "
           "The rows of loop sum to the step, and so do those of the four others, where the device was measured"),
    Column("phase", pl.String, "phase; null: in none that is known"),
    *COLUMNS,
)  # fmt: skip


def phase_differences(sides: tuple[Side, Side], scale: Scale) -> pl.DataFrame:
    """Split the difference of a step by phase; a table of ``SCHEMA``, without what one side has not measured."""
    cells = pl.concat([_cells(side).with_columns(side=pl.lit(at, pl.Int64)) for at, side in enumerate(sides)])
    measured_on = cells.group_by("part").agg(pl.col("side").n_unique()).filter(pl.col("side") == len(sides))["part"]
    some = cells.filter(pl.col("part").is_in(measured_on.implode()))
    found = measured(some, ["part", "phase"], scale).with_columns(pl.col("part").cast(SCHEMA[0].dtype))
    # Steps of a phase are all there is to count.
    return found.select(column.name for column in SCHEMA).sort("part", maintain_order=True)


def _cells(side: Side) -> pl.DataFrame:
    times = side.phases.join(side.places, on=["window", "step"], how="left", nulls_equal=True, validate="m:1")
    parts = times.select("at", "phase", *(pl.col(column).alias(part) for part, column in PARTS.items()))
    cells = parts.unpivot(index=["at", "phase"], on=[*PARTS], variable_name="part", value_name="ns")
    # Null is not measured, 0 is no time.
    return cells.filter(pl.col("ns").is_not_null()).with_columns(count=(pl.col("ns") > 0).cast(pl.Int64))
