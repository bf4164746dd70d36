"""Points in time joined by edges ``dst >= src + lag``: when each is reached, and by which edge."""

from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from chakra_capture.errors import ChakraCaptureError


class ReplayError(ChakraCaptureError):
    """A trace whose dependencies go round in a circle cannot be replayed."""


@dataclass(slots=True)
class Graph:
    """Points with the time they were recorded at (ns), edges between them, and points that stand at a given time."""

    recorded: list[int] = field(default_factory=list)
    src: list[int] = field(default_factory=list)
    dst: list[int] = field(default_factory=list)
    lag: list[int] = field(default_factory=list)
    kind: list[str] = field(default_factory=list)
    anchors: dict[int, int] = field(default_factory=dict)

    def point(self, recorded: int) -> int:
        """Add a point and return its number."""
        self.recorded.append(recorded)
        return len(self.recorded) - 1

    def points(self, recorded: list[int]) -> list[int]:
        """Add points and return their numbers."""
        first = len(self.recorded)
        self.recorded += recorded
        return [*range(first, len(self.recorded))]

    def chain(self, points: list[int], lags: list[int], kind: str) -> None:
        """Add an edge from each of some points to the next."""
        self.src += points[:-1]
        self.dst += points[1:]
        self.lag += lags
        self.kind += [kind] * len(lags)

    def edge(self, src: int, dst: int, lag: int, kind: str) -> None:
        """Add an edge; ``lag`` (ns) may be negative."""
        self.src.append(src)
        self.dst.append(dst)
        self.lag.append(lag)
        self.kind.append(kind)

    def solve(self) -> list[int]:
        """Return the earliest time of each point, ns; one that waits for nothing stands where it was recorded.

        Raises:
            ReplayError: the edges go round in a circle.
        """
        times: list[int | None] = [None] * len(self.recorded)
        for point, anchor in self.anchors.items():
            times[point] = anchor
        (first, edges), lag, dst_of = self._outgoing(), self.lag, self.dst
        for point in self.order():
            time = times[point]
            if time is None:
                time = times[point] = self.recorded[point]
            for edge in edges[first[point] : first[point + 1]]:
                dst, reached = dst_of[edge], time + lag[edge]
                before = times[dst]
                times[dst] = reached if before is None else max(before, reached)
        return [time for time in times if time is not None]

    def order(self) -> list[int]:
        """All points, each after those that it waits for.

        Raises:
            ReplayError: the edges go round in a circle.
        """
        num_points, (first, edges), dst_of = len(self.recorded), self._outgoing(), self.dst
        missing = np.bincount(np.asarray(dst_of, dtype=np.int64), minlength=num_points).tolist()
        found = [point for point in range(num_points) if not missing[point]]
        for point in found:  # which grows meanwhile
            for edge in edges[first[point] : first[point + 1]]:
                dst = dst_of[edge]
                missing[dst] -= 1
                if not missing[dst]:
                    found.append(dst)
        if len(found) < num_points:
            kinds = Counter(kind for kind, dst in zip(self.kind, self.dst, strict=True) if missing[dst])
            raise ReplayError(
                f"{num_points - len(found)} of {num_points} points wait for each other in a circle, through edges "
                f"{', '.join(f'{kind} ({count})' for kind, count in kinds.most_common(5))}; a replay needs an order. "
                "This is a fault of the replay: please report it with the trace."
            )
        return found

    def _outgoing(self) -> tuple[list[int], list[int]]:
        """All edges by the point that they leave, and of each point the place of its first one there."""
        src = np.asarray(self.src, dtype=np.int64)
        first = np.concatenate(([0], np.cumsum(np.bincount(src, minlength=len(self.recorded)))))
        return first.tolist(), np.argsort(src, kind="stable").tolist()
