"""Reading Chakra .et files node by node; nothing in them is believed before it was looked at."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from google.protobuf.message import DecodeError
from google.protobuf.unknown_fields import UnknownFieldSet

from chakra_capture.export.et_records import DamagedEtError, not_an_et, records
from chakra_capture.export.et_schema import message
from chakra_capture.trace.files import ByteSource

# Empty attributes take two bytes each in a file, and a hundred times that here.
_MOST_ATTRIBUTES = 10_000
_VARINT = 0

Value = float | int | str | bytes | bool | list[Any] | None


# Tuples: a file has millions of these.
class Attribute(NamedTuple):
    """One attribute; ``kind`` is its field of Chakra's AttributeProto, such as ``int64_val``; None without a value."""

    name: str
    kind: str | None
    value: Value


class Texts(NamedTuple):
    """Inputs or outputs of a node: lists written as text."""

    values: str
    shapes: str
    types: str


class EtNode(NamedTuple):
    """One node as it stands in the file; ``offset`` is the byte of its record."""

    node_id: int
    name: str
    type: int
    ctrl_deps: tuple[int, ...]
    data_deps: tuple[int, ...]
    start_us: int
    duration_us: int
    attributes: tuple[Attribute, ...]
    inputs: Texts | None
    outputs: Texts | None
    offset: int

    def value(self, name: str) -> Value:
        """Value of the first attribute of that name; None without one."""
        return next((one.value for one in self.attributes if one.name == name), None)


@dataclass(frozen=True, slots=True)
class EtMetadata:
    """The first record of a file."""

    version: str
    attributes: tuple[Attribute, ...]

    def value(self, name: str) -> Value:
        """Value of the first attribute of that name; None without one."""
        return next((one.value for one in self.attributes if one.name == name), None)


class EtFile:
    """An open .et file, plain or gzip.

    Attributes:
        is_gzip: the file is compressed.
        metadata: None where a node stands in its place, as feeders do not expect.

    Raises:
        TraceFileError: the file is missing, unreadable or empty.
        DamagedEtError: it is no .et file; or, while nodes are read, it is damaged from some byte on.
    """

    def __init__(self, path: Path, seen: Callable[[int], None] | None = None) -> None:
        self.path = path
        self._source = ByteSource(path, is_text=False)
        try:
            self.is_gzip = self._source.is_gzip
            self._records = records(self._source, seen)
            self._first_node: EtNode | None = None
            self.metadata = self._read_first()
        except BaseException:
            self._source.__exit__(None, None, None)
            raise

    def nodes(self) -> Iterator[EtNode]:
        """Give the nodes in the order of the file, once."""
        if self._first_node is not None:
            yield self._first_node
        for offset, data in self._records:
            yield self._node(offset, data)

    def __enter__(self) -> "EtFile":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._source.__exit__(kind, error, trace)

    def _read_first(self) -> EtMetadata | None:
        first = next(self._records, None)
        if first is None:
            raise DamagedEtError(f"{self.path} is empty, so it holds no Chakra trace. Export it again.")
        try:
            parsed = message("GlobalMetadata").FromString(first[1])
        except DecodeError:
            parsed = None
        if parsed is not None and not _is_of_a_node(parsed):
            return EtMetadata(parsed.version, self._attributes(parsed.attr, first[0]))
        try:
            self._first_node = self._node(*first)
        except DamagedEtError:
            raise not_an_et(self._source, "its first record is neither GlobalMetadata nor a Node") from None
        return None

    def _node(self, offset: int, data: bytes) -> EtNode:
        try:
            parsed = message("Node").FromString(data)
        except DecodeError:
            raise self._damaged(offset, "is no Chakra node") from None
        return EtNode(
            parsed.id,
            parsed.name,
            parsed.type,
            tuple(parsed.ctrl_deps),
            tuple(parsed.data_deps),
            parsed.start_time_micros,
            parsed.duration_micros,
            self._attributes(parsed.attr, offset),
            _texts(parsed.inputs) if parsed.HasField("inputs") else None,
            _texts(parsed.outputs) if parsed.HasField("outputs") else None,
            offset,
        )

    def _attributes(self, given: Any, offset: int) -> tuple[Attribute, ...]:
        if len(given) > _MOST_ATTRIBUTES:
            raise self._damaged(offset, f"has {len(given):,} attributes, more than any record has")
        return tuple([_attribute(one) for one in given])

    def _damaged(self, offset: int, what: str) -> DamagedEtError:
        inside = " of the unpacked file" if self.is_gzip else ""
        return DamagedEtError(f"{self.path} is damaged: the record at byte {offset:,}{inside} {what}. Export it again.")


def _is_of_a_node(parsed: Any) -> bool:
    """Say whether what was read as GlobalMetadata has the fields of a node: its id is a number, its type field 3."""
    return any(
        field.field_number > 2 or (field.field_number == 1 and field.wire_type == _VARINT)
        for field in UnknownFieldSet(parsed)
    )


def _attribute(given: Any) -> Attribute:
    kind: str | None = given.WhichOneof("value")
    if kind is None:
        return Attribute(given.name, None, None)
    value: Any = getattr(given, kind)
    return Attribute(given.name, kind, list(value.values) if kind.endswith("_list") else value)


def _texts(given: Any) -> Texts:
    return Texts(given.values, given.shapes, given.types)
