"""Reading a host trace (ExecutionTraceObserver), schemas 1.0.1 to 1.1.1, into columns."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from chakra_capture.errors import TraceFileError
from chakra_capture.trace.columns import LARGEST, MISSING, Coded, Int64, coded, int_column
from chakra_capture.trace.files import FileBytes, read_bytes
from chakra_capture.trace.salvage import NODES, Salvage, elements

USER_SCOPE = 7
"""``scope`` of an annotation (torch RecordScope::USER_SCOPE)."""

_KNOWN_SCHEMAS = ("1.0.1", "1.0.2", "1.0.3", "1.0.4", "1.1.0", "1.1.1")
_INT_ATTRS = ("rf_id", "seq_id", "scope", "tid", "fw_tid", "fw_parent")
_PROCESS = re.compile(r"\[pytorch\|profiler\|execution_(?:graph|trace)\|process\]")
_THREAD = re.compile(r"\[pytorch\|profiler\|execution_(?:graph|trace)\|thread\]")


class _Attr(msgspec.Struct, gc=False):
    name: str
    value: Any = None


class _Values(msgspec.Struct, gc=False, omit_defaults=True):
    values: msgspec.Raw = msgspec.Raw(b"[]")
    shapes: msgspec.Raw = msgspec.Raw(b"[]")
    types: msgspec.Raw = msgspec.Raw(b"[]")
    strides: msgspec.Raw = msgspec.Raw(b"[]")


class _Node(msgspec.Struct, gc=False):
    id: int
    name: str
    ctrl_deps: int | None = None
    attrs: list[_Attr] | None = None
    inputs: _Values | list[Any] | None = None
    outputs: _Values | list[Any] | None = None
    # schema 1.0.1: flat
    parent: int | None = None
    rf_id: int | None = None
    seq_id: int | None = None
    scope: int | None = None
    tid: int | None = None
    fw_tid: int | None = None
    fw_parent: int | None = None
    op_schema: str | None = None
    input_shapes: msgspec.Raw = msgspec.Raw(b"[]")
    input_types: msgspec.Raw = msgspec.Raw(b"[]")
    output_shapes: msgspec.Raw = msgspec.Raw(b"[]")
    output_types: msgspec.Raw = msgspec.Raw(b"[]")


class _File(msgspec.Struct):
    nodes: list[_Node] | None = None
    schema: str | None = None
    pid: int | None = None
    finish_ts: int | None = None


@dataclass(frozen=True, slots=True)
class HostTrace:
    """One host trace; every array has one entry per node, in file order.

    Attributes:
        parent: id of the parent node (``ctrl_deps``), ``MISSING`` for the root.
        attrs: ``rf_id``, ``seq_id``, ``scope``, ``tid``, ``fw_tid``, ``fw_parent`` as written; an
            ``rf_id`` of 0 or a ``seq_id`` of -1 means none and is ``MISSING``.
        rest: JSON text of inputs, outputs and the attributes that have no column.
        cycles: ids of each cycle in ``ctrl_deps``; the parent of its first, smallest id was taken away.
        is_process, is_thread: the observer's own root nodes.
    """

    path: Path
    schema: str | None
    pid: int | None
    finished: bool
    node_id: Int64
    parent: Int64
    name: Coded
    attrs: dict[str, Int64]
    input_shapes: Coded
    input_types: Coded
    rest: Coded
    num_duplicate_ids: int
    cycles: tuple[tuple[int, ...], ...]
    notes: tuple[str, ...]
    salvage: Salvage

    @property
    def num_nodes(self) -> int:
        return len(self.node_id)

    @property
    def is_process(self) -> "np.typing.NDArray[np.bool_]":
        return self.name.mask_of(np.array([bool(_PROCESS.fullmatch(v)) for v in self.name.values], dtype=bool))

    @property
    def is_thread(self) -> "np.typing.NDArray[np.bool_]":
        return self.name.mask_of(np.array([bool(_THREAD.fullmatch(v)) for v in self.name.values], dtype=bool))


def read_host_trace(path: Path) -> HostTrace:
    """Read a host trace, plain or gzip; a damaged one is read as far as it is whole.

    Raises:
        TraceFileError: the file is missing, or holds no nodes.
    """
    file = read_bytes(path)
    salvage = Salvage()
    if file.cut:
        salvage.note(file.cut)
    try:
        parsed = msgspec.json.decode(file.data, type=_File)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        salvage.note(f"not valid as a whole ({error}), read element by element")
        parsed = _decode_elements(file, salvage)
    if not parsed.nodes:
        raise TraceFileError(
            f"{path} is no host trace: it has no 'nodes'. Give the JSON that the ExecutionTraceObserver wrote."
        )
    if parsed.finish_ts is None:
        salvage.note("not finalised (no finish_ts)")
    return _columns(path, parsed, salvage)


def _decode_elements(file: FileBytes, salvage: Salvage) -> _File:
    if not re.search(rb'"nodes"\s*:\s*\[', file.data):
        return _File()
    nodes: list[_Node] = []
    decoder = msgspec.json.Decoder(_Node)
    for text in elements(file.data, NODES, salvage):
        try:
            nodes.append(decoder.decode(text))
        except msgspec.ValidationError:
            salvage.elements_lost += 1
            salvage.note("node with a field of a wrong type skipped")
    schema = re.search(rb'"schema"\s*:\s*"([^"\n]{1,60})"', file.data[:4096])
    pid = re.search(rb'"pid"\s*:\s*(\d{1,18})', file.data[:4096])
    finish = re.search(rb'"finish_ts"\s*:\s*(\d{1,18})', file.data[-4096:])
    return _File(
        nodes=nodes,
        schema=schema.group(1).decode("utf-8", "replace") if schema else None,
        pid=int(pid.group(1)) if pid else None,
        finish_ts=int(finish.group(1)) if finish else None,
    )


def _columns(path: Path, parsed: _File, salvage: Salvage) -> HostTrace:
    nodes = [node for node in parsed.nodes or () if -LARGEST <= node.id <= LARGEST]
    for _ in range(len(parsed.nodes or ()) - len(nodes)):
        salvage.elements_lost += 1
        salvage.note("node with an id out of range skipped")
    unique = list({node.id: node for node in nodes}.values())
    parent = {node.id: _parent(node) for node in unique}
    cycles = find_cycles(parent)
    for cycle in cycles:
        parent[cycle[0]] = None
    if cycles:
        name_of = {node.id: node.name[:40] for node in unique}
        names = ", ".join(f"{number} {name_of[number]}" for number in cycles[0][:4])
        salvage.note(f"{len(cycles)} cycle(s) in ctrl_deps broken, first: {names}")
    dangling = sum(p is not None and p not in parent for p in parent.values())
    described = [_flat(node) if node.attrs is None else _nested(node) for node in unique]
    attrs = {key: int_column(d.attrs.get(key) for d in described) for key in _INT_ATTRS}
    attrs["rf_id"][attrs["rf_id"] == 0] = MISSING
    attrs["seq_id"][attrs["seq_id"] < 0] = MISSING
    return HostTrace(
        path=path,
        schema=parsed.schema,
        pid=parsed.pid if parsed.pid is not None and abs(parsed.pid) <= LARGEST else None,
        finished=parsed.finish_ts is not None,
        node_id=int_column(node.id for node in unique),
        parent=int_column(parent.values()),
        name=coded(node.name for node in unique),
        attrs=attrs,
        input_shapes=coded(str(bytes(d.shapes), "utf-8", "replace") for d in described),
        input_types=coded(str(bytes(d.types), "utf-8", "replace") for d in described),
        rest=coded(str(msgspec.json.encode(d.rest), "utf-8", "replace") for d in described),
        num_duplicate_ids=len(nodes) - len(unique),
        cycles=tuple(cycles),
        notes=tuple(_notes(parsed.schema, dangling)),
        salvage=salvage,
    )


def find_cycles(parent: dict[int, int | None]) -> list[tuple[int, ...]]:
    """Cycles of a parent map, each as its ids from the smallest on; a node that names itself is none."""
    cycles: list[tuple[int, ...]] = []
    seen: dict[int, int] = {}
    for number, start in enumerate(parent):
        path: list[int] = []
        at: int | None = start
        while at is not None and at in parent and at not in seen:
            seen[at] = number
            path.append(at)
            at = parent[at]
        if at is not None and seen.get(at) == number and path:
            ring = path[path.index(at) :]
            first = ring.index(min(ring))
            cycles.append((*ring[first:], *ring[:first]))
    return cycles


def _notes(schema: str | None, num_dangling: int) -> list[str]:
    notes = []
    if schema is None or schema.split("-")[0] not in _KNOWN_SCHEMAS:
        notes.append(f"unknown host trace schema {schema!r}, read by its layout")
    if num_dangling:
        notes.append(f"{num_dangling} nodes name a parent that is not in the file; they stand without one")
    return notes


@dataclass(slots=True)
class _Described:
    """One node in the shape that both layouts are brought to."""

    attrs: dict[str, Any]
    shapes: msgspec.Raw
    types: msgspec.Raw
    rest: dict[str, Any]


def _flat(node: _Node) -> _Described:
    """Schema 1.0.1: every attribute is a key of the node."""
    rest: dict[str, Any] = {
        "inputs": {"values": node.inputs},
        "outputs": {"values": node.outputs, "shapes": node.output_shapes, "types": node.output_types},
    }
    if node.op_schema:
        rest["op_schema"] = node.op_schema
    return _Described({key: getattr(node, key) for key in _INT_ATTRS}, node.input_shapes, node.input_types, rest)


def _nested(node: _Node) -> _Described:
    """Schema 1.0.2 and later: ``attrs``, and one object each for inputs and outputs."""
    attrs = {attr.name: attr.value for attr in node.attrs or ()}
    inputs = node.inputs if isinstance(node.inputs, _Values) else _Values()
    rest: dict[str, Any] = {"inputs": {"values": inputs.values, "strides": inputs.strides}, "outputs": node.outputs}
    rest |= {key: value for key, value in attrs.items() if key not in _INT_ATTRS and value != ""}
    return _Described(attrs, inputs.shapes, inputs.types, rest)


def _parent(node: _Node) -> int | None:
    parent = node.ctrl_deps if node.ctrl_deps is not None else node.parent
    return None if parent == node.id else parent  # the process root names itself
