"""What every step of a rank took, part by part: the series that a diagnosis is made from.

As in TraceML a step is the wait for its input and what follows; validation and the like between its batches are none of
it. Null is not measured, never 0: the wait for input, forward and backward are part of every step, so one without is a
step in which they went unseen; a step may do without a copy to the device or an update, which then take no time.
"""

from dataclasses import dataclass

import polars as pl

from chakra_capture.annotations import (
    BACKWARD,
    BETWEEN_STEPS,
    FORWARD,
    H2D,
    INPUT_WAIT,
    OPTIMIZER,
    PHASE_NAMES,
    RECORDING,
)
from chakra_capture.trace.phase_records import USUAL, PhaseRecords, Untimed

STEP, TRACED, COMPUTE, REST = "step_time", "traced", "compute", "rest"
BETWEEN_OTHER, WALL = "between_other", "wall"
PARTS = (STEP, TRACED, INPUT_WAIT, H2D, FORWARD, BACKWARD, OPTIMIZER, COMPUTE, REST)
_IN_EVERY_STEP = (INPUT_WAIT, FORWARD, BACKWARD)
_KEYS = ("fit", "step")


@dataclass(frozen=True, slots=True)
class StepSeries:
    """The steps of one rank that ran as they always do: whole, not under the profiler, not the first of a training.

    Attributes:
        cpu: one row per step, in order: ``fit``, ``step``, ``ts_ns``, each of ``PARTS`` and what came before the step
            (``BETWEEN_STEPS``, ``BETWEEN_OTHER``) in ns, ``wall`` of all, ``rss_bytes``.
        device: the same of ``PARTS`` on the device's own time line; null where not all of a part is known.
        memory: of the device, of steps that say it: see ``trace.phase_records``.
        rest_names: what the rest of the steps holds by name, longest first, with its share of them.
        num_recorded: all steps that came to their end; ``last_step`` is the highest number.
    """

    rank: int
    cpu: pl.DataFrame
    device: pl.DataFrame
    memory: pl.DataFrame
    rest_names: tuple[tuple[str, float], ...]
    num_recorded: int
    last_step: int | None


def step_series(rank: int, records: PhaseRecords, most_steps: int) -> StepSeries:
    """Lay out the last ``most_steps`` steps that count."""
    whole = records.steps.with_row_index("row").filter(~pl.col("partial"))
    steps = whole.filter(USUAL).unique(_KEYS, keep="last", maintain_order=True)
    steps = steps.tail(most_steps)
    phases = records.phases.filter(pl.col("row").is_in(steps["row"].implode()))
    table = steps.select("row", *_KEYS, "ts_ns", "dur_ns", "gap_ns", "device_ns", "rss_bytes")
    untimed = Untimed(records)
    last = whole["step"].max()
    return StepSeries(
        rank=rank,
        cpu=_cpu(table, phases, untimed),
        device=_parts(table, phases, untimed, "device_ns"),
        memory=records.memory.join(steps.select("row", *_KEYS), on="row", validate="1:1", maintain_order="left"),
        rest_names=_rest_names(phases.filter(~pl.col("in_gap")), steps),
        num_recorded=whole.height,
        last_step=last if isinstance(last, int) else None,
    )


def _cpu(table: pl.DataFrame, phases: pl.DataFrame, untimed: Untimed) -> pl.DataFrame:
    parts = _parts(table, phases, untimed, "dur_ns")
    sums = table.select("row", "ts_ns", "rss_bytes", "dur_ns", pl.col("gap_ns").fill_null(0))
    for name in (*BETWEEN_STEPS, RECORDING):
        mine = phases.filter(pl.col("phase") == name)
        mine = mine if name != RECORDING else mine.filter(pl.col("in_gap"))
        sums = _joined(sums, mine.group_by("row").agg(pl.col("dur_ns").sum().cast(pl.Float64).alias(name)))
        if name != RECORDING:
            sums = sums.with_columns(_known_zero(name, untimed, sums["row"]))
    in_gap = phases.filter(pl.col("in_gap")).group_by("row").agg(pl.col("dur_ns").sum().alias("in_gap"))
    sums = _joined(sums, in_gap).with_columns(
        (pl.col("dur_ns") + pl.col("gap_ns") - pl.col(RECORDING).fill_null(0)).cast(pl.Float64).alias(WALL),
        between_other=(pl.col("gap_ns") - pl.col("in_gap").fill_null(0)).cast(pl.Float64),
    )
    return parts.join(sums.drop("dur_ns", "gap_ns", "in_gap", RECORDING), on="row", validate="1:1").drop("row")


