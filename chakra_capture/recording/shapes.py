"""Writes the records of steps; of steps that enter and leave the same phases in the same order, by one template.

A training does the same in nearly every step, and what ``Spans`` computes of the times it is told are sums and
differences of them. So for each order of moves ``Spans`` is run once, on moments that stand for themselves in what
comes out, and from then on the sums are taken directly: that takes a third of the time.
"""

import json
from collections.abc import Callable, Iterator
from operator import itemgetter, sub
from typing import Any

from chakra_capture.recording.spans import Spans, Stretch

BEGIN, END, START_STEP, END_STEP = range(4)
# (kind, what, ns) of each move, one after the other in one list: a list of tuples is work for the garbage collector.
Moves = list[Any]
# Longer steps, and orders beyond so many, are rare and may take their time.
_MOST_MOMENTS = 100
_MOST_SHAPES = 64
# Moment k is told as the number whose k-th digit is 1, so the digits of a sum say how often it has each moment.
_BITS = 16


class _Quoted(dict[str, str]):
    """Names as JSON writes them, in a template; there are few, and they come in every step."""

    def __missing__(self, name: str) -> str:
        self[name] = quoted = json.dumps(name).replace("%", "%%")
        return quoted


class Shapes:
    """The orders of moves met so far; names that are too many are the same ones as in ``spans``."""

    def __init__(self, spans: Spans) -> None:
        self._spans = spans
        self._quoted = _Quoted()
        self._known: dict[tuple[Any, ...], _Shape | None] = {}

    def text(self, moves: Moves) -> str | None:
        """What a step's record says of its times, from the end of the step before on; None of an order that is new."""
        if len(moves) > 3 * _MOST_MOMENTS:
            return None
        order = (*moves[::3], *moves[1::3])
        shape = self._known.get(order)
        if shape is None:
            self._meet(order, moves)
            return None
        return shape.text(moves)

    def text_of(self, step: Stretch, gap: Stretch | None) -> str:
        """The same of what has been summed up."""
        return self._template(step, gap) % tuple(_figures(step, gap))

    def _meet(self, order: tuple[Any, ...], moves: Moves) -> None:
        if order not in self._known:  # one that never comes again is not worth a template
            if len(self._known) >= _MOST_SHAPES:
                self._known.clear()
            self._known[order] = None
            return
        alike = moves[:]
        alike[2::3] = [1 << _BITS * at for at in range(len(moves) // 3)]
        ((gap, step),) = follow(self._spans.unused(alike[2]), alike[3:])
        figures = [_terms(figure) for figure in _figures(step, gap)]
        self._known[order] = _Shape(self._template(step, gap), figures, len(moves) // 3)

    def _template(self, step: Stretch, gap: Stretch | None) -> str:
        spans = ",".join([f"[{self._quoted[name]},%d,%d]" for name, _, _ in step.spans])
        text = f'"begin_ns":%d,"ns":%d,"phases":{self._totals(step)},"spans":[{spans}]'
        if step.num_spans_left_out:
            text += f',"spans_left_out":{step.num_spans_left_out}'
        return text if gap is None else f'{text},"gap":{{"ns":%d,"phases":{self._totals(gap)}}}'

    def _totals(self, stretch: Stretch) -> str:
        totals = [f"{self._quoted[name]}:[%d,{total.calls}]" for name, total in stretch.totals.items()]
        return f"{{{','.join(totals)}}}"


class _Shape:
    """Steps of one order of moves.

    Args:
        template: of their records.
        figures: moments that are added and that are taken away, of each number in it.
        num_moments: how many moments there are.
    """

    __slots__ = ("_added", "_rest", "_taken", "_template")

    def __init__(self, template: str, figures: list[tuple[list[int], list[int]]], num_moments: int) -> None:
        self._template = template
        # Behind the moments stands a zero: what takes no moment away takes that, and mostly it is one of each.
        pairs = [(added or [num_moments], taken or [num_moments]) for added, taken in figures]
        self._added: Callable[[Moves], tuple[int, ...]] = itemgetter(*[added[0] for added, _ in pairs])
        self._taken: Callable[[Moves], tuple[int, ...]] = itemgetter(*[taken[0] for _, taken in pairs])
        self._rest = [(at, added[1:], taken[1:]) for at, (added, taken) in enumerate(pairs) if len(added + taken) > 2]

    def text(self, moves: Moves) -> str:
        """The record of one of them."""
        moments = moves[2::3]
        moments.append(0)
        figures = list(map(sub, self._added(moments), self._taken(moments)))
        for at, added, taken in self._rest:
            figures[at] += sum([moments[one] for one in added]) - sum([moments[one] for one in taken])
        return self._template % tuple(figures)


def follow(spans: Spans, moves: Moves) -> Iterator[tuple[Stretch | None, Stretch]]:
    """Tell ``spans`` the moves; gives each (time before a step, step) that ends."""
    # Whichever thread does it, they are moves of the one thread that is followed.
    enter, leave, turn = spans.enter, spans.leave, spans.turn
    rest = iter(moves)
    for kind, what, now in zip(rest, rest, rest, strict=True):
        if kind == BEGIN:
            enter(what, now)
        elif kind == END:
            leave(what, now)
        elif kind == START_STEP:
            spans.gap = turn(now)
        else:
            step = turn(now)
            yield spans.take_gap(), step


def _figures(step: Stretch, gap: Stretch | None) -> list[int]:
    """The numbers of a template, in its order."""
    found = [step.begin_ns, step.end_ns - step.begin_ns, *[total.ns for total in step.totals.values()]]
    for _, begin, end in step.spans:
        found += begin, end
    if gap is not None:
        found += gap.end_ns - gap.begin_ns, *[total.ns for total in gap.totals.values()]
    return found


def _terms(figure: int) -> tuple[list[int], list[int]]:
    added: list[int] = []
    taken: list[int] = []
    at, half, mask = 0, 1 << _BITS - 1, (1 << _BITS) - 1
    while figure:
        count = (figure + half & mask) - half
        (added if count > 0 else taken).extend([at] * abs(count))
        figure, at = figure - count >> _BITS, at + 1
    return added, taken
