"""Which ranks the others wait for, step by step, and whether one can be named.

In a step a rank is late by the time in which half of the other members of an operation had come and it had not, as far
as they had to stay for it, less the time in which it was held itself: by the last one, or by a transfer that took
longer on it than on another member. Who is only late because it was made to wait, or because its link is slow, is not
counted. What an operation lets go is seen, not assumed: gloo's root of a broadcast waits for those it sends to, NCCL's
need not. Each stretch of time counts once, however many operations were due in it. The first operation of a group in a
window is left out: it takes up that the ranks begin to record at different times.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from chakra_capture.analysis.late_ops import Cause
from chakra_capture.analysis.own_times import LatePhase, OwnTimes, late_phases, with_path
from chakra_capture.analysis.slow_transfers import LINKS, SlowTransfers, slow_transfers
from chakra_capture.trace.columns import Int64
from chakra_capture.trace.merged import MergedTrace
from chakra_capture.trace.schema import Column

FOUND = (
    Column("rank", pl.Int64, "global rank"),
    Column("num_steps", pl.Int64, "steps (without steps: stretches of operations) in which its waits are known"),
    Column("num_latest", pl.Int64, "of these, in how many no other rank is later"),
    Column(
        "delay_ns",
        pl.Float64,
        "median over steps of the time in which it is later than half of the others, less that in which it waits "
        "itself or a transfer takes longer on it than on another rank; negative where that is more",
        "ns",
    ),
    Column("waiting_ns", pl.Float64, "median over steps of the time in which it waits for others", "ns"),
    Column("share", pl.Float64, "delay_ns of the time of a step; null = not measured"),
    Column("is_straggler", pl.Boolean, "the others wait for it, and chance does not explain that"),
)  # fmt: skip

_WHERE = (
    Column("phase", pl.String, "of a rank that is named: the phase in which its own work takes longer than the others, "
           "communication and waiting taken off; 'between phases' and 'between steps' are none; null: not known, or "
           "in no one phase"),
    Column("own_ns", pl.Float64, "median over steps of its own time there", "ns"),
    Column("others_ns", pl.Float64, "the same of the median of the other ranks", "ns"),
    Column("cause", pl.String, "what takes half of the difference: 'an op' (self time on the loop's and autograd's "
           "threads), 'an op on the device' (kernels and copies that it launches), else 'in Python', 'in the loader', "
           "'in no one phase' or 'not known'"),
    Column("op", pl.String, "that op; null: no one op takes half of the difference"),
    Column("op_ns", pl.Float64, "median over steps of its self time", "ns"),
    Column("op_others_ns", pl.Float64, "the same of the median of the other ranks", "ns"),
    Column("call_path", pl.String, "ops and annotations around it, the outermost first, where it takes the most time"),
)  # fmt: skip
SCHEMA = (*FOUND, *_WHERE)
BETWEEN_PHASES = "between phases"

# A rank is named if it is late by this share of a step, latest in this share of steps, and the others wait this share.
_LATE, _LATEST, _WAITING = 0.10, 0.80, 0.05
# Waiting beyond this share without a rank to name is worth saying.
_TURNS = 0.10
# How often a rank may be named among ranks that are all alike.
_CHANCE = 0.01
_PARTS = 20
_EXCUSED = "rank {} comes last, but its own work takes longer by too little, or in too few steps, to blame it"
# More say nothing new, and a matrix of ranks and steps has to be held.
_MOST_STEPS = 4096

Float = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Stragglers:
    """The stragglers of a run.

    Attributes:
        table: of ``FOUND``, by rank.
        ranks: those named, the latest first.
        reason: why none is; None if one is.
        num_steps: steps that were looked at; stretches of operations where no step is marked (``has_steps``).
        step_ns: median time from one to the next; None where there are not two.
        late_in: where those named take longer than the others, as far as a phase shows it.
        transfers: of groups that transfer for much of a step: a slow network makes no rank late.
    """

    table: pl.DataFrame
    ranks: tuple[int, ...]
    reason: str | None
    num_steps: int
    has_steps: bool
    step_ns: float | None
    late_in: Mapping[int, LatePhase] = field(default_factory=dict)
    transfers: SlowTransfers = field(default_factory=SlowTransfers)

    def located(self, own: Mapping[int, OwnTimes], traces: Mapping[int, MergedTrace]) -> "Stragglers":
        """The same with what the own times of the ranks say of those named, whose traces tell what calls an op."""
        if not self.ranks or self.step_ns is None:
            return self
        late = late_phases(self.ranks, own, self.step_ns)
        late_in = {rank: with_path(each, traces[rank]) for rank, each in late.items() if each is not None}
        # On a busy machine a rank may come last again and again for ever other reasons: that is none of the rank's.
        excused = [rank for rank, each in late.items() if each is None]
        ranks = tuple(rank for rank in self.ranks if rank not in excused)
        table = self.table.with_columns(is_straggler=pl.col("rank").is_in(ranks))
        reason = self.reason or (None if ranks else _EXCUSED.format(excused[0]))
        return replace(self, table=table, ranks=ranks, reason=reason, late_in=late_in)

    def as_json(self) -> dict[str, Any]:
        """The same as plain JSON values."""
        return {
            "ranks": list(self.ranks),
            "reason": self.reason,
            "num_steps": self.num_steps,
            "has_steps": self.has_steps,
            "step_ns": self.step_ns,
            "late_in": {str(rank): late.as_json() for rank, late in self.late_in.items()},
            "transfers": self.transfers.as_json(),
            "table": self.table.to_dicts(),
        }

    def explained(self) -> pl.DataFrame:
        """The table with where and in what those named are slow: of ``SCHEMA``."""
        rows = [{"rank": rank, **_explanation(late)} for rank, late in self.late_in.items()]
        more = pl.DataFrame(rows, schema={"rank": pl.Int64, **{c.name: c.dtype for c in _WHERE}})
        return self.table.join(more, on="rank", how="left", validate="1:1", maintain_order="left")


def find_stragglers(collectives: pl.DataFrame, doubt_ns: Mapping[int, int]) -> Stragglers:
    """Find ranks that the others wait for.

    Args:
        collectives: the table of the run.
        doubt_ns: how well the clock of each rank is known; ranks that are not there share the reference's.
    """
    rows = _usable(collectives)
    has_steps = rows["step"].count() > 0
    rows = _with_units(rows, has_steps=has_steps).filter(pl.col("unit") < _MOST_STEPS)
    if rows.is_empty():
        return _none(rows, _why_nothing(collectives), has_steps=has_steps)
    late, held, waiting, ranks = _per_unit(rows)
    step_ns = _unit_ns(rows)
    if step_ns is None:
        return _none(rows, "one step is too few", has_steps=has_steps)
    delay = late - held
    verdict = _Verdict(delay, waiting, step_ns, np.array([doubt_ns.get(rank, 0) for rank in ranks], dtype=np.float64))
    named = verdict.named()
    median_delay = np.nanmedian(delay, axis=0)
    table = pl.DataFrame(
        {
            "rank": ranks,
            "num_steps": np.isfinite(delay).sum(axis=0),
            "num_latest": (delay == np.nanmax(delay, axis=1)[:, None]).sum(axis=0),
            "delay_ns": median_delay,
            "waiting_ns": np.nanmedian(waiting, axis=0),
            "share": median_delay / step_ns,
            "is_straggler": np.isin(np.arange(len(ranks)), named),
        },
        schema={column.name: column.dtype for column in FOUND},
    )
    by_delay = sorted(named, key=lambda at: (-median_delay[at], at))
    reason = None if named else verdict.reason(ranks)
    transfers = slow_transfers(collectives, step_ns if has_steps else None)
    named_ranks = tuple(ranks[at] for at in by_delay)
    return Stragglers(table, named_ranks, reason, len(delay), has_steps, step_ns, transfers=transfers)


def _explanation(late: LatePhase) -> dict[str, Any]:
    what = late.what
    phase = late.phase or (None if what.cause == Cause.SPREAD else BETWEEN_PHASES)
    return {
        "phase": phase, "own_ns": late.own_ns, "others_ns": late.others_ns, "cause": str(what.cause), "op": what.op,
        "op_ns": what.op_ns, "op_others_ns": what.op_others_ns, "call_path": " > ".join(what.call_path) or None,
    }  # fmt: skip


def _usable(collectives: pl.DataFrame) -> pl.DataFrame:
    """Operations of groups whose waits are known, but not the first of a group in a window.

    With ``held_ns``: on each rank the wait, and how much longer the transfer takes than where it is shortest.
    """
    op, transfer = "collective_id", pl.col("transfer_ns").fill_null(0)
    known = ~pl.col("collective").is_in(LINKS) & pl.col("wait_ns").is_not_null() & (pl.col("num_found") > 1)
    return (
        collectives.lazy()
        .select(
            "window", "step", op, "rank", "order", "num_found", "arrival_ns", "wait_ns", "transfer_ns", "collective"
        )
        .filter(known)
        .filter((pl.col("order") > 0).all().over(op))
        .with_columns(
            held_ns=pl.col("wait_ns") + transfer - transfer.min().over(op),
            end_ns=pl.col("arrival_ns") + pl.col("wait_ns") + transfer,
        )
        .collect()
    )


def _with_units(rows: pl.DataFrame, *, has_steps: bool) -> pl.DataFrame:
    """Number the steps; where none is marked, as many stretches of equally many operations as give a verdict."""
    op = "collective_id"
    if has_steps:
        # What an operation is in is what its lowest rank says: ranks number their windows each for themselves.
        rows = rows.with_columns(pl.col("window", "step").sort_by("rank").first().over(op))
        rows = rows.filter(pl.col("step").is_not_null())
        return rows.with_columns(unit=pl.struct("window", "step").rank("dense").cast(pl.Int64) - 1)
    number = pl.col(op).rank("dense").cast(pl.Int64) - 1
    return rows.with_columns(unit=number // max(1, rows[op].n_unique() // _PARTS))


def _per_unit(rows: pl.DataFrame) -> tuple[Float, Float, Float, list[int]]:
    """Time in which each rank was late, was held and waited, by unit and rank; nan where a rank has none."""
    op, came = rows["collective_id"].to_numpy(), pl.col("arrival_ns")
    rows = rows.with_columns(
        pl.Series("due", _median_of_others(rows["arrival_ns"].to_numpy(), op)),
        pl.Series("left", _median_of_others(rows["end_ns"].to_numpy(), op)),
    )
    ranks = rows["rank"].unique().sort()
    # Half of the others had come and were there still: where they had left, nobody was kept.
    late = pl.min_horizontal("due", came), pl.min_horizontal(came, pl.max_horizontal("due", "left"))
    spans = (late, (came, came + pl.col("held_ns")), (came, came + pl.col("wait_ns")))
    tables = [_union(rows.select("unit", "rank", start=start, end=end)) for start, end in spans]
    found = []
    for table in tables:
        matrix = np.full((int(rows["unit"].max() or 0) + 1, len(ranks)), np.nan)  # type: ignore[arg-type]
        matrix[table["unit"].to_numpy(), np.searchsorted(ranks.to_numpy(), table["rank"].to_numpy())] = table["ns"]
        found.append(matrix)
    return found[0], found[1], found[2], ranks.to_list()


def _median_of_others(times: Int64, op: Int64) -> Int64:
    """Per row the median time of the other rows of its operation."""
    order = np.lexsort((times, op))
    found = np.empty_like(times)
    found[order] = _median_of_others_sorted(times[order], op[order])
    return found


def _median_of_others_sorted(times: Int64, op: Int64) -> Int64:
    begins = np.flatnonzero(np.diff(op, prepend=op[:1] - 1))
    sizes = np.diff(begins, append=len(op))
    first, num_others = np.repeat(begins, sizes), np.repeat(sizes - 1, sizes)
    own = np.arange(len(op)) - first
    low, high = (num_others - 1) // 2, num_others // 2
    lower: Int64 = times[first + low + (low >= own)]
    upper: Int64 = times[first + high + (high >= own)]
    return lower + (upper - lower) // 2


def _union(spans: pl.DataFrame) -> pl.DataFrame:
    """Length of the union of the spans of each unit and rank."""
    mine = ("unit", "rank")
    before = pl.col("end").cum_max().shift().over(mine)
    begin = pl.max_horizontal("start", before)
    return (
        spans.sort("unit", "rank", "start")
        .with_columns(ns=(pl.col("end") - begin).clip(lower_bound=0))
        .group_by(mine)
        .agg(pl.col("ns").sum())
    )


def _unit_ns(rows: pl.DataFrame) -> float | None:
    """Median time from one unit to the next of the same window."""
    begins = rows.group_by("unit").agg(pl.col("window").first(), pl.col("arrival_ns").min()).sort("unit")
    lengths = begins.select(pl.col("arrival_ns").diff().over("window")).to_series().drop_nulls()
    median = lengths.median()
    return float(median) if isinstance(median, int | float) and median > 0 else None


@dataclass(frozen=True, slots=True)
class _Verdict:
    """By unit and rank: how late a rank is and how long it waits."""

    delay: Float
    waiting: Float
    unit_ns: float
    doubt: Float

    def candidates(self) -> list[int]:
        median = np.nanmedian(self.delay, axis=0)
        return np.flatnonzero(median >= _LATE * self.unit_ns).tolist()

    def named(self) -> list[int]:
        """Ranks that are late, each held against those that are not: two slow ranks take turns in being the latest."""
        candidates = self.candidates()
        rest = np.setdiff1d(np.arange(self.delay.shape[1]), candidates)
        return [at for at in candidates if len(rest) and self._is_named(at, rest)]

    def _is_named(self, at: int, rest: Int64) -> bool:
        there = np.isfinite(self.delay[:, at]) & np.isfinite(self.delay[:, rest]).any(axis=1)
        mine, others = self.delay[there, at], self.delay[np.ix_(there, rest)]
        if not len(mine):
            return False
        num_latest = int((mine > np.nanmax(others, axis=1)).sum())
        waits = float(np.median(np.nanmedian(self.waiting[np.ix_(there, rest)], axis=1)))
        return (
            num_latest >= _LATEST * len(mine)
            and waits >= _WAITING * self.unit_ns
            and float(np.median(mine)) > self._doubt(at, rest)
            and self._chance(num_latest, len(mine), len(rest) + 1) <= _CHANCE
        )

    def _doubt(self, at: int, rest: Int64) -> float:
        return float(self.doubt[at] + np.median(self.doubt[rest]))

    def _chance(self, num_latest: int, num_units: int, num_ranks: int) -> float:
        """How probable it is that any of ranks that are all alike is the latest so often."""
        logs = [
            math.lgamma(num_units + 1) - math.lgamma(k + 1) - math.lgamma(num_units - k + 1)
            + (num_units - k) * math.log(num_ranks - 1) - num_units * math.log(num_ranks)
            for k in range(num_latest, num_units + 1)
        ]  # fmt: skip
        return float(self.delay.shape[1] * sum(map(math.exp, logs)))

    def reason(self, ranks: list[int]) -> str:
        """Why nobody is named."""
        num_units, num_ranks = self.delay.shape
        if num_ranks * float(num_ranks) ** -num_units > _CHANCE:
            return f"too few steps ({num_units}) to tell a slow rank from chance"
        candidates = self.candidates()
        rest = np.setdiff1d(np.arange(num_ranks), candidates)
        for at in candidates if len(rest) else []:
            delay = float(np.nanmedian(self.delay[:, at]))
            if delay <= self._doubt(at, rest):
                return (
                    f"rank {ranks[at]} seems {delay:.0f} ns late, but the clocks are known only to "
                    f"{self._doubt(at, rest):.0f} ns"
                )
        waiting = float(np.nanmedian(self.waiting))
        if waiting >= _TURNS * self.unit_ns:
            return "ranks wait for each other in turn, no single rank is slow"
        return f"no rank is late by {_LATE:.0%} of a step"


def _why_nothing(collectives: pl.DataFrame) -> str:
    several = collectives.filter(pl.col("num_found") > 1, ~pl.col("collective").is_in(LINKS))
    if several.is_empty():
        return "no operation of a group is recorded on several ranks"
    if several["wait_ns"].count() == 0:
        return "the waits of no operation are known: clocks cannot be compared, or ranks are missing"
    return "too few operations: the first of a window is left out"


def _none(rows: pl.DataFrame, reason: str, *, has_steps: bool) -> Stragglers:
    table = pl.DataFrame(schema={column.name: column.dtype for column in FOUND})
    return Stragglers(table, (), reason, rows["unit"].n_unique(), has_steps, None)
