"""The phases that the training half has timed, joined to the steps of the traces."""

import polars as pl

from chakra_capture.annotations import PHASE_NAMES
from chakra_capture.trace.phase_records import PhaseRecords, Untimed

# Of several trainings with a step of one number it is the one that began then; annotation and span are microseconds
# apart, and wall clocks are stepped by less.
_NEAR_NS = 1_000_000_000


def join_phases(steps: pl.DataFrame, records: PhaseRecords) -> pl.DataFrame:
    """Fill the phases, the coverage and ``update_skipped`` of the steps table.

    A phase that was timed, and that a step does not have, took 0 ns in it; one that was not timed stays null, and so do
    all of a step that the phase file does not have.
    """
    rows = steps.with_row_index("at")
    found = _nearest(rows, records.steps.with_row_index("row"))
    sums = _sums(records, found)
    rows = rows.join(sums, on="at", how="left", validate="1:1", suffix="_found")
    filled = [
        pl.col(f"{name}_found").alias(name) for name in sums.columns if name != "at" and f"{name}_found" in rows.columns
    ]
    return rows.with_columns(filled).select(steps.schema.names()).cast(steps.schema)


def _nearest(rows: pl.DataFrame, recorded: pl.DataFrame) -> pl.DataFrame:
    """The recorded step of each row: same number, begun at the same time; one row each at most."""
    known = recorded.filter(pl.col("profiled") & pl.col("ts_ns").is_not_null())
    pairs = rows.select("at", "step", "ts_ns").join(
        known.select("row", "step", "dur_ns", "update_skipped", pl.col("ts_ns").alias("begin_ns")), on="step"
    )
    apart = (pl.col("ts_ns") - pl.col("begin_ns")).abs()
    pairs = pairs.with_columns(apart.alias("apart")).filter(pl.col("apart") <= _NEAR_NS)
    return pairs.sort("at", "apart").unique("at", keep="first", maintain_order=True)


def _sums(records: PhaseRecords, found: pl.DataFrame) -> pl.DataFrame:
    phases = records.phases.filter(~pl.col("in_gap"))
    in_step, untimed = found.select("at", "row", "dur_ns", "update_skipped"), Untimed(records)
    for name in PHASE_NAMES:
        times = phases.filter(pl.col("phase") == name).select("row", pl.col("dur_ns").alias(f"{name}_ns"))
        in_step = in_step.join(times, on="row", how="left", validate="m:1")
        is_timed = pl.lit(~untimed.mask(name, in_step["row"]))
        in_step = in_step.with_columns(
            pl.when(pl.col(f"{name}_ns").is_null() & is_timed)
            .then(0)
            .otherwise(pl.col(f"{name}_ns"))
            .alias(f"{name}_ns")
        )
    named = phases.group_by("row").agg(pl.col("dur_ns").sum().alias("named_ns"))
    in_step = in_step.join(named, on="row", how="left", validate="m:1").with_columns(pl.col("named_ns").fill_null(0))
    return in_step.select(
        "at",
        *(f"{name}_ns" for name in PHASE_NAMES),
        (pl.col("dur_ns") - pl.col("named_ns")).alias("residual_ns"),
        pl.when(pl.col("dur_ns") > 0).then(pl.col("named_ns") / pl.col("dur_ns")).alias("coverage"),
        "update_skipped",
    )
