"""What is read layout by layout equals what json.loads reads one by one."""

import json
from pathlib import Path
from typing import Any

import pytest
from builder import write_json
from hypothesis import given, settings
from hypothesis import strategies as st
from same import differences, expected_events, expected_nodes, load_exact, rebuilt_events, rebuilt_nodes

from chakra_capture.trace.args import ArgsReader
from chakra_capture.trace.attrs import INT_ATTRS
from chakra_capture.trace.device import read_device_trace
from chakra_capture.trace.dictionary import Numbers
from chakra_capture.trace.host import read_host_trace
from chakra_capture.trace.layouts import Block, Integers, Template, by_layout, is_integer
from chakra_capture.trace.reading import ReadOptions
from chakra_capture.trace.scanners import ScannerKind

KEYS = (
    "External id", "external id", "correlation", "stream", "device", "Record function id", "Sequence number", "Ev Idx",
    "bytes", "Addr", "Input Dims", "Input type", "grid", "cbid", "k1", "k2", "a b", "é",
)  # fmt: skip
numbers = st.integers(-99, 99) | st.sampled_from([0, 10**17, -(10**17), 10**18, 2**62, 2**63])
texts = st.sampled_from(["", "7", "0x0", "x1", "x2", "-", "1.0", "1e3", 'a"b', "é", "\\", " 5", "007"])
values = st.one_of(
    numbers, numbers, texts, st.none(), st.booleans(), st.sampled_from([1.5, 1.05, 1e22]),
    st.lists(numbers, max_size=3), st.fixed_dictionaries({"stream": numbers}),
)  # fmt: skip
args = st.dictionaries(st.sampled_from(KEYS), values, max_size=6)


def varied(draw: st.DrawFn, value: Any) -> Any:
    """The same with other digits, mostly."""
    if isinstance(value, bool) or value is None or isinstance(value, float):
        return value
    if isinstance(value, int):
        return draw(st.integers(0, 9)) if 0 <= value <= 9 else value + draw(st.integers(0, 2))
    if isinstance(value, str):
        return value.replace("1", draw(st.sampled_from("123")))
    if isinstance(value, list):
        return [varied(draw, item) for item in value]
    return {varied(draw, key): varied(draw, item) for key, item in value.items()}


@st.composite
def alike(draw: st.DrawFn, elements: st.SearchStrategy[Any]) -> list[Any]:
    """A few elements, each many times in slightly other words."""
    kinds = draw(st.lists(elements, min_size=1, max_size=3))
    return [varied(draw, draw(st.sampled_from(kinds))) for _ in range(draw(st.integers(20, 40)))]


