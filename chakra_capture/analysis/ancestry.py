"""Rows of one rank and the rows around them, walked all at once."""

from collections.abc import Iterator, Mapping

import numpy as np

from chakra_capture.trace.columns import Bool, Int64


def positions(node_id: Int64, wanted: Int64) -> Int64:
    """Where each wanted id stands among ascending ids; -1 for none."""
    at = np.minimum(np.searchsorted(node_id, wanted), max(len(node_id) - 1, 0))
    found = node_id[at] == wanted if len(node_id) else np.zeros(len(wanted), dtype=bool)
    return np.where(found, at, -1)


def levels(parent: Int64, rows: Int64) -> Iterator[tuple[Int64, Int64]]:
    """Pairs of a place in ``rows`` and a row around it: the row itself first, then its parent, and so on."""
    place = np.flatnonzero(rows >= 0)
    around = rows[place]
    while len(place):
        yield place, around
        around = parent[around]
        inside = around >= 0
        place, around = place[inside], around[inside]


def nearest(parent: Int64, rows: Int64, accept: Bool) -> Int64:
    """The innermost accepted row around each row, itself included; -1 for none."""
    return all_around(parent, rows, {"": accept}, {})[""]


def outermost(parent: Int64, rows: Int64, accept: Bool) -> Int64:
    """The outermost accepted row around each row, itself included; -1 for none."""
    return all_around(parent, rows, {}, {"": accept})[""]


def all_around(parent: Int64, rows: Int64, inner: Mapping[str, Bool], outer: Mapping[str, Bool]) -> dict[str, Int64]:
    """The innermost rows of several kinds around each row, and the outermost of others, by name of the kind.

    Args:
        parent: the row around each row, -1 for none.
        rows: where to begin; -1 for nowhere.
        inner: by kind, which rows are accepted as the innermost.
        outer: by kind, which rows are accepted as the outermost.
    """
    # Many rows are asked for often: each is walked once.
    asked = np.zeros(len(parent), dtype=bool)
    asked[rows[rows >= 0]] = True
    some = np.flatnonzero(asked)
    found = {kind: np.full(len(some), -1, dtype=np.int64) for kind in (*inner, *outer)}
    for place, around in levels(parent, some):
        for kind, accept in inner.items():
            taken = accept[around] & (found[kind][place] < 0)
            found[kind][place[taken]] = around[taken]
        for kind, accept in outer.items():
            taken = accept[around]
            found[kind][place[taken]] = around[taken]
    number = np.where(rows >= 0, (np.cumsum(asked) - 1)[rows] if len(some) else -1, -1)
    return {kind: np.append(values, -1)[number] for kind, values in found.items()}


def without_equal_around(parent: Int64, group: Int64) -> Bool:
    """Rows that no row of their own group is around: recursion counts once."""
    alone = np.ones(len(parent), dtype=bool)
    for place, around in levels(parent, np.asarray(parent)):
        alone[place[group[around] == group[place]]] = False
    return alone
