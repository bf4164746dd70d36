"""A feeder and a simulator in one: reads .et files as ASTRA-sim's feeder does and runs all ranks together.

Written from what simulators were measured to do, with none of the product's code but Chakra's messages. Data and
control dependencies hold. Of the nodes that are ready the lowest id is issued first; a rank has one CPU, one device
and one place for communication, which a receive does not take. The k-th collective of a group begins when every
member has come to its k-th; a receive ends when what it asks for is sent.
"""

import heapq
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from chakra_capture.export.et_schema import message

METADATA, COMP, SEND, RECV, COLL = 1, 4, 5, 6, 7
COMMUNICATION = (SEND, RECV, COLL)


class BadTraceError(Exception):
    """A simulator would end, or simulate something else, at this file."""


class HangError(Exception):
    """Nodes that never run; ``stuck`` holds their ids by rank."""

    def __init__(self, stuck: dict[int, list[int]]) -> None:
        super().__init__(f"never issued or never done: { {rank: ids[:5] for rank, ids in stuck.items()} }")
        self.stuck = stuck


@dataclass(frozen=True)
class WalkNode:
    """One node as it stands in the file."""

    id: int
    name: str
    type: int
    data: tuple[int, ...]
    ctrl: tuple[int, ...]
    start_us: int
    duration_us: int
    attrs: dict[str, Any]

    @property
    def on_cpu(self) -> bool:
        return bool(self.attrs.get("is_cpu_op", False))

    @property
    def deps(self) -> set[int]:
        return {*self.data, *self.ctrl}


@dataclass
class Rank:
    """One file."""

    head: dict[str, Any]
    nodes: list[WalkNode]

    @property
    def by_id(self) -> dict[int, WalkNode]:
        return {node.id: node for node in self.nodes}

    def named(self, part: str) -> list[WalkNode]:
        return [node for node in self.nodes if part in node.name]

    @property
    def communication(self) -> list[WalkNode]:
        return [node for node in self.nodes if node.type in COMMUNICATION]

    @property
    def successors(self) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {node.id: [] for node in self.nodes}
        for node in self.nodes:
            for one in node.deps:
                found[one].append(node.id)
        return found


def read_rank(path: Path) -> Rank:
    """Read a file; a name of an attribute that stands twice, or an id, raises."""
    records = _records(path.read_bytes())
    head = message("GlobalMetadata").FromString(next(records))
    nodes = [_node(message("Node").FromString(record)) for record in records]
    ids = {node.id for node in nodes}
    if len(ids) != len(nodes):
        raise BadTraceError("an id stands twice, so a node is lost")
    return Rank(_attributes(head), nodes)


def _records(data: bytes) -> Iterator[bytes]:
    at = 0
    while at < len(data):
        size = shift = 0
        while True:
            byte = data[at]
            at += 1
            size |= (byte & 0x7F) << shift
            shift += 7
            if not byte & 0x80:
                break
        if at + size > len(data):
            raise BadTraceError("the last record is cut")
        yield data[at : at + size]
        at += size


def _node(raw: Any) -> WalkNode:
    return WalkNode(
        raw.id, raw.name, raw.type, tuple(raw.data_deps), tuple(raw.ctrl_deps), raw.start_time_micros,
        raw.duration_micros, _attributes(raw),
    )  # fmt: skip


