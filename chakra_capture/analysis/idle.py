"""Why a device is idle: every gap by cause, summing to the idle time exactly.

Idle is a device without any activity on any stream, so a wait of one stream for another while work runs is none, and a
collective that waits for its peers is busy. Between the first and the last activity gaps are ``inner``: they sum to
``idle_ns`` of ``device``. From the start of the first step to the first activity is ``lead``, from the last one to the
end of the last step ``tail``. A gap across the border of two steps is cut there. ``idle_gaps`` says what launches tell
of a gap, ``idle_host`` what the host does in the rest. A cause that nothing recorded shows is said to be unexplained.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl

from chakra_capture.analysis import idle_gaps, idle_host
from chakra_capture.analysis.activities import device_activities
from chakra_capture.analysis.ancestry import outermost
from chakra_capture.analysis.grouping import group_of_rows
from chakra_capture.analysis.host_threads import NEEDED, HostThreads, ascending, picked
from chakra_capture.analysis.idle_gaps import HOST, INNER, POSITIONS, Gaps, Stretches
from chakra_capture.trace.columns import Int64
from chakra_capture.trace.merged import MergedTrace
from chakra_capture.trace.schema import Column

SCHEMA = (
    Column("rank", pl.Int64, "global rank"),
    Column("window", pl.Int32, "recorded window"),
    Column("device", pl.Int64, "device"),
    Column("step", pl.Int64, "step whose bounds hold the time; null: between steps, none marked, or all together"),
    Column("position", pl.Enum(POSITIONS), "inner: between the first and the last activity of the window; lead, tail: "
           "from the start of the first step to the first, and from the last to the end of the last step"),
    Column("cause", pl.String, "what the device waits for"),
    Column("name", pl.String, "op (the outermost) or annotation that the host is in, or that launches next; null: none "
           "is recorded, or all together"),
    Column("detail", pl.String, "the innermost op or call, or the ops on both sides; null like name"),
    Column("phase", pl.String, "phase that the loop is in meanwhile; null: not known, or all together"),
    Column("drained_by", pl.String, "where the launch came too late: the call between the launches before and after "
           "the gap that waited for the device, so that nothing was queued; null: the host was slower than the device"),
    Column("count", pl.Int64, "gaps it has a part in"),
    Column("total_ns", pl.Int64, "summed time", "ns"),
    Column("share", pl.Float64, "of the idle time of all rows of this rank"),
    Column("longest_ns", pl.Int64, "most of it in one gap", "ns"),
)  # fmt: skip
# Columns that may tell rows of one cause apart.
KEYS = ("step", "name", "detail", "phase", "drained_by")
UNEXPLAINED = (idle_gaps.NOT_RECORDED, idle_gaps.QUEUED, idle_gaps.LAUNCHED)
# With more of the idle time than this unexplained a table of causes leads to no conclusion.
MOST_UNEXPLAINED = 0.10
_ALWAYS = ("rank", "window", "device", "position", "cause")


def idle_causes(
    traces: Sequence[MergedTrace], *, by: Sequence[str] = ("name",), steps: Sequence[int] | None = None
) -> pl.DataFrame:
    """Sum up idle time by cause, most first.

    Args:
        traces: ranks.
        by: of ``KEYS``, what makes rows of their own.
        steps: only what lies within these steps.
    """
    keys = [*_ALWAYS, *by]
    wanted = {*by, *(() if steps is None else ("step",))}
    pieces = pl.concat([_empty(), *(idle_pieces(trace, wanted) for trace in traces)])
    if steps is not None:
        pieces = pieces.filter(pl.col("step").is_in(list(steps)))
    group = group_of_rows(pieces, keys)
    alike = pl.DataFrame({"group": group}).with_row_index("row").unique("group", keep="first").sort("group")
    kinds = pieces.select(keys)[alike["row"]].with_columns(alike["group"])
    # A gap has several pieces of one cause where it comes and goes.
    size = int(pieces["gap"].max() or 0) + 1  # type: ignore[arg-type]
    per_gap = pl.DataFrame({"both": group * size + pieces["gap"].to_numpy(), "dur_ns": pieces["dur_ns"]})
    sums = (
        per_gap.group_by("both")
        .agg(pl.col("dur_ns").sum())
        .group_by(pl.col("both") // size)
        .agg(
            count=pl.len().cast(pl.Int64),
            total_ns=pl.col("dur_ns").sum(),
            longest_ns=pl.col("dur_ns").max(),
        )
    )
    return (
        kinds.join(sums, left_on="group", right_on="both", validate="1:1")
        .with_columns(share=pl.col("total_ns") / pl.col("total_ns").sum().over("rank"))
        .with_columns(pl.lit(None).alias(key) for key in KEYS if key not in by)
        .select(pl.col(column.name).cast(column.dtype) for column in SCHEMA)
        .sort("total_ns", *keys, descending=[True, *[False] * len(keys)])
    )


def unexplained_share(causes: pl.DataFrame) -> float | None:
    """Part of the inner idle time that nothing recorded explains; None without any."""
    inner = causes.filter(pl.col("position") == INNER)
    total = int(inner["total_ns"].sum())
    return int(inner.filter(pl.col("cause").is_in(UNEXPLAINED))["total_ns"].sum()) / total if total else None


def hand_over_ns(trace: MergedTrace) -> int:
    """Up to how long a gap is the hand-over between two activities: longer on ROCm."""
    calls = trace.some_of_nodes("kind", "name").filter(pl.col("kind") == "runtime")
    is_rocm = bool(calls["name"].str.starts_with("hip").any())
    return idle_gaps.HAND_OVER_ROCM_NS if is_rocm else idle_gaps.HAND_OVER_NS


def idle_pieces(trace: MergedTrace, wanted: Collection[str] = KEYS) -> pl.DataFrame:
    """Every piece of idle time of one rank, each of one cause.

    Args:
        trace: one rank.
        wanted: of ``KEYS``, what is asked for; the others are null.

    Returns:
        the columns of ``idle_causes`` that tell rows apart, ``gap`` (its number), ``ts_ns`` (on the device's clock) and
        ``dur_ns``; no row where the end of a device trace is lost.
    """
    activities = device_activities(trace, "name")
    if activities.is_empty() or trace.device_tail_lost:
        return _empty()
    nodes, limit = trace.some_of_nodes("window", *NEEDED), hand_over_ns(trace)
    found = [_empty()]
    for (window,), mine in activities.partition_by("window", as_dict=True, maintain_order=True).items():
        threads = HostThreads(nodes.filter(pl.col("window") == window))
        steps = trace.steps.filter(
            (pl.col("window") == window) & pl.col("step").is_not_null() & pl.col("dur_ns").is_not_null()
        ).sort("ts_ns")
        offset = trace.clock_offsets.get(window, 0)
        for (device,), rows in mine.partition_by("device", as_dict=True, maintain_order=True).items():
            table = _of_device(rows, threads, steps, _How(offset, limit, frozenset(wanted)))
            keys = {"rank": trace.rank, "window": window, "device": device}
            found.append(table.with_columns(pl.lit(v).alias(k) for k, v in keys.items()).select(_empty().columns))
    return pl.concat(found, how="vertical_relaxed")


def _empty() -> pl.DataFrame:
    dtypes = {column.name: column.dtype for column in SCHEMA}
    kept = ("rank", "window", "device", "step", "position", "cause", "name", "detail", "phase", "drained_by")
    more = {"gap": pl.Int64, "ts_ns": pl.Int64, "dur_ns": pl.Int64}
    texts = dict.fromkeys(("cause", "name", "detail", "phase", "drained_by"), pl.Categorical)
    return pl.DataFrame(schema={**{name: dtypes[name] for name in kept}, **texts, **more})


@dataclass(frozen=True, slots=True)
class _How:
    """The device's clock is ``offset`` behind; up to ``limit`` a gap is a hand-over."""

    offset: int
    limit: int
    wanted: frozenset[str]


def _of_device(activities: pl.DataFrame, threads: HostThreads, steps: pl.DataFrame, how: _How) -> pl.DataFrame:
    offset, wanted = how.offset, how.wanted
    low = steps["ts_ns"].to_numpy()
    high = low + steps["dur_ns"].to_numpy()
    bounds = (int(low.min()), int(high.max())) if len(low) else None
    gaps = idle_gaps.find_gaps(activities, threads, offset, bounds)
    phases = idle_host.PhaseRuns(threads)
    whole = idle_gaps.cut(gaps, threads, how.limit)
    is_host = whole.cause == idle_gaps.CAUSES.index(HOST)
    at_steps = ascending(low, high) + offset
    everywhere = ascending(at_steps, threads.changes, phases.bounds)
    calm, busy = (
        idle_gaps.cut_at(Stretches(*(getattr(whole, name)[rows] for name in Stretches.__slots__)), times)
        for rows, times in ((~is_host, at_steps), (is_host, everywhere))
    )
    parts = [_launched(calm, gaps, threads), of_host(busy, gaps, threads, phases, wanted)]
    pieces = _joined(calm, busy)
    table = pl.concat(parts).with_columns(
        pl.Series("gap", pieces.gap),
        pl.Series("ts_ns", pieces.start - offset),
        pl.Series("dur_ns", pieces.end - pieces.start),
        picked(steps["step"], _step_at(pieces.start - offset, low, high)).alias("step"),
        picked(pl.Series(POSITIONS, dtype=pl.Enum(POSITIONS)), gaps.position[pieces.gap]).alias("position"),
        (phases.at(pieces.start) if "phase" in wanted else pl.lit(None, dtype=pl.Categorical)).alias("phase"),
    )
    if "drained_by" not in wanted:
        return table.with_columns(drained_by=pl.lit(None, dtype=pl.Categorical))
    drained = picked(_drained_by(gaps, threads).cast(pl.Categorical), pieces.gap)
    is_late = pl.col("cause").is_in(UNEXPLAINED[:2] + _NOT_LATE)
    return table.with_columns(drained_by=pl.when(~is_late).then(drained)).sort("ts_ns")


_NOT_LATE = (idle_gaps.IN_GRAPH, idle_gaps.STAGING, idle_gaps.SAME_STREAM, idle_gaps.OTHER_STREAM)


def _joined(first: Stretches, second: Stretches) -> Stretches:
    return Stretches(
        *(np.concatenate([getattr(part, name) for part in (first, second)]) for name in Stretches.__slots__)
    )


def _step_at(times: Int64, low: Int64, high: Int64) -> Int64:
    at = np.searchsorted(low, times, side="right") - 1
    return np.where((at >= 0) & (times < np.append(high, 0)[at]), at, -1)


def _launched(pieces: Stretches, gaps: Gaps, threads: HostThreads) -> pl.DataFrame:
    """Pieces that launches tell: named by the op that launches what comes next."""
    call = gaps.call[pieces.gap]
    op = outermost(threads.parent, call, threads.marked.op)
    return _named(picked(pl.Series(idle_gaps.CAUSES), pieces.cause), threads.names(op), threads.names(call))


def of_host(
    pieces: Stretches, gaps: Gaps, threads: HostThreads, phases: idle_host.PhaseRuns, wanted: Collection[str]
) -> pl.DataFrame:
    """What the host does in some pieces, by columns ``cause``, ``name`` and ``detail``."""
    nothing = pl.Series([None], dtype=pl.Categorical).new_from_index(0, len(pieces.gap))
    if not len(threads.ids):  # nothing of the host is recorded
        return _named(pl.Series([idle_gaps.NOT_RECORDED]).new_from_index(0, len(pieces.gap)), nothing, nothing)
    call = np.where(gaps.call >= 0, gaps.call, gaps.call_before)[pieces.gap]
    track = np.where(call >= 0, threads.track[np.maximum(call, 0)], -1)
    states = idle_host.host_states(threads, track, pieces.start, phases)
    table = _named(
        picked(pl.Series(idle_host.STATES), states.state), threads.names(states.name), threads.names(states.detail)
    )
    if "detail" not in wanted:
        return table
    sides = {side: threads.names(getattr(states, side)) for side in ("after", "before")}
    both = [pl.lit(f"{side} ") + names.cast(pl.String) for side, names in sides.items()]
    is_between = pl.col("cause").is_in([idle_host.BETWEEN, idle_host.IN_ENGINE])
    beside = pl.concat_str(both, separator=", ", ignore_nulls=True).replace({"": None})
    detail = pl.when(is_between).then(beside.cast(pl.Categorical)).otherwise("detail")
    return table.with_columns(detail.alias("detail"))


def _named(causes: pl.Series, names: pl.Series, details: pl.Series) -> pl.DataFrame:
    columns = {"cause": causes, "name": names, "detail": details}
    return pl.DataFrame({name: column.cast(pl.Categorical) for name, column in columns.items()})


def _drained_by(gaps: Gaps, threads: HostThreads) -> pl.Series:
    """Of each gap the last call on the launching thread, between the two launches, that waited for the device."""
    row = np.full(len(gaps.call), -1, dtype=np.int64)
    both = np.flatnonzero((gaps.call >= 0) & (gaps.call_before >= 0))
    calls = np.flatnonzero(threads.marked.blocking)
    if len(both) and len(calls):
        call, before = gaps.call[both], gaps.call_before[both]
        at = threads.before(calls, threads.track[call], threads.start[call])
        last = np.where(at >= 0, calls[np.maximum(at, 0)], -1)
        row[both] = np.where((last >= 0) & (threads.start[last] >= threads.start[before]), last, -1)
    op, name = threads.names(outermost(threads.parent, row, threads.marked.op)), threads.names(row)
    table = pl.DataFrame({"op": op, "name": name}).cast(pl.String)
    in_op = pl.col("op") + " (" + pl.col("name") + ")"
    return table.select(pl.coalesce(in_op, "name")).to_series()
