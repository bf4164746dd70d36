"""``export graph``: the nodes and edges that the tables hold, read back by networkx and by a strict reader of DOT."""

import json
import re
import xml.etree.ElementTree as ET
from dataclasses import dataclass, field
from pathlib import Path

import networkx
import polars as pl
import pytest
from builder import TraceBuilder
from commands import refused, run
from disks import READ_ONLY
from handed import DATA, require
from hypothesis import given, settings
from hypothesis import strategies as st

from chakra_capture.export.graph import EDGE_COLUMNS, NODE_COLUMNS, Graph
from chakra_capture.export.graph_files import write_dot, write_graphml

# All that may be awkward in a name, as far as a table (UTF-8) can hold it.
NAMES = st.text(st.characters(codec="utf-8")) | st.text(
    st.sampled_from("\"\\\n\r\t\0\x1b<>&]'{}|;-\u2028\ufffe\U0001f600")
)
AWKWARD = 'a "b" \\"c\\ <d>&amp;]]>\n\t\x00\x1b\x85\u2028\ufffe -> n1; }\\'


@dataclass
class Dot:
    """A file of DOT as Graphviz reads it: attributes of nodes, and edges with theirs."""

    nodes: dict[str, dict[str, str]] = field(default_factory=dict)
    edges: list[tuple[str, str, dict[str, str]]] = field(default_factory=list)


_TOKEN = re.compile(
    r'\s+|(?P<id>[A-Za-z_][A-Za-z_0-9]*)|(?P<text>"(?:[^"\\]|\\.)*")|(?P<sign>->|[{}\[\]=,;])', re.DOTALL
)


def read_dot(text):
    """Read the part of DOT's grammar that is used; anything else is an error.

    In a quoted text a backslash takes the next character with it, so that a quote after one ends nothing.
    """
    tokens, at = [], 0
    while at < len(text):
        match = _TOKEN.match(text, at)
        assert match, text[at : at + 40]
        at = match.end()
        if match.lastgroup:
            tokens.append(match[match.lastgroup])
    tokens = iter(tokens)
    assert [next(tokens) for _ in range(3)] == ["digraph", "dependencies", "{"]
    dot = Dot()
    for token in tokens:
        if token == "}":
            assert next(tokens, None) is None
            return dot
        sign = next(tokens)
        target = None
        if sign == "->":
            target, sign = next(tokens), next(tokens)
        assert sign == "["
        attributes = {}
        while True:
            name, equals, value, after = (next(tokens) for _ in range(4))
            assert equals == "="
            assert name not in attributes
            attributes[name] = value
            if after == "]":
                break
            assert after == ","
        assert next(tokens) == ";"
        if target is not None:
            dot.edges.append((token, target, attributes))
        elif token != "node":
            assert token not in dot.nodes
            dot.nodes[token] = attributes
    raise AssertionError("no end")


def label(quoted):
    """A label as it is drawn: what escapes stand for."""
    assert quoted[0] == quoted[-1] == '"'
    escapes = {"\\": "\\", '"': '"', "n": "\n"}  # any other would draw something else than the name
    return re.sub(r"\\(.)", lambda match: escapes[match[1]], quoted[1:-1], flags=re.DOTALL)


def xml_text(name):
    """What XML 1.0 can hold of a text (production 2, Char); a carriage return would be read as a line feed."""
    return "".join(
        c if c in "\t\n" or "\x20" <= c <= "\ud7ff" or "\ue000" <= c <= "\ufffd" or c >= "\U00010000" else "\ufffd"
        for c in name
    )


def dot_text(name):
    return "".join("\ufffd" if (c < " " and c not in "\t\n") or c == "\x7f" else c for c in name)


def graph(*names):
    """Nodes of these names, each with an edge to the next."""
    nodes = [{"node_id": at, "name": name, "kind": "host_op", "ts_ns": 10 * at} for at, name in enumerate(names)]
    edges = [{"src": at, "dst": at + 1, "kind": "thread_order", "src_at": "end", "dst_at": "start", "lag_ns": at}
             for at in range(len(names) - 1)]  # fmt: skip
    return Graph(*(
        pl.DataFrame(
            {c.name: [row.get(c.name) for row in rows] for c in columns}, schema={c.name: c.dtype for c in columns}
        )
        for rows, columns in ((nodes, NODE_COLUMNS), (edges, EDGE_COLUMNS))
    ))  # fmt: skip