def _attributes(raw: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for one in raw.attr:
        if one.name in found:
            raise BadTraceError(f"attribute {one.name} stands twice")
        kind = one.WhichOneof("value")
        value = getattr(one, kind)
        found[one.name] = list(value.values) if kind.endswith("_list") else value
    return found


def read_export(folder: Path) -> dict[int, Rank]:
    """All ranks of a folder: chakra.0.et and on, without gaps."""
    found = {}
    for rank in count():
        path = folder / f"chakra.{rank}.et"
        if not path.exists():
            break
        found[rank] = read_rank(path)
    assert len(found) == len(list(folder.glob("*.et"))), "a rank is missing"
    return found


def defects(rank: Rank) -> list[str]:
    """Dependencies that are dangling, doubled, on the node itself, or in a circle."""
    found, by_id = [], rank.by_id
    for node in rank.nodes:
        for kind, deps in (("data", node.data), ("ctrl", node.ctrl)):
            found += [f"{node.id} {kind} on absent {one}" for one in deps if one not in by_id]
            found += [f"{node.id} {kind} doubled"] * (len(deps) - len(set(deps)))
            found += [f"{node.id} on itself"] * deps.count(node.id)
    if not found and (stuck := len(rank.nodes) - len(in_order(rank))):
        found.append(f"{stuck} nodes in or behind a circle")
    return found


def in_order(rank: Rank) -> list[int]:
    """Ids in an order that dependencies allow, the lowest first; those in or behind a circle are not in it."""
    missing = {node.id: len(node.deps) for node in rank.nodes}
    successors = rank.successors
    ready = [one for one, number in missing.items() if not number]
    heapq.heapify(ready)
    order = []
    while ready:
        order.append(one := heapq.heappop(ready))
        for after in successors[one]:
            missing[after] -= 1
            if not missing[after]:
                heapq.heappush(ready, after)
    return order


def without_successor(rank: Rank) -> list[WalkNode]:
    """Device nodes that nothing waits for, though they are not the last of their stream."""
    successors = rank.successors
    on_streams = [node for node in rank.nodes if "stream" in node.attrs and node.type != METADATA]
    last: dict[tuple[object, object], WalkNode] = {}
    for node in on_streams:
        key = (node.attrs.get("device"), node.attrs["stream"])
        if key not in last or _end(node) >= _end(last[key]):
            last[key] = node
    ends = {node.id for node in last.values()}
    return [node for node in on_streams if not successors[node.id] and node.id not in ends]


def _end(node: WalkNode) -> tuple[int, int]:
    return node.start_us + node.duration_us, node.id


def longest_path_us(rank: Rank, duration: Callable[[WalkNode], int] = lambda node: node.duration_us) -> int:
    """The longest way through the dependencies of one rank, which waits for no other."""
    by_id, end = rank.by_id, dict[int, int]()
    for one in in_order(rank):
        end[one] = max((end[dep] for dep in by_id[one].deps), default=0) + duration(by_id[one])
    return max(end.values())


@dataclass
class _State:
    """What of a rank has run."""

    rank: Rank
    missing: dict[int, int]
    after: dict[int, list[int]]
    nodes: dict[int, WalkNode]
    ready: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    busy: dict[str, bool] = field(default_factory=lambda: defaultdict(bool))
    done: set[int] = field(default_factory=set)
    issued: list[int] = field(default_factory=list)
    end: int = 0


@dataclass
class Walked:
    """How it went.

    Attributes:
        issued: ids by rank, in order.
        end: when each rank was done, us.
    """

    issued: dict[int, list[int]]
    end: dict[int, int]


class FeederWalk:
    """Runs all ranks; ``groups`` are id -> members, as in comm_group.json.

    Args:
        duration: of a node, us.
        full: METADATA_NODEs and types that ASTRA-sim does not have may stand in the files, and a rank may have any
            number of collectives in flight.
    """

    SIMULATED = (0, 2, 5, 6, 7)

    def __init__(
        self,
        ranks: dict[int, Rank],
        groups: dict[int, list[int]],
        *,
        duration: Callable[[int, WalkNode], int] = lambda rank, node: node.duration_us,
        full: bool = False,
    ) -> None:
        self._groups, self._duration, self._full = groups, duration, full
        self._state = {number: self._begin(number, rank) for number, rank in ranks.items()}
        self._events: list[tuple[int, int, int, int]] = []  # time, tie, rank, node
        self._tie, self._now = count(), 0
        self._met: dict[int, list[dict[int, WalkNode]]] = defaultdict(list)
        self._sent: dict[tuple[int, int, int], deque[tuple[int, WalkNode]]] = defaultdict(deque)
        self._asked: dict[tuple[int, int, int], deque[tuple[int, WalkNode]]] = defaultdict(deque)

    def _begin(self, number: int, rank: Rank) -> _State:
        nodes = rank.by_id
        for node in rank.nodes:
            for kind, deps in (("data", node.data), ("ctrl", node.ctrl)):
                for dep in deps:
                    if dep not in nodes:
                        raise BadTraceError(f"rank {number}: node {dep} in {kind}_dep graph, but not found in index")
        missing = {node.id: len(node.deps) for node in rank.nodes}
        if all(missing.values()):
            raise BadTraceError(f"rank {number}: no dependency free nodes")
        return _State(rank, missing, rank.successors, nodes)

    def run(self) -> Walked:
        """Run to the end.

        Raises:
            HangError: nodes never run.
            BadTraceError: a node has not what it needs.
        """
        for number, state in self._state.items():
            for one, missing in state.missing.items():
                if not missing:
                    self._is_ready(number, state.nodes[one])
        self._issue_all()
        while self._events:
            self._now = self._events[0][0]
            while self._events and self._events[0][0] == self._now:
                _, _, rank, one = heapq.heappop(self._events)
                self._finish(rank, one)
            self._issue_all()
        stuck = {n: [one for one in s.nodes if one not in s.done] for n, s in self._state.items()}
        if any(stuck.values()):
            raise HangError({rank: ids for rank, ids in stuck.items() if ids})
        if left := [key for key, queue in self._sent.items() if queue]:
            raise BadTraceError(f"sent and never received: {left}")
        return Walked({n: s.issued for n, s in self._state.items()}, {n: s.end for n, s in self._state.items()})

    def _unit(self, node: WalkNode) -> str:
        """What of its rank a node takes while it runs."""
        if node.type in (RECV, METADATA) or (self._full and node.type == COLL):
            return f"free {node.id}"
        if node.type in COMMUNICATION:
            return "comm"
        return "cpu" if node.on_cpu else "device"

    def _is_ready(self, rank: int, node: WalkNode) -> None:
        heapq.heappush(self._state[rank].ready[self._unit(node)], node.id)

    def _issue_all(self) -> None:
        again = True
        while again:
            again = False
            for number, state in self._state.items():
                for unit in [one for one in state.ready if not state.busy[one]]:
                    one = heapq.heappop(state.ready[unit])
                    if not state.ready[unit]:
                        del state.ready[unit]
                    state.busy[unit] = True
                    state.issued.append(one)
                    self._issue(number, state.nodes[one])
                    again = True

    def _ends(self, rank: int, node: WalkNode, after: int) -> None:
        heapq.heappush(self._events, (self._now + after, next(self._tie), rank, node.id))

    def _finish(self, rank: int, one: int) -> None:
        state = self._state[rank]
        state.busy.pop(self._unit(state.nodes[one]))
        state.done.add(one)
        state.end = self._now
        for after in state.after[one]:
            state.missing[after] -= 1
            if not state.missing[after]:
                self._is_ready(rank, state.nodes[after])

    def _issue(self, rank: int, node: WalkNode) -> None:
        if node.type == COMP:
            self._ends(rank, node, self._duration(rank, node))
        elif node.type in COMMUNICATION:
            if node.on_cpu:
                raise BadTraceError(f"rank {rank}, node {node.id}: comm node should not be on CPU")
            (self._collective if node.type == COLL else self._point_to_point)(rank, node)
        elif node.type == METADATA and self._full:
            self._ends(rank, node, 0)
        else:
            raise BadTraceError(f"rank {rank}, node {node.id}: type {node.type}")

    def _collective(self, rank: int, node: WalkNode) -> None:
        group, kind = self._pg(rank, node), self._needs(node, "comm_type")
        self._needs(node, "comm_size")
        if not self._full and kind not in self.SIMULATED:
            raise BadTraceError(f"rank {rank}, node {node.id}: unsupported collective comm type {kind}")
        members = self._groups[group]
        if rank not in members:
            raise BadTraceError(f"rank {rank}, node {node.id}: not in group {group}")
        if len(members) < 2:
            return  # a simulator waits for ever
        met = next((one for one in self._met[group] if rank not in one), None)
        if met is None:
            self._met[group].append(met := {})
        met[rank] = node
        if len(met) == len(members):
            stated = {tuple(one.attrs.get(k) for k in ("comm_type", "comm_size", "root_rank")) for one in met.values()}
            if len(stated) > 1:
                return  # they wait for each other for ever
            lasts = min(self._duration(one, of) for one, of in met.items())
            for one, of in met.items():
                self._ends(one, of, lasts)

    def _pg(self, rank: int, node: WalkNode) -> int:
        name = node.attrs.get("pg_name")
        if not (isinstance(name, str) and name.isdecimal()):
            raise BadTraceError(f"rank {rank}, node {node.id}: pg_name {name!r} is no decimal number")
        if int(name) not in self._groups:
            raise BadTraceError(f"rank {rank}, node {node.id}: communicator group {name} not found")
        return int(name)

    def _needs(self, node: WalkNode, name: str) -> int:
        if not isinstance(node.attrs.get(name), int):
            raise BadTraceError(f"node {node.id}: attribute {name} not found")
        return int(node.attrs[name])

    def _point_to_point(self, rank: int, node: WalkNode) -> None:
        tag, size = self._needs(node, "comm_tag"), self._needs(node, "comm_size")
        is_send = node.type == SEND
        own, other = ("comm_src", "comm_dst") if is_send else ("comm_dst", "comm_src")
        peer = self._needs(node, other)
        if node.attrs.get(own, rank) != rank or peer == rank or peer not in self._state:
            raise BadTraceError(f"rank {rank}, node {node.id}: from or to rank {peer}")
        key = (rank, peer, tag) if is_send else (peer, rank, tag)
        if is_send:  # it is done when it is sent
            self._ends(rank, node, self._duration(rank, node))
        here, there = (self._sent, self._asked) if is_send else (self._asked, self._sent)
        here[key].append((rank, node))
        if there[key]:
            (sender, sent), (receiver, asked) = self._sent[key].popleft(), self._asked[key].popleft()
            if sent.attrs["comm_size"] != size or asked.attrs["comm_size"] != size:
                raise BadTraceError(f"{key}: bytes sent are not those that are received")
            lasts = min(self._duration(sender, sent), self._duration(receiver, asked))
            self._ends(receiver, asked, lasts)
