"""Where the time of recorded steps goes, by phase: on the loop's thread, on all CPU threads and on the device.

The device time of a step is split so that it sums: compute, communication that no compute hides, copies that neither
hides, and idle. An activity counts to the phase that launched it; of activities at one time the earlier phase counts.
Idle time counts to the phase that the loop's thread is in meanwhile.
"""

from collections.abc import Sequence

import numpy as np
import polars as pl

from chakra_capture.analysis.ancestry import positions
from chakra_capture.analysis.loop import PHASES, LoopWindow, cut_to_steps, is_step, loop_windows
from chakra_capture.merge import intervals
from chakra_capture.trace.columns import Int64
from chakra_capture.trace.merged import MergedTrace
from chakra_capture.trace.schema import Column

SCHEMA = (
    Column("window", pl.Int32, "recorded window"),
    Column("step", pl.Int64, "global step number"),
    Column("phase", pl.String, "phase; null: the rest of the step, in no phase that is known"),
    Column("wall_ns", pl.Int64, "time of the loop's thread in it", "ns"),
    Column("cpu_self_ns", pl.Int64, "self time of its CPU rows, on all threads", "ns"),
    Column("num_launches", pl.Int64, "calls in it that launched device activities; null = no device events"),
    Column("compute_ns", pl.Int64, "kernels that are not communication, of its launches; null = not measured", "ns"),
    Column("exposed_communication_ns", pl.Int64, "communication that no compute hides; null = not measured", "ns"),
    Column("exposed_memory_ns", pl.Int64, "copies and memsets that neither hides; null = not measured", "ns"),
    Column("device_idle_ns", pl.Int64, "time without any of them; null = not measured", "ns"),
)

_ON_DEVICE = ("kernel", "memcpy", "memset")
_TIMES = ("compute_ns", "exposed_communication_ns", "exposed_memory_ns")


def phase_times(trace: MergedTrace, *, windows: Sequence[LoopWindow] | None = None) -> pl.DataFrame:
    """Split the recorded steps of one rank by phase.

    Args:
        windows: ``loop_windows`` of the trace, where they are at hand.

    Returns:
        a table of ``SCHEMA``: for each step with a duration a row per phase that has something in it, and one for the
        rest. ``wall_ns`` of a step's rows sum to its duration, and so do the device's four times.
    """
    used = loop_windows(trace) if windows is None else windows
    return pl.concat([_empty(), *(_of_window(each, tail_lost=trace.device_tail_lost) for each in used)])


def mean_phase_times(tables: Sequence[pl.DataFrame]) -> pl.DataFrame:
    """Mean over all steps of all ranks, by phase; a step that lacks a phase counts as none of it.

    Returns:
        ``phase``, ``num_steps`` (in which it is) and the times and counts of ``SCHEMA``, null where no step has them.
    """
    rows = pl.concat(
        [_empty(), *(table.with_columns(rank=pl.lit(at)) for at, table in enumerate(tables))], how="diagonal"
    )
    if rows.is_empty():
        return rows.select("phase", pl.lit(0).alias("num_steps"), *(pl.col(name).cast(pl.Float64) for name in _COUNTED))
    # A rank without device events has no say in the times of the device.
    steps = {name: rows.filter(pl.col(name).is_not_null()).n_unique(["rank", "window", "step"]) for name in _COUNTED}
    means = [
        pl.when(pl.col(name).count() > 0).then(pl.col(name).sum() / max(steps[name], 1)).alias(name)
        for name in _COUNTED
    ]
    table = rows.group_by("phase").agg(pl.len().alias("num_steps"), *means)
    order = {phase: at for at, phase in enumerate(PHASES)}
    return table.sort(pl.col("phase").replace_strict(order, return_dtype=pl.Int64))


def _empty() -> pl.DataFrame:
    return pl.DataFrame(schema={column.name: column.dtype for column in SCHEMA})


