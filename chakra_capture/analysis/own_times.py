"""In which phase, and in which op, a rank is late: its own time, without that in which it communicates or waits.

The loop's thread communicates while an operation of its rank is under way and neither it nor autograd works on anything
else: that is waiting for peers and transfer alike, wherever it is (gloo's root waits in a broadcast of forward). A call
that waits for the device is none of the CPU's own time; what the device works in kernels is counted beside it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from chakra_capture.analysis.activities import KINDS as ON_DEVICE
from chakra_capture.analysis.host_threads import ENGINE_PREFIX, HostThreads, ascending
from chakra_capture.analysis.late_ops import COMMUNICATES, Cause, LateOp, call_path, late_op, no_ops, own_ops
from chakra_capture.analysis.loop import PHASES, LoopWindow, cut_to_steps, loop_windows
from chakra_capture.merge import intervals
from chakra_capture.trace.columns import Bool, Int64
from chakra_capture.trace.merged import MergedTrace

# A phase makes a rank late if it takes longer there by this share of a step, in this share of steps.
_LATE, _LONGER = 0.10, 0.80
# Shorter pauses between two ops are no waiting.
_BLOCKED_NS = 50_000

# Own ns of each of PHASES, by step.
Times = dict[int, npt.NDArray[np.float64]]


@dataclass(frozen=True, slots=True)
class OwnTimes:
    """One rank: ns of each of PHASES by step, on the loop's thread and in its device's activities; its ops."""

    host: Times = field(default_factory=dict)
    device: Times = field(default_factory=dict)
    ops: pl.DataFrame = field(default_factory=no_ops)


@dataclass(frozen=True, slots=True)
class LatePhase:
    """Where a rank takes longer than the others.

    Attributes:
        phase: None: in no phase.
        own_ns: median over steps of its own time there; ``others_ns`` the same of the median of the other ranks.
        what: what of it does.
    """

    phase: str | None
    own_ns: float
    others_ns: float
    what: LateOp = LateOp(Cause.PYTHON)

    def as_json(self) -> dict[str, Any]:
        """The same as plain JSON values."""
        what = {name: getattr(self.what, name) for name in self.what.__slots__}
        what |= {"cause": str(self.what.cause), "call_path": list(self.what.call_path)}
        return {"phase": self.phase, "own_ns": self.own_ns, "others_ns": self.others_ns, **what}


def own_times(trace: MergedTrace, windows: Sequence[LoopWindow]) -> OwnTimes:
    """Own times of one rank.

    Args:
        windows: ``loop_windows`` of the trace.
    """
    found = OwnTimes(ops=pl.concat([no_ops(), *(own_ops(loop) for loop in windows)]))
    communication = trace.communication.select("window", "node_id", "issued_ns", "ts_ns", "dur_ns").drop_nulls("dur_ns")
    for loop in windows:
        # The loop's thread does not wait in a kernel, but in a call that waits for the device.
        kernels = loop.nodes.filter(kind="kernel").select("node_id")
        here = communication.filter(window=loop.window).join(kernels, on="node_id", how="anti")
        start = here.select(pl.min_horizontal("issued_ns", "ts_ns")).to_series().to_numpy()
        end = here.select(pl.col("ts_ns") + pl.col("dur_ns")).to_series().to_numpy()
        own = _of_window(loop, _blocked(loop, intervals.union(start, end)))
        steps = loop.steps["step"].to_list()
        found.host.update(zip(steps, own, strict=True))
        found.device.update(_device_times(loop, steps))
    return found


def late_phases(ranks: Sequence[int], own: Mapping[int, OwnTimes], step_ns: float) -> dict[int, LatePhase]:
    """Find where each of some ranks is late, as far as one phase shows it.

    Args:
        ranks: those that the others wait for.
        own: of the ranks that are at hand.
        step_ns: time of a step.
    """
    found = {rank: _late_phase(rank, own, step_ns) for rank in ranks if rank in own and len(own) > 1}
    return {rank: late for rank, late in found.items() if late is not None}


def with_path(late: LatePhase, trace: MergedTrace) -> LatePhase:
    """The same with the ops around the one that is named; ``trace`` is that of the rank."""
    what = late.what
    if what.op is None:
        return late
    path = call_path(loop_windows(trace), late.phase, what.op, on_device=what.cause == Cause.DEVICE)
    what = LateOp(what.cause, what.op, what.op_ns, what.op_others_ns, path)
    return LatePhase(late.phase, late.own_ns, late.others_ns, what)


def _blocked(loop: LoopWindow, pending: tuple[Int64, Int64]) -> tuple[Int64, Int64]:
    """Where the loop's thread communicates, or waits for the device."""
    threads = HostThreads(loop.nodes)
    place = threads.place(loop.steps["node_id"].drop_nulls().to_numpy())
    main = np.unique(threads.track[place[place >= 0]])
    if not len(main):
        return pending
    is_engine = threads.table["name"].str.starts_with(ENGINE_PREFIX).to_numpy()
    engine = np.unique(threads.track[is_engine & np.isin(threads.pid, threads.pid[place])])
    is_comm = threads.table.select(
        (pl.col("collective").is_not_null() | pl.col("name").str.contains(COMMUNICATES)).fill_null(value=False)
    )
    works = _works(threads, is_comm.to_series().to_numpy())
    times = ascending(threads.changes, *pending)
    busy = np.zeros(len(times), dtype=bool)
    waits = np.zeros(len(times), dtype=bool)
    for track in np.union1d(main, engine).tolist():
        row = threads.innermost(np.full(len(times), track), times)
        busy |= (row >= 0) & works[row]
        if track in main:
            waits |= (row >= 0) & threads.marked.blocking[row]
    idle = intervals.holds(*pending, times) & ~busy
    ends = np.append(times[1:], times[-1:])
    start, end = intervals.union(times[idle], ends[idle])
    is_long = end - start > _BLOCKED_NS
    return intervals.union(*intervals.joined((start[is_long], end[is_long]), (times[waits], ends[waits])))


