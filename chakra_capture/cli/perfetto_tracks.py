"""What the analyses have to show on a time line, as the Perfetto export takes it."""

from typing import TYPE_CHECKING

import polars as pl

from chakra_capture.analysis import counters
from chakra_capture.analysis.critical_path import PARTS, Paths
from chakra_capture.analysis.device_states import device_states
from chakra_capture.analysis.loop import loop_windows
from chakra_capture.analysis.replay.calibrated import calibrate
from chakra_capture.analysis.replay.graph import ReplayError
from chakra_capture.analysis.replay.replay import replay
from chakra_capture.analysis.replay.run import windows_of
from chakra_capture.export.perfetto.given import (
    COUNTERS,
    CRITICAL_PATH,
    DEVICE_STATE,
    HOST,
    PHASES,
    RUN,
    STEPS,
    Counter,
    Intervals,
    Made,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from chakra_capture.export.perfetto.cut import Cut
    from chakra_capture.trace.merged import MergedRun, MergedTrace

_MEGA = 1_000_000


def of_rank(run: "MergedRun", trace: "MergedTrace", cut: "Cut") -> Made:
    """Phases, states of devices and counters of a rank."""
    intervals: list[Intervals] = []
    if cut.shows(PHASES):
        intervals.append(Intervals(HOST, "phases", "phase", _phases(trace)))
    if cut.shows(DEVICE_STATE):
        intervals += _states(trace)
    shown = tuple(_counters(run, trace)) if cut.shows(COUNTERS) else ()
    lost = cut.shows(DEVICE_STATE) and trace.device_tail_lost
    notes = (
        (f"rank {trace.rank}: the end of the device trace is lost, so no state of the GPU is shown",) if lost else ()
    )
    return Made(tuple(intervals), shown, notes=notes)


def of_run(run: "MergedRun", traces: "Sequence[MergedTrace]", cut: "Cut") -> Made:
    """The critical path and the steps of all ranks together."""
    intervals, notes, path = [], [], None
    if cut.shows(CRITICAL_PATH):
        try:
            path = _path(run, traces)
        except ReplayError as error:
            notes.append(f"no critical path: {error}")
        if path is not None and path.height:
            intervals.append(Intervals(RUN, "critical path", "critical_path", path))
    if cut.shows(STEPS):
        intervals.append(Intervals(RUN, "steps", "step", _steps(run, traces)))
    arrows = None if path is None else path.select("node_id", "begin_ns", "end_ns", rank="on_rank")
    return Made(tuple(intervals), path=arrows, notes=tuple(notes))


def _phases(trace: "MergedTrace") -> pl.DataFrame:
    tables = [pl.DataFrame(schema={"name": pl.String, "begin_ns": pl.Int64, "end_ns": pl.Int64})]
    for window in loop_windows(trace):
        one = window.segments
        columns = {"name": pl.Series(one.phase, dtype=pl.String), "begin_ns": one.start, "end_ns": one.end}
        tables.append(pl.DataFrame(columns))
    return pl.concat(tables)


def _states(trace: "MergedTrace") -> "Iterator[Intervals]":
    states = device_states(trace).rename({"name": "op"}).rename({"state": "name"}).drop("window")
    for (device,), rows in states.partition_by("device", as_dict=True, maintain_order=True).items():
        yield Intervals(int(device), "GPU state", "gpu_state", rows.drop("device"))


def _counters(run: "MergedRun", trace: "MergedTrace") -> "Iterator[Counter]":
    queues = counters.queue_lengths(trace)
    for (device, stream), rows in queues.partition_by("device", "stream", as_dict=True, maintain_order=True).items():
        yield Counter(int(device), f"queue length stream {stream} [activities]", rows.select("ts_ns", "value"))
    held = counters.memory_held(trace)
    for (device,), rows in held.partition_by("device", as_dict=True, maintain_order=True).items():
        for what in ("allocated", "reserved"):
            known = rows.select("ts_ns", value=what).drop_nulls()
            if known.height:
                part, of = (HOST, "of the host") if device is None else (int(device), f"of GPU {device}")
                yield Counter(part, f"memory {what} {of} [bytes]", known)
    copies = counters.copy_bandwidths(trace)
    for (device,), rows in copies.partition_by("device", as_dict=True, maintain_order=True).items():
        yield _bandwidth(int(device), "copy bandwidth [GB/s]", rows)
    bus = counters.bus_bandwidths(run, trace.rank)
    if bus.height:
        devices = trace.some_of_nodes("kind", "collective", "device").filter(
            (pl.col("kind") == "kernel") & pl.col("collective").is_not_null()
        )["device"].drop_nulls().unique().sort()  # fmt: skip
        yield _bandwidth(int(devices[0]) if len(devices) else HOST, "bus bandwidth [GB/s]", bus)


def _bandwidth(part: str | int, name: str, rows: pl.DataFrame) -> Counter:
    """Bytes per second as GB/s with three decimals."""
    return Counter(part, name, rows.select("ts_ns", value=pl.col("value") // _MEGA), in_thousandths=True)


def _path(run: "MergedRun", traces: "Sequence[MergedTrace]") -> pl.DataFrame:
    """Of each window the path to its end: that of the rank that ends last."""
    found = [pl.DataFrame(schema=PARTS)]
    for (_, meetings, clocks), ranks in windows_of(run, [*traces]):
        if ranks:
            paths = Paths(calibrate(replay(ranks, meetings, clocks, inputs=True)))
            whole = [parts for rank in ranks if (parts := paths.whole(rank).parts).height]
            found += [max(whole, key=lambda parts: int(parts["end_ns"][-1]))] if whole else []
    named = pl.concat(found).with_columns(pl.col("category").cast(pl.String))
    return named.with_columns(name=pl.coalesce("name", "category"))


def _steps(run: "MergedRun", traces: "Sequence[MergedTrace]") -> pl.DataFrame:
    """From the first rank's start to the last one's end, on the clock of the reference rank."""
    tables = []
    for trace in traces:
        clock = run.clocks.get(trace.rank)
        offset = 0 if clock is None or clock.reason is not None else clock.offset_ns or 0
        known = trace.steps.filter(pl.col("step").is_not_null() & pl.col("dur_ns").is_not_null())
        tables.append(known.select("window", "step", "dur_ns", ts_ns=pl.col("ts_ns") - offset, rank=pl.lit(trace.rank)))
    steps = pl.concat(tables).group_by("window", "step").agg(
        begin_ns=pl.col("ts_ns").min(), end_ns=(pl.col("ts_ns") + pl.col("dur_ns")).max(), num_ranks=pl.len(),
        shortest_ns=pl.col("dur_ns").min(), longest_ns=pl.col("dur_ns").max(),
        longest_on_rank=pl.col("rank").sort_by("dur_ns", "rank").last(),
    )  # fmt: skip
    return steps.sort("window", "step").with_columns(name=pl.format("step {}", "step")).drop("window")
