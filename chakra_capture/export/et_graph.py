"""The dependencies of one .et file as columns, and the walk through them that a simulator takes."""

import heapq
from array import array
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from chakra_capture.export.et_reader import EtNode
from chakra_capture.export.et_schema import NodeType

# Names are only shown; a file whose names all differ must not fill the memory.
_MOST_NAMES = 100_000
_NO_STREAM = -1


@dataclass(frozen=True, slots=True)
class Links:
    """All dependencies as written: of which row, on which id, and its row (-1: not in the file)."""

    owner: NDArray[np.int64]
    on_id: NDArray[np.uint64]
    on: NDArray[np.int64]
    is_data: NDArray[np.bool_]


@dataclass(frozen=True)
class Graph:
    """Nodes in the order of their ids, which is that of their rows."""

    ids: NDArray[np.uint64]
    types: NDArray[np.int32]
    start_us: NDArray[np.uint64]
    duration_us: NDArray[np.uint64]
    on_cpu: NDArray[np.bool_]
    streams: NDArray[np.int64]
    name_codes: NDArray[np.int64]
    names: list[str]
    links: Links

    def __len__(self) -> int:
        return len(self.ids)

    def node_id(self, row: int) -> int:
        """Id of a row's node."""
        return int(self.ids[row])

    def name(self, row: int) -> str:
        """Name of a row's node; empty if the file has too many."""
        code = int(self.name_codes[row])
        return self.names[code] if code >= 0 else ""

    @cached_property
    def edges(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Rows that are waited for, and rows that wait, each pair once; without links to nowhere or to itself."""
        links = self.links
        good = (links.on >= 0) & (links.on != links.owner)
        pairs = np.unique(links.on[good] * len(self) + links.owner[good])
        return pairs // max(len(self), 1), pairs % max(len(self), 1)

    @cached_property
    def span_us(self) -> int | None:
        """From the first start to the last end that nodes state; None if they state no starts.

        What runs nothing (METADATA_NODE) may stand for a row of a thread that is not simulated.
        """
        runs = self.types != NodeType.METADATA_NODE
        if not self.start_us[runs].any():
            return None
        starts: list[int] = self.start_us[runs].tolist()
        durations: list[int] = self.duration_us[runs].tolist()
        return max(map(int.__add__, starts, durations)) - min(starts)

    @cached_property
    def has_successor(self) -> NDArray[np.bool_]:
        """Rows that another one waits for."""
        return np.bincount(self.edges[0], minlength=len(self)) > 0

    @cached_property
    def num_waited_for(self) -> NDArray[np.int64]:
        """How many rows each row waits for."""
        return np.bincount(self.edges[1], minlength=len(self))


class GraphBuilder:
    """Takes nodes one by one."""

    def __init__(self) -> None:
        self._ids, self._start, self._duration = array("Q"), array("Q"), array("Q")
        self._types, self._names, self._streams = array("i"), array("q"), array("q")
        self._on_cpu = bytearray()
        self._deps, self._num_data, self._num_ctrl = array("Q"), array("q"), array("q")
        self._name_codes: dict[str, int] = {}
        self._stream_codes: dict[object, int] = {}

    def add(self, node: EtNode, *, on_cpu: bool) -> None:
        """Take one node."""
        self._ids.append(node.node_id)
        self._types.append(node.type)
        self._start.append(node.start_us)
        self._duration.append(node.duration_us)
        self._on_cpu.append(on_cpu)
        self._names.append(self._name_code(node.name))
        stream = node.value("stream")
        on_stream = isinstance(stream, int) and not on_cpu
        self._streams.append(self._stream_code(stream) if on_stream else _NO_STREAM)
        self._deps.extend(node.data_deps)
        self._deps.extend(node.ctrl_deps)
        self._num_data.append(len(node.data_deps))
        self._num_ctrl.append(len(node.ctrl_deps))

    def build(self) -> Graph:
        """Put the nodes in the order of their ids, and find what they depend on."""
        ids = np.array(self._ids, np.uint64)
        order = np.argsort(ids, kind="stable")
        ids = ids[order]
        row_of = np.empty(len(ids), np.int64)
        row_of[order] = np.arange(len(ids))
        return Graph(
            ids,
            np.array(self._types, np.int32)[order],
            np.array(self._start, np.uint64)[order],
            np.array(self._duration, np.uint64)[order],
            np.frombuffer(self._on_cpu, np.bool_)[order],
            np.array(self._streams, np.int64)[order],
            np.array(self._names, np.int64)[order],
            [*self._name_codes],
            self._links(ids, row_of),
        )

    def _links(self, ids: NDArray[np.uint64], row_of: NDArray[np.int64]) -> Links:
        counts = np.array([self._num_data, self._num_ctrl], np.int64).T.ravel()
        owner = np.repeat(np.repeat(row_of, 2), counts)
        is_data = np.repeat(np.tile(np.array([True, False]), len(ids)), counts)
        on_id = np.array(self._deps, np.uint64)
        at = np.minimum(np.searchsorted(ids, on_id), max(len(ids) - 1, 0))
        return Links(owner, on_id, np.where(ids[at] == on_id, at, -1) if len(ids) else at - 1, is_data)

    def _stream_code(self, stream: object) -> int:
        return self._stream_codes.setdefault(stream, len(self._stream_codes))

    def _name_code(self, name: str) -> int:
        code = self._name_codes.get(name)
        if code is None:
            if len(self._name_codes) >= _MOST_NAMES:
                return -1
            code = self._name_codes[name] = len(self._name_codes)
        return code


@dataclass(frozen=True, slots=True)
class Walk:
    """Every row that runs, in the order in which a simulator with nothing else to do issues them: lowest id first.

    Attributes:
        end_us: of each row, when it ends if every node takes its duration and nothing else; 0 if it never runs.
        after: of each row, the one whose end it waits for longest; -1 if it waits for none.
        stuck: rows that never run, because they are on a circle or depend on one.
    """

    order: list[int]
    end_us: list[int]
    after: list[int]
    stuck: list[int]

    @property
    def longest_path(self) -> list[int]:
        """Rows of the longest path by duration, first to last."""
        if not self.order:
            return []
        path, row = [], max(self.order, key=self.end_us.__getitem__)
        while row >= 0:
            path.append(row)
            row = self.after[row]
        return path[::-1]


def walk(graph: Graph) -> Walk:
    """Issue each node when all that it waits for have ended."""
    before, waiting_rows = graph.edges
    first = np.searchsorted(before, np.arange(len(graph) + 1)).tolist()
    successors = np.ascontiguousarray(waiting_rows).data
    num_waiting: list[int] = graph.num_waited_for.tolist()
    durations = np.ascontiguousarray(graph.duration_us).data
    end_us, after, order = [0] * len(graph), [-1] * len(graph), list[int]()
    ready = [row for row, number in enumerate(num_waiting) if number == 0]  # sorted, so a heap
    while ready:
        row = heapq.heappop(ready)
        order.append(row)
        end = end_us[row] = end_us[row] + durations[row]
        for at in range(first[row], first[row + 1]):
            other = successors[at]
            if end > end_us[other] or after[other] < 0:
                end_us[other], after[other] = end, row
            num_waiting[other] -= 1
            if num_waiting[other] == 0:
                heapq.heappush(ready, other)
    stuck = [row for row, number in enumerate(num_waiting) if number > 0]
    for row in stuck:
        end_us[row] = 0
    return Walk(order, end_us, after, stuck)


def circle(graph: Graph, stuck: list[int]) -> list[int]:
    """Rows of one circle among those that never run: each waits for the next, the last for the first."""
    is_stuck = np.zeros(len(graph), np.bool_)
    is_stuck[stuck] = True
    before, waiting = graph.edges
    both = is_stuck[before] & is_stuck[waiting]
    waits_for = dict(zip(waiting[both].tolist(), before[both].tolist(), strict=True))
    # Whatever is stuck waits for something stuck, so this comes back to a row it has seen.
    seen: dict[int, int] = {}
    row = stuck[0]
    while row not in seen:
        seen[row] = len(seen)
        row = waits_for[row]
    return [one for one, at in seen.items() if at >= seen[row]]
