"""Calls under the same parent that only one side has: which of them are the same call under another name.

In this order: the same op on the same shapes in another phase; the same op on other shapes; then calls of one kind
between the same neighbours, if what they call is called the same, if their names are alike, or if nothing else stands
there. What is left over is new, or gone. The pairs do not depend on which side is the first.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher

# As alike as names of two instances of one template, or of one module that was renamed.
_ALIKE = 0.6
# Among more calls than this names are not compared one by one.
_FEW = 30


@dataclass(frozen=True, slots=True)
class Sibling:
    """A call of one side.

    Attributes:
        node: its number.
        place: where it stands among all that its parent calls.
        inside: what it calls.
    """

    node: int
    kind: str
    name: str
    shapes: str | None
    phase: int
    place: float
    inside: tuple[str, ...] = ()


_Pairs = list[tuple[Sibling, Sibling]]
_Key = Callable[[Sibling], Hashable]


def pair_siblings(
    first: Sequence[Sibling], second: Sequence[Sibling], same: Sequence[tuple[float, float]]
) -> list[tuple[int, int]]:
    """Pair calls that only one side has.

    Args:
        first, second: of each side.
        same: places, on both sides, of the calls of this parent that both have.

    Returns:
        pairs of their numbers.
    """
    pairs: _Pairs = []
    left = _in_order(first), _in_order(second)
    keys: tuple[_Key, ...] = (lambda each: (each.kind, each.name, each.shapes), lambda each: (each.kind, each.name))
    for key in keys:
        left = _paired_by(key, left, pairs)
    if left[0] and left[1]:
        known = sorted([*same, *((a.place, b.place) for a, b in pairs)])
        for gap in _gaps(left, known):
            _pair_gap(*gap, pairs)
    return sorted((a.node, b.node) for a, b in pairs)


def _in_order(calls: Sequence[Sibling]) -> list[Sibling]:
    return sorted(calls, key=lambda each: (each.place, each.name, each.shapes or "", each.phase))


def _paired_by(
    key: _Key, left: tuple[list[Sibling], list[Sibling]], pairs: _Pairs
) -> tuple[list[Sibling], list[Sibling]]:
    """Pair the k-th call of one side with the k-th of the other, of those with one key; returns what is left."""
    groups: dict[Hashable, tuple[list[Sibling], list[Sibling]]] = defaultdict(lambda: ([], []))
    for side, calls in enumerate(left):
        for each in calls:
            groups[key(each)][side].append(each)
    rest: tuple[list[Sibling], list[Sibling]] = [], []
    for group in groups.values():
        num = min(len(group[0]), len(group[1]))
        pairs.extend(zip(group[0][:num], group[1][:num], strict=True))
        for side in (0, 1):
            rest[side].extend(group[side][num:])
    return _in_order(rest[0]), _in_order(rest[1])


def _gaps(
    left: tuple[list[Sibling], list[Sibling]], known: list[tuple[float, float]]
) -> list[tuple[list[Sibling], list[Sibling]]]:
    """Calls of one kind between the same two neighbours, where both sides have some."""
    gaps: dict[Hashable, tuple[list[Sibling], list[Sibling]]] = defaultdict(lambda: ([], []))
    for side, calls in enumerate(left):
        order = sorted(range(len(known)), key=lambda at: known[at][side])
        places = [known[at][side] for at in order]
        for each in calls:
            at = bisect_left(places, each.place)
            before, after = (order[at - 1] if at else None), (order[at] if at < len(order) else None)
            gaps[each.kind, before, after][side].append(each)
    return [gap for gap in gaps.values() if gap[0] and gap[1]]


def _pair_gap(first: list[Sibling], second: list[Sibling], pairs: _Pairs) -> None:
    deep = [each for each in first if each.inside], [each for each in second if each.inside]
    before = len(pairs)
    _paired_by(lambda each: each.inside, deep, pairs)
    done = {each.node for pair in pairs[before:] for each in pair}
    first, second = ([each for each in side if each.node not in done] for side in (first, second))
    if len(first) != len(second) and len(first) <= _FEW and len(second) <= _FEW:
        before = len(pairs)
        _pair_alike(first, second, pairs)
        done = {each.node for pair in pairs[before:] for each in pair}
        first, second = ([each for each in side if each.node not in done] for side in (first, second))
    if len(first) == len(second):
        pairs.extend(zip(first, second, strict=True))


def _pair_alike(first: list[Sibling], second: list[Sibling], pairs: _Pairs) -> None:
    """Pair by the likeness of names, most alike first."""
    scored = sorted(
        ((-_likeness(a.name, b.name), abs(i - j), i + j, min(i, j)), i, j)
        for i, a in enumerate(first)
        for j, b in enumerate(second)
    )
    taken: tuple[set[int], set[int]] = set(), set()
    for (score, *_), i, j in scored:
        if -score >= _ALIKE and i not in taken[0] and j not in taken[1]:
            pairs.append((first[i], second[j]))
            taken[0].add(i)
            taken[1].add(j)


def _likeness(first: str, second: str) -> float:
    """The same either way round, which the ratio of the standard library is not."""
    least, most = sorted((first, second))
    return SequenceMatcher(None, least, most, autojunk=False).ratio()
