"""V2 to V6 and V13: is the graph of one file whole, does every node run, in the time that was measured?"""

import numpy as np
from numpy.typing import NDArray

from chakra_capture.export.et_graph import Graph, Walk, circle, walk
from chakra_capture.export.et_schema import NodeType
from chakra_capture.export.validation import checks
from chakra_capture.export.validation.findings import Check, Findings, Place
from chakra_capture.export.validation.node_checks import COMMUNICATION

_SHOWN_OF_CIRCLE = 8
_FAR = 0.1


def check_graph(graph: Graph, rank: int, findings: Findings) -> Walk:
    """Check the graph of one rank; returns the order in which its nodes run."""
    reported = _Reported(graph, rank, findings)
    if not len(graph):
        findings.add(checks.NO_NODES, Place(rank))
    repeated = np.flatnonzero(graph.ids[1:] == graph.ids[:-1]) + 1
    reported.rows(checks.DUPLICATE_ID, repeated)
    _check_links(graph, reported)
    walked = walk(graph)
    if walked.stuck:
        _check_circle(graph, walked, reported)
    if len(graph) and not _has_root(graph):
        findings.add(checks.NO_ROOT, Place(rank))
    _check_successors(graph, reported)
    _check_starts(graph, reported)
    _check_time(graph, walked, rank, findings)
    return walked


class _Reported:
    """Findings about rows of one rank's graph."""

    def __init__(self, graph: Graph, rank: int, findings: Findings) -> None:
        self.graph, self.rank, self.findings = graph, rank, findings

    def row(self, check: Check, row: int, detail: str = "", count: int = 1) -> None:
        place = Place(self.rank, self.graph.node_id(row), self.graph.name(row), detail)
        self.findings.add(check, place, count=count)

    def rows(self, check: Check, rows: NDArray[np.int64]) -> None:
        for row in rows.tolist():
            self.row(check, row)

    def links(self, check: Check, chosen: NDArray[np.int64]) -> None:
        links = self.graph.links
        for at in chosen.tolist():
            self.row(check, int(links.owner[at]), f"depends on node {links.on_id[at]}")


def _check_links(graph: Graph, reported: _Reported) -> None:
    links = graph.links
    for check, of_kind in ((checks.DATA_DANGLING, links.is_data), (checks.CTRL_DANGLING, ~links.is_data)):
        reported.links(check, np.flatnonzero(of_kind & (links.on < 0)))
    for check, of_kind in ((checks.DATA_REPEATED, links.is_data), (checks.CTRL_REPEATED, ~links.is_data)):
        at = np.flatnonzero(of_kind & (links.on >= 0))
        key = links.owner[at] * len(graph) + links.on[at]
        sort = np.argsort(key, kind="stable")
        reported.links(check, np.sort(at[sort[1:][key[sort][1:] == key[sort][:-1]]]))
    reported.links(checks.SELF_DEPENDENCY, np.flatnonzero(links.on == links.owner))


def _check_circle(graph: Graph, walked: Walk, reported: _Reported) -> None:
    rows = circle(graph, walked.stuck)
    shown = [str(graph.node_id(row)) for row in rows[:_SHOWN_OF_CIRCLE]]
    if len(rows) > _SHOWN_OF_CIRCLE:
        shown.append(f"{len(rows) - _SHOWN_OF_CIRCLE} more")
    way = " waits for ".join([*shown, shown[0]])
    reported.row(checks.CYCLE, rows[0], f"{way}; {len(walked.stuck)} of {len(graph)} nodes never run")


def _has_root(graph: Graph) -> bool:
    has_dependency = np.zeros(len(graph), np.bool_)
    has_dependency[graph.links.owner] = True
    return not bool(has_dependency.all())


def _check_successors(graph: Graph, reported: _Reported) -> None:
    """Of each stream only what is last in the order of starts, then ids, may have nothing after it."""
    on_device = np.flatnonzero(~graph.on_cpu & _of_types(graph, NodeType.COMP_NODE, *COMMUNICATION))
    order = on_device[np.lexsort((on_device, graph.start_us[on_device], graph.streams[on_device]))]
    is_last = np.ones(len(order), np.bool_)
    is_last[:-1] = graph.streams[order][1:] != graph.streams[order][:-1]
    reported.rows(checks.NO_SUCCESSOR, np.sort(order[~is_last & ~graph.has_successor[order]]))


def _check_starts(graph: Graph, reported: _Reported) -> None:
    collectives = _of_types(graph, NodeType.COMM_COLL_NODE)
    others = np.flatnonzero(_of_types(graph, NodeType.COMP_NODE))
    if not len(others):
        return
    free = np.flatnonzero(collectives & (graph.num_waited_for == 0))
    began_later = graph.start_us[free] > graph.start_us[others].min()
    if not graph.start_us.any():  # times were not written: then the order of ids must do
        began_later = free > others[0]
    reported.rows(checks.AT_START, free[began_later])


def _check_time(graph: Graph, walked: Walk, rank: int, findings: Findings) -> None:
    span_us = graph.span_us
    if walked.stuck or span_us is None:
        return
    path_us = max(walked.end_us)
    if abs(path_us - span_us) > _FAR * span_us:
        detail = f"longest path {path_us:,} us, measured {span_us:,} us"
        findings.add(checks.PATH_AND_SPAN, Place(rank, detail=detail))


def _of_types(graph: Graph, *types: NodeType) -> NDArray[np.bool_]:
    return np.isin(graph.types, types)
