"""Comparing two readings of one file column by column, and rebuilding what the file says from the columns."""

import dataclasses
import json
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np

from chakra_capture.errors import ChakraCaptureError
from chakra_capture.trace.args import ID_ARGS
from chakra_capture.trace.attrs import INT_ATTRS
from chakra_capture.trace.columns import MISSING, Coded, Sparse
from chakra_capture.trace.device import DeviceTrace
from chakra_capture.trace.host import HostTrace
from chakra_capture.trace.packed import Packed

Trace = DeviceTrace | HostTrace


def outcome(read: Callable[..., Trace], path: Path, **how: Any) -> Trace | str:
    """A trace, or the message of the error."""
    try:
        return read(path, **how)
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
    if isinstance(first, Packed):
        return _same(first[:], second[:])
    if isinstance(first, Sparse):
        return _same(first.rows, second.rows) and _same(first.values, second.values)
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(_same(first[key], second[key]) for key in first)
    return bool(first == second)


def texts(column: Coded) -> "np.ndarray[Any, Any]":
    return np.array([*column.values, None], dtype=object)[column.codes]


def load_exact(data: bytes | str) -> Any:
    """json.loads with exact numbers."""
    return json.loads(data, parse_float=Decimal)


def rebuilt_events(trace: DeviceTrace) -> Iterator[dict[str, Any]]:
    """Every row as the event it came from; ids under one spelling, times in nanoseconds."""
    names, categories, phases = texts(trace.name), texts(trace.category), texts(trace.phase_type)
    residue, shapes, types = parsed(trace.residue), parsed(trace.input_shapes), parsed(trace.input_types)
    wide: dict[int, dict[str, int]] = {}
    for key, column in trace.wide.items():
        for row, value in zip(column.rows.tolist(), column.values.tolist(), strict=True):
            wide.setdefault(row, {})[key] = value
    ints = {key: known(c) for key, c in trace.ids.items()}
    pid, tid, ts, dur = known(trace.pid), known(trace.tid), known(trace.ts_ns), known(trace.dur_ns)
    for row in range(trace.num_rows):
        members = {**(residue[row] or {}), **wide.get(row, {})}
        members |= {k: v[row] for k, v in (("Input Dims", shapes), ("Input type", types)) if v[row] is not None}
        members |= {key: c[row] for key, c in ints.items() if c[row] is not None}
        yield {
            "ph": phases[row], "cat": categories[row], "name": names[row], "args": members,
            "pid": pid[row], "tid": tid[row], "ts": ts[row], "dur": dur[row],
        }  # fmt: skip


def parsed(column: Coded) -> "np.ndarray[Any, Any]":
    """Each row's JSON text as its value; None for null."""
    values = np.empty(len(column.values) + 1, dtype=object)
    for number, text in enumerate(column.values):
        values[number] = load_exact(text)
    return values[column.codes]


def known(column: "np.ndarray[Any, Any] | Packed") -> list[int | None]:
    return [None if value == MISSING else value for value in column[:].tolist()]


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
            "args": _with_ids(event.get("args") or {}),
            "pid": _number(event.get("pid")), "tid": _number(event.get("tid")),
            "ts": None if start is None else start + base,
            "dur": None if duration is None or duration < 0 else duration,
        }  # fmt: skip


def _with_ids(args: dict[str, Any]) -> dict[str, Any]:
    members = dict(args)
    for column, keys in ID_ARGS.items():
        # The first of its spellings that is an integer, quoted or not.
        key = next((key for key in keys if _number(members.get(key)) is not None), None)
        if key is not None:
            value = _number(members.pop(key))
            if value or column not in ("record_function_id", "correlation_id"):
                members[column] = value
    return members


def rebuilt_nodes(trace: HostTrace) -> Iterator[dict[str, Any]]:
    """Every row as the node it came from."""
    names, details = texts(trace.name), parsed(trace.details)
    inputs, outputs = parsed(trace.input_values), parsed(trace.output_values)
    shapes, types = parsed(trace.input_shapes), parsed(trace.input_types)
    parents, attrs = known(trace.parent), {key: known(column) for key, column in trace.attrs.items()}
    for row, number in enumerate(trace.node_id[:].tolist()):
        yield {
            "id": number, "name": names[row], "parent": parents[row], "input_shapes": shapes[row],
            "input_types": types[row], "input_values": inputs[row], "output_values": outputs[row],
            **(details[row] or {}), **{key: attrs[key][row] for key in INT_ATTRS},
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


def _number(value: Any) -> int | None:
    if isinstance(value, str):
        return int(value) if value.removeprefix("-").isdigit() else None
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _nanoseconds(value: Any) -> int | None:
    try:
        exact = Decimal(value) * 1000
    except (TypeError, ArithmeticError):
        return None
    return round(exact)
