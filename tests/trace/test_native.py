"""The C scanner and the msgspec path read the same rows, and both read what json.loads reads."""

import gzip
import json
import subprocess
import sys
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from builder import TraceBuilder
from handed import CASES, DATA, SAMPLES
from hypothesis import given, settings
from hypothesis import strategies as st
from same import (
    differences,
    expected_events,
    expected_nodes,
    load_exact,
    outcome,
    parsed,
    rebuilt_events,
    rebuilt_nodes,
)  # fmt: skip

from chakra_capture.errors import MissingDependencyError
from chakra_capture.trace import native
from chakra_capture.trace.columns import MISSING
from chakra_capture.trace.device import DeviceTrace, read_device_trace
from chakra_capture.trace.host import HostTrace, read_host_trace
from chakra_capture.trace.reading import ReadOptions
from chakra_capture.trace.scanners import ScannerKind

OWN = Path(__file__).resolve().parents[2] / "traces"
HANDED = [path for root in (OWN, DATA, CASES, SAMPLES) for path in sorted(root.rglob("*.json*")) if path.is_file()]
NAMES = {path: str(path.relative_to(DATA.parent if DATA.parent in path.parents else OWN.parent)) for path in HANDED}
requires_native = pytest.mark.skipif(native.load() is None, reason="the C scanner is not built here (no C compiler)")

KINDS = [pytest.param(k, marks=[requires_native] if k == "native" else []) for k in ScannerKind]


def read_both(path: Path, read: Callable[..., Any], buffer_size: int = 1 << 20) -> tuple[Any, Any]:
    fast = outcome(read, path, options=ReadOptions(ScannerKind.NATIVE, buffer_size=buffer_size))
    return fast, outcome(read, path, scanner=ScannerKind.MSGSPEC)


def text_of(path: Path) -> bytes:
    raw = path.read_bytes()
    return gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw


def valid_json(path: Path) -> Any:
    """The file as json.loads reads it; None where it is damaged on purpose or no trace."""
    try:
        return load_exact(text_of(path))
    except (ValueError, EOFError):
        return None


@requires_native
@pytest.mark.parametrize("path", HANDED, ids=NAMES.get)
def test_both_paths_read_the_same_columns_and_every_arg_of_the_file(path: Path) -> None:
    truth = valid_json(path)
    if truth is None or "nodes" not in truth:
        first, second = read_both(path, read_device_trace)
        assert differences(first, second) == []
        if isinstance(first, DeviceTrace) and truth is not None:
            assert first_difference(rebuilt_events(first), expected_events(truth)) is None
            events = truth if isinstance(truth, list) else truth["traceEvents"]
            assert (first.num_events, sum(first.categories.values())) == (len(events), len(events))
    if truth is None or "traceEvents" not in truth:
        first, second = read_both(path, read_host_trace)
        assert differences(first, second) == []
        if isinstance(first, HostTrace) and truth is not None and not first.cycles:
            assert first_difference(rebuilt_nodes(first), expected_nodes(truth)) is None


def test_texts_put_together_hold_all_that_has_no_column() -> None:
    for path in (path for path in HANDED if OWN in path.parents):
        truth = valid_json(path)
        if not {"nodes", "traceEvents"} & truth.keys():
            continue
        if "nodes" in truth:
            host = read_host_trace(path)
            parts = zip(map(host.input_values.__getitem__, range(host.num_nodes)), parsed(host.rest), strict=True)
            assert all(load_exact(values or "") == rest["inputs"]["values"] for values, rest in parts)
        else:
            trace = read_device_trace(path)
            whole = [event["args"] for event in rebuilt_events(trace)]
            columns = {*trace.ids, "Input Dims", "Input type"}
            left = [{k: v for k, v in args.items() if k not in columns} or None for args in whole]
            assert left == parsed(trace.args).tolist()


def first_difference(found: Any, expected: Any) -> Any:
    pairs = zip(found, expected, strict=True)
    return next(((a, b) for a, b in pairs if a != b), None)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1, 7, 64, 4096])
