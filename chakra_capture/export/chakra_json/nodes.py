"""Nodes of the linked JSON as text: fields of the host trace, times, and what the converter looks for on each node."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from chakra_capture.export.chakra_json.kernels import KernelName
from chakra_capture.export.chakra_json.order import Order
from chakra_capture.export.chakra_json.tables import WindowTables
from chakra_capture.export.chakra_json.waits import Waits
from chakra_capture.trace.columns import MISSING, Int64

NODES_AT_ONCE = 1 << 14
USER_SCOPE = 7
THREAD = "[pytorch|profiler|execution_trace|thread]"
PROCESS = "[pytorch|profiler|execution_trace|process]"
_CATEGORY = {"kernel": "kernel", "memcpy": "gpu_memcpy", "memset": "gpu_memset"}
_COLUMNS = (
    "node_id", "kind", "name", "ts_ns", "dur_ns", "self_dur_ns", "tid", "device", "stream", "record_function_id",
    "sequence_number", "collective", "process_group", "comm_bytes", "input_shapes", "input_types", "args",
)  # fmt: skip
_EMPTY = '"inputs":{"values":[],"shapes":[],"types":[]},"outputs":{"values":[],"shapes":[],"types":[]}'
# As torch's observer names element types of tensors, and their sizes.
_ELEMENTS = {
    "float32": ("float", 4), "float64": ("double", 8), "float16": ("c10::Half", 2), "bfloat16": ("c10::BFloat16", 2),
    "int64": ("long int", 8), "int32": ("int", 4), "int16": ("short int", 2), "int8": ("signed char", 1),
    "uint8": ("unsigned char", 1), "bool": ("bool", 1),
}  # fmt: skip
_BYTE = ("unsigned char", 1)

_LIST, _ABSENT = msgspec.Raw(b"[]"), msgspec.Raw()


class _Side(msgspec.Struct, gc=False):
    """Inputs or outputs of a host op as the tables keep them."""

    values: msgspec.Raw = _LIST
    shapes: msgspec.Raw = _LIST
    types: msgspec.Raw = _LIST
    strides: msgspec.Raw = _ABSENT


class _Args(msgspec.Struct, gc=False):
    cat: str | None = None
    host: dict[str, msgspec.Raw] | None = None


@dataclass(frozen=True, slots=True)
class Facts:
    """What of a window is known beforehand.

    Attributes:
        origin_ns: from which ``ts`` counts.
        own_ns: of each row, see ``waits.own_times``.
        kernels: names of communication kernels by row.
        dtypes: element type of what a communication kernel moves, by row.
        rf_ids: record-function id of each row, ``MISSING`` for none.
    """

    tables: WindowTables
    order: Order
    waits: Waits
    origin_ns: int
    own_ns: Int64
    kernels: dict[int, KernelName]
    dtypes: dict[int, str]
    rf_ids: Int64


def node_texts(facts: Facts) -> Iterator[list[str]]:
    """Give the JSON of all nodes but the process, a block at a time."""
    writer = _Writer(facts)
    for begin in range(0, len(facts.order.row), NODES_AT_ONCE):
        yield writer.block(begin, min(begin + NODES_AT_ONCE, len(facts.order.row)))


def process_text(name: str | None) -> str:
    """The root of all: it names itself as its parent, as torch writes it."""
    attrs = _attrs(0, -1, USER_SCOPE, 0, {})
    return f'{{"id":1,"name":{_text(name or PROCESS)},"ctrl_deps":1,{_EMPTY},"attrs":[{attrs}]}}'


class _Writer:
    def __init__(self, facts: Facts) -> None:
        self._facts = facts
        self._args, self._side = msgspec.json.Decoder(_Args), msgspec.json.Decoder(_Side)
        # Not the number of a track: what stands in attrs as tid.
        self._tids = [0 if tid == MISSING else tid for _, tid in facts.tables.track.pairs]

    def block(self, begin: int, end: int) -> list[str]:
        order, num_rows = self._facts.order, self._facts.tables.num_rows
        row = order.row[begin:end]
        in_table = row < num_rows
        frame = self._facts.tables.read(row[in_table], _COLUMNS)
        given = iter(frame.rows(named=True))
        texts = []
        for number, at, parent, thread, on_device, is_there in zip(
            range(begin + 2, end + 2),
            row.tolist(),
            order.parent[begin:end].tolist(),
            order.thread[begin:end].tolist(),
            order.is_activity[begin:end].tolist(),
            in_table.tolist(),
            strict=True,
        ):
            tid = self._tids[thread] if thread >= 0 else 0
            head = f'{{"id":{number},"ctrl_deps":{parent},'
            if not is_there:
                texts.append(f'{head}"name":{_text(THREAD)},{_EMPTY},"attrs":[{_attrs(0, -1, USER_SCOPE, tid, {})}]}}')
            elif on_device:
                texts.append(head + self._activity(next(given), at, parent, tid))
            else:
                texts.append(head + self._host(next(given), at, number))
        return texts

    def _host(self, node: dict[str, Any], row: int, number: int) -> str:
        args = self._args.decode(node["args"] or "{}")
        host = dict(args.host or {})
        sides = ",".join(
            (
                self._values("inputs", host.pop("inputs", None), node["input_shapes"], node["input_types"]),
                self._values("outputs", host.pop("outputs", None), None, None),
            )
        )
        is_op = node["kind"] == "host_op"
        sequence = node["sequence_number"]
        attrs = _attrs(
            node["record_function_id"] or 0,
            -1 if sequence is None else sequence,
            0 if is_op else USER_SCOPE,
            node["tid"] or 0,
            host,
        )
        times = "" if node["ts_ns"] is None else self._times(node, int(self._facts.own_ns[row]))
        waits = ""
        if node["kind"] != "thread":
            inter_thread = self._facts.waits.inter_thread.get(number)
            sync = ",".join(map(str, self._facts.waits.sync.get(number, ())))
            waits = f',"inter_thread_dep":{"null" if inter_thread is None else inter_thread},"sync_dep":[{sync}]'
        return (
            f'"name":{_text(node["name"] or "")},{sides},"attrs":[{attrs}]{times}{waits},"node_id":{node["node_id"]}}}'
        )

    def _activity(self, node: dict[str, Any], row: int, parent: int, tid: int) -> str:
        named = self._facts.kernels.get(row)
        name = node["name"] or ""
        written = name if named is None else named.name
        kernel = "" if written == name else f',"kernel_name":{_text(name)}'
        category = self._args.decode(node["args"] or "{}").cat or _CATEGORY[node["kind"]]
        rf_id = int(self._facts.rf_ids[self._parent_row(parent)]) if self._parent_row(parent) >= 0 else MISSING
        attrs = _attrs(0 if rf_id == MISSING else rf_id, -1, 0, tid, {})
        values = _EMPTY if named is None else self._moved(node, row)
        times = "" if node["ts_ns"] is None else self._times(node, node["self_dur_ns"])
        group = "" if node["process_group"] is None else f',"pg_name":{_text(node["process_group"])}'
        place = "".join(f',"{key}":{node[key]}' for key in ("device", "stream") if node[key] is not None)
        return (
            f'"name":{_text(written)}{kernel},"cat":{_text(category)},"ph":"X",{values},"attrs":[{attrs}]{times}'
            f'{place}{group},"node_id":{node["node_id"]}}}'
        )

    def _parent_row(self, parent: int) -> int:
        """Row of the table that a number stands for; -1 if it is none."""
        row = int(self._facts.order.row[parent - 2])
        return row if row < self._facts.tables.num_rows else -1

    def _times(self, node: dict[str, Any], own_ns: int | None) -> str:
        length = node["dur_ns"]
        inclusive = "" if length is None else f',"inclusive_dur":{_us(length)}'
        exclusive = "" if own_ns is None else f',"exclusive_dur":{_us(own_ns)}'
        return f'{inclusive}{exclusive},"ts":{_us(node["ts_ns"] - self._facts.origin_ns)}'

    def _values(self, key: str, side: msgspec.Raw | None, shapes: str | None, types: str | None) -> str:
        given = _Side() if side is None else self._side.decode(side)
        shapes = _raw(given.shapes) if shapes is None else shapes
        types = _raw(given.types) if types is None else types
        strides = "" if given.strides == _ABSENT else f',"strides":{_raw(given.strides)}'
        return f'"{key}":{{"values":{_raw(given.values)},"shapes":{shapes},"types":{types}{strides}}}'

    def _moved(self, node: dict[str, Any], row: int) -> str:
        """What a communication kernel moves, as one tensor: the converter adds up the inputs to its size."""
        num_bytes = node["comm_bytes"]
        if num_bytes is None:
            return _EMPTY
        kind, size = _ELEMENTS.get(self._facts.dtypes.get(row, ""), _BYTE)
        if num_bytes % size:
            kind, size = _BYTE
        count = num_bytes // size
        device = _text(f"cuda:{node['device'] or 0}")
        return (
            f'"inputs":{{"values":[[0,0,0,{count},{size},{device}]],"shapes":[[{count}]],"types":["Tensor({kind})"]}},'
            '"outputs":{"values":[],"shapes":[],"types":[]}'
        )


def _attrs(rf_id: int, seq_id: int, scope: int, tid: int, others: dict[str, msgspec.Raw]) -> str:
    """The attributes that the converter reads on every node, and those that the host trace has beside them."""
    schema = _raw(others["op_schema"]) if "op_schema" in others else '""'
    known = (
        f'{{"name":"rf_id","type":"uint64","value":{rf_id}}},{{"name":"fw_parent","type":"uint64","value":0}},'
        f'{{"name":"seq_id","type":"int64","value":{seq_id}}},{{"name":"scope","type":"uint64","value":{scope}}},'
        f'{{"name":"tid","type":"uint64","value":{tid}}},{{"name":"fw_tid","type":"uint64","value":0}},'
        f'{{"name":"op_schema","type":"string","value":{schema}}}'
    )
    return known + "".join(
        f',{{"name":{_text(name)},"type":"{_type(value)}","value":{_raw(value)}}}'
        for name, value in others.items()
        if name != "op_schema"
    )


def _type(value: msgspec.Raw) -> str:
    return "string" if bytes(value)[:1] == b'"' else "uint64"


def _raw(text: msgspec.Raw) -> str:
    return str(bytes(text), "utf-8")


def _text(value: str) -> str:
    return str(msgspec.json.encode(value), "utf-8")


def _us(ns: int) -> str:
    """Nanoseconds as microseconds with all their digits."""
    sign, ns = ("-", -ns) if ns < 0 else ("", ns)
    return f"{sign}{ns // 1000}.{ns % 1000:03d}"


def origin(starts: Int64) -> int:
    """A time before all of them that the ranks of a run share: floats hold what passed since then to the ns."""
    known = starts[starts != MISSING]
    return int(np.min(known)) // 10**15 * 10**15 if len(known) else 0
