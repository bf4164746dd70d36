"""Hand-overs between threads that no event marks, by how long one thread does nothing while another is busy.

A long stretch of the loop's thread in which another thread of its process is busy most of the time is a wait for it:
the other one begins at the start of the stretch, and its latest mark before the end ends it. Good enough for a replay
and for what a simulator is to wait for; the table edges has only what the trace itself shows.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

_US = 1_000
_SHORTEST_NS = 150 * _US
_BEGINS_WITHIN_NS, _BEGINS_WITHIN = 500 * _US, 0.20
_ENDS_WITHIN_NS, _ENDS_WITHIN = 400 * _US, 0.05


@dataclass(frozen=True, slots=True)
class Handover:
    """One stretch of the loop's thread.

    Attributes:
        at: its number.
        begins: mark of the other thread at which that one goes on; None if it ran already, or goes on much later.
        ends: mark of the other thread at which the loop goes on; None if none is near.
    """

    at: int
    begins: int | None
    ends: int | None


@dataclass(frozen=True, slots=True)
class Stretches:
    """A thread; stretch k lies between the times k and k + 1.

    Attributes:
        times: ns, ascending.
        is_busy: a row runs.
        may_wait: no call of the runtime runs, which waits for something else if at all.
    """

    times: Sequence[int]
    is_busy: Sequence[bool]
    may_wait: Sequence[bool]


def find_handovers(loop: Stretches, other: Stretches) -> Iterator[Handover]:
    """Give the stretches of ``loop`` that are a wait for ``other``."""
    busy = _Busy(other)
    for at, (begin, end) in enumerate(pairwise(loop.times)):
        length = end - begin
        if length <= _SHORTEST_NS or not loop.may_wait[at] or busy.between(begin, end) <= length / 2:
            continue
        first = bisect_left(other.times, begin)
        goes_on = busy.is_idle(begin) and first < len(other.times)
        is_soon = goes_on and other.times[first] - begin <= max(_BEGINS_WITHIN_NS, _BEGINS_WITHIN * length)
        last = bisect_right(other.times, end) - 1
        is_inside = last >= 0 and other.times[last] > begin
        is_near = is_inside and end - other.times[last] <= max(_ENDS_WITHIN_NS, _ENDS_WITHIN * length)
        if is_soon or is_near:
            yield Handover(at, first if is_soon else None, last if is_near else None)


class _Busy:
    """How long a thread runs rows between two times."""

    def __init__(self, thread: Stretches) -> None:
        self._times, self._is_busy = thread.times, thread.is_busy
        lengths = [after - before for before, after in pairwise(thread.times)]
        self._until = [0, *accumulate(map(int.__mul__, lengths, map(int, thread.is_busy)))]

    def between(self, begin: int, end: int) -> int:
        return self._before(end) - self._before(begin)

    def is_idle(self, time: int) -> bool:
        """Whether no row runs from a time on."""
        at = bisect_right(self._times, time) - 1
        return at < 0 or at >= len(self._is_busy) or not self._is_busy[at]

    def _before(self, time: int) -> int:
        at = bisect_right(self._times, time) - 1
        if at < 0:
            return 0
        if at >= len(self._is_busy):
            return self._until[-1]
        return self._until[at] + (time - self._times[at] if self._is_busy[at] else 0)
