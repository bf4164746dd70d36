"""Which rows of a rank stay: those of some steps, or one op and what is beneath it.

A row is of the step in which it starts, and a device activity of that of its launch, as in the column ``step``. What
has no step goes by its start: between two steps that both stay, and follow each other, it stays, too. Beside these stay
device activities launched before, as far as they run in a step that stays: else the device would be idle where it was
not. Other rows that begin before, such as an annotation of a whole epoch, do not stay: they say nothing of the steps.
An annotation of a phase does where it reaches into a step: it says what the step begins with.
"""

from dataclasses import dataclass

import numpy as np
import polars as pl

from chakra_capture.annotations import BETWEEN_STEPS, PHASE_NAMES
from chakra_capture.merge import intervals
from chakra_capture.merge.rows import ACTIVITY_KINDS, DEVICE_KINDS, climb
from chakra_capture.trace.columns import MISSING, Bool, Int64
from chakra_capture.trace.keys import match_keys

_ROOTS = ("process", "thread")
_NUMBERS = ("node_id", "step", "parent_id", "launch_id", "ts_ns", "dur_ns")


@dataclass(frozen=True, slots=True)
class Kept:
    """The rows of a rank that stay.

    Attributes:
        ids: their ``node_id``, ascending; the position of each is its number in the slice.
        carried: those of them that only run in the time of what stays; their launch, if any is recorded, goes.
    """

    ids: Int64
    carried: Int64

    def renumbered(self, column: str) -> pl.Expr:
        """A column of node ids as they are numbered in the slice, null where the row does not stay."""
        return _renumbered(self.ids, column)

    def stays(self, column: str) -> pl.Expr:
        """Whether the row that a column names stays."""
        low, high = (int(self.ids[0]), int(self.ids[-1])) if len(self.ids) else (0, -1)
        # The bounds, unlike the rest, let polars leave whole parts of a file alone.
        return pl.col(column).is_between(low, high) & self.renumbered(column).is_not_null()

    def is_own(self, column: str) -> pl.Expr:
        """Whether it stays for what it is, not for when it runs."""
        return self.stays(column) & _renumbered(self.carried, column).is_null()


def _renumbered(ids: Int64, column: str) -> pl.Expr:
    def numbers(values: pl.Series) -> pl.Series:
        wanted = values.fill_null(MISSING).to_numpy()
        at = np.searchsorted(ids, wanted)
        found = (np.append(ids, MISSING)[at] == wanted) & (wanted != MISSING)
        return pl.select(pl.when(pl.Series(found)).then(pl.Series(at, dtype=pl.Int64)).alias(values.name)).to_series()

    return pl.col(column).map_batches(numbers, return_dtype=pl.Int64, is_elementwise=True)


def rows_of_steps(nodes: pl.LazyFrame, steps: pl.DataFrame) -> Kept:
    """The rows of some steps.

    Args:
        nodes: the table of the rank.
        steps: the rows of its table of steps that are to stay.
    """
    numbers, windows = (steps[name].unique().to_list() for name in ("step", "window"))
    end = pl.col("ts_ns") + pl.col("dur_ns").fill_null(0)
    low, high = steps["ts_ns"].min(), (steps["ts_ns"] + steps["dur_ns"].fill_null(0)).max()
    is_near = pl.lit(value=False)
    if low is not None and high is not None:
        is_near = pl.col("kind").is_in(DEVICE_KINDS) & (pl.col("ts_ns") <= high) & (end >= low)
    is_mark = pl.col("kind").is_in(("device_annotation", "sync"))
    is_phase = (pl.col("kind") == "annotation") & pl.col("name").is_in((*PHASE_NAMES, *BETWEEN_STEPS))
    may_stay = pl.col("step").is_in(numbers) | pl.col("step").is_null() | is_near | is_mark | is_phase
    rows = (
        nodes.filter(pl.col("window").is_in(windows) & may_stay.fill_null(value=False))
        .select("window", "kind", *_NUMBERS, is_phase=is_phase.fill_null(value=False))
        .collect(engine="streaming")
        .sort("node_id")
    )
    found = [
        _of_window(mine, steps.filter(pl.col("window") == window))
        for (window,), mine in rows.partition_by("window", as_dict=True, maintain_order=True).items()
    ]
    none = np.zeros(0, dtype=np.int64)
    return Kept(np.concatenate([none, *(ids for ids, _ in found)]), np.concatenate([none, *(c for _, c in found)]))


