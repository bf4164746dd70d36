"""Nodes of a host trace as columns, decoded by msgspec: the slow reader, and the layout of the fast one."""

from typing import Any

import msgspec

from chakra_capture.trace import native
from chakra_capture.trace.attrs import INT_ATTRS, AttrsColumns, AttrsReader
from chakra_capture.trace.columns import LARGEST, Positions, int_column
from chakra_capture.trace.dictionary import Numbers
from chakra_capture.trace.mend import NODES
from chakra_capture.trace.reading import Part, SlowReader

_NONE = b"[]"
_EMPTY = msgspec.Raw(_NONE)
_ABSENT = msgspec.Raw()
# Details that are no attributes, in the order in which they are written.
_STRIDES_AND_OUTPUTS = ("input_strides", "output_shapes", "output_types", "output_strides")


class _Values(msgspec.Struct, gc=False):
    values: msgspec.Raw = _EMPTY
    shapes: msgspec.Raw = _ABSENT
    types: msgspec.Raw = _ABSENT
    strides: msgspec.Raw = _ABSENT


_NO_VALUES = _Values()


class _Nested(msgspec.Struct, gc=False):
    """Schema 1.0.2 and later: ``attrs``, and one object each for inputs and outputs."""

    id: int
    name: str
    attrs: msgspec.Raw
    ctrl_deps: int | None = None
    parent: int | None = None
    inputs: _Values | None = None
    outputs: _Values | None = None


class _Flat(msgspec.Struct, gc=False):
    """Schema 1.0.1: every attribute is a key of the node."""

    id: int
    name: str
    attrs: None = None
    ctrl_deps: int | None = None
    parent: int | None = None
    rf_id: msgspec.Raw = _ABSENT
    seq_id: msgspec.Raw = _ABSENT
    scope: msgspec.Raw = _ABSENT
    tid: msgspec.Raw = _ABSENT
    fw_tid: msgspec.Raw = _ABSENT
    fw_parent: msgspec.Raw = _ABSENT
    op_schema: msgspec.Raw = _ABSENT
    inputs: msgspec.Raw = _EMPTY
    input_shapes: msgspec.Raw = _EMPTY
    input_types: msgspec.Raw = _EMPTY
    outputs: msgspec.Raw = _EMPTY
    output_shapes: msgspec.Raw = _ABSENT
    output_types: msgspec.Raw = _ABSENT


class NodeReader(SlowReader):
    """Reads nodes of either layout."""

    shape = NODES

    def restart(self) -> None:
        super().restart()
        self._nested = msgspec.json.Decoder(_Nested)
        self._flat = msgspec.json.Decoder(_Flat)
        self._nested_array = msgspec.json.Decoder(list[_Nested])
        self._flat_array = msgspec.json.Decoder(list[_Flat])
        self._attrs = AttrsReader(taken=_STRIDES_AND_OUTPUTS)

    def decode(self, text: bytes) -> Any:
        try:
            nested = self._nested.decode(text)
            self._attrs.check(bytes(nested.attrs))
            node: _Nested | _Flat = nested
        except msgspec.ValidationError:
            node = self._flat.decode(text)
        return node if abs(node.id) <= LARGEST else "an id out of range"

    def decode_all(self, array: bytes) -> list[Any]:
        try:
            nodes: list[Any] = self._nested_array.decode(array)
        except msgspec.ValidationError:
            nodes = self._flat_array.decode(array)
        if any(abs(node.id) > LARGEST for node in nodes):
            raise msgspec.ValidationError("an id out of range")
        return nodes

    def kept(self, elements: list[Any]) -> list[Any]:
        return elements

    def to_part(self, elements: list[Any]) -> Part:
        numbers = self.numbers
        shapes, types, values, output_values, *others, attr_texts = _texts(elements)
        attrs = self._attrs.read(attr_texts)
        return Part(
            ints={
                "node_id": int_column([node.id for node in elements]),
                "ctrl_deps": int_column([node.ctrl_deps for node in elements]),
                "parent": int_column([node.parent for node in elements]),
                **attrs.ints,
            },
            codes={
                "name": numbers["name"].codes([node.name for node in elements]),
                "input_shapes": numbers["input_shapes"].codes([text or _NONE for text in shapes]),
                "input_types": numbers["input_types"].codes([text or _NONE for text in types]),
                "input_values": numbers["input_values"].codes(values),
                "output_values": numbers["output_values"].codes(output_values),
                "details": _details(others, attrs, numbers["details"]),
            },
            wide={},
        )

    def native_layout(self) -> native.Layout:
        return native.Layout(
            is_host=True,
            ints=("node_id", "ctrl_deps", "parent", *INT_ATTRS),
            texts=("name", "input_shapes", "input_types", "input_values", "output_values", "details"),
            num_quoted=1,
            wide=(),
        )

    def add_native_counts(self, scan: native.NativeScanner) -> None:
        pass


def _texts(nodes: list[Any]) -> list[list[bytes]]:
    """What stays text, an empty one where it is absent: shapes, types and values of the inputs, values of the outputs,
    ``_STRIDES_AND_OUTPUTS``, and the attributes.
    """
    rows = [_nested_texts(node) if isinstance(node, _Nested) else _flat_texts(node) for node in nodes]
    return [list(map(bytes, column)) for column in zip(*rows, strict=True)] or [[] for _ in range(9)]


def _nested_texts(node: _Nested) -> tuple[bytes | msgspec.Raw, ...]:
    i, o = node.inputs or _NO_VALUES, node.outputs or _NO_VALUES
    return i.shapes, i.types, i.values, o.values, i.strides, o.shapes, o.types, o.strides, node.attrs


def _flat_texts(node: _Flat) -> tuple[bytes | msgspec.Raw, ...]:
    """The same, with the keys of the node that are attributes written as those of a nested one."""
    raws = [(key, bytes(getattr(node, key))) for key in (*INT_ATTRS, "op_schema")]
    attrs = b",".join(b'{"name":"%s","value":%s}' % (key.encode(), raw) for key, raw in raws if raw)
    n = node
    return (
        n.input_shapes, n.input_types, n.inputs, n.outputs, b"", n.output_shapes, n.output_types, b"", b"[%s]" % attrs,
    )  # fmt: skip


def _details(others: list[list[bytes]], attrs: AttrsColumns, numbers: Numbers[bytes]) -> Positions:
    """Objects of ``_STRIDES_AND_OUTPUTS`` and the other attributes; few of them differ."""
    own: Numbers[tuple[bytes, ...]] = Numbers()
    codes = own.codes(list(zip(*others, attrs.rest, strict=True)))
    table = numbers.codes([_object(*entry) for entry in own.entries()])
    codes = table[codes] if len(codes) else codes
    encode = msgspec.json.Encoder().encode
    for row, members in attrs.members.items():
        present = {key: texts[row] for key, texts in zip(_STRIDES_AND_OUTPUTS, others, strict=True) if texts[row]}
        details = {**{key: msgspec.Raw(text) for key, text in present.items()}, **members}
        codes[row] = numbers[encode(details) if details else None]
    return codes


def _object(*texts: bytes) -> bytes | None:
    *values, rest = texts
    members = [
        b'"%s":%s' % (key.encode(), value) for key, value in zip(_STRIDES_AND_OUTPUTS, values, strict=True) if value
    ]
    return b"{%s}" % b",".join([*members, rest] if rest else members) if members or rest else None
