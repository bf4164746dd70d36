"""Rows of one rank and the rows around them, walked all at once."""

from collections.abc import Callable, Iterator

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
    return _found(parent, rows, accept, lambda found: found < 0)


def outermost(parent: Int64, rows: Int64, accept: Bool) -> Int64:
    """The outermost accepted row around each row, itself included; -1 for none."""
    return _found(parent, rows, accept, lambda found: np.ones(len(found), dtype=bool))


def _found(parent: Int64, rows: Int64, accept: Bool, takes: Callable[[Int64], Bool]) -> Int64:
    # Many rows are asked for often: each is walked once.
    asked = np.zeros(len(parent), dtype=bool)
    asked[rows[rows >= 0]] = True
    some = np.flatnonzero(asked)
    found = np.full(len(some), -1, dtype=np.int64)
    for place, around in levels(parent, some):
        taken = accept[around] & takes(found[place])
        found[place[taken]] = around[taken]
    number = np.cumsum(asked) - 1
    return np.where(rows >= 0, found[number[rows]] if len(some) else -1, -1)


def without_equal_around(parent: Int64, group: Int64) -> Bool:
    """Rows that no row of their own group is around: recursion counts once."""
    alone = np.ones(len(parent), dtype=bool)
    for place, around in levels(parent, np.asarray(parent)):
        alone[place[group[around] == group[place]]] = False
    return alone
