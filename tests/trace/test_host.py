import json
from pathlib import Path
from typing import Any

import pytest
from builder import TraceBuilder, write_json
from handed import CASES, load_json, require
from hypothesis import given
from hypothesis import strategies as st

from chakra_capture.errors import TraceFileError
from chakra_capture.trace.columns import MISSING
from chakra_capture.trace.host import HostTrace, find_cycles, read_host_trace

SCHEMAS = ("1.0.1", "1.0.2-chakra.0.0.4", "1.0.3-chakra.0.0.4", "1.1.0-chakra.0.0.4", "1.1.1-chakra.0.0.4")


def tree(trace: HostTrace) -> dict[int, tuple[str | None, int | None, int | None]]:
    """Name, parent and record-function id of each node."""
    none = {MISSING: None}
    rows = zip(trace.node_id[:].tolist(), trace.parent[:].tolist(), trace.attrs["rf_id"][:].tolist(), strict=True)
    return {n: (trace.name[i], none.get(p, p), none.get(r, r)) for i, (n, p, r) in enumerate(rows)}


def node(number: int, parent: Any, name: str = "n", **attrs: Any) -> dict[str, Any]:
    listed = [{"name": key, "type": "uint64", "value": value} for key, value in attrs.items()]
    values: dict[str, Any] = {"values": [], "shapes": [], "types": []}
    return {"id": number, "name": name, "ctrl_deps": parent, "inputs": values, "outputs": values, "attrs": listed}


def read(path: Path, *nodes: dict[str, Any], pid: Any = 1) -> HostTrace:
    content = {"schema": "1.1.1-chakra.0.0.4", "pid": pid, "nodes": nodes, "finish_ts": 1}
    return read_host_trace(write_json(path / "h.json", content))


@pytest.mark.parametrize("name", [*SCHEMAS, "1.1.1-chakra.1.0.0", "1.9.0-chakra.9.9.9"])
def test_every_schema_gives_the_same_graph(name: str) -> None:
    folder = require(CASES / "033-et-schema-variants")
    trace = read_host_trace(folder / f"{name}.json")
    recorded = load_json(folder / "1.1.1-chakra.0.0.4.json")["nodes"]
    ids = {n["id"]: next(a["value"] for a in n["attrs"] if a["name"] == "rf_id") or None for n in recorded}
    expected = {
        n["id"]: (n["name"], n["ctrl_deps"] if n["ctrl_deps"] != n["id"] else None, ids[n["id"]]) for n in recorded
    }
    # The writers spell the root nodes execution_graph or execution_trace.
    seen = {
        n: ((name or "").replace("execution_graph", "execution_trace"), *rest)
        for n, (name, *rest) in tree(trace).items()
    }
    assert seen == expected
    assert len(seen) == 14
    assert (int(trace.is_process.sum()), int(trace.is_thread.sum())) == (1, 2)
    linear = next(n for n, (text, *_) in seen.items() if text == "aten::linear")
    assert {parent for text, parent, _ in seen.values() if text == "aten::addmm"} == {linear}
    assert bool(trace.notes) == name.startswith("1.9")
    assert not trace.salvage


def test_unknown_schema_is_said() -> None:
    path = require(CASES / "033-et-schema-variants" / "1.9.0-chakra.9.9.9.json")
    assert read_host_trace(path).notes == ("unknown host trace schema '1.9.0-chakra.9.9.9', read by its layout",)


@pytest.mark.parametrize("name", ["et.json.gz", "gz-named-json.json", "plain-named.json.gz"])
def test_gzip_is_sniffed(name: str) -> None:
    folder = require(CASES / "040-gz-host-trace")
    assert tree(read_host_trace(folder / name)) == tree(read_host_trace(folder / "et.json.gz"))
    assert read_host_trace(folder / name).num_nodes == 14


def test_infinite_scalars_written_as_text_load() -> None:
    trace = read_host_trace(require(CASES / "032-et-infinite-scalars" / "et-torch2.13.json"))
    assert (trace.num_nodes, trace.salvage.notes) == (18, [])


def test_three_thousand_nested_nodes_load() -> None:
    trace = read_host_trace(require(CASES / "041-deep-nesting" / "et.json.gz"))
    assert (trace.num_nodes, trace.cycles) == (3002, ())


def test_truncated_trace_is_salvaged() -> None:
    trace = read_host_trace(require(CASES / "030-et-truncated-killed" / "et.json"))
    assert (trace.num_nodes, trace.finished) == (11, False)
    assert "not finalised (no finish_ts)" in trace.salvage.notes


