"""The calls of a step as a tree that both sides share: matched by where a call stands, not only by what it is called.

A node is the k-th call of an op, on inputs of some shapes and in some phase, by one and the same parent. Level by level
from the step down, nodes that both sides have are one; of the others those that stand in the same place are one too
(see ``siblings``). An annotation that only one side has, around calls that the other makes without it, is looked
through: the calls match, the annotation is new.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import polars as pl

from chakra_capture.analysis.trace_diff.siblings import Sibling, pair_siblings
from chakra_capture.analysis.trace_diff.side import KINDS, Side
from chakra_capture.trace.columns import Bool, Int64

Float = npt.NDArray[np.float64]
ROOT = 0
# This call of one parent and all later ones are one node.
_MOST_CALLS = 256
_MOST_PASSES = 4
_MOST_INSIDE = 8


@dataclass(slots=True)
class Nodes:
    """The shared tree; node 0 is the step. Lists by number of the node, a pair for the two sides.

    Attributes:
        parent: number of the node that calls it.
        kind: host_op, annotation, runtime.
        token: place in ``tokens`` on each side; -1 where the side does not have it.
        phase: of the call on each side, as merge labels it.
        tokens: names and shapes.
    """

    tokens: list[tuple[str, str | None]]
    parent: list[int] = field(default_factory=lambda: [-1])
    kind: list[str] = field(default_factory=lambda: ["step"])
    token: tuple[list[int], list[int]] = field(default_factory=lambda: ([-1], [-1]))
    phase: tuple[list[int], list[int]] = field(default_factory=lambda: ([-1], [-1]))

    def __len__(self) -> int:
        return len(self.parent)

    def has(self, side: int, node: int) -> bool:
        """Whether a side makes this call; the step is everybody's."""
        return node == ROOT or self.token[side][node] >= 0


@dataclass(frozen=True, slots=True)
class Structure:
    """The tree, and for the rows of each side their nodes."""

    nodes: Nodes
    of_rows: tuple[Int64, Int64]


@dataclass(frozen=True, slots=True)
class _Calls:
    """The rows of both sides, one after the other."""

    side: Int64
    token: Int64
    phase: Int64
    kind: list[str]
    kind_code: Int64
    parent: Int64
    is_mark: Bool
    # Of rows without a parent: which step, and whether on the loop's thread.
    origin: Int64
    is_loop: Bool
    tokens: list[tuple[str, str | None]]


def match_sides(first: Side, second: Side) -> Structure:
    """Match the calls of two sides."""
    calls = _calls(first, second)
    through = calls.is_mark.copy()
    nodes, node = _matched(calls, through)
    for _ in range(_MOST_PASSES - 1):
        wrappers = _wrappers(calls, nodes, node, through)
        if not wrappers.any():
            break
        through |= wrappers
        nodes, node = _matched(calls, through)
    return Structure(nodes, (node[: first.rows.height], node[first.rows.height :]))


def _calls(first: Side, second: Side) -> _Calls:
    sides = (first, second)
    rows = pl.concat(side.rows for side in sides)
    tokens = pl.concat(side.tokens.with_columns(side=pl.lit(at)) for at, side in enumerate(sides))
    is_known = tokens["input_shapes"].is_not_null()
    if len(set(tokens.filter(is_known)["side"])) < len(sides):  # of one side alone they tell nothing
        tokens = tokens.with_columns(input_shapes=pl.lit(None, pl.String))
    # As recorded: one tool indents them.
    tokens = tokens.with_columns(pl.col("input_shapes").str.replace_all(r"\s", ""))
    tokens = tokens.with_columns(number=pl.struct("name", "input_shapes").rank("dense").cast(pl.Int64) - 1)
    numbers = [
        tokens.filter(side=at)["number"].to_numpy()[side.rows["token"].to_numpy()] for at, side in enumerate(sides)
    ]
    names = tokens.unique("number", keep="first").sort("number")
    parent = rows["parent"].to_numpy().copy()
    after = np.arange(len(parent)) >= first.rows.height
    parent[(parent >= 0) & after] += first.rows.height
    return _Calls(
        side=after.astype(np.int64),
        token=np.concatenate(numbers),
        phase=rows["phase"].to_numpy(),
        kind=list(KINDS),
        kind_code=rows["kind"].to_physical().cast(pl.Int64).to_numpy(),
        parent=parent,
        is_mark=rows["is_mark"].to_numpy(),
        origin=rows["at"].to_numpy(),
        is_loop=rows["is_loop"].to_numpy(),
        tokens=list(zip(names["name"], names["input_shapes"], strict=True)),
    )


