"""A replay that gives back exactly what was recorded: the base of what-ifs and of the critical path.

The edge that set a point's time carries the lag that was recorded there; every other edge the 10th percentile of its
class, and never more than was recorded. So all points stand where they stood, which says nothing about how good the
dependencies are (a replay with one median per class does), and any change is one from the measurement.
"""

from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property
from graphlib import CycleError, TopologicalSorter

import numpy as np
import numpy.typing as npt

from chakra_capture.analysis.replay.graph import ReplayError
from chakra_capture.analysis.replay.knots import Knots
from chakra_capture.analysis.replay.replay import Replay
from chakra_capture.trace.columns import Int64

# Where two edges set the same time, the one of the same thread or stream is the reason.
KINDS = (
    *("thread", "run", "stream_order", "launch", "sync", "queue", "event_wait", "contention", "hand_over"),
    *("collective", "input", "begin"),
)
_CODE = {kind: code for code, kind in enumerate(KINDS)}
_LEARNED = ("launch", "stream_order", "sync", "queue", "event_wait", "contention")
_OF_ONE_CLASS = ("event_wait", "contention")
_FEW = 10
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
    src: Int64
    dst: Int64
    kind: npt.NDArray[np.int8]
    usual: Int64
    lag: Int64
    times: Int64
    ranks: list[int]
    rank: Int64
    row: Int64
    point_rank: Int64

    @cached_property
    def knots(self) -> Knots:
        """What is left of the graph when chains are one edge.

        Raises:
            ReplayError: the dependencies go round in a circle.
        """
        return Knots.of(self.replay.graph, self.replay.graph.order(), self.src, self.dst)

    def is_kind(self, *kinds: str) -> npt.NDArray[np.bool_]:
        """Which edges are of some kinds."""
        return np.isin(self.kind, [_CODE[kind] for kind in kinds])

    def solve(self, lag: Int64) -> Int64:
        """Times of all points with other lags, ns.

        Raises:
            ReplayError: the dependencies go round in a circle.
        """
        return self.knots.solve(lag)

    def reasons(self, times: Int64, lag: Int64) -> Int64:
        """The edge that sets the time of each point, -1 for none."""
        return _first_of_each(
            self.src, self.dst, self.kind, times[self.dst] - times[self.src] - lag, len(times), most=0
        )


def calibrate(replay: Replay) -> Calibrated:
    """Learn the lags with which a replay gives what was recorded."""
    graph = replay.graph
    src, dst, usual = (np.asarray(given, dtype=np.int64) for given in (graph.src, graph.dst, graph.lag))
    kind = np.array([_CODE[name] for name in graph.kind], dtype=np.int8)
    inner = np.zeros(len(graph.recorded), dtype=bool)
    inner[_inner(replay)] = True
    times = _base_times(replay, src, dst, inner)
    slack = times[dst] - times[src]
    is_binding = np.zeros(len(src), dtype=bool)
    binding = _first_of_each(src, dst, kind, slack - usual, len(times))
    is_binding[binding[binding != NONE]] = True
    stands = np.zeros(len(times), dtype=bool)
    stands[[point for point, time in graph.anchors.items() if time == graph.recorded[point]]] = True
    is_binding &= ~stands[dst] & ~inner[dst]
    lag = np.where(is_binding, slack, np.minimum(_low_lags(kind, usual, slack, is_binding), slack))
    rank, row, point_rank = _owners(replay, src, dst, kind)
    return Calibrated(replay, src, dst, kind, usual, lag, times, [*replay.ranks], rank, row, point_rank)


def _inner(replay: Replay) -> list[int]:
    """Points inside of stretches whose cost is derived, but for the bounds of steps."""
    found = []
    for one in replay.ranks.values():
        steps = [row for row in one.threads.ends if one.rows.step(row) is not None]
        bounds = {side(one.rows, row) for row in steps for side in (one.threads.begin_point, one.threads.end_point)}
        for thread in one.threads.of_track.values():
            found += [thread.points[mark] for mark in sorted(thread.inner) if thread.points[mark] not in bounds]
    return found


def _base_times(replay: Replay, src: Int64, dst: Int64, inner: npt.NDArray[np.bool_]) -> Int64:
    """Recorded times; of points within a wait, as early as they can be: else the wait would be a cost."""
    graph = replay.graph
    times = np.asarray(graph.recorded, dtype=np.int64)
    incoming: dict[int, list[int]] = defaultdict(list)
    for edge in np.flatnonzero(inner[dst]).tolist():
        incoming[graph.dst[edge]].append(edge)
    outside = {point for point in np.unique(src[inner[dst]]).tolist() if not inner[point]}
    before = {point: {graph.src[edge] for edge in edges} - outside for point, edges in incoming.items()}
    try:
        order = [*TopologicalSorter(before).static_order()]
    except CycleError as error:
        raise ReplayError(f"points within a wait wait for each other in a circle: {error.args[1][:5]}.") from error
    for point in order:
        if edges := incoming.get(point):
            times[point] = min(times[point], max(int(times[graph.src[edge]]) + graph.lag[edge] for edge in edges))
    return times


def _first_of_each(
    src: Int64, dst: Int64, kind: npt.NDArray[np.int8], behind: Int64, num_points: int, most: int | None = None
) -> Int64:
    """Of the edges into each point the one that is least behind, of several that of the first kind; -1 for none."""
    edges = np.lexsort((src, kind, behind, dst))
    if most is not None:
        edges = edges[behind[edges] <= most]
    points, first = np.unique(dst[edges], return_index=True)
    found = np.full(num_points, NONE, dtype=np.int64)
    found[points] = edges[first]
    return found


def _low_lags(kind: npt.NDArray[np.int8], usual: Int64, slack: Int64, is_binding: npt.NDArray[np.bool_]) -> Int64:
    """Of each edge the 10th percentile of its class's lags where they set a time."""
    low = usual.copy()
    for name in _LEARNED:
        of_kind = kind == _CODE[name]
        # A class has one usual lag, but events, whose lag is cut to what was recorded.
        for lag in [None] if name in _OF_ONE_CLASS else np.unique(usual[of_kind]).tolist():
            alike = of_kind if lag is None else of_kind & (usual == lag)
            seen = slack[alike & is_binding]
            if len(seen) >= _FEW:
                low[alike] = np.percentile(seen, 10).astype(np.int64)
    return low


def _owners(replay: Replay, src: Int64, dst: Int64, kind: npt.NDArray[np.int8]) -> tuple[Int64, Int64, Int64]:
    """Rank and row of each edge, rank of each point."""
    num_points = len(replay.graph.recorded)
    rank_at, begins, ends = (np.full(num_points, NONE, dtype=np.int64) for _ in range(3))
    for number, one in enumerate(replay.ranks.values()):
        for thread in one.threads.of_track.values():
            rank_at[thread.points] = number
            begins[thread.points[:-1]] = thread.owners
            ends[thread.points[1:]] = thread.owners
        for where in (one.activities, one.gloo):
            starts, stops = [*where.starts.values()], [*where.ends.values()]
            rank_at[starts] = rank_at[stops] = number
            begins[starts], ends[stops] = [*where.starts], [*where.ends]
    at_begin = np.isin(kind, [_CODE[name] for name in ("thread", "run")])
    of_start = np.isin(kind, [_CODE[name] for name in ("launch", "stream_order", "event_wait", "contention")])
    row = np.where(at_begin, begins[src], np.where(of_start, begins[dst], ends[dst]))
    rank = np.where(rank_at[dst] == NONE, rank_at[src], rank_at[dst])
    return rank, row, rank_at