def test_cycle_in_ctrl_deps_is_broken_and_named() -> None:
    trace = read_host_trace(require(CASES / "036-cyclic-ctrl-deps" / "et.json"))
    assert trace.cycles == ((11, 12),)
    assert tree(trace)[11][:2] == ("aten::linear", None)
    assert tree(trace)[12][:2] == ("aten::addmm", 11)
    assert tree(trace)[1][1] is None  # the process root names itself, which is no cycle
    assert trace.salvage.notes == ["1 cycle(s) in ctrl_deps broken, first: 11 aten::linear, 12 aten::addmm"]
    assert find_cycles({int(n): int(p) for n, p in zip(trace.node_id[:], trace.parent[:], strict=True)}) == []


@given(st.dictionaries(st.integers(0, 8), st.none() | st.integers(0, 9), max_size=9))
def test_found_cycles_are_all_there_are(parent: dict[int, int | None]) -> None:
    def walk(start: int) -> tuple[int, ...] | None:
        """The cycle that a walk from ``start`` comes back to, if it comes back to ``start`` itself."""
        path = [start]
        for _ in range(len(parent)):
            at = parent.get(path[-1])
            if at == start:
                return tuple(path)
            if at is None:
                return None
            path.append(at)
        return None

    expected = {walk(start) for start in parent if walk(start) and start == min(walk(start) or ())}
    assert set(find_cycles(parent)) == expected
    assert len(find_cycles(parent)) == len(expected)


def test_long_chain_and_long_cycle_take_no_recursion() -> None:
    chain: dict[int, int | None] = {n: n + 1 for n in range(200_000)}
    assert find_cycles(chain) == []
    chain[199_999] = 0
    assert [len(cycle) for cycle in find_cycles(chain)] == [200_000]


def test_numbers_out_of_range_are_none(tmp_path: Path) -> None:
    trace = read(tmp_path, node(5, 2**64, rf_id=2**63), node(6, None, rf_id="²"), node(2**63, 5), pid=2**70)
    assert tree(trace) == {5: ("n", None, None), 6: ("n", None, None)}
    assert trace.pid is None
    assert list(trace.salvage.causes) == ["node with an id out of range skipped"]


def test_ids_as_text_zero_ids_and_negative_sequence_numbers(tmp_path: Path) -> None:
    trace = read(tmp_path, node(5, None, rf_id="7", seq_id=-1), node(6, None, rf_id=0, seq_id=3))
    assert trace.attrs["rf_id"][:].tolist() == [7, MISSING]
    assert trace.attrs["seq_id"][:].tolist() == [MISSING, 3]


def test_repeated_node_ids_are_counted_and_the_last_one_stays(tmp_path: Path) -> None:
    trace = read(tmp_path, node(5, None, "old"), node(5, None, "new"))
    assert (tree(trace), trace.num_duplicate_ids) == ({5: ("new", None, None)}, 1)


def test_what_has_no_column_is_kept(tmp_path: Path) -> None:
    given = node(5, None, rf_id=7, scope=0, op_schema="aten::a()", kernel_file="")
    given["inputs"] = {
        "values": [[1, 2, 0, 3, 4, "cpu"]],
        "shapes": [[3]],
        "types": ["Tensor(float)"],
        "strides": [[1]],
    }
    trace = read(tmp_path, given)
    rest = json.loads(trace.rest[0] or "")
    assert rest["inputs"] == {"values": [[1, 2, 0, 3, 4, "cpu"]], "strides": [[1]]}
    assert rest["op_schema"] == "aten::a()"
    assert "kernel_file" not in rest
    assert json.loads(trace.input_shapes[0] or "") == [[3]]
    assert json.loads(trace.input_types[0] or "") == ["Tensor(float)"]


@pytest.mark.parametrize("text", ["3", "[]", "{}", '{"nodes": []}', '{"nodes": [1]}', '{"traceEvents": []}', "PK\x03"])
def test_what_is_no_host_trace_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "h.json"
    path.write_text(text)
    with pytest.raises(TraceFileError, match="is no host trace: it has no 'nodes'"):
        read_host_trace(path)


def test_device_trace_is_no_host_trace(tmp_path: Path) -> None:
    with pytest.raises(TraceFileError, match="is no host trace"):
        read_host_trace(TraceBuilder().op("a", 1, 1).write_device(tmp_path / "d.json"))
