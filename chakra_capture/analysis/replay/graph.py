"""Points in time joined by edges ``dst >= src + lag``: when each is reached, and by which edge."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

from chakra_capture.analysis.replay.loops import Into, longest, ordered
from chakra_capture.errors import ChakraCaptureError
from chakra_capture.trace.columns import Bool, Int64, Ints, Positions, is_one_of

# Where two edges set the same time, the one of the same thread or stream is the reason.
KINDS = (
    *("thread", "run", "stream_order", "launch", "sync", "queue", "event_wait", "contention", "hand_over"),
    *("collective", "input", "begin"),
)
CODE = {kind: code for code, kind in enumerate(KINDS)}
_UNSET = -(1 << 62)
_Number = TypeVar("_Number", np.int64, np.int32, np.int8)


class ReplayError(ChakraCaptureError):
    """A trace whose dependencies go round in a circle cannot be replayed."""


class _Grown(Generic[_Number]):
    """An array that grows by blocks; they become one when it is read."""

    def __init__(self, dtype: type[_Number]) -> None:
        self._blocks: list[npt.NDArray[_Number]] = [np.zeros(0, dtype=dtype)]

    def add(self, block: npt.NDArray[_Number]) -> None:
        self._blocks.append(block)

    @property
    def values(self) -> npt.NDArray[_Number]:
        if len(self._blocks) > 1:
            self._blocks = [np.concatenate(self._blocks)]
        return self._blocks[0]


@dataclass(slots=True)
class Graph:
    """Points with the time they were recorded at (ns), edges between them, and points that stand at a given time."""

    anchors: dict[int, int] = field(default_factory=dict)
    num_points: int = 0
    num_edges: int = 0
    _recorded: _Grown[np.int64] = field(default_factory=lambda: _Grown(np.int64))
    _src: _Grown[np.int32] = field(default_factory=lambda: _Grown(np.int32))
    _dst: _Grown[np.int32] = field(default_factory=lambda: _Grown(np.int32))
    _lag: _Grown[np.int64] = field(default_factory=lambda: _Grown(np.int64))
    _kind: _Grown[np.int8] = field(default_factory=lambda: _Grown(np.int8))

    @property
    def recorded(self) -> Int64:
        return self._recorded.values

    @property
    def src(self) -> Positions:
        return self._src.values

    @property
    def dst(self) -> Positions:
        return self._dst.values

    @property
    def lag(self) -> Int64:
        return self._lag.values

    @property
    def kind(self) -> npt.NDArray[np.int8]:
        """Of each edge, a number in ``KINDS``."""
        return self._kind.values

    def is_kind(self, *kinds: str) -> Bool:
        """Which edges are of some kinds."""
        return is_one_of(self.kind, [CODE[kind] for kind in kinds])

    def point(self, recorded: int) -> int:
        """Add a point and return its number."""
        return int(self.points(np.array([recorded], dtype=np.int64))[0])

    def points(self, recorded: Int64) -> Positions:
        """Add points and return their numbers."""
        first, self.num_points = self.num_points, self.num_points + len(recorded)
        self._recorded.add(recorded)
        return np.arange(first, self.num_points, dtype=np.int32)

    def edge(self, src: int, dst: int, lag: int, kind: str) -> int:
        """Add an edge and return its number; ``lag`` (ns) may be negative."""
        return int(self.edges(np.array([src]), np.array([dst]), lag, kind)[0])

    def edges(self, src: Ints, dst: Ints, lag: Int64 | int, kind: str) -> Int64:
        """Add edges of one kind and return their numbers."""
        first, self.num_edges = self.num_edges, self.num_edges + len(src)
        self._src.add(src.astype(np.int32, copy=False))
        self._dst.add(dst.astype(np.int32, copy=False))
        self._lag.add(np.broadcast_to(np.asarray(lag, dtype=np.int64), len(src)))
        self._kind.add(np.full(len(src), CODE[kind], dtype=np.int8))
        return np.arange(first, self.num_edges)

    def shift(self, first: int, by_ns: int) -> None:
        """Move all points from one on to another clock."""
        self.recorded[first:] += by_ns
        self.anchors.update({point: time + by_ns for point, time in self.anchors.items() if point >= first})

    def solve(self) -> Int64:
        """Return the earliest time of each point, ns; one that waits for nothing stands where it was recorded.

        Raises:
            ReplayError: the edges go round in a circle.
        """
        return Order.of(self).solve(self.lag)


@dataclass(frozen=True, slots=True)
class Order:
    """The points of a graph in an order in which they can be reached; what of it does not change with the lags.

    Attributes:
        stands: of each point the earliest time it can have without any edge, ns.
    """

    into: Into
    stands: Int64

    @classmethod
    def of(cls, graph: Graph) -> "Order":
        """Find an order.

        Raises:
            ReplayError: the edges go round in a circle.
        """
        src, dst, size = graph.src, graph.dst, graph.num_points
        num_before = np.bincount(dst, minlength=size).astype(np.int32)
        points = ordered(_firsts(src, size), dst[np.argsort(src, kind="stable")], num_before)
        if len(points) < size:
            raise _circle(graph, points)
        place = np.empty(size, dtype=np.int32)
        place[points] = np.arange(size, dtype=np.int32)
        at = place[dst]
        edges = np.argsort(at, kind="stable").astype(np.int32)
        stands = np.where(num_before == 0, graph.recorded, _UNSET)
        stands[[*graph.anchors]] = [*graph.anchors.values()]
        return cls(Into(points, _firsts(at, size), edges, src[edges]), stands)

    def solve(self, lag: Int64) -> Int64:
        """Times of all points, ns."""
        return longest(self.into, lag, self.stands)


def _firsts(number: Ints, size: int) -> Positions:
    """Of each number where it begins among them when they are sorted, and the end."""
    return np.append(0, np.cumsum(np.bincount(number, minlength=size))).astype(np.int32)


def _circle(graph: Graph, reached: Positions) -> ReplayError:
    is_left = np.ones(graph.num_points, dtype=bool)
    is_left[reached] = False
    kinds = Counter(KINDS[code] for code in graph.kind[is_left[graph.dst]].tolist())
    return ReplayError(
        f"{np.count_nonzero(is_left)} of {graph.num_points} points wait for each other in a circle, through edges "
        f"{', '.join(f'{kind} ({count})' for kind, count in kinds.most_common(5))}; a replay needs an order. "
        "This is a fault of the replay: please report it with the trace."
    )