def _of_window(loop: LoopWindow, *, tail_lost: bool) -> pl.DataFrame:
    times = {(number, phase): dict.fromkeys(_COUNTED, 0) for number in range(loop.steps.height) for phase in PHASES}
    _add_wall(times, loop)
    _add_cpu(times, loop)
    # Not by whether there are activities: a step of a slice may have none.
    measured = not tail_lost and loop.steps["device_busy_ns"].is_not_null().any()
    if measured:
        _add_device(times, loop)
    rows = [
        {"window": loop.window, "step": loop.steps["step"][number], "phase": phase, **_row(values, measured=measured)}
        for (number, phase), values in times.items()
        if phase is None or any(values.values())
    ]
    return pl.DataFrame(rows, schema=_empty().schema)


_COUNTED = tuple(column.name for column in SCHEMA[3:])
_OF_DEVICE = _COUNTED[2:]
_Times = dict[tuple[int, str | None], dict[str, int]]


def _row(values: dict[str, int], *, measured: bool) -> dict[str, int | None]:
    return {name: None if name in _OF_DEVICE and not measured else value for name, value in values.items()}


def _add_wall(times: _Times, loop: LoopWindow) -> None:
    for number, dur in enumerate(loop.steps["dur_ns"].to_list()):
        times[number, None]["wall_ns"] = dur
    for number, phase, begin, stop in cut_to_steps(loop):
        times[number, phase]["wall_ns"] += stop - begin
        times[number, None]["wall_ns"] -= stop - begin


def _add_cpu(times: _Times, loop: LoopWindow) -> None:
    nodes, number = loop.nodes, {step: at for at, step in enumerate(loop.steps["step"].to_list())}
    ids = nodes["node_id"].to_numpy()
    launches = np.zeros(len(ids), dtype=bool)
    called = positions(ids, nodes["launch_id"].drop_nulls().to_numpy())
    launches[called[called >= 0]] = True
    on_cpu = ~pl.col("kind").is_in([*_ON_DEVICE, "device_annotation", "sync", "overhead"])
    sums = (
        nodes.lazy()  # of these rows, most of the table, the columns that are needed alone
        .with_columns(launches=pl.Series(launches))
        .filter(on_cpu & pl.col("step").is_in(list(number)) & ~is_step())
        .group_by("step", "phase")
        .agg(pl.col("self_dur_ns").sum(), pl.col("launches").sum())
        .collect()
    )
    for step, phase, self_ns, num_launches in sums.iter_rows():
        own = times[number[step], phase]
        own["cpu_self_ns"] += self_ns
        own["num_launches"] += num_launches


def _add_device(times: _Times, loop: LoopWindow) -> None:
    activities = loop.nodes.filter(pl.col("kind").is_in(_ON_DEVICE) & pl.col("self_dur_ns").is_not_null())
    is_comm = (pl.col("kind") == "kernel") & pl.col("collective").is_not_null()
    classes = ((pl.col("kind") == "kernel") & ~is_comm, is_comm, pl.col("kind") != "kernel")
    low, high = loop.low, loop.high
    covered = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
    for name, rule in zip(_TIMES, classes, strict=True):
        for phase in PHASES:
            mine = activities.filter(rule & (pl.col("phase").is_null() if phase is None else pl.col("phase") == phase))
            if mine.is_empty():
                continue
            start = mine["ts_ns"].to_numpy()
            both = intervals.union(*intervals.joined(covered, (start, start + mine["self_dur_ns"].to_numpy())))
            more = intervals.covered(*both, low, high) - intervals.covered(*covered, low, high)
            for number, value in enumerate(more.tolist()):
                times[number, phase][name] += value
            covered = both
    _add_idle(times, loop, covered)


def _add_idle(times: _Times, loop: LoopWindow, busy: tuple[Int64, Int64]) -> None:
    idle = loop.high - loop.low - intervals.covered(*busy, loop.low, loop.high)
    for number, value in enumerate(idle.tolist()):
        times[number, None]["device_idle_ns"] = value
    parts = cut_to_steps(loop)
    begin, stop = (np.array([part[at] for part in parts], dtype=np.int64) for at in (2, 3))
    for (number, phase, *_), value in zip(
        parts, (stop - begin - intervals.covered(*busy, begin, stop)).tolist(), strict=True
    ):
        times[number, phase]["device_idle_ns"] += value
        times[number, None]["device_idle_ns"] -= value
