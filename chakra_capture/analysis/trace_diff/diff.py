"""The recorded steps of two runs, compared: rank by rank, by phase, call, kernel and collective."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import polars as pl

from chakra_capture.analysis.trace_diff import collectives, kernels, ops, phases
from chakra_capture.analysis.trace_diff.measure import COLUMNS, Scale, measured
from chakra_capture.analysis.trace_diff.side import Side, read_side, whole_steps
from chakra_capture.analysis.trace_diff.structure import match_sides
from chakra_capture.trace.merged import MergedRun, MergedTrace
from chakra_capture.trace.schema import Column
from chakra_capture.trace.values import as_json

# Of the columns those that a step has: it is one call, and all of its difference.
_OF_STEP = tuple(
    column for column in COLUMNS if column.name not in ("share", "calls_ns", "longer_ns", "first_seen", "second_seen")
)
RANKS = (
    Column("rank", pl.Int64, "global rank of B"),
    Column("first_rank", pl.Int64, "of A, where it is another; null: the same"),
    *_OF_STEP,
)
_SCHEMAS: dict[str, tuple[Column, ...]] = {
    "phases": phases.SCHEMA, "ops": ops.SCHEMA, "kernels": kernels.SCHEMA, "collectives": collectives.SCHEMA,
}  # fmt: skip
Steps = Sequence[int | None]
Ranks = Mapping[int, MergedTrace]


@dataclass(frozen=True, slots=True)
class RankDifference:
    """One rank of two runs.

    Attributes:
        steps: numbers of the steps of A and of B; None: a window that marks none.
        tables: ``phases``, ``ops``, ``kernels`` and ``collectives``; without what was not measured on both sides.
    """

    rank: int
    first_rank: int
    steps: tuple[tuple[int | None, ...], tuple[int | None, ...]]
    scale: Scale
    tables: dict[str, pl.DataFrame]

    def as_json(self) -> dict[str, Any]:
        """The same as plain JSON values."""
        return {
            "rank": self.rank,
            "first_rank": self.first_rank,
            "steps": [list(each) for each in self.steps],
            "num_steps": list(self.scale.num_steps),
            "total_ns": list(self.scale.total_ns),
            "exact_difference": self.scale.exact_difference,
            "difference_ns": self.scale.difference_ns,
            "tables": {name: _as_json(table, _SCHEMAS[name]) for name, table in self.tables.items()},
        }


@dataclass(frozen=True, slots=True)
class RunDifference:
    """Two runs.

    Attributes:
        ranks: the step of each rank that is compared, largest difference first; a table of ``RANKS``.
        worst: the rank whose step differs most; None where nothing can be compared.
        median: the rank in the middle, by difference; None where that is the same.
        reason: why nothing can be compared.
    """

    ranks: pl.DataFrame
    worst: RankDifference | None
    median: RankDifference | None
    notes: tuple[str, ...]
    reason: str | None = None

    def as_json(self) -> dict[str, Any]:
        """The same as plain JSON values."""
        return {
            "reason": self.reason,
            "ranks": _as_json(self.ranks, RANKS),
            "worst": None if self.worst is None else self.worst.as_json(),
            "median": None if self.median is None else self.median.as_json(),
            "notes": list(self.notes),
        }


def compare_recorded(first: Ranks, second: Ranks, runs: tuple[MergedRun, MergedRun]) -> RunDifference:
    """Compare the recorded steps of two runs, each rank with the same rank.

    All ranks by their step; in full the one that differs most, and the one in the middle.

    Args:
        first, second: merged ranks of A and of B.
        runs: their tables across ranks.
    """
    pairs, notes = _same_ranks(first, second)
    steps = {rank: (whole_steps(first[other]), whole_steps(second[rank])) for rank, other in pairs.items()}
    refused = {rank: why for rank, both in steps.items() if (why := _refusal(both))}
    if not pairs or len(refused) == len(pairs):
        why = next(iter(refused.values()), "the runs have no rank in common")
        return not_compared(why, notes)
    notes += [f"rank {rank} is left out: {why}" for rank, why in refused.items()]
    chosen = {rank: _common(steps[rank]) for rank in pairs if rank not in refused}
    notes += _notes_on_steps(chosen)
    rows = [_step_row(rank, first[pairs[rank]], second[rank], both) for rank, both in chosen.items()]
    table = pl.concat(rows).sort("difference_ns", "rank", descending=[True, False])
    order = table.sort(pl.col("difference_ns").abs(), "rank", descending=[True, False])["rank"]
    worst, median = order[0], table["rank"][table.height // 2]
    full = {
        rank: _compare_rank(first[pairs[rank]], second[rank], runs, chosen[rank])
        for rank in dict.fromkeys((worst, median))
    }
    return RunDifference(table, full[worst], full[median] if median != worst else None, tuple(notes))


def not_compared(reason: str, notes: Sequence[str] = ()) -> RunDifference:
    """Two runs whose recorded steps cannot be compared."""
    nothing = pl.DataFrame(schema={column.name: column.dtype for column in RANKS})
    return RunDifference(nothing, None, None, tuple(notes), reason)


def _same_ranks(first: Ranks, second: Ranks) -> tuple[dict[int, int], list[str]]:
    """By rank of B that of A."""
    common = sorted(set(first) & set(second))
    if not common and len(first) == 1 and len(second) == 1:
        (a,), (b,) = first, second
        return {b: a}, [f"rank {b} of B is compared with rank {a} of A: the runs have no rank in common"]
    notes = [
        f"not compared, of {label} alone: rank {', '.join(map(str, sorted(set(mine) - set(other))))}"
        for label, mine, other in (("A", first, second), ("B", second, first))
        if set(mine) - set(other)
    ]
    return {rank: rank for rank in common}, notes


def _refusal(steps: tuple[Steps, Steps]) -> str | None:
    for label, mine in zip(("A", "B"), steps, strict=True):
        if not mine:
            return f"no step of {label} was recorded whole, with times"
    is_marked = [mine[0] is not None for mine in steps]
    if is_marked[0] != is_marked[1]:
        return f"{'B' if is_marked[0] else 'A'} marks no steps (ProfilerStep), the other side does"
    return None


def _common(steps: tuple[Steps, Steps]) -> tuple[Steps, Steps]:
    """The steps that both have, if these are at least half of the fewer; else all of each."""
    both = [step for step in steps[0] if step is not None and step in set(steps[1])]
    return (both, both) if 2 * len(both) >= max(min(map(len, steps)), 1) and both else steps


def _notes_on_steps(chosen: Mapping[int, tuple[Steps, Steps]]) -> list[str]:
    notes = []
    if any(both[0][0] is None for both in chosen.values()):
        notes.append("no step is marked: whole windows are compared")
    if any(list(both[0]) != list(both[1]) for both in chosen.values()):
        notes.append("the sides recorded other steps; what differs by step number is in the difference")
    fewest = min(min(map(len, both)) for both in chosen.values())
    if fewest == 1:
        notes.append("of one step nothing tells a change from chance")
    return notes


def _step_row(rank: int, first: MergedTrace, second: MergedTrace, steps: tuple[Steps, Steps]) -> pl.DataFrame:
    cells, totals = [], []
    for side, (trace, mine) in enumerate(zip((first, second), steps, strict=True)):
        times = _step_times(trace, mine)
        totals.append(int(times["ns"].sum()))
        cells.append(times.with_columns(side=pl.lit(side, pl.Int64), count=pl.lit(1, pl.Int64)))
    scale = Scale((len(steps[0]), len(steps[1])), (totals[0], totals[1]))
    table = measured(pl.concat(cells).with_columns(rank=pl.lit(rank, pl.Int64)), ["rank"], scale)
    other = pl.lit(first.rank if first.rank != rank else None, pl.Int64).alias("first_rank")
    return table.with_columns(other).select(pl.col(column.name).cast(column.dtype) for column in RANKS)


def _step_times(trace: MergedTrace, steps: Steps) -> pl.DataFrame:
    timed = trace.steps.filter(pl.col("dur_ns").is_not_null() & ~pl.col("partial").fill_null(False))
    own = timed.filter(pl.col("step").is_in(list(steps), nulls_equal=True)).sort("window", "ts_ns")
    if steps[0] is not None:
        own = own.unique(["window", "step"], keep="first", maintain_order=True)
    return own.select(ns="dur_ns").with_row_index("at").with_columns(pl.col("at").cast(pl.Int64))


def _compare_rank(
    first: MergedTrace, second: MergedTrace, runs: tuple[MergedRun, MergedRun], steps: tuple[Steps, Steps]
) -> RankDifference:
    sides = read_side(first, steps[0]), read_side(second, steps[1])
    scale = Scale(_of(sides, "num_steps"), _of(sides, "total_ns"))
    structure = match_sides(*sides)
    tables = {
        "phases": phases.phase_differences(sides, scale),
        "ops": ops.op_differences(sides, structure, scale),
        "kernels": kernels.kernel_differences(sides, structure, scale),
        "collectives": collectives.collective_differences(sides, runs, scale),
    }
    known = {name: table for name, table in tables.items() if table is not None}
    return RankDifference(second.rank, first.rank, (sides[0].steps, sides[1].steps), scale, known)


def _of(sides: tuple[Side, Side], name: str) -> tuple[int, int]:
    return getattr(sides[0], name), getattr(sides[1], name)


def _as_json(table: pl.DataFrame, schema: tuple[Column, ...]) -> dict[str, Any]:
    return {
        "columns": [{"name": c.name, "unit": c.unit, "meaning": c.meaning} for c in schema],
        "rows": [{name: as_json(value) for name, value in row.items()} for row in table.iter_rows(named=True)],
    }
