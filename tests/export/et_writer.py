"""Writes .et files byte by byte, with no protobuf library and none of our code, so that tests can plant anything."""

import struct
from dataclasses import dataclass, field, replace
from pathlib import Path

COMP, SEND, RECV, COLL = 4, 5, 6, 7
ALL_REDUCE, ALL_GATHER, BROADCAST, ALL_TO_ALL, REDUCE_SCATTER = 0, 2, 5, 6, 7
# Field of AttributeProto, and how its value is written.
KINDS = {
    "double_val": 3, "float_val": 5, "int32_val": 7, "int64_val": 9, "uint32_val": 11, "uint64_val": 13,
    "bool_val": 27, "string_val": 29,
}  # fmt: skip


def varint(number: int) -> bytes:
    number &= (1 << 64) - 1
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*out, number])


def number(field_number: int, value: int) -> bytes:
    return varint(field_number << 3) + varint(value) if value else b""


def text(field_number: int, value: bytes | str) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return varint(field_number << 3 | 2) + varint(len(data)) + data


def attribute(name: str, kind: str | None, value: object) -> bytes:
    out = text(1, name)
    if kind == "double_val":
        out += varint(3 << 3 | 1) + struct.pack("<d", value)
    elif kind == "float_val":
        out += varint(5 << 3 | 5) + struct.pack("<f", value)
    elif kind == "string_val":
        out += text(29, str(value))
    elif kind is not None:
        out += varint(KINDS[kind] << 3) + varint(int(str(int(value))))  # type: ignore[call-overload]
    return out


def record(data: bytes) -> bytes:
    return varint(len(data)) + data


def metadata(**attributes: str) -> bytes:
    return text(1, "1.0") + b"".join(text(2, attribute(k, "string_val", v)) for k, v in attributes.items())


@dataclass(frozen=True)
class Node:
    """A node to write; ``attrs`` are name, kind and value."""

    id: int
    type: int = COMP
    name: str = ""
    data: tuple[int, ...] = ()
    ctrl: tuple[int, ...] = ()
    start: int = 0
    dur: int = 0
    attrs: tuple[tuple[str, str | None, object], ...] = ()
    values: str = ""

    def but(self, **changes: object) -> "Node":
        return replace(self, **changes)  # type: ignore[arg-type]

    def without(self, name: str) -> "Node":
        return self.but(attrs=tuple(one for one in self.attrs if one[0] != name))

    def having(self, name: str, kind: str | None, value: object) -> "Node":
        """The node with an attribute of that name set to this alone."""
        return self.but(attrs=(*self.without(name).attrs, (name, kind, value)))

    def encoded(self) -> bytes:
        packed = [b"".join(map(varint, deps)) for deps in (self.ctrl, self.data)]
        return (
            number(1, self.id)
            + text(2, self.name)
            + number(3, self.type)
            + b"".join(text(4 + at, deps) for at, deps in enumerate(packed) if deps)
            + number(6, self.start)
            + number(7, self.dur)
            + (text(8, text(1, self.values)) if self.values else b"")
            + b"".join(text(10, attribute(*one)) for one in self.attrs)
        )


def et(nodes: list[Node], head: bytes | None = None) -> bytes:
    """Text of a file."""
    first = metadata() if head is None else head
    return b"".join(map(record, [first, *(node.encoded() for node in nodes)]))


def comp(node_id: int, data: tuple[int, ...] = (), *, start: int, dur: int, cpu: bool = False, **more: object) -> Node:
    attrs: tuple[tuple[str, str | None, object], ...] = (("is_cpu_op", "bool_val", cpu),)
    if not cpu:
        attrs += (("stream", "int64_val", 7),)
    return Node(node_id, COMP, f"work {node_id}", data, start=start, dur=dur, attrs=attrs).but(**more)


def coll(node_id: int, data: tuple[int, ...], comm_type: int, size: int, group: str, *, start: int, dur: int) -> Node:
    attrs: tuple[tuple[str, str | None, object], ...] = (
        ("is_cpu_op", "bool_val", False),
        ("comm_type", "int64_val", comm_type),
        ("comm_size", "int64_val", size),
        ("pg_name", "string_val", group),
        ("stream", "int64_val", 20),
    )
    return Node(node_id, COLL, f"nccl {node_id}", data, start=start, dur=dur, attrs=attrs)


def p2p(node_id: int, data: tuple[int, ...], peer: int, size: int, *, sends: bool, start: int, dur: int) -> Node:
    attrs: tuple[tuple[str, str | None, object], ...] = (
        ("is_cpu_op", "bool_val", False),
        ("comm_size", "int64_val", size),
        ("comm_dst" if sends else "comm_src", "int32_val", peer),
        ("comm_tag", "int32_val", 3),
        ("stream", "int64_val", 20),
    )
    return Node(node_id, SEND if sends else RECV, f"p2p {node_id}", data, start=start, dur=dur, attrs=attrs)


@dataclass
class Run:
    """A set of ranks to write; tests change it before."""

    ranks: dict[int, list[Node]]
    groups: str | None = '{"1": [0, 1], "2": [0, 1]}'
    heads: dict[int, bytes] = field(default_factory=dict)
    names: dict[int, str] = field(default_factory=dict)
    data: dict[int, bytes] = field(default_factory=dict)
    modes: dict[int, int] = field(default_factory=dict)

    def node(self, rank: int, node_id: int) -> Node:
        return next(one for one in self.ranks[rank] if one.id == node_id)

    def put(self, rank: int, node: Node) -> None:
        """Replace the node of that id."""
        self.ranks[rank] = [node if one.id == node.id else one for one in self.ranks[rank]]

    def add(self, rank: int, *nodes: Node) -> None:
        self.ranks[rank] += nodes

    def drop(self, rank: int, *ids: int) -> None:
        self.ranks[rank] = [one for one in self.ranks[rank] if one.id not in ids]

    def write(self, folder: Path) -> Path:
        folder.mkdir(exist_ok=True)
        for rank, nodes in self.ranks.items():
            path = folder / self.names.get(rank, f"chakra.{rank}.et")
            path.write_bytes(self.data.get(rank) or et(nodes, self.heads.get(rank)))
            path.chmod(self.modes.get(rank, 0o644))
        if self.groups is not None:
            (folder / "comm_group.json").write_text(self.groups)
        return folder


def healthy() -> Run:
    """Two ranks whose every node waits for the one before: CPU, kernel, three collectives, a transfer, a kernel."""
    ranks = {}
    for rank in (0, 1):
        ranks[rank] = [
            comp(1, start=100, dur=10, cpu=True),
            comp(2, (1,), start=110, dur=40),
            coll(3, (2,), ALL_REDUCE, 4096, "1", start=150, dur=20),
            coll(4, (3,), REDUCE_SCATTER, 2048, "2", start=170, dur=20),
            coll(5, (4,), ALL_GATHER, 1024, "1", start=190, dur=10),
            p2p(6, (5,), 1 - rank, 512, sends=rank == 0, start=200, dur=10),
            comp(7, (6,), start=210, dur=30),
            comp(8, (7,), start=240, dur=5, cpu=True, ctrl=(2,)),
        ]
    return Run(ranks)