def _matched(calls: _Calls, through: Bool) -> tuple[Nodes, Int64]:
    """Build the tree from the step down, looking through some rows."""
    up = _up(calls.parent, through)
    nodes, node = Nodes(calls.tokens), np.full(len(up), ROOT, dtype=np.int64)
    inside = _Inside(calls, up)
    for level in _levels(up):
        rows = level[~calls.is_mark[level]]
        if len(rows):
            _add_level(calls, nodes, node, rows, up, inside)
    marks = np.flatnonzero(calls.is_mark)
    node[marks] = np.where(up[marks] >= 0, node[up[marks]], ROOT)
    return nodes, node


def _up(parent: Int64, through: Bool) -> Int64:
    """The next row around each that is not looked through."""
    up = parent
    while True:
        skip = (up >= 0) & through[up]
        if not skip.any():
            return up
        up = np.where(skip, parent[up], up)


def _levels(up: Int64) -> Iterator[Int64]:
    """Rows by their depth, the outermost first."""
    depth, around = np.zeros(len(up), dtype=np.int64), up
    while (around >= 0).any():
        depth += around >= 0
        around = np.where(around >= 0, up[around], -1)
    order = np.argsort(depth, kind="stable")
    yield from np.split(order, np.cumsum(np.bincount(depth))[:-1]) if len(up) else ()


class _Inside:
    """What a row calls: names in order, for telling a renamed call by them."""

    def __init__(self, calls: _Calls, up: Int64) -> None:
        self._calls, self._order = calls, np.argsort(up, kind="stable")
        self._up = up[self._order]

    def names(self, row: int) -> tuple[str, ...]:
        begin, end = np.searchsorted(self._up, [row, row + 1])
        some = self._order[begin : min(int(end), int(begin) + _MOST_INSIDE)]
        return tuple(self._calls.tokens[self._calls.token[each]][0] for each in some)


def _numbered(group: Int64) -> Int64:
    """Of each entry how many of its group come before."""
    order = np.argsort(group, kind="stable")
    ordered = group[order]
    begins = np.append(True, ordered[1:] != ordered[:-1])[: len(group)]
    first = np.maximum.accumulate(np.where(begins, np.arange(len(group)), 0))
    found = np.empty(len(group), dtype=np.int64)
    found[order] = np.arange(len(group)) - first
    return found


@dataclass(frozen=True, slots=True)
class _Level:
    """Nodes of one level before they are paired: of each a row on either side, and its place there."""

    parent: Int64
    row: tuple[Int64, Int64]
    place: tuple[Float, Float]


def _add_level(calls: _Calls, nodes: Nodes, node: Int64, rows: Int64, up: Int64, inside: _Inside) -> None:
    num_phases, num_tokens = int(calls.phase.max()) + 1, len(calls.tokens)
    has_parent = up[rows] >= 0
    side, loop = calls.side[rows], calls.is_loop[rows]
    # Rows without a parent are called by the step, on its thread or beside it.
    instance = np.where(has_parent, up[rows], len(up) + 4 * calls.origin[rows] + 2 * side + loop)
    parent = np.where(has_parent, node[up[rows]], ROOT)
    label = ((calls.token[rows] * num_phases + calls.phase[rows]) * 2 + loop) * len(calls.kind) + calls.kind_code[rows]
    width = num_tokens * num_phases * 2 * max(len(calls.kind), 1)
    number = np.minimum(_numbered(instance * width + label), _MOST_CALLS - 1)
    place = _numbered(instance)
    _, kept = np.unique(parent * width + label, return_inverse=True)
    _, local = np.unique(kept * _MOST_CALLS + number, return_inverse=True)
    size = int(local.max()) + 1
    first_rows, places = [], []
    for at in (0, 1):
        own = side == at
        row = np.full(size, -1, dtype=np.int64)
        row[local[own][::-1]] = rows[own][::-1]
        count = np.bincount(local[own], minlength=size)
        places.append(np.bincount(local[own], weights=place[own], minlength=size) / np.maximum(count, 1))
        first_rows.append(row)
    of_local = np.zeros(size, dtype=np.int64)
    of_local[local] = parent
    level = _Level(of_local, (first_rows[0], first_rows[1]), (places[0], places[1]))
    node[rows] = _numbers(calls, nodes, level, _pairs(calls, level, inside))[local]