@settings(max_examples=150, deadline=None)
@given(all_args=alike(args), spaced=st.booleans())
def test_args_of_any_keys_and_values_are_read_as_json_loads_does(
    all_args: list[Any], spaced: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    events = [
        {"ph": "X", "name": f"n{i % 2}", "cat": "c", "pid": 1, "tid": 2, "ts": 10 + i, "dur": 1, "args": members}
        for i, members in enumerate(all_args)
    ]
    path = tmp_path_factory.mktemp("args") / "d.json"
    path.write_text(json.dumps(events, separators=None if spaced else (",", ":"), ensure_ascii=spaced))
    trace = read_device_trace(path, scanner=ScannerKind.MSGSPEC)
    truth = list(expected_events(load_exact(path.read_bytes())))
    odd = 2**61  # what is too large for an id stays in the args, which json.loads does not know
    for found, expected in zip(rebuilt_events(trace), truth, strict=True):
        if all(abs(v) < odd for v in expected["args"].values() if isinstance(v, int)):
            assert _known(found) == _known(expected)


def _known(event: dict[str, Any]) -> dict[str, Any]:
    """Without nulls in the args: the rows tell a null in "Input Dims" from none, rebuilding an event does not."""
    return {**event, "args": {key: value for key, value in event["args"].items() if value is not None}}


attrs = st.dictionaries(st.sampled_from([*INT_ATTRS, "op_schema", "pg_name", "output_types", "k1"]), numbers | texts)


@settings(max_examples=100, deadline=None)
@given(all_attrs=alike(attrs))
def test_attributes_of_any_names_and_values_are_read_as_json_loads_does(
    all_attrs: list[Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    inputs = {"values": [1, [2]], "shapes": [[], [3]], "types": ["Int"]}
    nodes = [
        {"id": i + 1, "name": "n", "ctrl_deps": 1, "inputs": inputs, "outputs": inputs,
         "attrs": [{"name": key, "type": "t", "value": value} for key, value in members.items()]}
        for i, members in enumerate(all_attrs)
    ]  # fmt: skip
    path = write_json(tmp_path_factory.mktemp("attrs") / "h.json", {"schema": "1.1.1", "nodes": nodes})
    trace = read_host_trace(path, scanner=ScannerKind.MSGSPEC)
    small = [all(abs(v) < 2**61 for v in members.values() if isinstance(v, int)) for members in all_attrs]
    pairs = zip(rebuilt_nodes(trace), expected_nodes(load_exact(path.read_bytes())), small, strict=True)
    assert [(found, expected) for found, expected, is_small in pairs if is_small and found != expected] == []


def test_texts_of_one_layout_differ_in_nothing_but_digits() -> None:
    texts = [b"a1", b"a22", b"a3", b"1a", b"a-1"]
    assert {layout: rows.tolist() for layout, rows in by_layout(texts)} == {
        b"a0": [0, 2], b"a00": [1], b"0a": [3], b"a-0": [4],
    }  # fmt: skip


def test_a_block_gives_integers_and_texts() -> None:
    rows = [b"[12, -3, 007]", b"[45, -6, 089]"]
    block = Block(rows)
    integers = Integers(rows[0], [(1, 3), (5, 7), (9, 12)])
    assert block.integers(integers).tolist() == [[12, 45], [-3, -6], [7, 89]]
    assert block.texts(Template(rows[0], [b"<", (1, 3), b"|", (9, 12), b">"])) == [b"<12|007>", b"<45|089>"]
    assert block.texts(Template(rows[0], [b"<>"])) == [b"<>", b"<>"]


@pytest.mark.parametrize(
    ("value", "judged"),
    [
        (b"5", True), (b"-5", True), (b"9" * 18, True), (b"9" * 19, None), (b'"5"', None), (b"5.0", None),
        (b"5e1", None), (b'""', None), (b"null", False), (b"true", False), (b'"0x0"', False),
        (b"[5]", False), (b'{"a":5}', False),
    ],
)  # fmt: skip
def test_what_is_an_integer_in_every_text_of_a_layout(value: bytes, judged: bool | None) -> None:
    assert is_integer(value) is judged


def test_keys_with_digits_of_their_own_are_kept_apart() -> None:
    texts = [b'{"k%d": %d, "stream": %d}' % (i, i, i) for i in range(10)]
    numbers: dict[str, Numbers[bytes]] = {key: Numbers() for key in ("input_shapes", "input_types", "residue")}
    columns = ArgsReader().read(texts, numbers)
    assert columns.ids["stream"].tolist() == list(range(10))
    assert list(numbers["residue"].entries()) == [b'{"k%d":%d}' % (i, i) for i in range(10)]


@pytest.mark.parametrize("size", [1, 100, 1000, 1 << 20])
def test_pieces_of_any_size_read_the_same(size: int, tmp_path: Path) -> None:
    event = {"ph": "X", "name": "a}, {b", "ts": 1, "dur": 1, "args": {"x": [{"name": 1}, {"name": 2}], "stream": 7}}
    events = [{**event, "ts": i, "tid": "Spans" if i == 50 else i} for i in range(100)]
    path = write_json(tmp_path / "d.json", {"traceEvents": events, "more": [{"name": 1}, {"name": 2}]})
    whole = read_device_trace(path, scanner=ScannerKind.MSGSPEC)
    pieces = read_device_trace(path, options=ReadOptions(ScannerKind.MSGSPEC, buffer_size=size))
    assert differences(whole, pieces) == []
    assert (whole.num_rows, whole.salvage.notes) == (100, [])
