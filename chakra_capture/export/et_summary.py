"""What one Chakra .et file holds: counts, communication, time, and the longest path through its dependencies."""

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path

from chakra_capture.export.et_graph import Graph, GraphBuilder, walk
from chakra_capture.export.et_reader import EtFile, EtNode, Value
from chakra_capture.export.et_schema import NodeType, collective_name, node_type_name

_MOST_PATH_NAMES = 10


@dataclass(frozen=True, slots=True)
class Traffic:
    """Communication of one kind, or of one group; ``num_bytes`` adds up what nodes state as comm_size."""

    kind: str
    num_nodes: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class PathShare:
    """Nodes of one name on the longest path."""

    name: str
    num_nodes: int
    duration_us: int


@dataclass(frozen=True, slots=True)
class EtSummary:
    """One file.

    Attributes:
        span_us: from the first start to the last end that the file states; None if it states no starts.
        path_us: the longest path by duration; what a simulation takes at least that adds nothing.
        on_path: the names that take most of it.
        num_never_run: nodes on a circle, or behind one.
        dangling: dependencies on nodes that the file does not have.
    """

    version: str | None
    metadata: dict[str, Value]
    is_gzip: bool
    num_nodes: int
    num_on_cpu: int
    types: dict[str, int]
    collectives: list[Traffic]
    groups: list[Traffic]
    data_deps: int
    ctrl_deps: int
    dangling: int
    num_roots: int
    span_us: int | None
    duration_us: int
    path_us: int
    path_nodes: int
    on_path: list[PathShare]
    num_never_run: int


@dataclass(slots=True)
class _Counts:
    """What is added up node by node."""

    types: Counter[int] = field(default_factory=Counter)
    on_cpu: int = 0
    kinds: dict[str, list[int]] = field(default_factory=lambda: defaultdict(lambda: [0, 0]))
    groups: dict[str, list[int]] = field(default_factory=lambda: defaultdict(lambda: [0, 0]))

    def add(self, node: EtNode) -> bool:
        """Take a node; returns whether it is on the CPU."""
        on_cpu = node.value("is_cpu_op") is True
        self.types[node.type] += 1
        self.on_cpu += on_cpu
        size = node.value("comm_size")
        num_bytes = size if isinstance(size, int) else 0
        if node.type == NodeType.COMM_COLL_NODE:
            given, group = node.value("comm_type"), node.value("pg_name")
            kind = collective_name(given) if isinstance(given, int) else "no type"
            _count(self.kinds[kind], num_bytes)
            _count(self.groups[str(group) if group else "all ranks"], num_bytes)
        elif node.type in (NodeType.COMM_SEND_NODE, NodeType.COMM_RECV_NODE):
            _count(self.kinds["SEND" if node.type == NodeType.COMM_SEND_NODE else "RECV"], num_bytes)
        return on_cpu


def _count(pair: list[int], num_bytes: int) -> None:
    pair[0] += 1
    pair[1] += num_bytes


def summarize_et(path: Path) -> EtSummary:
    """Read a file and sum it up.

    Raises:
        TraceFileError: it cannot be opened, or is damaged.
    """
    counts, builder = _Counts(), GraphBuilder()
    with EtFile(path) as file:
        for node in file.nodes():
            builder.add(node, on_cpu=counts.add(node))
        metadata, is_gzip = file.metadata, file.is_gzip
    graph = builder.build()
    walked = walk(graph)
    rows = walked.longest_path
    links = graph.links
    return EtSummary(
        version=metadata.version if metadata else None,
        metadata={one.name: one.value for one in metadata.attributes} if metadata else {},
        is_gzip=is_gzip,
        num_nodes=len(graph),
        num_on_cpu=counts.on_cpu,
        types={node_type_name(number): count for number, count in sorted(counts.types.items())},
        collectives=_traffic(counts.kinds),
        groups=_traffic(counts.groups),
        data_deps=int(links.is_data.sum()),
        ctrl_deps=int((~links.is_data).sum()),
        dangling=int((links.on < 0).sum()),
        num_roots=int((graph.num_waited_for == 0).sum()),
        span_us=graph.span_us,
        duration_us=sum(graph.duration_us.tolist()),
        path_us=walked.end_us[rows[-1]] if rows else 0,
        path_nodes=len(rows),
        on_path=_on_path(graph, rows),
        num_never_run=len(walked.stuck),
    )


def _traffic(counted: dict[str, list[int]]) -> list[Traffic]:
    found = [Traffic(kind, number, num_bytes) for kind, (number, num_bytes) in counted.items()]
    return sorted(found, key=lambda one: (-one.num_bytes, one.kind))


def _on_path(graph: Graph, rows: list[int]) -> list[PathShare]:
    shares: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for row in rows:
        _count(shares[graph.name(row)], int(graph.duration_us[row]))
    found = [PathShare(name, number, duration) for name, (number, duration) in shares.items()]
    return sorted(found, key=lambda one: (-one.duration_us, one.name))[:_MOST_PATH_NAMES]
