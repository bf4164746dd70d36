"""A replay that gives back exactly what was recorded: the base of what-ifs and of the critical path.

The edge that set a point's time carries the lag that was recorded there; every other edge the 10th percentile of its
class, and never more than was recorded. So all points stand where they stood, which says nothing about how good the
dependencies are (a replay with one median per class does), and any change is one from the measurement.
"""

from collections import defaultdict
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter

import numpy as np
import numpy.typing as npt

from chakra_capture.analysis.replay.graph import CODE, ReplayError
from chakra_capture.analysis.replay.loops import Edges, reasons
from chakra_capture.analysis.replay.replay import Replay
from chakra_capture.trace.columns import Bool, Int64, Positions, is_one_of

_LEARNED = ("launch", "stream_order", "sync", "queue", "event_wait", "contention")
_OF_ONE_CLASS = ("event_wait", "contention")
_FEW = 10
_ANY = np.iinfo(np.int64).max
NONE = -1
# The lag of an edge that is taken away.
NEVER = -(1 << 60)


@dataclass(frozen=True)
class Calibrated:
    """Points and edges as arrays, with lags that give the recorded times.

    Attributes:
        kind: of each edge, a number in ``KINDS``.
        usual: lag of each edge's class, ns; ``lag`` less that of the edge that set a time is more than usual.
        times: base times of all points, ns; but within calls that waited, as recorded.
        rank: of each edge, a number in ``ranks``; of one between ranks that of its end.
        row: of each edge: what runs on it, or waits on it; -1 for nobody.
        point_rank: of each point, a number in ``ranks``; -1 for what no rank has alone.
    """

    replay: Replay
    src: Positions
    dst: Positions
    kind: npt.NDArray[np.int8]
    usual: Int64
    lag: Int64
    times: Int64
    ranks: list[int]
    rank: Positions
    row: Positions
    point_rank: Positions

    def is_kind(self, *kinds: str) -> Bool:
        """Which edges are of some kinds."""
        return is_one_of(self.kind, [CODE[kind] for kind in kinds])

    def solve(self, lag: Int64) -> Int64:
        """Times of all points with other lags, ns.

        Raises:
            ReplayError: the dependencies go round in a circle.
        """
        return self.replay.order.solve(lag)

    def reasons(self, times: Int64, lag: Int64) -> Positions:
        """The edge that sets the time of each point, -1 for none."""
        return reasons(Edges(self.src, self.dst, self.kind), lag, times, 0)


def calibrate(replay: Replay) -> Calibrated:
    """Learn the lags with which a replay gives what was recorded."""
    graph = replay.graph
    src, dst, usual, kind = graph.src, graph.dst, graph.lag, graph.kind
    inner = _inner(replay)
    times = _base_times(replay, src, dst, inner)
    slack = times[dst] - times[src]
    binding = reasons(Edges(src, dst, kind), usual, times, _ANY)
    anchored, when = (np.array([*side], dtype=np.int64) for side in (graph.anchors.keys(), graph.anchors.values()))
    binding[anchored[when == graph.recorded[anchored]]] = NONE
    binding[inner] = NONE
    binding = binding[binding != NONE]
    lag = _low_lags(kind, usual, slack, binding)
    np.minimum(lag, slack, out=lag)
    lag[binding] = slack[binding]
    rank, row, point_rank = _owners(replay, src, dst, kind)
    return Calibrated(replay, src, dst, kind, usual, lag, times, [*replay.ranks], rank, row, point_rank)


def _inner(replay: Replay) -> Bool:
    """Points inside of stretches whose cost is derived, but for the bounds of steps."""
    found = np.zeros(replay.graph.num_points, dtype=bool)
    for one in replay.ranks.values():
        found[one.threads.points[one.threads.inner]] = True
        found[[point for _, *bounds in one.steps for point in bounds]] = False
    return found


def _base_times(replay: Replay, src: Positions, dst: Positions, inner: Bool) -> Int64:
    """Recorded times; of points within a wait, as early as they can be: else the wait would be a cost."""
    times, lag = replay.graph.recorded.copy(), replay.graph.lag
    incoming: dict[int, list[tuple[int, int]]] = defaultdict(list)
    edges = np.flatnonzero(inner[dst])
    for source, point, cost in zip(*(side[edges].tolist() for side in (src, dst, lag)), strict=True):
        incoming[point].append((source, cost))
    before = {point: {source for source, _ in edges if source in incoming} for point, edges in incoming.items()}
    try:
        order = [*TopologicalSorter(before).static_order()]
    except CycleError as error:
        raise ReplayError(f"points within a wait wait for each other in a circle: {error.args[1][:5]}.") from error
    for point in order:
        times[point] = min(times[point], max(int(times[source]) + cost for source, cost in incoming[point]))
    return times


def _low_lags(kind: npt.NDArray[np.int8], usual: Int64, slack: Int64, binding: Positions) -> Int64:
    """Of each edge the 10th percentile of its class's lags where they set a time."""
    low = usual.copy()
    for name in _LEARNED:
        of_kind, setting = np.flatnonzero(kind == CODE[name]), binding[kind[binding] == CODE[name]]
        # A class has one usual lag, but events, whose lag is cut to what was recorded.
        for lag in [None] if name in _OF_ONE_CLASS else np.unique(usual[of_kind]).tolist():
            seen = slack[setting if lag is None else setting[usual[setting] == lag]]
            if len(seen) >= _FEW:
                alike = of_kind if lag is None else of_kind[usual[of_kind] == lag]
                low[alike] = np.percentile(seen, 10).astype(np.int64)
    return low


def _owners(
    replay: Replay, src: Positions, dst: Positions, kind: npt.NDArray[np.int8]
) -> tuple[Positions, Positions, Positions]:
    """Rank and row of each edge, rank of each point."""
    rank_at, begins, ends = (np.full(replay.graph.num_points, NONE, dtype=np.int32) for _ in range(3))
    for number, one in enumerate(replay.ranks.values()):
        goes_on = np.flatnonzero(one.threads.is_segment)
        rank_at[one.threads.points] = number
        begins[one.threads.points[goes_on]] = ends[one.threads.points[goes_on + 1]] = one.threads.owners[goes_on]
        for where in (one.activities, one.gloo):
            rank_at[where.starts] = rank_at[where.ends] = number
            begins[where.starts] = ends[where.ends] = where.rows
    row = ends[dst]
    for owner, side, kinds in (
        (begins, src, ("thread", "run")),
        (begins, dst, ("launch", "stream_order", "event_wait", "contention")),
    ):
        chosen = np.flatnonzero(is_one_of(kind, [CODE[name] for name in kinds]))
        row[chosen] = owner[side[chosen]]
    rank = rank_at[dst]
    between = np.flatnonzero(rank == NONE)
    rank[between] = rank_at[src[between]]
    return rank, row, rank_at