@settings(max_examples=150)
@given(st.lists(NAMES, min_size=1, max_size=4))
def test_any_name_comes_back_as_far_as_the_format_can_hold_it(tmp_path_factory, names):
    folder = tmp_path_factory.mktemp("names")
    made = graph(*names)
    write_graphml(made, folder / "g.graphml")
    write_dot(made, folder / "g.dot")
    read = networkx.read_graphml(folder / "g.graphml")
    dot = read_dot((folder / "g.dot").read_bytes().decode())
    # networkx gives a node without a text None, where an element is empty.
    assert [read.nodes[f"n{at}"]["name"] or "" for at in range(len(names))] == [xml_text(name) for name in names]
    assert [label(dot.nodes[f"n{at}"]["label"]) for at in range(len(names))] == [dot_text(name) for name in names]
    assert len(dot.edges) == read.number_of_edges() == len(names) - 1


@pytest.fixture(scope="module")
def twin(tmp_path_factory):
    out = tmp_path_factory.mktemp("twin") / "merged"
    assert run("merge", require(DATA / "pairs" / "resnet50_ddp_twin"), "--force", "-o", out).code == 0
    return out


def expected(folder, keep):
    """Nodes and edges between rows that ``keep`` takes, straight from the tables."""
    nodes = {row["node_id"]: row for row in pl.read_parquet(folder / "nodes.parquet").iter_rows(named=True)}
    offset = json.loads((folder / "link.json").read_text())["windows"][0]["clock_offset_ns"]
    nodes = {number: row for number, row in nodes.items() if keep(row)}

    def time(number, side):
        row = nodes[number]
        moved = offset if row["kind"] in ("kernel", "memcpy", "memset") else 0
        return row["ts_ns"] + moved + (row["dur_ns"] if side == "end" else 0)

    edges = [
        (f"n{edge['src']}", f"n{edge['dst']}", edge["kind"], edge["src_at"], edge["dst_at"],
         time(edge["dst"], edge["dst_at"]) - time(edge["src"], edge["src_at"]))
        for edge in pl.read_parquet(folder / "edges.parquet").iter_rows(named=True)
        if edge["src"] in nodes and edge["dst"] in nodes
    ]  # fmt: skip
    columns = [column.name for column in NODE_COLUMNS if column.name != "node_id"]
    shown = {f"n{number}": {name: row[name] for name in columns if row[name] is not None}
             for number, row in nodes.items()}  # fmt: skip
    return shown, sorted(edges)


def test_graphml_of_some_rows_holds_what_the_tables_do(twin, tmp_path):
    done = run("export", "graph", twin, "--nodes", "7486-8500,1000-2000", "-o", tmp_path / "out")
    nodes, edges = expected(twin / "rank=0", lambda r: 7486 <= r["node_id"] <= 8500 or 1000 <= r["node_id"] <= 2000)
    file = tmp_path / "out" / "rank-0.graphml"
    assert done.out == f"{file}: {len(nodes)} nodes, {len(edges)} edges\n"
    read = networkx.read_graphml(file)
    assert dict(read.nodes(data=True)) == nodes
    assert sorted((a, b, *(of[key] for key in ("kind", "src_at", "dst_at", "lag_ns"))) for a, b, of in
                  read.edges(data=True)) == edges  # fmt: skip
    assert {kind for _, _, kind, *_ in edges} >= {"thread_order", "stream_order"}
    assert min(lag for *_, lag in edges) >= 0


def test_dot_of_a_step_holds_the_rows_that_a_slice_of_it_does(twin, tmp_path):
    assert run("slice", twin, "--steps", "5", "-o", tmp_path / "slice").code == 0
    done = run(
        "export", "graph", twin, "--steps", "5", "--format", "dot", "--max-nodes", "9000", "-o", tmp_path / "out"
    )
    assert done.code == 0
    runs = json.loads((tmp_path / "slice" / "rank=0" / "link.json").read_text())["slice"]["source_node_ids"]
    nodes, edges = expected(twin / "rank=0", lambda row: any(low <= row["node_id"] <= high for low, high in runs))
    dot = read_dot((tmp_path / "out" / "rank-0.dot").read_text())
    of = {name: {key: label(value) for key, value in attributes.items()} for name, attributes in dot.nodes.items()}
    assert of == {name: {("label" if key == "name" else key): str(value) for key, value in row.items()}
                  for name, row in nodes.items()}  # fmt: skip
    keys = ("label", "src_at", "dst_at", "lag_ns")
    found = sorted((a, b, *(label(attributes[key]) for key in keys)) for a, b, attributes in dot.edges)
    assert found == sorted((*edge[:5], str(edge[5])) for edge in edges)


