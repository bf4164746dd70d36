"""Hand-overs between threads that no event marks, by how long one thread does nothing while another is busy.

A long stretch of the loop's thread in which another thread of its process is busy most of the time is a wait for it:
the other one begins at the start of the stretch, and its latest mark before the end ends it. Good enough for a replay
and for what a simulator is to wait for; the table edges has only what the trace itself shows.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from chakra_capture.trace.columns import Bool, Int64

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

    times: Int64
    is_busy: Bool
    may_wait: Bool


def find_handovers(loop: Stretches, other: Stretches) -> Iterator[Handover]:
    """Give the stretches of ``loop`` that are a wait for ``other``."""
    if not len(other.times):
        return
    length = np.diff(loop.times)
    at = np.flatnonzero((length > _SHORTEST_NS) & loop.may_wait)
    begin, end, length = loop.times[at], loop.times[at + 1], length[at]
    is_wait = _busy_until(other, end) - _busy_until(other, begin) > length / 2
    first, num_times = np.searchsorted(other.times, begin), len(other.times)
    last = np.searchsorted(other.times, end, "right") - 1
    goes_on = _is_idle(other, begin) & (first < num_times)
    wait = other.times[np.minimum(first, num_times - 1)] - begin
    is_soon = goes_on & (wait <= np.maximum(_BEGINS_WITHIN_NS, _BEGINS_WITHIN * length))
    reached = other.times[np.maximum(last, 0)]
    is_inside = (last >= 0) & (reached > begin)
    is_near = is_inside & (end - reached <= np.maximum(_ENDS_WITHIN_NS, _ENDS_WITHIN * length))
    for one in np.flatnonzero(is_wait & (is_soon | is_near)).tolist():
        yield Handover(
            int(at[one]), int(first[one]) if is_soon[one] else None, int(last[one]) if is_near[one] else None
        )


def _busy_until(thread: Stretches, time: Int64) -> Int64:
    """How long a thread has run rows until some times."""
    before = np.append(0, np.cumsum(np.diff(thread.times) * thread.is_busy))
    at = np.searchsorted(thread.times, time, "right") - 1
    begun = np.maximum(at, 0)
    since = np.where(np.append(thread.is_busy, False)[begun], time - thread.times[begun], 0)
    return np.where(at < 0, 0, before[begun] + since)


def _is_idle(thread: Stretches, time: Int64) -> Bool:
    """Whether no row runs from some times on."""
    at = np.searchsorted(thread.times, time, "right") - 1
    return np.asarray((at < 0) | ~np.append(thread.is_busy, False)[np.maximum(at, 0)])
