"""Where the time of all steps goes: the phases of steps, what comes between them, and how much is accounted for."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import polars as pl

from chakra_capture.analysis.batches import batch_sizes, batches_of
from chakra_capture.annotations import BETWEEN_STEPS, PHASE_NAMES
from chakra_capture.trace.phase_records import USUAL, PhaseRecords, Untimed
from chakra_capture.trace.schema import Column

RESIDUAL, OTHER = "residual", "other"
_MOST_DROPPED = 5

SCHEMA = (
    Column("place", pl.String, "step: part of a step; between: between two steps, or between the batches of one"),
    Column("phase", pl.String, "name of the phase; residual: of a step, in no phase; other: between, in no phase"),
    Column("num_steps", pl.Int64, "steps with this phase"),
    Column(
        "mean_ns",
        pl.Float64,
        "mean over steps where it is timed, one without it counting as 0; null = not measured",
        "ns",
    ),
    Column("median_ns", pl.Float64, "median over the same steps", "ns"),
    Column("p90_ns", pl.Float64, "shortest time that 9 of 10 steps do not exceed (nearest rank)", "ns"),
    Column("share", pl.Float64, "of the wall time of these steps and the time before each"),
    Column("device_mean_ns", pl.Float64, "mean on the device's own time line, over steps where it is known", "ns"),
)


@dataclass(frozen=True, slots=True)
class PhaseSummary:
    """The phases of one rank.

    Attributes:
        table: of ``SCHEMA``; every phase that was timed, or is said not to be.
        num_steps: steps the table is over.
        num_recorded: all steps that came to their end.
        left_out: why recorded steps are not among them, with how many.
        step_ns: mean and median of a step without what comes between its batches.
        profiled_median_ns: the same of steps under the profiler, where there are others to compare with.
        first_ns: the same of the first step of the training.
        steps_per_s: over the wall time; None without any step.
        batches_per_s: the same, by the batches of a step; None where nothing tells how many these are.
        samples_per_s: the same; None unless all batches that were looked at hold as many samples.
        batch_size: samples of the smallest and the largest batch that was looked at; None where none was.
        rss_bytes: largest resident memory of the process that was read; None where it was not.
        wall_ns: of these steps and the time before each.
        coverage: share of the wall time that is in a named phase; None without any step.
        not_measured: reason for each phase that was not timed.
        notes: what else a reader should know.
    """

    table: pl.DataFrame
    num_steps: int
    num_recorded: int
    left_out: dict[str, int]
    step_mean_ns: float | None
    step_median_ns: float | None
    profiled_median_ns: float | None
    first_ns: float | None
    steps_per_s: float | None
    batches_per_s: float | None
    samples_per_s: float | None
    batch_size: tuple[int, int] | None
    rss_bytes: int | None
    wall_ns: int
    coverage: float | None
    not_measured: dict[str, str]
    notes: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        """The same as plain JSON values."""
        return {**{slot: getattr(self, slot) for slot in self.__slots__}, "table": self.table.to_dicts()}


def phase_summary(records: PhaseRecords) -> PhaseSummary:
    """Summarise the steps that ran as they always do: whole, not under the profiler, not the first of a training."""
    whole = records.work
    counted, left_out = _counted(whole)
    num = counted.height
    phases = records.phases.filter(pl.col("row").is_in(counted["row"].implode()))
    between = pl.col("in_gap") | pl.col("phase").is_in(BETWEEN_STEPS)
    places = pl.when(between).then(pl.lit("between")).otherwise(pl.lit("step")).alias("place")
    parts = phases.group_by("row", places, "phase").agg(
        pl.col("dur_ns").sum(), pl.col("num_calls").sum(), pl.col("device_ns").sum().alias("device_ns"),
        pl.col("device_ns").is_not_null().all().alias("on_device"),
    )  # fmt: skip
    sums = parts.group_by("row", "place").agg(pl.col("dur_ns").sum())
    wall = counted.select(
        "row", (pl.col("dur_ns") + pl.col("gap_ns").fill_null(0)).alias("wall_ns"), "work_ns", "inside_ns", "gap_ns"
    )
    for place, name in (("step", "in_step"), ("between", "between_ns")):
        wall = wall.join(_place(sums, place, name), on="row", how="left", validate="1:1")
    wall = wall.fill_null(0)
    rests = wall.select(
        "row", (pl.col("work_ns") - pl.col("in_step")).alias(RESIDUAL), "work_ns",
        (pl.col("gap_ns") + pl.col("inside_ns") - pl.col("between_ns")).alias(OTHER),
    )  # fmt: skip
    total = int(wall["wall_ns"].sum())
    untimed = Untimed(records)
    found = {(part[0], part[1]): table for part, table in parts.partition_by("place", "phase", as_dict=True).items()}
    rows, partly = [], []
    not_measured = {}
    for place, name in _names(found, untimed.reasons):
        mine = found.get((place, name), parts.clear())
        num_timed = _num_timed(mine, counted["row"], untimed, name)
        rows.append(_row(place, name, mine, num_timed, total))
        why = untimed.reasons.get(name)
        if not num_timed and why is not None:
            not_measured[name] = why
        elif 0 < num_timed < num and place == _usual_place(name):
            partly.append(f"{name} is timed in {num_timed} of {num} steps" + (f": {why}" if why else ""))
    rows.insert(_end_of_step(rows), _rest("step", RESIDUAL, rests[RESIDUAL], total))
    rows.append(_rest("between", OTHER, rests[OTHER], total))
    batches, sizes = batches_of(phases.filter(~between), counted["row"]), batch_sizes(records.steps)
    per_second = num / total * 1e9 if total else None
    batches_per_s = per_second * batches.mean if per_second is not None and batches is not None else None
    is_even = sizes is not None and sizes[0] == sizes[1]
    accounted = total - int(rests[RESIDUAL].sum()) - int(rests[OTHER].sum())
    return PhaseSummary(
        table=pl.DataFrame(rows, schema={column.name: column.dtype for column in SCHEMA}, orient="row"),
        num_steps=num,
        num_recorded=whole.height,
        left_out=left_out,
        step_mean_ns=_number(rests["work_ns"].mean()),
        step_median_ns=_number(rests["work_ns"].median()),
        profiled_median_ns=None if "under the profiler" not in left_out else _median_work(whole, pl.col("profiled")),
        first_ns=_median_work(whole, pl.col("first") & ~pl.col("profiled")),
        steps_per_s=per_second,
        batches_per_s=batches_per_s,
        samples_per_s=batches_per_s * sizes[0] if batches_per_s is not None and sizes is not None and is_even else None,
        batch_size=sizes,
        rss_bytes=_largest(records.steps["rss_bytes"]),
        wall_ns=total,
        coverage=accounted / total if total else None,
        not_measured=not_measured,
        notes=(*_flagged(counted), *_notes(records, whole), *partly),
    )


def _median_work(whole: pl.DataFrame, which: pl.Expr) -> float | None:
    """Median of the work of steps of a kind."""
    return _number(whole.filter(which)["work_ns"].median())


def _largest(values: pl.Series) -> int | None:
    found = values.max()
    return found if isinstance(found, int) else None


def _flagged(counted: pl.DataFrame) -> list[str]:
    """Say of steps that count for want of others what they are."""
    kinds = {
        "profiled": "under the profiler, which makes small ops several times slower",
        "first": "first of a training",
    }
    numbers = {kind: int(counted[kind].sum()) for kind in kinds}
    return [f"{numbers[kind]} of these steps: {what}" for kind, what in kinds.items() if numbers[kind]]


def _notes(records: PhaseRecords, whole: pl.DataFrame) -> list[str]:
    notes = []
    if not records.is_closed:
        notes.append("the process did not finish its phases (killed, or still running); up to a second is missing")
    if skipped := int(whole["update_skipped"].sum()):
        notes.append(f"{skipped} steps ended without their update (update_skipped)")
    if partial := records.steps.height - whole.height:
        notes.append(f"{partial} steps were cut short; their times are in no row")
    for step, batches, number, why in records.dropped[:_MOST_DROPPED]:
        more = f" and {number - len(batches[:8])} more" if number > len(batches[:8]) else ""
        notes.append(f"batches {', '.join(map(str, batches[:8]))}{more} before step {step} came to nothing: {why}")
    if len(records.dropped) > _MOST_DROPPED:
        notes.append(f"... and {len(records.dropped) - _MOST_DROPPED} such groups more")
    if records.num_unreadable:
        notes.append(f"{records.num_unreadable} lines of the phase file cannot be read")
    return notes


def _counted(whole: pl.DataFrame) -> tuple[pl.DataFrame, dict[str, int]]:
    """The steps that count, or all if none would."""
    counted = whole.filter(USUAL)
    if counted.is_empty():
        return whole, {}
    profiled = int(whole["profiled"].sum())
    first = whole.filter(pl.col("first") & ~pl.col("profiled")).height
    reasons = {"under the profiler": profiled, "first of a training": first}
    return counted, {why: number for why, number in reasons.items() if number}


def _place(sums: pl.DataFrame, place: str, name: str) -> pl.DataFrame:
    return sums.filter(pl.col("place") == place).select("row", pl.col("dur_ns").alias(name))


def _usual_place(name: str) -> str:
    return "between" if name in BETWEEN_STEPS else "step"


def _names(found: Iterable[tuple[str, str]], named: Iterable[str]) -> list[tuple[str, str]]:
    """Every phase found or named, in the order of a step."""
    known = [*PHASE_NAMES, *BETWEEN_STEPS]

    def order(entry: tuple[str, str]) -> tuple[bool, int, str]:
        place, name = entry
        return place == "between", known.index(name) if name in known else len(known), name

    return sorted({*found, *((_usual_place(name), name) for name in named)}, key=order)


def _num_timed(mine: pl.DataFrame, counted: pl.Series, untimed: Untimed, name: str) -> int:
    """In how many steps a phase was timed, whether they have it or not."""
    num_untimed, num_found_there = (int(untimed.mask(name, rows).sum()) for rows in (counted, mine["row"]))
    return counted.len() - (num_untimed - num_found_there)


def _row(place: str, name: str, mine: pl.DataFrame, num_timed: int, total: int) -> tuple[object, ...]:
    times = pl.concat([mine["dur_ns"], pl.repeat(0, num_timed - mine.height, dtype=pl.Int64, eager=True)])
    device = mine.filter(pl.col("on_device"))["device_ns"].mean()
    return place, name, mine.height, *_statistics(times, total), device


def _rest(place: str, name: str, times: pl.Series, total: int) -> tuple[object, ...]:
    return place, name, int((times > 0).sum()), *_statistics(times, total), None


def _statistics(times: pl.Series, total: int) -> tuple[float | None, ...]:
    if times.is_empty():
        return None, None, None, None
    high = times.sort()[(9 * times.len() + 9) // 10 - 1]
    return _number(times.mean()), _number(times.median()), high, int(times.sum()) / total if total else None


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) else None


def _end_of_step(rows: list[tuple[object, ...]]) -> int:
    return next((at for at, row in enumerate(rows) if row[0] == "between"), len(rows))
