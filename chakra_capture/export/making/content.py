"""What stands in each node besides its times: name, type, attributes, and what it belongs to."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl

from chakra_capture.export.anonymize import Anonymizer
from chakra_capture.export.et_schema import NodeType, message
from chakra_capture.export.making.encode import Encodable, add_attribute
from chakra_capture.export.making.window import Nodes, Window
from chakra_capture.merge.rows import group_numbers
from chakra_capture.merge.window import Rows, coded_series
from chakra_capture.trace.columns import MISSING, Coded, Int64
from chakra_capture.trace.merged import MergedTrace
from chakra_capture.trace.schema import KINDS

_US = 1_000
# Time of a thread in which no recorded row runs: Python's own, and waits that nothing shows.
NO_ROW = "(no op)"
_COMM = ("comm_type", "comm_size", "group", "root", "src", "dst", "tag")
# Attributes and the column that they come from.
_NUMBERS = {
    "rf_id": "record_function_id", "seq_id": "sequence_number", "external_id": "external_id",
    "correlation_id": "correlation_id", "step": "step",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Texts:
    """How texts of a trace are written: as they are, or hidden."""

    name: Callable[[str], str] = str
    shapes: Callable[[str], str] = str
    types: Callable[[str], str] = str


def hidden(by: Anonymizer) -> Texts:
    """Texts as an anonymous export has them."""
    return Texts(by.name, by.shapes, by.types)


def astra_content(rows: Rows, made: Window, operations: pl.DataFrame, texts: Texts) -> Encodable:
    """What ASTRA-sim reads, and the names."""
    nodes = made.nodes
    columns = _comm_columns(nodes, operations)
    name = _codes(rows.name, nodes.row)
    stream = _at(rows.stream, np.where(nodes.on_cpu, -1, nodes.row))
    kinds = _Kinds(rows, texts)
    kind, shared = _numbered((name, nodes.on_cpu.astype(np.int64), stream, *columns), kinds.astra)
    return _encodable(nodes, kind, shared)


def full_content(
    trace: MergedTrace, window: int, rows: Rows, made: Window, operations: pl.DataFrame, texts: Texts
) -> Encodable:
    """All that the tables have of each node; rows that run nothing of their own become METADATA_NODEs."""
    nodes = _with_markers(rows, made.nodes)
    table = trace.some_of_nodes("window", "input_shapes", "input_types", "phase", *_NUMBERS.values())
    table = table.filter(pl.col("window") == window)
    shapes, types, phase = (coded_series(table[name]) for name in ("input_shapes", "input_types", "phase"))
    first = _first_nodes(nodes)
    kinds = _Kinds(rows, texts, shapes, types, phase)
    columns = (
        _codes(rows.name, nodes.row),
        nodes.on_cpu.astype(np.int64),
        _at(rows.stream, np.where(nodes.on_cpu, -1, nodes.row)),
        *_comm_columns(nodes, operations),
        _marks(nodes),
        _at(rows.kind.astype(np.int64), nodes.row),
        _at(rows.device, nodes.row),
        *_threads(rows, nodes),
        _codes(shapes, first),
        _codes(types, first),
        _codes(phase, nodes.row),
    )
    kind, shared = _numbered(columns, kinds.full)
    numbers = {"start_ns": nodes.start_ns, "dur_ns": nodes.duration_ns, "node_id": _at_or_missing(rows, nodes.row)}
    for name, column in _NUMBERS.items():
        found = _at(table[column].fill_null(MISSING).to_numpy(), nodes.row)
        numbers[name] = np.where(found < 0, MISSING, found)
    return _encodable(nodes, kind, shared, _callers(rows, made, nodes), numbers)


def _encodable(
    nodes: Nodes,
    kind: Int64,
    kinds: list[bytes],
    ctrl: Int64 | None = None,
    numbers: dict[str, Int64] | None = None,
) -> Encodable:
    size = len(nodes)
    return Encodable(
        ids=np.arange(1, size + 1),
        kind=kind,
        kinds=kinds,
        start_us=np.maximum(nodes.start_ns, 0) // _US,
        duration_us=nodes.duration_us,
        data_first=np.searchsorted(nodes.dst, np.arange(size + 1)),
        data_deps=nodes.src + 1,
        ctrl_deps=ctrl,
        numbers=numbers or {},
    )


def _numbered(columns: tuple[Int64, ...], make: Callable[[tuple[int, ...]], bytes]) -> tuple[Int64, list[bytes]]:
    """Number the distinct rows of some columns, and make the bytes of each."""
    code = np.zeros(len(columns[0]), dtype=np.int64)
    for column in columns:
        code = group_numbers(code, column)
    _, first = np.unique(code, return_index=True)
    return code, [make(tuple(int(column[at]) for column in columns)) for at in first.tolist()]


def _codes(texts: Coded, row: Int64) -> Int64:
    return _at(texts.codes.astype(np.int64), row, -1)


def _at(values: Int64, row: Int64, none: int = MISSING) -> Int64:
    if not len(values):
        return np.full(len(row), none)
    return np.where(row >= 0, values[np.maximum(row, 0)], none)


def _at_or_missing(rows: Rows, row: Int64) -> Int64:
    return np.where(row >= 0, row + rows.first, MISSING)


def _comm_columns(nodes: Nodes, operations: pl.DataFrame) -> list[Int64]:
    """Type of each node, and what its communication operation states, ``MISSING`` for nothing."""
    columns = [operations[name].cast(pl.Int64).fill_null(MISSING).to_numpy() for name in _COMM]
    types = operations["node_type"].cast(pl.Int64).to_numpy()
    return [_at(types, nodes.operation, int(NodeType.COMP_NODE)), *(_at(one, nodes.operation) for one in columns)]


def _with_markers(rows: Rows, nodes: Nodes) -> Nodes:
    """Add a node for each row that has none; it has no duration, and nothing waits for it."""
    has = np.zeros(len(rows), dtype=bool)
    has[nodes.row[nodes.row >= 0]] = True
    row = np.flatnonzero(~has)
    known = rows.start != MISSING
    first = int(rows.start[known].min()) if known.any() else 0
    start = np.where(known[row], rows.start[row], first)
    order = np.argsort(np.concatenate([start, nodes.start_ns]), kind="stable")
    # Those that run keep the order in which they can.
    is_marker = order < len(row)
    order[~is_marker] = len(row) + np.arange(len(nodes))
    place = np.empty(len(order), dtype=np.int64)
    place[order] = np.arange(len(order))
    moved = place[len(row) :]
    lasts = np.where(rows.is_timed[row], rows.end[row] - np.where(known[row], rows.start[row], 0), 0)
    none = np.full(len(row), -1)
    sort = np.argsort(moved[nodes.dst], kind="stable")
    return Nodes(
        np.concatenate([row, nodes.row])[order],
        np.concatenate([start, nodes.start_ns])[order],
        np.concatenate([lasts, nodes.duration_ns])[order],
        np.concatenate([np.zeros(len(row), dtype=np.int64), nodes.duration_us])[order],
        np.concatenate([rows.track[row], nodes.lane])[order],
        np.concatenate([~rows.is_kind("device_annotation", "sync")[row], nodes.on_cpu])[order],
        np.concatenate([none - 1, nodes.operation])[order],
        moved[nodes.src][sort],
        moved[nodes.dst][sort],
    )


def _threads(rows: Rows, nodes: Nodes) -> tuple[Int64, Int64]:
    """Process and thread of each node; where no row runs, those of its lane."""
    tracks, row_of_track = np.unique(rows.track, return_index=True)
    row = np.where(nodes.row >= 0, nodes.row, row_of_track[np.searchsorted(tracks, nodes.lane)])
    return rows.pid[row], rows.tid[row]


def _first_nodes(nodes: Nodes) -> Int64:
    """The row of each node that is the first of its row, -1 of the others: what is long is written once."""
    rows, first = np.unique(nodes.row, return_index=True)
    found = np.full(len(nodes), -1)
    found[first] = rows
    return found


def _marks(nodes: Nodes) -> Int64:
    """Which nodes run nothing."""
    return (nodes.operation < -1).astype(np.int64)


def _callers(rows: Rows, made: Window, nodes: Nodes) -> Int64:
    """Id of the node with which the row around each begins, where that comes before; ``MISSING`` else."""
    runs = nodes.on_cpu & (nodes.row >= 0) & ~_marks(nodes).astype(bool)
    begins = np.full(len(rows) + 1, -1)
    at = np.flatnonzero(runs)[::-1]
    begins[nodes.row[at]] = at
    around = np.where(rows.is_activity, rows.parent, made.segments.parent)
    caller = begins[_at(around, nodes.row, -1)]
    comes_before = (caller >= 0) & (caller < np.arange(len(nodes)))
    return np.where(comes_before, caller + 1, MISSING)


class _Kinds:
    """Makes the bytes that nodes of one kind share."""

    def __init__(self, rows: Rows, texts: Texts, *coded: Coded) -> None:
        self._name = [texts.name(one) for one in rows.name.values]
        shapes, types, phase = coded or (None, None, None)
        self._shapes = [texts.shapes(one) for one in shapes.values] if shapes else []
        self._types = [texts.types(one) for one in types.values] if types else []
        self._phase = list(phase.values) if phase else []

    def astra(self, values: tuple[int, ...]) -> bytes:
        data: bytes = self._node(*values).SerializeToString(deterministic=True)
        return data

    def _node(self, name: int, on_cpu: int, stream: int, node_type: int, *comm: int) -> Any:
        node = message("Node")(name=self._name[name] if name >= 0 else NO_ROW, type=node_type)
        add_attribute(node.attr.add(), "is_cpu_op", bool(on_cpu))
        if stream != MISSING:
            add_attribute(node.attr.add(), "stream", stream)
        comm_type, comm_size, group, root, *ends = comm
        if comm_type != MISSING:
            add_attribute(node.attr.add(), "comm_type", comm_type)
        if comm_size != MISSING:
            add_attribute(node.attr.add(), "comm_size", comm_size)
        if group > 0:
            add_attribute(node.attr.add(), "pg_name", str(group))
        if root != MISSING:
            add_attribute(node.attr.add(), "root_rank", root)
        for key, value in zip(("comm_src", "comm_dst", "comm_tag"), ends, strict=True):
            if value != MISSING:
                node.attr.add(name=key, int32_val=value)
        return node

    def full(self, values: tuple[int, ...]) -> bytes:
        basic, (marks, kind, device, pid, tid, shapes, types, phase) = values[:11], values[11:]
        node = self._node(*basic)
        if marks:
            node.type = int(NodeType.METADATA_NODE)
        if kind != MISSING:
            add_attribute(node.attr.add(), "kind", KINDS[kind])
        for key, value in (("device", device), ("pid", pid), ("tid", tid)):
            if value != MISSING:
                add_attribute(node.attr.add(), key, value)
        if phase >= 0:
            add_attribute(node.attr.add(), "phase", self._phase[phase])
        if shapes >= 0:
            node.inputs.shapes = self._shapes[shapes]
        if types >= 0:
            node.inputs.types = self._types[types]
        data: bytes = node.SerializeToString(deterministic=True)
        return data
