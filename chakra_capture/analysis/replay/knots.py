"""Longest paths of one graph for many sets of lags: what does not change with the lags is found once.

Most points wait for one other alone, and keep their distance from it: they lie on chains. Left are knots, which wait
for several or for none, or follow a point beside others; only those are walked one by one.
"""

from dataclasses import dataclass

import numpy as np

from chakra_capture.analysis.replay.graph import Graph
from chakra_capture.trace.columns import Int64

_UNSET = -(1 << 62)


@dataclass(frozen=True, slots=True)
class Knots:
    """A graph as chains between knots.

    Attributes:
        chained: points of all chains, one chain after the other, each from its knot on.
        chain_edges: the edge that leads to each of them.
        chain_first: of each the place where its chain begins.
        top: of each point the place of its knot (of a knot its own).
        knots: points, in an order in which they can be reached.
        edges: all edges to knots, in the order of these.
        first_edge: of each knot the place of its first edge, and the end.
        stands: of each knot the earliest time it can have without any edge.
    """

    chained: Int64
    chain_edges: Int64
    chain_first: Int64
    top: Int64
    knots: Int64
    edges: Int64
    edge_src: Int64
    edge_top: list[int]
    first_edge: list[int]
    stands: list[int]

    @classmethod
    def of(cls, graph: Graph, order: list[int], src: Int64, dst: Int64) -> "Knots":
        """Find the chains of a graph."""
        num_points = len(graph.recorded)
        num_in = np.bincount(dst, minlength=num_points)
        is_knot = num_in != 1
        is_knot[[*graph.anchors]] = True
        # Of several that follow one point each begins a chain of its own: so chains do not branch.
        branches = np.bincount(src[~is_knot[dst]], minlength=num_points) > 1
        is_knot[dst[branches[src]]] = True
        follower, edge_to = np.full(num_points, -1, dtype=np.int64), np.full(num_points, -1, dtype=np.int64)
        to_chain = np.flatnonzero(~is_knot[dst])
        edge_to[dst[to_chain]] = to_chain
        follower[src[to_chain]] = dst[to_chain]
        knots = [point for point in order if is_knot[point]]
        top, chained, firsts = [0] * num_points, list[int](), list[int]()
        follows = follower.tolist()
        for place, knot in enumerate(knots):
            top[knot], first, point = place, len(chained), follows[knot]
            while point >= 0:
                top[point] = place
                chained.append(point)
                firsts.append(first)
                point = follows[point]
        tops, all_knots = np.asarray(top, dtype=np.int64), np.asarray(knots, dtype=np.int64)
        to_knot = np.flatnonzero(is_knot[dst])
        edges = to_knot[np.argsort(tops[dst[to_knot]], kind="stable")]
        first_edge = np.searchsorted(tops[dst[edges]], np.arange(len(knots) + 1))
        stands = [graph.anchors.get(knot, _UNSET if num_in[knot] else graph.recorded[knot]) for knot in knots]
        chain = np.asarray(chained, dtype=np.int64)
        return cls(
            chain, edge_to[chain], np.asarray(firsts, dtype=np.int64), tops, all_knots, edges, src[edges],
            tops[src[edges]].tolist(), first_edge.tolist(), stands,
        )  # fmt: skip

    def solve(self, lag: Int64) -> Int64:
        """Times of all points, ns."""
        offset = np.zeros(len(self.top), dtype=np.int64)
        if len(self.chained):
            along = lag[self.chain_edges]
            total = np.cumsum(along)
            offset[self.chained] = total - (total - along)[self.chain_first]
        weight, src = (offset[self.edge_src] + lag[self.edges]).tolist(), self.edge_top
        times = [*self.stands]
        first = self.first_edge
        for knot, earliest in enumerate(self.stands):
            time = earliest
            for place in range(first[knot], first[knot + 1]):
                reached = times[src[place]] + weight[place]
                if reached > time:
                    time = reached
            times[knot] = time
        return np.asarray(times, dtype=np.int64)[self.top] + offset