def test_the_size_of_the_buffer_does_not_matter(size: int, kind: ScannerKind) -> None:
    small = [path for path in HANDED if path.stat().st_size < 20_000]
    for path in [*islice(small, 0, None, 5), *(path for path in small if "058" in str(path) or "damaged" in str(path))]:
        for read in (read_device_trace, read_host_trace):
            options = ReadOptions(kind, buffer_size=size)
            pieces = outcome(read, path, options=options)
            whole = outcome(read, path, scanner=kind)
            assert differences(pieces, whole) == [], path


def device(tmp_path: Path, text: str | bytes, kind: ScannerKind) -> DeviceTrace:
    path = tmp_path / "d.json"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return read_device_trace(path, scanner=kind)


ARGS = [
    # args as written; ids that became columns; what stays as JSON text
    ('{"stream": "0x0", "correlation": 5}', {"correlation_id": 5}, '{"stream":"0x0"}'),
    ('{"stream": "7", "device": -1}', {"stream": 7, "device": -1}, None),
    ('{"stream": 7.5, "x": 1.50}', {}, '{"stream":7.5,"x":1.50}'),
    ('{"correlation": 0, "Record function id": 0}', {}, None),
    ('{"External id": 1, "external id": 2}', {"external_id": 1}, '{"external id":2}'),
    ('{"External id": 4611686018427387903}', {"external_id": 4611686018427387903}, None),
    ('{"External id": 4611686018427387904}', {}, '{"External id":4611686018427387904}'),
    ('{"a": 1, "b": [1, {"stream": 3}], "a": 2}', {}, '{"a":2,"b":[1, {"stream": 3}]}'),
    ('{"\\u0073tream": 3, "é\\n": "\\u00e9"}', {"stream": 3}, '{"é\\n":"\\u00e9"}'),
    ('{"Python parent id": null}', {}, '{"Python parent id":null}'),
    ('{"": 1}', {}, '{"":1}'),
    ("{}", {}, None),
    ("null", {}, None),
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("args", "ids", "residue"), ARGS)
def test_args_become_columns_or_stay_as_text(
    args: str, ids: dict[str, int], residue: str | None, kind: ScannerKind, tmp_path: Path
) -> None:
    event = f'{{"ph": "X", "name": "n", "pid": 1, "tid": 2, "ts": 1, "dur": 1, "args": {args}}}'
    trace = device(tmp_path, f'{{"traceEvents": [{event}]}}', kind)
    assert {key: int(c[:][0]) for key, c in trace.ids.items() if c[:][0] != MISSING} == ids
    assert trace.args[0] == residue


TIMES = [
    ("1.0005", 1000), ("1.0015", 1002), ("1.00150000000000000001", 1002), ("-1.0005", -1000), ("-0.0006", -1),
    ("1689179597340616", 1689179597340616000), ("1689179597340616.123", 1689179597340616123), ("1e3", 1_000_000),
    ("4611686018427387.903", 4611686018427387903), ("4611686018427387.9035", None), ("9999999999999999", None),
    ('"12.5"', 12500), ('"x"', None), ("null", None), ("[1]", None), ("0", 0), ("0.001", 1),
]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("text", "nanoseconds"), TIMES)
def test_times_are_read_from_their_text(text: str, nanoseconds: int | None, kind: ScannerKind, tmp_path: Path) -> None:
    trace = device(tmp_path, f'[{{"ph": "X", "name": "n", "pid": 1, "tid": 2, "ts": {text}, "dur": 1}}]', kind)
    assert int(trace.ts_ns[0]) == (MISSING if nanoseconds is None else nanoseconds)


