"""Comparing two readings of one file column by column, and rebuilding what the file says from the columns."""

import dataclasses
import json
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np

from chakra_capture.errors import ChakraCaptureError
from chakra_capture.trace.columns import MISSING, Coded, Sparse
from chakra_capture.trace.device import DeviceTrace
from chakra_capture.trace.events import ID_ARGS
from chakra_capture.trace.host import HostTrace
from chakra_capture.trace.nodes import INT_ATTRS

Trace = DeviceTrace | HostTrace
Read = Callable[[], Trace]


def outcome(read: Read) -> Trace | str:
    """A trace, or the message of the error."""
    try:
        return read()
    except ChakraCaptureError as error:
        return f"{type(error).__name__}: {error}"


def differences(first: Trace | str, second: Trace | str) -> list[str]:
    """Fields that differ between two readings; the scanner's name is allowed to."""
    if isinstance(first, str) or isinstance(second, str):
        return [] if first == second else [f"{first!s:.300} != {second!s:.300}"]
    fields = [field.name for field in dataclasses.fields(first) if field.name != "scanner"]
    return [name for name in fields if not _same(getattr(first, name), getattr(second, name))]


def _same(first: Any, second: Any) -> bool:
    if isinstance(first, Coded):
        return len(first) == len(second) and bool((texts(first) == texts(second)).all())
    if isinstance(first, np.ndarray):
        return first.dtype == second.dtype and np.array_equal(first, second)
    if isinstance(first, Sparse):
        return _same(first.rows, second.rows) and _same(first.values, second.values)
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(_same(first[key], second[key]) for key in first)
    return bool(first == second)


def texts(column: Coded) -> "np.ndarray[Any, Any]":
    return np.array([*column.values, None], dtype=object)[column.codes]


def load_exact(data: bytes) -> Any:
    """json.loads with every number as its Decimal."""
    return json.loads(data, parse_float=Decimal, parse_int=Decimal)


def rebuilt_events(trace: DeviceTrace) -> Iterator[dict[str, Any]]:
    """Every row as the event it came from; ids under one spelling, times in nanoseconds."""
    names, categories, phases = texts(trace.name), texts(trace.category), texts(trace.phase_type)
    args, shapes, types = texts(trace.args), texts(trace.input_shapes), texts(trace.input_types)
    for row in range(trace.num_rows):
        members = load_exact(args[row]) if args[row] else {}
        for key, text in (("Input Dims", shapes[row]), ("Input type", types[row])):
            if text is not None:
                members[key] = load_exact(text)
        members |= {key: Decimal(int(c[row])) for key, c in trace.ids.items() if c[row] != MISSING}
        yield {
            "ph": phases[row], "cat": categories[row], "name": names[row], "args": members,
            "pid": _known(trace.pid[row]), "tid": _known(trace.tid[row]),
            "ts": _known(trace.ts_ns[row]), "dur": _known(trace.dur_ns[row]),
        }  # fmt: skip


def expected_events(file: Any) -> Iterator[dict[str, Any]]:
    """The same from json.loads alone."""
    base = 0 if isinstance(file, list) else int(file.get("baseTimeNanoseconds", 0))
    events = file if isinstance(file, list) else file["traceEvents"]
    rows = [e for e in events if e.get("ph") in ("X", "i", "I")]
    starts = [_nanoseconds(e.get("ts")) for e in rows]
    # A time on the Unix epoch already stays as it is.
    if sorted(s for s in starts if s is not None)[len(rows) // 2] > base // 2:
        base = 0
    for event, start in zip(rows, starts, strict=True):
        duration = 0 if event["ph"] != "X" else _nanoseconds(event.get("dur"))
        yield {
            "ph": event["ph"], "cat": event.get("cat"), "name": event.get("name", ""),
            "args": _with_ids(event.get("args") or {}), "pid": _number(event.get("pid")), "tid": _number(event.get("tid")),
            "ts": None if start is None else start + base,
            "dur": None if duration is None or duration < 0 else duration,
        }  # fmt: skip


def _with_ids(args: dict[str, Any]) -> dict[str, Any]:
    members = dict(args)
    for column, keys in ID_ARGS.items():
        for key in keys:
            value = _number(members.get(key))
            if value is not None and column not in members:
                del members[key]
                if value or column not in ("record_function_id", "correlation_id"):
                    members[column] = Decimal(value)
    return members


def rebuilt_nodes(trace: HostTrace) -> Iterator[dict[str, Any]]:
    """Every row as the node it came from."""
    names, shapes, types, rest = (texts(c) for c in (trace.name, trace.input_shapes, trace.input_types, trace.rest))
    for row in range(trace.num_nodes):
        yield {
            "id": int(trace.node_id[row]), "name": names[row], "parent": _known(trace.parent[row]),
            "input_shapes": load_exact(shapes[row]), "input_types": load_exact(types[row]), **load_exact(rest[row]),
            **{key: _known(trace.attrs[key][row]) for key in INT_ATTRS},
        }  # fmt: skip


def expected_nodes(file: Any) -> Iterator[dict[str, Any]]:
    """The same from json.loads alone: one shape for both layouts, an empty text as none."""
    for node in {int(n["id"]): n for n in file["nodes"]}.values():
        nested = "attrs" in node
        attrs = {a["name"]: a["value"] for a in node["attrs"]} if nested else dict(node)
        inputs = node["inputs"] if nested else {"values": node["inputs"]}
        outputs = node["outputs"] if nested else {"values": node["outputs"]}
        parent = _number(node.get("ctrl_deps", node.get("parent")))
        ints = {key: _number(attrs.get(key)) for key in INT_ATTRS}
        ints["rf_id"] = ints["rf_id"] or None
        ints["seq_id"] = None if ints["seq_id"] is None or ints["seq_id"] < 0 else ints["seq_id"]
        known = {*INT_ATTRS, "id", "name", "parent", "ctrl_deps", "inputs", "outputs", "input_shapes", "input_types"}
        yield {
            "id": int(node["id"]), "name": node["name"], "parent": None if parent == int(node["id"]) else parent,
            "input_shapes": inputs.get("shapes", node.get("input_shapes", [])),
            "input_types": inputs.get("types", node.get("input_types", [])),
            "input_values": inputs["values"], "output_values": outputs["values"],
            **{f"input_{k}": inputs[k] for k in ("strides",) if k in inputs},
            **{f"output_{k}": outputs[k] for k in ("shapes", "types", "strides") if k in outputs},
            **{key: value for key, value in attrs.items() if key not in known and value != ""}, **ints,
        }  # fmt: skip


def _known(value: Any) -> int | None:
    return None if value == MISSING else int(value)


def _number(value: Any) -> int | None:
    if isinstance(value, str):
        return int(value) if value.removeprefix("-").isdigit() else None
    return int(value) if isinstance(value, Decimal) and value == value.to_integral_value() else None


def _nanoseconds(value: Any) -> int | None:
    try:
        exact = Decimal(value) * 1000
    except (TypeError, ArithmeticError):
        return None
    return round(exact)


def as_file(folder: Path, data: bytes) -> Path:
    path = folder / "trace.json"
    path.write_bytes(data)
    return path