def _of_window(rows: pl.DataFrame, steps: pl.DataFrame) -> tuple[Int64, Int64]:
    """Ids of the rows that stay, and of those of them that are carried."""
    node_id, step, parent, launch, start, dur = (rows[name].fill_null(MISSING).to_numpy() for name in _NUMBERS)
    is_root, on_device, is_activity = (rows["kind"].is_in(k).to_numpy() for k in (_ROOTS, DEVICE_KINDS, ACTIVITY_KINDS))
    is_timed = start != MISSING
    end = np.where(is_timed, start, 0) + np.where(dur != MISSING, dur, 0)
    spans = _spans(steps)
    stays = np.isin(step, steps["step"].to_numpy())
    has_no_step = (step == MISSING) & (launch == MISSING) & (~on_device | is_activity)
    stays |= has_no_step & is_timed & intervals.holds(*spans, start)
    stays |= rows["is_phase"].to_numpy() & is_timed & _overlap(spans, start, end)
    stays |= _beneath(stays, match_keys(parent, node_id), ~is_timed & ~is_root)
    at = match_keys(launch, node_id)
    launched = stays | (is_activity & (at >= 0) & stays[np.maximum(at, 0)])
    carried = is_activity & ~launched & is_timed & _overlap(spans, start, end)
    stays = launched | carried
    # What annotates device activities, or waits for them, has no launch: it stays beside those that stay.
    ran = is_activity & stays & is_timed
    busy = intervals.union(*intervals.joined(spans, (start[ran], end[ran])))
    stays |= on_device & ~is_activity & is_timed & _overlap(busy, start, end)
    stays |= is_root
    return node_id[stays], node_id[carried]


def _spans(steps: pl.DataFrame) -> tuple[Int64, Int64]:
    """Times of the steps, and between those that follow each other."""
    timed = steps.filter(pl.col("ts_ns").is_not_null() & pl.col("dur_ns").is_not_null()).sort("pid", "step", "ts_ns")
    low = timed["ts_ns"].to_numpy()
    high = low + timed["dur_ns"].to_numpy()
    number, pid = timed["step"].to_numpy(), timed["pid"].fill_null(MISSING).to_numpy()
    follows = (number[1:] == number[:-1] + 1) & (pid[1:] == pid[:-1])
    high[:-1][follows] = np.maximum(high[:-1], low[1:])[follows]
    return intervals.union(low, high)


def _overlap(spans: tuple[Int64, Int64], start: Int64, end: Int64) -> Bool:
    """Which rows run in one of the spans, which are disjoint and ascending; an instant is in the span that holds it."""
    low, high = spans
    at = np.searchsorted(high, start, side="right")
    return np.asarray((at < len(low)) & (np.append(low, MISSING)[at] < np.maximum(end, start + 1)))


def _beneath(seeds: Bool, parent: Int64, follows: Bool) -> Bool:
    """Rows that ``follows`` marks and that are beneath a seed, with nothing but such rows between."""
    accepted = seeds | ~follows
    up = np.where(follows, parent, -1).astype(np.int32)
    nearest = climb(up, up, accepted)
    return np.asarray(follows & (nearest >= 0) & np.append(seeds, False)[nearest])


def rows_beneath(nodes: pl.LazyFrame, node: int) -> Kept | None:
    """A row, those beneath it by ``parent_id``, and the device activities that they launch; None: there is no such row.

    Args:
        nodes: the table of the rank.
        node: the ``node_id``.
    """
    window = nodes.filter(pl.col("node_id") == node).select("window").collect(engine="streaming")
    if window.is_empty():
        return None
    rows = (
        nodes.filter(pl.col("window") == window.item())
        .select("node_id", "parent_id", "launch_id")
        .collect(engine="streaming")
        .sort("node_id")
    )
    node_id, parent, launch = (rows[name].fill_null(MISSING).to_numpy() for name in rows.columns)
    own = node_id == node
    up = match_keys(parent, node_id).astype(np.int32)
    inside = climb(np.arange(len(up), dtype=np.int32), up, own) >= 0
    call = match_keys(launch, node_id)
    inside |= (call >= 0) & inside[np.maximum(call, 0)]
    return Kept(node_id[inside], np.zeros(0, dtype=np.int64))