blanks = st.text(" \n\t\r", max_size=3)
scalars = st.one_of(
    st.none(), st.booleans(), st.integers(-(10**20), 10**20), st.text(max_size=8),
    st.decimals(allow_nan=False, allow_infinity=False, places=4).map(float),
)  # fmt: skip
anything = st.recursive(
    scalars, lambda c: st.lists(c, max_size=3) | st.dictionaries(st.text(max_size=6), c, max_size=3)
)
known_args = st.sampled_from(
    [
        "External id",
        "stream",
        "device",
        "correlation",
        "Ev Idx",
        "Input Dims",
        "Input type",
        "bytes",
        "Addr",
        "grid",
        "cbid",
    ]
)
events = st.fixed_dictionaries(
    {"ph": st.sampled_from("XXXisM"), "name": st.text(max_size=12), "ts": st.integers(0, 10**12)},
    optional={
        "cat": st.sampled_from(["cpu_op", "kernel", "é\"\\"]), "dur": st.integers(-5, 10**9),
        "pid": st.integers(0, 9) | scalars, "tid": st.integers(0, 9) | scalars, "id": scalars, "x": anything,
        "args": st.dictionaries(known_args | st.text(max_size=6), st.integers(0, 99) | anything, max_size=8),
    },
)  # fmt: skip


@st.composite
def laid_out(draw: st.DrawFn) -> bytes:
    """A trace with random blanks, key order and escapes."""
    ascii_only = draw(st.booleans())

    def write(value: Any) -> str:
        if isinstance(value, dict):
            members = draw(st.permutations(list(value.items())))
            inside = ",".join(f"{draw(blanks)}{write(k)}{draw(blanks)}:{draw(blanks)}{write(v)}" for k, v in members)
            return f"{{{inside}{draw(blanks)}}}"
        if isinstance(value, list):
            return f"[{','.join(draw(blanks) + write(v) + draw(blanks) for v in value)}]"
        return json.dumps(value, ensure_ascii=ascii_only)

    file = {"traceEvents": [{"ph": "X", "name": "first", "ts": 0, "dur": 1}, *draw(st.lists(events, max_size=5))]}
    return write(file | draw(st.sampled_from([{}, {"baseTimeNanoseconds": 10**9}, {"x": [1]}]))).encode(
        "utf-8", "replace"
    )


@requires_native
@settings(max_examples=80, deadline=None)
@given(text=laid_out(), size=st.sampled_from([1, 7, 64, 1 << 20]))
def test_any_layout_gives_the_same_as_json_loads(
    text: bytes, size: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("layout") / "d.json"
    path.write_bytes(text)
    first, second = read_both(path, read_device_trace, size)
    assert differences(first, second) == []
    truth = load_exact(text)
    lost = first.salvage.elements_lost if isinstance(first, DeviceTrace) else 0
    assert isinstance(first, DeviceTrace), first
    assert first.num_events + lost == len(truth["traceEvents"])
    if not lost:
        assert first.name.values is not None
        names = [e["name"] for e in truth["traceEvents"] if e["ph"] in "Xi"]
        assert [first.name[row] for row in range(first.num_rows)] == names


def test_without_the_library_the_msgspec_path_reads(tmp_path: Path) -> None:
    path = TraceBuilder().op("aten::mm", 0, 5).write_device(tmp_path / "d.json")
    program = (
        "import sys; from pathlib import Path; from chakra_capture.trace import compiled\n"
        "compiled.load = lambda stem, interface: None\n"
        "from chakra_capture.trace.device import read_device_trace\n"
        "print(read_device_trace(Path(sys.argv[1])).scanner)"
    )
    done = subprocess.run([sys.executable, "-c", program, str(path)], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("msgspec\n", "")


def test_a_missing_library_is_named_only_when_it_was_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "load", lambda: None)
    path = TraceBuilder().op("aten::mm", 0, 5).write_device(tmp_path / "d.json")
    assert read_device_trace(path).scanner is ScannerKind.MSGSPEC
    with pytest.raises(MissingDependencyError, match="pip install"):
        read_device_trace(path, scanner=ScannerKind.NATIVE)


@requires_native
def test_the_scanner_that_read_is_named(tmp_path: Path) -> None:
    builder = TraceBuilder().op("aten::mm", 0, 5)
    assert read_device_trace(builder.write_device(tmp_path / "d.json")).scanner is ScannerKind.NATIVE
    assert read_host_trace(builder.write_host(tmp_path / "h.json")).scanner is ScannerKind.NATIVE


def test_a_library_that_is_none_is_as_good_as_missing(tmp_path: Path) -> None:
    (tmp_path / "_scan.so").write_bytes(b"no library")
    assert native.load(tmp_path / "_scan") is None
