"""Why a device is idle: every gap by cause, summing to the idle time exactly.

Idle is a device without any activity on any stream, so a wait of one stream for another while work runs is none, and a
collective that waits for its peers is busy. Between the first and the last activity gaps are ``inner``: they sum to
``idle_ns`` of ``device``. From the start of the first step to the first activity is ``lead``, from the last one to the
end of the last step ``tail``. A gap across the border of two steps is cut there. ``idle_gaps`` says what launches tell
of a gap, ``idle_host`` what the host does in the rest. A cause that nothing recorded shows is said to be unexplained.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import polars as pl

from chakra_capture.analysis import idle_gaps, idle_host
from chakra_capture.analysis.activities import device_activities
from chakra_capture.analysis.ancestry import outermost
from chakra_capture.analysis.host_threads import NEEDED, HostThreads
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
    pieces = pl.concat([_empty(), *(idle_pieces(trace) for trace in traces)])
    if steps is not None:
        pieces = pieces.filter(pl.col("step").is_in(list(steps)))
    return (
        pieces.group_by(*keys, "gap")
        .agg(pl.col("dur_ns").sum())
        .group_by(keys)
        .agg(
            count=pl.len().cast(pl.Int64),
            total_ns=pl.col("dur_ns").sum(),
            longest_ns=pl.col("dur_ns").max(),
        )
        .with_columns(share=pl.col("total_ns") / pl.col("total_ns").sum().over("rank"))
        .with_columns(pl.lit(None).alias(key) for key in KEYS if key not in by)
        .sort("total_ns", *keys, descending=[True, *[False] * len(keys)])
        .select(pl.col(column.name).cast(column.dtype) for column in SCHEMA)
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


def idle_pieces(trace: MergedTrace) -> pl.DataFrame:
    """Every piece of idle time of one rank, each of one cause: the columns of ``idle_causes`` with ``gap``, ``ts_ns``
    (on the device's clock) and ``dur_ns``. Nothing where the end of a device trace is lost."""
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
            table = _of_device(rows, threads, steps, offset, limit)
            keys = {"rank": trace.rank, "window": window, "device": device}
            found.append(table.with_columns(pl.lit(v).alias(k) for k, v in keys.items()).select(_empty().columns))
    return pl.concat(found, how="vertical_relaxed")


def _empty() -> pl.DataFrame:
    dtypes = {column.name: column.dtype for column in SCHEMA}
    kept = ("rank", "window", "device", "step", "position", "cause", "name", "detail", "phase", "drained_by")
    more = {"gap": pl.Int64, "ts_ns": pl.Int64, "dur_ns": pl.Int64}
    return pl.DataFrame(schema={**{name: dtypes[name] for name in kept}, **more})


def _of_device(
    activities: pl.DataFrame, threads: HostThreads, steps: pl.DataFrame, offset: int, limit: int
) -> pl.DataFrame:
    low = steps["ts_ns"].to_numpy()
    high = low + steps["dur_ns"].to_numpy()
    bounds = (int(low.min()), int(high.max())) if len(low) else None
    gaps = idle_gaps.find_gaps(activities, threads, offset, bounds)
    phases = idle_host.PhaseRuns(threads)
    whole = idle_gaps.cut(gaps, threads, limit)
    is_host = whole.cause == idle_gaps.CAUSES.index(HOST)
    at_steps = np.unique(np.concatenate([low, high])) + offset
    everywhere = np.unique(np.concatenate([at_steps, threads.changes, phases.bounds]))
    calm, busy = (
        idle_gaps.cut_at(Stretches(*(getattr(whole, name)[rows] for name in Stretches.__slots__)), times)
        for rows, times in ((~is_host, at_steps), (is_host, everywhere))
    )
    parts = [_launched(calm, gaps, threads), _of_host(busy, gaps, threads, phases)]
    pieces = _joined(calm, busy)
    table = pl.concat(parts).with_columns(
        pl.Series("gap", pieces.gap),
        pl.Series("ts_ns", pieces.start - offset),
        pl.Series("dur_ns", pieces.end - pieces.start),
        pl.Series("step", _step_at(pieces.start - offset, low, high, steps), dtype=pl.Int64),
        position=pl.Series(gaps.position[pieces.gap]).replace_strict(
            dict(enumerate(POSITIONS)), return_dtype=pl.Enum(POSITIONS)
        ),
        phase=pl.Series(phases.at(pieces.start).tolist(), dtype=pl.String).replace({"": None}),
    )
    drained = pl.Series("drained_by", _drained_by(gaps, threads), dtype=pl.String)
    is_late = pl.col("cause").is_in(UNEXPLAINED[:2] + _NOT_LATE)
    return table.with_columns(
        drained_by=pl.when(~is_late).then(drained.gather(pieces.gap) if len(drained) else pl.lit(None, pl.String))
    ).sort("ts_ns")


_NOT_LATE = (idle_gaps.IN_GRAPH, idle_gaps.STAGING, idle_gaps.SAME_STREAM, idle_gaps.OTHER_STREAM)


def _joined(first: Stretches, second: Stretches) -> Stretches:
    return Stretches(
        *(np.concatenate([getattr(part, name) for part in (first, second)]) for name in Stretches.__slots__)
    )


def _step_at(times: Int64, low: Int64, high: Int64, steps: pl.DataFrame) -> list[int | None]:
    at = np.searchsorted(low, times, side="right") - 1
    inside = (at >= 0) & (times < np.append(high, 0)[at])
    numbers = steps["step"].to_list()
    return [numbers[place] if known else None for place, known in zip(at.tolist(), inside, strict=True)]


def _launched(pieces: Stretches, gaps: Gaps, threads: HostThreads) -> pl.DataFrame:
    """Pieces that launches tell: named by the op that launches what comes next."""
    call = gaps.call[pieces.gap]
    op = outermost(threads.parent, call, threads.marked.op)
    causes = [idle_gaps.CAUSES[code] for code in pieces.cause.tolist()]
    return _named(causes, threads.names(op), threads.names(call))


def _of_host(pieces: Stretches, gaps: Gaps, threads: HostThreads, phases: idle_host.PhaseRuns) -> pl.DataFrame:
    if not len(pieces.gap):
        return _named([], [], [])
    if not len(threads.ids):  # nothing of the host is recorded
        return _named([idle_gaps.NOT_RECORDED] * len(pieces.gap), *[[None] * len(pieces.gap)] * 2)
    call = np.where(gaps.call >= 0, gaps.call, gaps.call_before)[pieces.gap]
    track = np.where(call >= 0, threads.track[np.maximum(call, 0)], -1)
    states = idle_host.host_states(threads, track, pieces.start, phases)
    is_between = states.state >= idle_host.STATES.index(idle_host.BETWEEN)
    details = threads.names(states.detail)
    after, before = (threads.names(rows) for rows in (states.after, states.before))
    for at in np.flatnonzero(is_between).tolist():
        sides = [f"{word} {idle_host.stripped(name)}" for word, name in (("after", after[at]), ("before", before[at]))
                 if name is not None]  # fmt: skip
        details[at] = ", ".join(sides) or None
    causes = [idle_host.STATES[code] for code in states.state.tolist()]
    return _named(causes, threads.names(states.name), details)


def _named(causes: list[str], names: list[str | None], details: list[str | None]) -> pl.DataFrame:
    columns = {"cause": causes, "name": names, "detail": details}
    table = pl.DataFrame(columns, schema=dict.fromkeys(columns, pl.String))
    return table.with_columns(pl.col("name", "detail").str.strip_prefix("autograd::engine::evaluate_function: "))


def _drained_by(gaps: Gaps, threads: HostThreads) -> list[str | None]:
    """Of each gap the last call on the launching thread, between the two launches, that waited for the device."""
    both = np.flatnonzero((gaps.call >= 0) & (gaps.call_before >= 0))
    found: list[str | None] = [None] * len(gaps.call)
    calls = np.flatnonzero(threads.marked.blocking)
    if not len(both) or not len(calls):
        return found
    call, before = gaps.call[both], gaps.call_before[both]
    at = threads.before(calls, threads.track[call], threads.start[call])
    row = np.where(at >= 0, calls[np.maximum(at, 0)], -1)
    row = np.where((row >= 0) & (threads.start[row] >= threads.start[before]), row, -1)
    ops = threads.names(outermost(threads.parent, row, threads.marked.op))
    for gap, op, name in zip(both.tolist(), ops, threads.names(row), strict=True):
        found[gap] = name if op is None else f"{idle_host.stripped(op)} ({name})" if name else None
    return found


def cause_order() -> Iterator[str]:
    """All causes that the table may have."""
    yield from idle_host.STATES
    yield from (cause for cause in idle_gaps.CAUSES if cause != HOST)
