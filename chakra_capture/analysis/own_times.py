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

BETWEEN = "between steps"
# Of the time before a step, too.
PARTS = (*PHASES, BETWEEN)
# Own ns of each of PARTS, by step.
Times = dict[int, npt.NDArray[np.float64]]


@dataclass(frozen=True, slots=True)
class OwnTimes:
    """One rank: ns of each of PARTS by step, on the loop's thread and in its device's activities; its ops."""

    host: Times = field(default_factory=dict)
    device: Times = field(default_factory=dict)
    ops: pl.DataFrame = field(default_factory=no_ops)


@dataclass(frozen=True, slots=True)
class LatePhase:
    """Where a rank takes longer than the others.

    Attributes:
        phase: None: in no phase; ``BETWEEN``: before the step.
        own_ns: median over steps of its own time there; ``others_ns`` the same of the median of the other ranks.
        what: what of it does.
    """

    phase: str | None
    own_ns: float
    others_ns: float
    what: LateOp = field(default_factory=lambda: LateOp(Cause.PYTHON))

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


def late_phases(ranks: Sequence[int], own: Mapping[int, OwnTimes], step_ns: float) -> dict[int, LatePhase | None]:
    """Find where each of some ranks is late; None: it takes no longer than the others, by steps that all have.

    Args:
        ranks: those that the others wait for; one that cannot be held against others is left out.
        own: of the ranks that are at hand.
        step_ns: time of a step.
    """
    found = {}
    for rank in ranks:
        others = [each for other, each in own.items() if other != rank]
        if rank in own and others and (steps := _common(own[rank].host, [each.host for each in others])):
            found[rank] = _late_phase(own[rank], others, steps, _LATE * step_ns)
    return found


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
    found = np.zeros((loop.steps.height, len(PARTS)))
    rest = PARTS.index(None)
    found[:, rest] = loop.high - loop.low - intervals.covered(*blocked, loop.low, loop.high)
    before = np.minimum(np.append(loop.low[:1], loop.high[:-1]), loop.low)
    found[:, PARTS.index(BETWEEN)] = loop.low - before - intervals.covered(*blocked, before, loop.low)
    for number, phase, begin, stop in cut_to_steps(loop):
        bounds = np.array([begin, stop], dtype=np.int64)
        own = stop - begin - int(intervals.covered(*blocked, bounds[:1], bounds[1:])[0])
        found[number, PARTS.index(phase)] += own
        found[number, rest] -= own
    return found


def _device_times(loop: LoopWindow, steps: Sequence[int]) -> Times:
    rows = loop.nodes.filter(
        pl.col("kind").is_in(ON_DEVICE) & pl.col("collective").is_null() & pl.col("step").is_in(list(steps))
    )
    if rows.is_empty():
        return {}
    found = {step: np.zeros(len(PARTS)) for step in steps}
    sums = rows.group_by("step", "phase").agg(pl.col("self_dur_ns").sum())
    for step, phase, ns in sums.iter_rows():
        found[step][PARTS.index(phase if phase in PHASES else None)] += ns
    return found


def _late_phase(
    own: OwnTimes, others: Sequence[OwnTimes], steps: Sequence[int], least_ns: float
) -> LatePhase | None:  # fmt: skip
    """The phase with the most excess, on the CPU or on the device; where no one has enough, all of them together."""
    sides = [(own.host, [each.host for each in others], False)]
    if all(_common(own.device, [each.device]) for each in others):
        sides.append((own.device, [each.device for each in others], True))
    compared = [(_Excess.of(mine, theirs, steps), on_device) for mine, theirs, on_device in sides]
    found = [(most, each, on_device) for each, on_device in compared if (most := each.largest(least_ns)) is not None]
    if not found:
        whole = [all_parts for each, _ in compared if (all_parts := each.whole(least_ns)) is not None]
        return LatePhase(None, *whole[0], LateOp(Cause.SPREAD)) if whole else None
    at, each, on_device = max(found, key=lambda one: one[1].medians[one[0]])
    mine, theirs, excess = each.times(at), each.times_of_others(at), float(each.medians[at])
    if PARTS[at] == BETWEEN:
        return LatePhase(BETWEEN, mine, theirs, LateOp(Cause.UNKNOWN))
    tables = [one.ops for one in others]
    what = late_op(own.ops, tables, steps, PARTS[at], on_device=on_device, excess=excess)
    return LatePhase(PARTS[at], mine, theirs, what)


def _common(own: Times, others: Sequence[Times]) -> list[int]:
    return [step for step in own if all(step in times for times in others)]


@dataclass(frozen=True, slots=True)
class _Excess:
    """Times of a rank and of the median of the others, by step and part."""

    mine: npt.NDArray[np.float64]
    theirs: npt.NDArray[np.float64]

    @classmethod
    def of(cls, own: Times, others: Sequence[Times], steps: Sequence[int]) -> "_Excess":
        mine = np.stack([own[step] for step in steps])
        return cls(mine, np.median([[times[step] for step in steps] for times in others], axis=0))

    @property
    def medians(self) -> npt.NDArray[np.float64]:
        return np.median(self.mine - self.theirs, axis=0)

    def times(self, at: int) -> float:
        return float(np.median(self.mine[:, at]))

    def times_of_others(self, at: int) -> float:
        return float(np.median(self.theirs[:, at]))

    def largest(self, least_ns: float) -> int | None:
        """The part with the most excess, if it is enough and there in nearly every step."""
        excess = self.mine - self.theirs
        at = int(np.argmax(self.medians))
        is_late = self.medians[at] >= least_ns and (excess[:, at] > 0).mean() >= _LONGER
        return at if is_late else None

    def whole(self, least_ns: float) -> tuple[float, float] | None:
        """Time of all parts together and that of the others, if that is enough in nearly every step."""
        mine, theirs = self.mine.sum(axis=1), self.theirs.sum(axis=1)
        if np.median(mine - theirs) < least_ns or (mine > theirs).mean() < _LONGER:
            return None
        return float(np.median(mine)), float(np.median(theirs))
