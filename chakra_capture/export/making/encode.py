"""Nodes as the bytes of a .et file, columns at a time: what protobuf would write node by node.

Most of a node's bytes are those of many others (name, type, attributes that do not count): these are made once per
kind, by protobuf itself. Numbers of their own are written as varints into a table of bytes, a column for each byte.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chakra_capture.export.et_schema import message
from chakra_capture.export.making.weave import weave
from chakra_capture.trace.columns import MISSING, Bool, Int64

_ID, _DATA_DEPS, _START, _DURATION = 1, 5, 6, 7
_CTRL_DEPS, _ATTR = 4, 10
_ATTR_NAME, _ATTR_INT64 = 1, 9
_VARINT, _BYTES = 0, 2
_BLOCK = 1 << 14
# So many dependencies of a node go with its numbers, more into a field of their own.
_FEW_DEPS = 4


@dataclass(frozen=True, slots=True)
class Encodable:
    """Nodes to write.

    Attributes:
        kind: of each node, which of ``kinds`` has the rest of its bytes.
        kinds: serialized messages ``Node`` without what stands here.
        data_first: where the data dependencies of each node begin in ``data_deps``, and where the last ones end.
        ctrl_deps: id of the node that each depends on, ``MISSING`` for none.
        numbers: attributes of type int64 by name, ``MISSING`` where a node has none.
    """

    ids: Int64
    kind: Int64
    kinds: Sequence[bytes]
    start_us: Int64
    duration_us: Int64
    data_first: Int64
    data_deps: Int64
    ctrl_deps: Int64 | None = None
    numbers: Mapping[str, Int64] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.ids)


def metadata_record(version: str, attributes: Mapping[str, object]) -> bytes:
    """The first record of a file: text, whole numbers or lists of them as attributes."""
    record = message("GlobalMetadata")(version=version)
    for name, value in attributes.items():
        add_attribute(record.attr.add(), name, value)
    data: bytes = record.SerializeToString(deterministic=True)
    return _varint(len(data)) + data


def add_attribute(attribute: object, name: str, value: object) -> None:
    """Fill a message ``AttributeProto`` with text, a whole number (int64), a truth value, or a list of numbers."""
    attribute.name = name  # type: ignore[attr-defined]
    if isinstance(value, bool):
        attribute.bool_val = value  # type: ignore[attr-defined]
    elif isinstance(value, int):
        attribute.int64_val = value  # type: ignore[attr-defined]
    elif isinstance(value, str):
        attribute.string_val = value  # type: ignore[attr-defined]
    else:
        attribute.int64_list.values.extend(value)  # type: ignore[attr-defined]


def encoded(nodes: Encodable) -> Iterator[bytes | memoryview]:
    """Give the records of all nodes, some thousand at a time."""
    for first in range(0, len(nodes), _BLOCK):
        yield _block(nodes, slice(first, min(first + _BLOCK, len(nodes))))


def _block(nodes: Encodable, part: slice) -> bytes | memoryview:
    table = _Table(part.stop - part.start)
    table.number(_ID, nodes.ids[part])
    table.number(_START, nodes.start_us[part])
    table.number(_DURATION, nodes.duration_us[part])
    if nodes.ctrl_deps is not None:
        one = nodes.ctrl_deps[part]
        table.sized(_CTRL_DEPS, b"", one, one != MISSING)
    for name, values in nodes.numbers.items():
        text = name.encode()
        head = _tag(_ATTR_NAME, _BYTES) + _varint(len(text)) + text + _tag(_ATTR_INT64, _VARINT)
        table.sized(_ATTR, head, values[part], values[part] != MISSING)
    first = nodes.data_first[part.start : part.stop + 1]
    table.repeated(_DATA_DEPS, first, nodes.data_deps)
    used, kind = np.unique(nodes.kind[part], return_inverse=True)
    shared = [nodes.kinds[one] for one in used.tolist()]
    for at in np.flatnonzero(np.diff(first) > _FEW_DEPS).tolist():  # a kind of its own
        more = _packed(_DATA_DEPS, nodes.data_deps[first[at] + _FEW_DEPS : first[at + 1]].tolist())
        shared.append(shared[kind[at]] + more)
        kind[at] = len(shared) - 1
    shared_size = np.array([len(one) for one in shared], dtype=np.int64)[kind]
    lengths = _Table(len(kind))
    lengths.varint(table.sizes + shared_size, None)
    data, sizes = lengths.beside(table)
    return weave(data, sizes, shared, kind)


def _packed(tag: int, numbers: Sequence[int]) -> bytes:
    """Numbers as one packed field; a reader appends them to those of an earlier one."""
    data = b"".join(map(_varint, numbers))
    return _tag(tag, _BYTES) + _varint(len(data)) + data


class _Table:
    """Bytes of a number of rows, column by column; a row need not have a byte in each."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._columns: list[NDArray[np.uint8]] = []
        self._has: list[Bool] = []
        self.sizes = np.zeros(size, dtype=np.int64)

    def number(self, tag: int, values: Int64) -> None:
        """A field of the message itself; 0 is what a reader takes where it is missing."""
        has = values != 0
        self.constant(_tag(tag, _VARINT), has)
        self.varint(values, has)

    def sized(self, tag: int, head: bytes, values: Int64, has: Bool) -> None:
        """A field that holds ``head``, then the number."""
        if has.any():
            self.constant(_tag(tag, _BYTES), has)
            self.varint(len(head) + _varint_sizes(values), has)
            self.constant(head, has)
            self.varint(values, has)

    def repeated(self, tag: int, first: Int64, values: Int64) -> None:
        """A packed field of the first few of several numbers.

        Args:
            first: where the numbers of each row begin in ``values``, and where the last ones end.
        """
        count = np.minimum(np.diff(first), _FEW_DEPS)
        at = [(np.flatnonzero(count > place), place) for place in range(int(count.max(initial=0)))]
        columns = []
        for rows, place in at:
            column = np.zeros(self._size, dtype=np.int64)
            column[rows] = values[first[rows] + place]
            columns.append((column, count > place))
        size = np.zeros(self._size, dtype=np.int64)
        for column, has in columns:
            size += np.where(has, _varint_sizes(column), 0)
        self.constant(_tag(tag, _BYTES), count > 0)
        self.varint(size, count > 0)
        for column, has in columns:
            self.varint(column, has)

    def constant(self, data: bytes, has: Bool) -> None:
        for byte in data:
            self._add(np.full(self._size, byte, dtype=np.uint8), has)

    def varint(self, values: Int64, has: Bool | None) -> None:
        """Seven bits a byte, the lowest first; all but the last have their top bit set."""
        narrow = values.max(initial=0) < 1 << 32
        left: NDArray[np.unsignedinteger[Any]] = values.astype(np.uint32) if narrow else values.astype(np.uint64)
        here = np.ones(self._size, dtype=bool) if has is None else has
        while here.any():
            low = left.astype(np.uint8)
            left >>= 7
            more = left > 0
            self._add((low & np.uint8(0x7F)) | (more.view(np.uint8) << np.uint8(7)), here)
            here = here & more

    def _add(self, column: NDArray[np.uint8], has: Bool) -> None:
        self._columns.append(column)
        self._has.append(has)
        self.sizes += has

    def beside(self, other: "_Table") -> tuple[bytes, Int64]:
        """The rows of this table, each followed by that of the other, and their sizes."""
        both = _Table(self._size)
        both._columns, both._has = self._columns + other._columns, self._has + other._has
        return both.flat, self.sizes + other.sizes

    @property
    def flat(self) -> bytes:
        """All bytes, row by row."""
        if not self._columns:
            return b""
        return np.stack(self._columns, axis=1)[np.stack(self._has, axis=1)].tobytes()


def _varint_sizes(values: Int64) -> Int64:
    left, sizes = values.astype(np.uint64) >> np.uint64(7), np.ones(len(values), dtype=np.int64)
    while left.any():
        sizes += left > 0
        left >>= np.uint64(7)
    return sizes


def _tag(number: int, wire_type: int) -> bytes:
    return _varint(number << 3 | wire_type)


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*out, number])
