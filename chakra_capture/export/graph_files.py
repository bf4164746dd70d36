"""Dependency graphs as GraphML and DOT; names come from a trace, and may hold anything."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO
from xml.sax.saxutils import XMLGenerator
from xml.sax.xmlreader import AttributesImpl

import polars as pl

from chakra_capture.export.graph import EDGE_COLUMNS, NODE_COLUMNS, Graph
from chakra_capture.trace.schema import Column

_NAMESPACE = "http://graphml.graphdrawing.org/xmlns"
_REPLACEMENT = "\ufffd"
# XML 1.0 has no such characters, not even escaped; a carriage return it has, and readers make a line feed of it.
_NOT_IN_XML = re.compile("[^\t\n\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f\ud800-\udfff]")
_ENDS = frozenset({"node_id", "src", "dst"})


def write_graphml(graph: Graph, path: Path) -> None:
    """Write GraphML to a file that must not exist; what XML cannot hold of a name becomes U+FFFD.

    Raises:
        OSError: the file cannot be written.
    """
    with path.open("xb") as file:
        xml = XMLGenerator(file, encoding="utf-8", short_empty_elements=True)
        xml.startDocument()
        _start(xml, "graphml", {"xmlns": _NAMESPACE})
        for of, columns in (("node", NODE_COLUMNS), ("edge", EDGE_COLUMNS)):
            for column in _attributes(columns):
                about = {"id": _key(of, column.name), "for": of, "attr.name": column.name, "attr.type": _type(column)}
                _start(xml, "key", about)
                xml.endElement("key")
        _start(xml, "graph", {"id": "dependencies", "edgedefault": "directed"})
        for node in _rows(graph.nodes):
            _element(xml, "node", {"id": f"n{node['node_id']}"}, node, NODE_COLUMNS)
        for number, edge in enumerate(_rows(graph.edges)):
            ends = {"id": f"e{number}", "source": f"n{edge['src']}", "target": f"n{edge['dst']}"}
            _element(xml, "edge", ends, edge, EDGE_COLUMNS)
        xml.ignorableWhitespace("\n")
        xml.endElement("graph")
        xml.endElement("graphml")
        xml.endDocument()


def write_dot(graph: Graph, path: Path) -> None:
    """Write DOT to a file that must not exist; control characters of a name become U+FFFD.

    Raises:
        OSError: the file cannot be written.
    """
    with path.open("x", encoding="utf-8", newline="\n") as file:
        file.write("digraph dependencies {\n  node [shape=box];\n")
        for node in _rows(graph.nodes):
            file.write(f"  n{node['node_id']} [label={_quoted(node['name'])}")
            _write_attributes(file, node, NODE_COLUMNS, without="name")
        for edge in _rows(graph.edges):
            file.write(f"  n{edge['src']} -> n{edge['dst']} [label={_quoted(edge['kind'])}")
            _write_attributes(file, edge, EDGE_COLUMNS, without="kind")
        file.write("}\n")


_Row = dict[str, str | int | None]


def _rows(table: pl.DataFrame) -> Iterator[_Row]:
    return table.iter_rows(named=True)


def _attributes(columns: tuple[Column, ...]) -> list[Column]:
    """The columns that are no ends: those are ids in a file."""
    return [column for column in columns if column.name not in _ENDS]


def _key(of: str, name: str) -> str:
    """Both nodes and edges have a kind."""
    return f"{of}_{name}"


def _type(column: Column) -> str:
    return "string" if column.dtype == pl.String else "long"


def _start(xml: XMLGenerator, element: str, about: dict[str, str]) -> None:
    """Begin an element on a line of its own."""
    xml.ignorableWhitespace("\n")
    xml.startElement(element, AttributesImpl(about))


def _element(xml: XMLGenerator, of: str, about: dict[str, str], row: _Row, columns: tuple[Column, ...]) -> None:
    _start(xml, of, about)
    for column in _attributes(columns):
        value = row[column.name]
        if value is not None:
            xml.startElement("data", AttributesImpl({"key": _key(of, column.name)}))
            xml.characters(_NOT_IN_XML.sub(_REPLACEMENT, str(value)))
            xml.endElement("data")
    xml.endElement(of)


def _write_attributes(file: TextIO, row: _Row, columns: tuple[Column, ...], *, without: str) -> None:
    for column in _attributes(columns):
        value = row[column.name]
        if column.name != without and value is not None:
            file.write(f", {column.name}={_quoted(value)}")
    file.write("];\n")


def _quoted(value: str | int | None) -> str:
    """A quoted text of DOT; in a label a backslash begins an escape, so that of a name is doubled."""
    text = _CONTROL.sub(_REPLACEMENT, "" if value is None else str(value))
    for character, escaped in (("\\", "\\\\"), ('"', '\\"'), ("\n", "\\n")):
        text = text.replace(character, escaped)
    return f'"{text}"'
