"""What the difference of a step consists of: its calls by phase, path and shapes; they sum to it exactly.

Each nanosecond of a step belongs to one call (see ``timeline``). Rows are outermost ops with all inside them, what
stands inside and is new, gone, renamed or on other shapes as a row of its own, and Python between ops by the annotation
that is open. Why this and not the critical path: it is the time of one thread, so it sums to the step by construction
on either side, and its parts are the calls that a program makes, which can be matched; what a path runs through differs
from run to run.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl

from chakra_capture.analysis.loop import PHASES
from chakra_capture.analysis.operators import OUTSIDE
from chakra_capture.analysis.trace_diff.measure import COLUMNS, Scale, measured
from chakra_capture.analysis.trace_diff.side import Side
from chakra_capture.analysis.trace_diff.structure import ROOT, Nodes, Structure
from chakra_capture.trace.columns import Int64
from chakra_capture.trace.schema import Column

STATUSES = ("matched", "new", "gone", "renamed", "reshaped", "moved")
_OPS = ("host_op", "runtime")
_LIST = pl.List(pl.String)

SCHEMA = (
    Column("status", pl.Enum(STATUSES), "matched; new, gone: of one side alone; of what stands in the same place: "
           "renamed, reshaped (other input shapes), moved (to another phase)"),
    Column("phase", pl.String, "phase that the loop is in; null: in none that is known"),
    Column("name", pl.String, "op, with all inside that has no row of its own; annotation: Python in it"),
    Column("kind", pl.String, "host_op, runtime, annotation; step: what is outside of any"),
    Column("parents", _LIST, "annotations and ops around it, the outermost first"),
    Column("input_shapes", pl.String, "JSON; null: not recorded on both sides, or of no op"),
    Column("first_phase", pl.String, "the same of A; another than phase where it is moved"),
    Column("first_name", pl.String, "name of A, where it is another; null: the same"),
    Column("first_parents", _LIST, "parents of A, where they are others; null: the same"),
    Column("first_shapes", pl.String, "input shapes of A, where they are others"),
    Column("mostly", pl.String, "call inside it whose own time differs most; null where it is its own"),
    *COLUMNS,
)  # fmt: skip

_Path = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Label:
    """What a row is called on either side; a call that one side lacks is called the same on both."""

    kind: str
    names: tuple[str, str]
    parents: tuple[_Path, _Path]
    shapes: tuple[str | None, str | None]


def op_differences(sides: tuple[Side, Side], structure: Structure, scale: Scale) -> pl.DataFrame:
    """Split the difference of a step by calls, largest part first; a table of ``SCHEMA``."""
    nodes = structure.nodes
    unit = np.array(_units(nodes), dtype=np.int64)
    labels, label_of = _labels(nodes, np.unique(unit).tolist())
    cells = [_cells(side, structure.of_rows[at], at, unit) for at, side in enumerate(sides)]
    table = _with_phases(pl.concat(cells)).with_columns(label=pl.lit(label_of).gather(pl.col("unit")))
    own = pl.concat([_own_times(side, structure.of_rows[at], at) for at, side in enumerate(sides)])
    found = measured(table, ["label", "phase", "first_phase"], scale)
    found = found.join(
        _mostly(own, nodes, unit, label_of, scale), on="label", how="left", validate="m:1", maintain_order="left"
    )
    return _named(found, labels)


def _units(nodes: Nodes) -> list[int]:
    """The node whose row of the table each node is in."""
    unit, is_whole = [ROOT] * len(nodes), [False] * len(nodes)
    for node in range(1, len(nodes)):
        parent, tokens = nodes.parent[node], (nodes.token[0][node], nodes.token[1][node])
        is_op = nodes.kind[node] in _OPS
        if is_whole[unit[parent]]:
            unit[node] = unit[parent]
        elif min(tokens) < 0 or (is_op and tokens[0] != tokens[1]):
            unit[node], is_whole[node] = node, True
        elif nodes.kind[unit[parent]] in _OPS:
            unit[node] = unit[parent]
        else:
            unit[node] = node
    return unit


def _labels(nodes: Nodes, units: Sequence[int]) -> tuple[list[_Label], pl.Series]:
    """The rows of the table, and for each node that is a unit its row."""
    paths: tuple[list[_Path], list[_Path]] = [()], [()]
    numbers: dict[_Label, int] = {}
    of_node, wanted = [0] * len(nodes), set(units)
    for node in range(len(nodes)):
        token = [nodes.token[at][node] for at in (0, 1)]
        token = [own if own >= 0 else other for own, other in zip(token, token[::-1], strict=True)]
        names = [OUTSIDE if node == ROOT else nodes.tokens[each][0] for each in token]
        around = [paths[at][nodes.parent[node]] if node != ROOT else () for at in (0, 1)]
        if node in wanted:
            shapes = (None, None) if node == ROOT else (nodes.tokens[token[0]][1], nodes.tokens[token[1]][1])
            label = _Label(nodes.kind[node], (names[0], names[1]), (around[0], around[1]), shapes)
            of_node[node] = numbers.setdefault(label, len(numbers))
        if node != ROOT:
            for at in (0, 1):
                paths[at].append((*around[at], names[at]))
    return list(numbers), pl.Series(of_node, dtype=pl.Int64)


def _cells(side: Side, node: Int64, at: int, unit: Int64) -> pl.DataFrame:
    """Time and calls of one side by step, phase and unit."""
    times = side.times.with_columns(unit=pl.Series(unit[_nodes_of(side, node)]))
    times = times.group_by("at", "phase", "unit").agg(pl.col("ns").sum())
    is_own = (unit[node] == node) & ~side.rows["is_mark"].to_numpy()
    calls = side.rows.select("at", phase="begin_phase").with_columns(unit=pl.Series(node)).filter(pl.Series(is_own))
    calls = calls.group_by("at", "phase", "unit").agg(count=pl.len().cast(pl.Int64))
    outside = times.filter(unit=ROOT).select("at", "phase", "unit", count=pl.lit(1, pl.Int64))
    both = times.join(
        pl.concat([calls, outside]), on=["at", "phase", "unit"], how="full", coalesce=True, validate="1:1"
    )
    both = both.select("at", "phase", "unit", pl.col("ns").fill_null(0), pl.col("count").fill_null(0))
    return both.with_columns(side=pl.lit(at, pl.Int64))


def _nodes_of(side: Side, node: Int64) -> Int64:
    return np.asarray(np.append(node, ROOT)[side.times["row"].to_numpy()])


def _with_phases(cells: pl.DataFrame) -> pl.DataFrame:
    """Tell each cell the phase of B and of A: the same, unless a unit is in one phase there and in another one here."""
    found = cells.group_by("unit", "phase").agg(first=(pl.col("side") == 0).any(), second=(pl.col("side") == 1).any())
    alone = [found.filter(pl.col(mine), ~pl.col(other)) for mine, other in (("first", "second"), ("second", "first"))]
    # Of a unit with several phases of its own on a side nothing says which is which.
    single = [each.filter(pl.len().over("unit") == 1).select("unit", "phase") for each in alone]
    pairs = single[0].join(single[1], on="unit", suffix="_of_second", validate="1:1")
    moved = [
        pairs.select("unit", "phase", other="phase_of_second", side=pl.lit(0, pl.Int64)),
        pairs.select("unit", phase="phase_of_second", other="phase", side=pl.lit(1, pl.Int64)),
    ]
    cells = cells.join(pl.concat(moved), on=["unit", "phase", "side"], how="left", validate="m:1")
    other = pl.coalesce("other", "phase")
    is_first = pl.col("side") == 0
    return cells.with_columns(
        phase=pl.when(is_first).then(other).otherwise("phase"),
        first_phase=pl.when(is_first).then("phase").otherwise(other),
    )


def _own_times(side: Side, node: Int64, at: int) -> pl.DataFrame:
    times = side.times.with_columns(node=pl.Series(_nodes_of(side, node)))
    return times.group_by("node").agg(pl.col("ns").sum()).with_columns(side=pl.lit(at, pl.Int64))


def _mostly(own: pl.DataFrame, nodes: Nodes, unit: Int64, label_of: pl.Series, scale: Scale) -> pl.DataFrame:
    """By row of the table the name inside it whose own time differs most."""
    second = pl.Series([max(pair) if pair[1] < 0 else pair[1] for pair in zip(*nodes.token, strict=True)])
    names = pl.Series([name for name, _ in nodes.tokens], dtype=pl.String)
    weight = pl.when(pl.col("side") == 1).then(scale.weights[1]).otherwise(-scale.weights[0])
    inside = own.with_columns(unit=pl.lit(pl.Series(unit)).gather(pl.col("node"))).filter(pl.col("unit") != ROOT)
    return (
        inside.with_columns(
            label=pl.lit(label_of).gather(pl.col("unit")),
            mostly=pl.lit(names).gather(pl.lit(second).gather(pl.col("node"))),
            unit_name=pl.lit(names).gather(pl.lit(second).gather(pl.col("unit"))),
        )
        .group_by("label", "mostly", "unit_name")
        .agg((pl.col("ns") * weight).sum().abs())
        .sort("ns", "mostly", descending=[True, False])
        .unique("label", keep="first", maintain_order=True)
        .select("label", mostly=pl.when(pl.col("mostly") != pl.col("unit_name")).then("mostly"))
    )


def _named(found: pl.DataFrame, labels: list[_Label]) -> pl.DataFrame:
    rows = []
    for label, phase, first_phase, first, second in found.select(
        "label", "phase", "first_phase", "first_seen", "second_seen"
    ).iter_rows():
        each = labels[label]
        status = _status(each, is_moved=phase != first_phase, first=first, second=second)
        is_same = [pair[0] == pair[1] for pair in (each.names, each.parents, each.shapes)]
        rows.append(
            (status, PHASES[phase], each.names[1], each.kind, list(each.parents[1]), each.shapes[1],
             PHASES[first_phase], None if is_same[0] else each.names[0],
             None if is_same[1] else list(each.parents[0]), None if is_same[2] else each.shapes[0])
        )  # fmt: skip
    keys = pl.DataFrame(rows, schema={column.name: column.dtype for column in SCHEMA[:10]}, orient="row")
    return pl.concat([keys, found.drop("label", "phase", "first_phase")], how="horizontal").select(
        pl.col(column.name).cast(column.dtype) for column in SCHEMA
    )


def _status(label: _Label, *, is_moved: bool, first: int, second: int) -> str:
    if not first or not second:
        return "gone" if first else "new"
    if label.names[0] != label.names[1]:
        return "renamed"
    if label.shapes[0] != label.shapes[1]:
        return "reshaped"
    return "moved" if is_moved else "matched"