def _pairs(calls: _Calls, level: _Level, inside: _Inside) -> dict[int, int]:
    """Of nodes that only the second side has, those of the first that are the same."""
    has = [row >= 0 for row in level.row]
    alone = [np.flatnonzero(has[at] & ~has[1 - at]) for at in (0, 1)]
    contested = np.intersect1d(level.parent[alone[0]], level.parent[alone[1]])
    if not len(contested):
        return {}
    some = np.flatnonzero(np.isin(level.parent, contested))
    some = some[np.argsort(level.parent[some], kind="stable")]
    found = {}
    for own in np.split(some, np.flatnonzero(np.diff(level.parent[some])) + 1):
        sides: tuple[list[Sibling], list[Sibling]] = [], []
        same = []
        for each in own.tolist():
            at = 0 if has[0][each] else 1
            if has[0][each] and has[1][each]:
                same.append((float(level.place[0][each]), float(level.place[1][each])))
                continue
            row = int(level.row[at][each])
            name, shapes = calls.tokens[calls.token[row]]
            kind, phase = calls.kind[calls.kind_code[row]], int(calls.phase[row])
            place = float(level.place[at][each])
            sides[at].append(Sibling(each, kind, name, shapes, phase, place, inside.names(row)))
        found.update({b: a for a, b in pair_siblings(*sides, same)})
    return found


def _numbers(calls: _Calls, nodes: Nodes, level: _Level, pairs: dict[int, int]) -> Int64:
    """Enter the nodes of a level into the tree; returns their numbers there."""
    numbers = np.zeros(len(level.parent), dtype=np.int64)
    kept = [each for each in range(len(level.parent)) if each not in pairs]
    partner = {a: b for b, a in pairs.items()}
    parents, rows = level.parent.tolist(), [row.tolist() for row in level.row]
    for each in kept:
        numbers[each] = len(nodes)
        own = rows[0][each], rows[1][partner.get(each, each)]
        nodes.parent.append(parents[each])
        nodes.kind.append(calls.kind[calls.kind_code[max(own)]])
        for at, row in enumerate(own):
            nodes.token[at].append(int(calls.token[row]) if row >= 0 else -1)
            nodes.phase[at].append(int(calls.phase[row]) if row >= 0 else -1)
    for b, a in pairs.items():
        numbers[b] = numbers[a]
    return numbers


def _wrappers(calls: _Calls, nodes: Nodes, node: Int64, through: Bool) -> Bool:
    """Rows of annotations of one side around calls that the other side makes in the same place without one."""
    alone: dict[int, tuple[list[int], set[str]]] = {}
    names: dict[tuple[int, int], set[str]] = defaultdict(set)
    for number in range(1, len(nodes)):
        has = nodes.has(0, number), nodes.has(1, number)
        if has[0] != has[1]:
            at = 0 if has[0] else 1
            name = nodes.tokens[nodes.token[at][number]][0]
            parent = nodes.parent[number]
            names[at, parent].add(name)
            if parent in alone:
                alone[parent][1].add(name)
            if nodes.kind[number] == "annotation" and nodes.has(1 - at, parent):
                alone[number] = ([at], set())
    chosen = [
        number
        for number, (side, inside) in alone.items()
        if nodes.has(1 - side[0], nodes.parent[number]) and inside & names[1 - side[0], nodes.parent[number]]
    ]
    return np.isin(node, chosen) & ~through
