"""One order of all communication of a run, which every rank can keep.

ASTRA-sim has one communication of a rank in flight (receives aside). Two of different groups that ran side by side
may be issued in another order on the next rank, and then the ranks wait for each other for ever.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import polars as pl

_NONE = -1


class _Row(NamedTuple):
    rank: int
    op: int
    group: int  # of a send or recv -1
    start: int
    end: int
    is_recv: bool  # which need not wait for its turn


def find_turns(rows: pl.DataFrame) -> pl.Series:
    """Number the operations in an order in which none comes before one that had ended when it began on some rank.

    Args:
        rows: ``rank``, ``op``, ``group``, ``start``, ``end``, ``is_recv``; those of a rank in order of issue.

    Returns:
        The turn of each row; null where it need not wait for its turn or, since ranks contradict each other, cannot.
    """
    names = ("rank", "op", "group", "start", "end", "is_recv")
    given = [_Row(*row) for row in rows.select(names).iter_rows()]
    return pl.Series("turn", _Order(given).turns(), dtype=pl.Int64)


@dataclass(slots=True)
class _Queue:
    """Rows of which the first that has no turn yet is wanted."""

    rows: Sequence[int]
    at: int = 0


@dataclass(slots=True)
class _Order:
    rows: list[_Row]
    of_op: dict[int, list[int]] = field(default_factory=dict)
    placed: dict[int, int] = field(default_factory=dict)
    by_end: dict[int, _Queue] = field(default_factory=dict)
    by_issue: dict[tuple[int, int], _Queue] = field(default_factory=dict)

    def turns(self) -> list[int | None]:
        """The turn of each row."""
        of_rank, of_group = dict[int, list[int]](), dict[tuple[int, int], list[int]]()
        for number, row in enumerate(self.rows):
            self.of_op.setdefault(row.op, []).append(number)
            of_rank.setdefault(row.rank, []).append(number)
            if row.group >= 0:
                of_group.setdefault((row.rank, row.group), []).append(number)
        self.by_end = {rank: _Queue(sorted(some, key=lambda one: self.rows[one].end)) for rank, some in of_rank.items()}
        self.by_issue = {key: _Queue(some) for key, some in of_group.items()}
        turns: list[int | None] = [None] * len(self.rows)
        for row in self.rows:
            while row.op not in self.placed:
                op = self._next(row.op)
                for number in self.of_op[op]:
                    if not self.rows[number].is_recv and self._before(number) == _NONE:
                        turns[number] = len(self.placed)
                self.placed[op] = len(self.placed)
        return turns

    def _next(self, op: int) -> int:
        """An operation that must come no later than this one, and nothing before it; one of a circle, if they do."""
        seen = set[int]()
        while op not in seen:
            seen.add(op)
            before = (self._before(number) for number in self.of_op[op] if not self.rows[number].is_recv)
            op = next((one for one in before if one != _NONE), op)
        return op

    def _before(self, number: int) -> int:
        """An operation without a turn that must come before that of this row."""
        row = self.rows[number]
        issued = self._first(self.by_issue.get((row.rank, row.group)))
        if issued not in (_NONE, number) and self.rows[issued].op != row.op:
            return self.rows[issued].op
        ended = self._first(self.by_end[row.rank])
        if ended != _NONE and self.rows[ended].op != row.op and self.rows[ended].end <= row.start:
            return self.rows[ended].op
        return _NONE

    def _first(self, queue: _Queue | None) -> int:
        if queue is None:
            return _NONE
        while queue.at < len(queue.rows) and self.rows[queue.rows[queue.at]].op in self.placed:
            queue.at += 1
        return queue.rows[queue.at] if queue.at < len(queue.rows) else _NONE
