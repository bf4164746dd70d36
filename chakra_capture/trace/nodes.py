"""Nodes of a host trace as columns, decoded by msgspec: the slow reader, and the layout of the fast one."""

from itertools import chain
from typing import Any

import msgspec
import numpy as np

from chakra_capture.trace import native
from chakra_capture.trace.columns import (
    LARGEST,
    MISSING,
    Int64,
    Rows,
    coded,
    coded_bytes,
    int_column,
    missing,
    parse_ids,
)
from chakra_capture.trace.mend import NODES
from chakra_capture.trace.reading import SlowReader

INT_ATTRS = ("rf_id", "seq_id", "scope", "tid", "fw_tid", "fw_parent")
_NONE = msgspec.Raw(b"[]")
_ABSENT = msgspec.Raw()
_EMPTY_TEXT = b'""'


class _Attr(msgspec.Struct, gc=False):
    name: str
    value: msgspec.Raw


class _Values(msgspec.Struct, gc=False):
    values: msgspec.Raw = _NONE
    shapes: msgspec.Raw = _ABSENT
    types: msgspec.Raw = _ABSENT
    strides: msgspec.Raw = _ABSENT


class _Nested(msgspec.Struct, gc=False):
    """Schema 1.0.2 and later: ``attrs``, and one object each for inputs and outputs."""

    id: int
    name: str
    attrs: list[_Attr]
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
    inputs: msgspec.Raw = _NONE
    input_shapes: msgspec.Raw = _NONE
    input_types: msgspec.Raw = _NONE
    outputs: msgspec.Raw = _NONE
    output_shapes: msgspec.Raw = _ABSENT
    output_types: msgspec.Raw = _ABSENT


class NodeReader(SlowReader):
    """Reads nodes of either layout."""

    shape = NODES

    def restart(self) -> None:
        super().restart()
        self._nested = msgspec.json.Decoder(_Nested)
        self._flat = msgspec.json.Decoder(_Flat)

    def decode(self, text: bytes) -> Any:
        try:
            node: _Nested | _Flat = self._nested.decode(text)
        except msgspec.ValidationError:
            node = self._flat.decode(text)
        return node if abs(node.id) <= LARGEST else "an id out of range"

    def decode_all(self, array: bytes) -> list[Any]:
        try:
            nodes: list[Any] = msgspec.json.decode(array, type=list[_Nested])
        except msgspec.ValidationError:
            nodes = msgspec.json.decode(array, type=list[_Flat])
        if any(abs(node.id) > LARGEST for node in nodes):
            raise msgspec.ValidationError("an id out of range")
        return nodes

    def keep(self, elements: list[Any]) -> list[Any]:
        return elements

    def to_rows(self, elements: list[Any]) -> Rows:
        return node_rows(elements)

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


def node_rows(nodes: list[_Nested | _Flat]) -> Rows:
    """Columns of nodes, whichever layout each has."""
    described = [_describe_nested(n) if isinstance(n, _Nested) else _describe_flat(n) for n in nodes]
    details = [d[1] for d in described]
    attrs = _take_attrs([d[2] for d in described], details)
    # The observer writes 0 for no record function, -1 for no sequence number.
    attrs["rf_id"][attrs["rf_id"] == 0] = MISSING
    attrs["seq_id"][attrs["seq_id"] < 0] = MISSING
    encode = msgspec.json.Encoder().encode
    return Rows(
        ints={
            "node_id": int_column([n.id for n in nodes]),
            "ctrl_deps": int_column([n.ctrl_deps for n in nodes]),
            "parent": int_column([n.parent for n in nodes]),
            **attrs,
        },
        texts={
            "name": coded([n.name for n in nodes]),
            **{key: coded_bytes([bytes(d[0][i]) for d in described]) for i, key in enumerate(_VALUE_TEXTS)},
            "details": coded_bytes([encode(d) if d else None for d in details]),
        },
        wide={},
    )


_VALUE_TEXTS = ("input_shapes", "input_types", "input_values", "output_values")
# The four texts; all else that stays text, by name; the attributes, which are still to be sorted into ints and text.
_Described = tuple[tuple[msgspec.Raw, ...], dict[str, msgspec.Raw], list[_Attr]]
_NO_VALUES = _Values()


def _describe_nested(node: _Nested) -> _Described:
    inputs, outputs = node.inputs or _NO_VALUES, node.outputs or _NO_VALUES
    details = {}
    if inputs.strides is not _ABSENT:
        details["input_strides"] = inputs.strides
    if outputs.shapes is not _ABSENT:
        details["output_shapes"] = outputs.shapes
    if outputs.types is not _ABSENT:
        details["output_types"] = outputs.types
    if outputs.strides is not _ABSENT:
        details["output_strides"] = outputs.strides
    shapes = _NONE if inputs.shapes is _ABSENT else inputs.shapes
    types = _NONE if inputs.types is _ABSENT else inputs.types
    return (shapes, types, inputs.values, outputs.values), details, node.attrs


def _describe_flat(node: _Flat) -> _Described:
    details = {key: raw for key in ("output_shapes", "output_types") if (raw := getattr(node, key)) is not _ABSENT}
    attrs = [_Attr(key, raw) for key in (*INT_ATTRS, "op_schema") if (raw := getattr(node, key)) is not _ABSENT]
    return (node.input_shapes, node.input_types, node.inputs, node.outputs), details, attrs


def _take_attrs(attrs: list[list[_Attr]], details: list[dict[str, msgspec.Raw]]) -> dict[str, Int64]:
    """Columns of the integer attributes; the others that say something go into ``details``."""
    flat = list(chain.from_iterable(attrs))
    owner = np.repeat(np.arange(len(attrs)), [len(each) for each in attrs])
    name = coded([attr.name for attr in flat])
    columns = {}
    for key in INT_ATTRS:
        columns[key] = missing(len(attrs))
        at = np.flatnonzero(name.mask((key,)))
        columns[key][owner[at]] = parse_ids([flat[i].value for i in at.tolist()])
    for i in np.flatnonzero(~name.mask(INT_ATTRS)).tolist():
        attr = flat[i]
        if bytes(attr.value) != _EMPTY_TEXT:
            details[owner[i]][attr.name] = attr.value
    return columns
