"""In which phase a rank is late: its own time there, without that in which it waits for other ranks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from chakra_capture.analysis.loop import PHASES, LoopWindow, cut_to_steps
from chakra_capture.merge import intervals
from chakra_capture.trace.columns import Int64
from chakra_capture.trace.merged import MergedTrace

# A phase makes a rank late if it takes longer there by this share of a step, in this share of steps.
_LATE, _LONGER = 0.10, 0.80

# Own ns of each of PHASES, by step.
OwnTimes = dict[int, npt.NDArray[np.float64]]


@dataclass(frozen=True, slots=True)
class LatePhase:
    """Where a rank takes longer than the others.

    Attributes:
        phase: None: in no phase.
        own_ns: median over steps of its own time there; ``others_ns`` the same of the median of the other ranks.
    """

    phase: str | None
    own_ns: float
    others_ns: float

    def as_json(self) -> dict[str, Any]:
        """The same as plain JSON values."""
        return {name: getattr(self, name) for name in self.__slots__}


def own_times(trace: MergedTrace, collectives: pl.DataFrame, windows: Sequence[LoopWindow]) -> OwnTimes:
    """Own times of one rank.

    Args:
        collectives: the table of the run.
        windows: ``loop_windows`` of the trace.
    """
    # A wait is a length, which holds on this rank's own clock: there its communication begins.
    keys = ["window", "node_id"]
    mine = collectives.filter(rank=trace.rank).select(*keys, "wait_ns")
    waits = trace.communication.select(*keys, "ts_ns").join(mine, on=keys).drop_nulls()
    found: OwnTimes = {}
    for loop in windows:
        # The loop's thread does not wait in a kernel.
        kernels = loop.nodes.filter(kind="kernel").select("node_id")
        here = waits.filter(window=loop.window).join(kernels, on="node_id", how="anti")
        start = here["ts_ns"].to_numpy()
        own = _of_window(loop, intervals.union(start, start + here["wait_ns"].to_numpy()))
        found |= dict(zip(loop.steps["step"].to_list(), own, strict=True))
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


def _of_window(loop: LoopWindow, waits: tuple[Int64, Int64]) -> npt.NDArray[np.float64]:
    found = np.zeros((loop.steps.height, len(PHASES)))
    rest = PHASES.index(None)
    found[:, rest] = loop.high - loop.low - intervals.covered(*waits, loop.low, loop.high)
    for number, phase, begin, stop in cut_to_steps(loop):
        bounds = np.array([begin, stop], dtype=np.int64)
        own = stop - begin - int(intervals.covered(*waits, bounds[:1], bounds[1:])[0])
        found[number, PHASES.index(phase)] += own
        found[number, rest] -= own
    return found


def _late_phase(rank: int, own: Mapping[int, OwnTimes], step_ns: float) -> LatePhase | None:
    others = [times for other, times in own.items() if other != rank]
    steps = [step for step in own[rank] if all(step in times for times in others)]
    if not steps:
        return None
    mine = np.stack([own[rank][step] for step in steps])
    theirs = np.median([[times[step] for step in steps] for times in others], axis=0)
    excess = mine - theirs
    medians = np.median(excess, axis=0)
    at = int(np.argmax(medians))
    if medians[at] < _LATE * step_ns or (excess[:, at] > 0).mean() < _LONGER:
        return None
    return LatePhase(PHASES[at], float(np.median(mine[:, at])), float(np.median(theirs[:, at])))
