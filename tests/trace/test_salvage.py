"""Damaged files: what is whole or can be mended is read, what is lost is counted by cause, on both paths alike."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from builder import TraceBuilder
from handed import CASES, SAMPLES, require
from same import differences, outcome

from chakra_capture.errors import TraceFileError
from chakra_capture.trace import native
from chakra_capture.trace.device import DeviceTrace, read_device_trace
from chakra_capture.trace.files import Limits
from chakra_capture.trace.host import HostTrace, read_host_trace
from chakra_capture.trace.reading import ReadOptions
from chakra_capture.trace.scanners import ScannerKind

KINDS = [ScannerKind.MSGSPEC, *([ScannerKind.NATIVE] if native.load() else [])]


def both(read: Callable[..., Any], path: Path) -> Any:
    """Read by each path there is; they must agree."""
    found = [outcome(read, path, scanner=kind) for kind in KINDS]
    assert differences(found[0], found[-1]) == []
    return found[-1]


def device(path: Path) -> DeviceTrace:
    trace = both(read_device_trace, path)
    assert isinstance(trace, DeviceTrace), trace
    return trace


def host(path: Path) -> HostTrace:
    trace = both(read_host_trace, path)
    assert isinstance(trace, HostTrace), trace
    return trace


def refused(read: Callable[..., Any], path: Path) -> str:
    message = both(read, path)
    assert isinstance(message, str), "a trace came out of it"
    assert message.startswith(f"TraceFileError: {path}"), message
    return message


def written(tmp_path: Path, text: str | bytes) -> Path:
    path = tmp_path / "d.json"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def event(name: str, **more: Any) -> str:
    return json.dumps({"ph": "X", "cat": "cpu_op", "name": name, "pid": 1, "tid": 2, "ts": 1, "dur": 1, **more})


def names(trace: DeviceTrace | HostTrace) -> list[str | None]:
    return [trace.name[row] for row in range(len(trace.name))]


def repairs(trace: DeviceTrace | HostTrace) -> dict[str, int]:
    return {text: cause.count for text, cause in trace.salvage.causes.items()}


# --- handed cases


def case(number: str) -> Path:
    return require(next(iter(sorted(CASES.glob(f"{number}-*"))), CASES / number))


@pytest.mark.parametrize(("file", "events"), [("rank-0.json", 21), ("rank-0-cut.json.gz", 14)])
def test_killed_export_says_what_is_cut_where_and_what_precedes(file: str, events: int) -> None:
    trace = device(case("001") / file)
    assert trace.num_events == events
    cut, *more = trace.salvage.notes
    assert cut.startswith("truncated at byte ")
    assert cut.endswith(f", after {events} whole events")
    assert more == (["truncated gzip"] if file.endswith("gz") else [])
    if file == "rank-0.json":
        assert trace.category.mask(("kernel",)).sum() == 2
        assert "truncated at byte 5055, inside the event that begins at byte 4964" in cut


def test_trailing_comma_is_one_repair() -> None:
    trace, clean = (device(case("002") / file) for file in ("rank-0.json", "clean.json"))
    assert repairs(trace) == {"surplus comma": 1}
    assert [d for d in differences(trace, clean) if d not in ("path", "salvage")] == []


def test_backslash_that_starts_no_escape_is_literal() -> None:
    trace = device(case("005") / "rank-0.json")
    assert "torch\\cuda\\__init__.py(219): _lazy_init" in trace.name.values
    assert (trace.salvage.elements_repaired, trace.salvage.elements_lost) == (1, 0)


def test_control_characters_and_bad_utf8_are_replaced_in_one_name() -> None:
    trace = device(case("006") / "rank-0.json")
    assert (trace.num_events, trace.salvage.elements_repaired) == (28, 1)
    assert sum("�" in name for name in trace.name.values) == 1


def test_byte_order_marks_and_escapes_make_no_difference() -> None:
    first, *others = (device(case("008") / f"{name}.json") for name in ("raw-bom", "escaped", "utf16"))
    for other in others:
        assert [d for d in differences(first, other) if d != "path"] == []
    assert {"triton_poi_fused_加法_relu_0", "void k<(anonymous)::模型>(float*)"} <= set(first.name.values)


def test_killed_host_trace_keeps_its_whole_nodes() -> None:
    trace = host(case("030") / "et.json")
    assert (trace.num_nodes, trace.finished) == (11, False)
    assert "not finalised (no finish_ts)" in trace.salvage.notes


def test_bare_infinities_are_read_as_torch_writes_them_today() -> None:
    bare, quoted = (host(case("032") / f"et-{name}.json") for name in ("bare", "torch2.13"))
    assert [d for d in differences(bare, quoted) if d not in ("path", "salvage")] == []
    assert (bare.num_nodes, bare.salvage.elements_repaired) == (18, 5)


def test_gzip_is_known_by_its_first_bytes() -> None:
    first, *others = (host(case("040") / name) for name in ("et.json.gz", "gz-named-json.json", "plain-named.json.gz"))
    assert first.num_nodes == 14
    assert all([d for d in differences(first, other) if d != "path"] == [] for other in others)


def test_three_thousand_nested_ops_are_read() -> None:
    assert host(case("041") / "et.json.gz").num_nodes == 3002


# As the host trace says it, and as Kineto, which replaces some characters itself.
READABLE = {
    "quote": ('only"quote', 'only"quote'), "backslash": ("back\\slash", "back/slash"),
    "newline": ("nl\nx", "nlx"), "utf8": ("模型 é", "unknown"),
}  # fmt: skip


@pytest.mark.parametrize("what", READABLE)
def test_names_that_break_json_stay_readable(what: str) -> None:
    folder = case("058")
    nodes, events = host(folder / f"{what}-et.json"), device(folder / f"{what}-kineto.json")
    assert (nodes.num_nodes, events.num_events) == (11, 20)
    assert nodes.salvage.elements_lost == events.salvage.elements_lost == 0
    assert READABLE[what][0] in nodes.name.values
    assert READABLE[what][1] in events.name.values


DAMAGED = [
    # file, nodes, ids seen twice, finished, note
    ("killed_sigterm", 926, 0, False, "truncated at byte 935402, after 926 whole nodes"),
    ("disk_full_truncated", 200, 0, False, "truncated at byte 200000, inside the node that begins at byte 199461"),
    ("fork_child_finalized", 618, 199, True, "more nodes after an early end, as a forked process writes"),
    ("bad_annotation_name", 11, 0, True, "unescaped quote in a text"),
]


@pytest.mark.parametrize(("file", "nodes", "twice", "finished", "note"), DAMAGED)
def test_damaged_sample(file: str, nodes: int, twice: int, finished: bool, note: str) -> None:
    trace = host(require(SAMPLES / "damaged" / f"{file}.et.json"))
    assert (trace.num_nodes, trace.num_duplicate_ids, trace.finished) == (nodes, twice, finished)
    assert trace.salvage.notes[0].startswith(note)


# --- one damage at a time

MENDED = [
    # the damaged element; the name read; the causes
    ('{"ph": "X", "name": "a"b", "ts": 1, "dur": 1}', 'a"b', ["unescaped quote in a text"]),
    ('{"ph": "X", "ts": 1, "dur": 1, "name": "a "quoted" name"}', 'a "quoted" name', ["unescaped quote in a text"]),
    ('{"ph": "X", "name": "{"a": "b"}", "ts": 1, "dur": 1}', '{"a": "b"}', ["unescaped quote in a text"]),
    (r'{"ph": "X", "name": "C:\dir\", "ts": 1, "dur": 1}', "C:\\dir\\", ["backslash in a text taken literally"]),
    ('{"ph": "X", "name": "a\nb\x01", "ts": 1, "dur": 1}', "a\nb\x01", ["control character in a text kept"]),
    (r'{"ph": "X", "name": "\ud800x", "ts": 1, "dur": 1}', "�x", ["half a surrogate pair replaced"]),
    ('{"ph": "X", "name": "x", "ts": 1, "dur": 1, "tdur": NaN}', "x", ["NaN or infinity kept as text"]),
    ('{"ph": "X", "name": "x", "ts": 1, "dur": 1, "args": {"a": -Infinity, "b": [nan, inf]}}', "x",
     ["NaN or infinity kept as text"]),
    ('{"ph": "X", "name": "x", "ts": 1, "dur": 1, "args": {"a": [1, 2,],},}', "x", ["surplus comma"]),
]  # fmt: skip


@pytest.mark.parametrize(("text", "name", "causes"), MENDED)
def test_damaged_event_is_mended(text: str, name: str, causes: list[str], tmp_path: Path) -> None:
    path = written(tmp_path, f'{{"traceEvents": [{event("before")},\n{text},\n{event("after")}], "x": 1}}')
    trace = device(path)
    assert names(trace) == ["before", name, "after"]
    assert repairs(trace) == dict.fromkeys(causes, 1)
    assert all(c.first_byte == path.read_bytes().index(text.encode()) for c in trace.salvage.causes.values())
    assert (trace.salvage.elements_repaired, trace.salvage.elements_lost) == (1, 0)


LOST = [
    # what stands between two events; the note
    ('{"ph": "X", "name": "x", "ts": }', "damaged event skipped"),
    ('{"ph": "X", "name": "x" "ts": 1}', "damaged event skipped"),
    ('{"ph": "X", "name": "x", "args": {"grid": [1, 2', "damaged event skipped"),
    ('{"ph": "X", "name": "unended', "damaged event skipped"),
    ('{"ph": "X", "cat": [1], "name": "x"}', "event with a field of a wrong type skipped"),
    ("garbage", "text that is no event skipped"),
    ("5", "text that is no event skipped"),
    ('{"ph": "X", "a": ' + "[" * 2000 + "]" * 2000 + "}", "event nested deeper than 1000 skipped"),
]


@pytest.mark.parametrize(("text", "note"), LOST)
def test_what_cannot_be_mended_costs_no_other_event(text: str, note: str, tmp_path: Path) -> None:
    trace = device(written(tmp_path, f'{{"traceEvents": [{event("before")},\n{text},\n{event("after")}], "x": 1}}'))
    assert names(trace) == ["before", "after"]
    assert trace.salvage.notes[0].startswith(note)


def test_a_missing_and_a_surplus_comma_cost_nothing(tmp_path: Path) -> None:
    trace = device(written(tmp_path, f'{{"traceEvents": [{event("a")} {event("b")},, {event("c")}]}}'))
    assert names(trace) == ["a", "b", "c"]
    assert repairs(trace) == {"missing comma": 1, "surplus comma": 1}


def test_damage_around_the_events_leaves_the_events_and_the_base_time(tmp_path: Path) -> None:
    text = f'{{"bad": "C:\\x", "baseTimeNanoseconds": 1000000000, "traceEvents": [{event("a")}], "also": \x01'
    trace = device(written(tmp_path, text))
    assert trace.ts_ns.tolist() == [1_000_001_000]
    assert [note.split(" (")[0] for note in trace.salvage.notes] == [
        "damaged text before the events skipped", "truncated after the last event",
    ]  # fmt: skip


def test_many_damaged_events_are_counted_by_cause(tmp_path: Path) -> None:
    text = ",".join(f'{event(f"ok{i}")},{{"ph": "X", "name": "a"{i}", "ts": 1, "dur": 1}}' for i in range(2000))
    trace = device(written(tmp_path, f'{{"traceEvents": [{text}]}}'))
    assert (trace.num_events, repairs(trace)) == (4000, {"unescaped quote in a text": 2000})
    assert trace.salvage.notes[0].startswith("unescaped quote in a text (2000 times, first at byte ")


def test_gzip_of_several_members_is_one_file(tmp_path: Path) -> None:
    whole = TraceBuilder().op("a", 0, 1).op("b", 2, 1).write_device(tmp_path / "whole.json")
    data = whole.read_bytes()
    parts = tmp_path / "parts.json.gz"
    parts.write_bytes(gzip.compress(data[:100]) + gzip.compress(b"") + gzip.compress(data[100:]) + b"\0" * 9)
    assert [d for d in differences(device(parts), device(whole)) if d != "path"] == []


# --- files that are no trace

NO_TRACES = [
    (b"<!DOCTYPE html><html></html>", "an HTML or XML page"),
    (b"\x80\x04\x95\x10\x00\x00\x00", "a Python pickle"),
    (b"\x0a\x0f\x42\x02\x08\x01\x50\x01", "Perfetto's .pftrace"),
    (b"PK\x03\x04rest", "a zip archive"),
    (bytes(range(200, 256)) * 20, "binary data"),
    (b"hello, world", "text"),
    (b'{"a": 1, "b": {"traceEvents": []}}', "JSON with the keys a, b"),
    (b'[{"name": "x", "ph": "X", "ts": 1, "dur": 2, "tid": 0, "pid": "CPU functions"}]', "Python-only profiler"),
    (b"  \n", "is empty"),
    (b'{"schema": "1.1.1", "nodes": []}', "looks like a host trace"),
]  # fmt: skip


@pytest.mark.parametrize(("data", "looks"), NO_TRACES)
def test_what_is_no_trace_is_named_in_one_sentence(data: bytes, looks: str, tmp_path: Path) -> None:
    assert looks in refused(read_device_trace, written(tmp_path, data))


def test_the_other_kind_of_trace_is_named(tmp_path: Path) -> None:
    path = TraceBuilder().op("aten::mm", 0, 5).write_device(tmp_path / "d.json")
    assert "looks like a device trace" in refused(read_host_trace, path)


def test_gzip_bomb_is_refused_with_its_size(tmp_path: Path) -> None:
    path = tmp_path / "bomb.json.gz"
    path.write_bytes(gzip.compress(b'{"traceEvents": [' + b" " * 30_000_000))
    for kind in KINDS:
        with pytest.raises(TraceFileError, match=r"unfolds to more than .* bytes from .* gunzip"):
            read_device_trace(path, options=ReadOptions(kind, limits=Limits(ratio=100, free_bytes=1 << 20)))


@pytest.mark.parametrize("size", [*range(8150, 8210, 3), 40_000, 300_000])
def test_long_elements_are_whole_wherever_the_reading_window_ends(size: int, tmp_path: Path) -> None:
    long = event("x" * (size - 120), args={"v": "é\n\\u", "n": 12.5, "z": [1, None, {"a": -3}]})
    trace = device(written(tmp_path, f'{{"traceEvents": [{long}, {{"cut'))
    assert [len(name or "") for name in names(trace)] == [size - 120]
    assert trace.salvage.elements_lost == 1


# --- files made to be slow

SLOW = {
    "nested beginnings": '{"ph":' * 60_000,
    "unended arrays": '{"ph":1,"a":[' * 30_000,
    "unended arrays and a long tail": '{"ph":1,"a":[' * 900 + "1," * 200_000,
    "quotes": '{"ph":"X","name":"' + 'a"b' * 100_000,
    "line breaks": "\n" * 400_000,
    "commas": "," * 3_000,
    "backslashes": '{"ph":"X","name":"' + "\\" * 400_000,
    "open braces": "{" * 400_000,
    "one long text": '{"ph":"X","name":"' + "x" * 2_000_000,
    "broken texts": '{"ph":"X","name":"\n' * 20_000,
    "damaged elements after a wide character": '{"ph":"X","name":"é"}' + ',\n{"ph": "X" "x"}' * 20_000,
    "brackets": "[" * 400_000,
    "garbage": "}{:," * 100_000,
    "spaces": " " * 400_000,
    "many args": '{"ph":"X","name":"n","ts":1,"args":{' + ",".join(f'"k{i}":{i}' for i in range(50_000)) + "}}",
}


@pytest.mark.parametrize("what", SLOW)
def test_a_file_made_to_be_slow_is_not(what: str, tmp_path: Path) -> None:
    trace = device(written(tmp_path, f'{{"traceEvents": [{event("first")},{SLOW[what]}'))
    assert trace.name[0] == "first"
    assert trace.salvage