def _parts(table: pl.DataFrame, phases: pl.DataFrame, untimed: Untimed, time: str) -> pl.DataFrame:
    """Each part of each step on one clock; a part that any time is missing of is null, as is one of before the step."""
    inside, before = (phases.filter(pl.col("in_gap") == in_gap) for in_gap in (False, True))
    found = table.select("row", *_KEYS, pl.col(time).cast(pl.Float64).alias(STEP))
    # polars sums nulls as 0: on the device's clock a part that is known in part is not known.
    total = pl.when(pl.col(time).is_not_null().all()).then(pl.col(time).sum()).cast(pl.Float64)
    between = inside.filter(pl.col("phase").is_in(BETWEEN_STEPS)).group_by("row").agg(total.alias("between"))
    between = between.with_columns(pl.col("between").fill_null(float("nan")))
    found = _joined(found, between).with_columns(pl.col(STEP) - pl.col("between").fill_null(0)).drop("between")
    # What comes between batches cannot take longer than the step: such times are not those of one step.
    found = found.with_columns(pl.when(pl.col(STEP).fill_nan(None) >= 0).then(pl.col(STEP)))
    for name in PHASE_NAMES:
        mine = inside.filter(pl.col("phase") == name).group_by("row").agg(total.fill_null(float("nan")).alias(name))
        found = _joined(found, mine)
        if name not in _IN_EVERY_STEP:
            outside = before.filter(pl.col("phase") == name)["row"]
            found = found.with_columns(_known_zero(name, untimed, found["row"], outside))
        found = found.with_columns(pl.col(name).fill_nan(None))
    found = found.with_columns(
        (pl.col(STEP) - pl.col(INPUT_WAIT)).clip(lower_bound=0).alias(TRACED),
        (pl.col(FORWARD) + pl.col(BACKWARD) + pl.col(OPTIMIZER)).alias(COMPUTE),
    )
    rest = pl.col(TRACED) - pl.col(COMPUTE) - pl.col(H2D).fill_null(0)
    found = found.with_columns(rest.clip(lower_bound=0).alias(REST)).select("row", *_KEYS, *PARTS)
    return found if time == "dur_ns" else found.drop("row")


def _known_zero(name: str, untimed: Untimed, rows: pl.Series, outside: pl.Series | None = None) -> pl.Expr:
    """Of steps without a phase that was timed in them it took no time; not of those that had it ``outside``."""
    is_timed = ~untimed.mask(name, rows)
    if outside is not None:
        is_timed &= ~rows.is_in(outside.implode())
    return pl.when(pl.col(name).is_null() & pl.lit(is_timed)).then(0.0).otherwise(pl.col(name)).alias(name)


def _joined(left: pl.DataFrame, right: pl.DataFrame) -> pl.DataFrame:
    return left.join(right, on="row", how="left", validate="1:1", maintain_order="left")


def _rest_names(inside: pl.DataFrame, steps: pl.DataFrame) -> tuple[tuple[str, float], ...]:
    total = int(steps["dur_ns"].sum())
    own = inside.filter(~pl.col("phase").is_in([*PHASE_NAMES, *BETWEEN_STEPS]))
    sums = own.group_by("phase").agg(pl.col("dur_ns").sum()).sort("dur_ns", "phase", descending=[True, False])
    return tuple((name, ns / total) for name, ns in sums.iter_rows()) if total else ()