def test_lags_are_counted_with_the_offset_of_the_device_clock_removed(tmp_path):
    # The kernel seems to begin 3 us before its launch, so the device's clock is 3 us behind.
    TraceBuilder().op("a", 0, 20).launched("k", 7, 5, 1, at=10).write(tmp_path / "run")
    assert run("merge", tmp_path / "run").code == 0
    assert run("export", "graph", tmp_path / "run", "-o", tmp_path / "out").code == 0
    read = networkx.read_graphml(tmp_path / "out" / "rank-0.graphml")
    (launch,) = [of for *_, of in read.edges(data=True) if of["kind"] == "launch"]
    assert (launch["lag_ns"], launch["src_at"], launch["dst_at"]) == (0, "start", "start")


def test_an_awkward_name_of_a_trace_breaks_neither_format(tmp_path):
    TraceBuilder().op(AWKWARD, 0, 20).op("b", 30, 5).write(tmp_path / "run")
    assert run("merge", tmp_path / "run").code == 0
    for format_ in ("graphml", "dot"):
        assert run("export", "graph", tmp_path / "run", "--format", format_, "-o", tmp_path / format_).code == 0
    names = [
        of.get("name") for _, of in networkx.read_graphml(tmp_path / "graphml" / "rank-0.graphml").nodes(data=True)
    ]
    recorded = pl.read_parquet(tmp_path / "run" / "0_merged" / "rank=0" / "nodes.parquet")["name"].to_list()
    assert names == [xml_text(name) for name in recorded]
    dot = read_dot((tmp_path / "dot" / "rank-0.dot").read_text())
    assert [label(of["label"]) for of in dot.nodes.values()] == [dot_text(name) for name in recorded]
    assert ET.parse(tmp_path / "graphml" / "rank-0.graphml").getroot().tag.endswith("graphml")


def test_one_file_per_rank_and_json_names_them(tmp_path):
    for rank in (0, 1, 2):
        TraceBuilder(rank=rank, pid=100 + rank).op("a", 0, 20).op("b", 5, 5).write(tmp_path / "run", rank)
    assert run("merge", tmp_path / "run").code == 0
    out = tmp_path / "out"
    report = json.loads(run("export", "graph", tmp_path / "run", "--ranks", "0,2", "-o", out, "--json").out)
    assert report["schema_version"] == 1
    assert report["format"] == "graphml"
    names = [out / "rank-0.graphml", out / "rank-2.graphml"]
    assert sorted(out.iterdir()) == names
    # The parent to its first child, and back from the last.
    assert [(f["rank"], f["file"], f["num_edges"]) for f in report["files"]] == [
        (0, str(names[0]), 2), (2, str(names[1]), 2),
    ]  # fmt: skip


def test_a_graph_that_nothing_draws_is_refused_with_how_to_narrow_it(twin, tmp_path):
    out = tmp_path / "out"
    said = refused(run("export", "graph", twin, "--steps", "5", "-o", out), "8980 rows", "more than 5000")
    for option in ("--steps", "--ranks", "--nodes", "slice --node", "--max-nodes"):
        assert option in said
    assert not list(tmp_path.iterdir())


def test_what_cannot_be_written_or_is_not_there_is_one_sentence(twin, tmp_path):
    out = tmp_path / "out"
    refused(run("export", "graph", twin, "--nodes", "99999-100000", "-o", out), "no row with such a node_id")
    refused(run("export", "graph", twin, "--steps", "9", "-o", out), "has no step 9; it has 4-6.")
    refused(run("export", "graph", twin, "--ranks", "1", "-o", out), "has no merged rank 1; it has 0.")
    out.mkdir()
    refused(run("export", "graph", twin, "--nodes", "1-5", "-o", out), "exists already")
    refused(run("export", "graph", twin, "--nodes", "1-5", "-o", READ_ONLY / "x"), "cannot be written")
    assert sorted(tmp_path.iterdir()) == [out]


def test_node_ids_are_of_one_rank(tmp_path):
    for rank in (0, 1):
        TraceBuilder(rank=rank, pid=100 + rank).op("a", 0, 20).write(tmp_path / "run", rank)
    assert run("merge", tmp_path / "run").code == 0
    done = run("export", "graph", tmp_path / "run", "--nodes", "0-3", "-o", tmp_path / "out")
    assert (done.code, done.out) == (2, "")
    assert "Name it with --ranks" in done.err
    assert run("export", "graph", tmp_path / "run", "--nodes", "0-3", "--ranks", "1", "-o", tmp_path / "out").code == 0


def test_files_are_never_written_over(tmp_path):
    made = graph("a")
    for write in (write_graphml, write_dot):
        path = Path(tmp_path / "file")
        path.write_text("mine")
        with pytest.raises(FileExistsError):
            write(made, path)
        assert path.read_text() == "mine"