def _works(threads: HostThreads, is_comm: Bool) -> Bool:
    """Rows in which a thread works, if they are the innermost; an annotation alone is none, but for the loader's."""
    marked = threads.marked
    found: Bool = ((marked.op | marked.runtime) & ~marked.blocking & ~is_comm) | (marked.loader & marked.annotation)
    return found


def _of_window(loop: LoopWindow, blocked: tuple[Int64, Int64]) -> npt.NDArray[np.float64]:
    found = np.zeros((loop.steps.height, len(PHASES)))
    rest = PHASES.index(None)
    found[:, rest] = loop.high - loop.low - intervals.covered(*blocked, loop.low, loop.high)
    for number, phase, begin, stop in cut_to_steps(loop):
        bounds = np.array([begin, stop], dtype=np.int64)
        own = stop - begin - int(intervals.covered(*blocked, bounds[:1], bounds[1:])[0])
        found[number, PHASES.index(phase)] += own
        found[number, rest] -= own
    return found


def _device_times(loop: LoopWindow, steps: Sequence[int]) -> Times:
    rows = loop.nodes.filter(
        pl.col("kind").is_in(ON_DEVICE) & pl.col("collective").is_null() & pl.col("step").is_in(list(steps))
    )
    if rows.is_empty():
        return {}
    found = {step: np.zeros(len(PHASES)) for step in steps}
    sums = rows.group_by("step", "phase").agg(pl.col("self_dur_ns").sum())
    for step, phase, ns in sums.iter_rows():
        found[step][PHASES.index(phase if phase in PHASES else None)] += ns
    return found


def _late_phase(rank: int, own: Mapping[int, OwnTimes], step_ns: float) -> LatePhase | None:
    others = [each for other, each in own.items() if other != rank]
    found = [
        (*most, side == "device")
        for side in ("host", "device")
        if (most := _most(getattr(own[rank], side), [getattr(each, side) for each in others], step_ns)) is not None
    ]
    if not found:
        return None
    at, steps, mine, theirs, excess, on_device = max(found, key=lambda each: each[4])
    tables = [each.ops for each in others]
    what = late_op(own[rank].ops, tables, steps, PHASES[at], on_device=on_device, excess=excess)
    return LatePhase(PHASES[at], mine, theirs, what)


def _most(own: Times, others: Sequence[Times], step_ns: float) -> tuple[int, list[int], float, float, float] | None:
    """The phase with the most excess, the steps that were compared, own and the others' time, and the excess."""
    steps = [step for step in own if all(step in times for times in others)]
    if not steps:
        return None
    mine = np.stack([own[step] for step in steps])
    theirs = np.median([[times[step] for step in steps] for times in others], axis=0)
    excess = mine - theirs
    medians = np.median(excess, axis=0)
    at = int(np.argmax(medians))
    if medians[at] < _LATE * step_ns or (excess[:, at] > 0).mean() < _LONGER:
        return None
    return at, steps, float(np.median(mine[:, at])), float(np.median(theirs[:, at])), float(medians[at])
