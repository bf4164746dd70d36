"""What of a run is shown: some steps, a stretch of time, some kinds; what reaches out of it is clipped."""

from dataclasses import dataclass

import numpy as np

from chakra_capture.merge import intervals
from chakra_capture.trace.columns import Bool, Int64

_NEVER, _ALWAYS = np.iinfo(np.int64).min // 2, np.iinfo(np.int64).max // 2


@dataclass(frozen=True, slots=True)
class Cut:
    """What stays; None: all.

    Attributes:
        steps: numbers; of each the time from its start to the end of the last thing that it launched.
        begin_ns, end_ns: since the first event of the ranks that are shown.
        kinds: of rows, and of what is made of them (``given.MADE_KINDS``).
    """

    steps: frozenset[int] | None = None
    begin_ns: int | None = None
    end_ns: int | None = None
    kinds: frozenset[str] | None = None

    def shows(self, kind: str) -> bool:
        return self.kinds is None or kind in self.kinds

    @property
    def is_whole(self) -> bool:
        """All of the time is shown."""
        return self.steps is None and self.begin_ns is None and self.end_ns is None


@dataclass(frozen=True, slots=True)
class Spans:
    """Stretches of time that are shown, disjoint and ascending; half open."""

    start: Int64
    end: Int64

    @classmethod
    def whole(cls) -> "Spans":
        return cls(np.array([_NEVER]), np.array([_ALWAYS]))

    @classmethod
    def of(cls, start: Int64, end: Int64) -> "Spans":
        return cls(*intervals.union(start, end))

    def within(self, begin: int | None, end: int | None) -> "Spans":
        """The part of them between two times; None: no bound."""
        low, high = _NEVER if begin is None else begin, _ALWAYS if end is None else end
        return Spans.of(*intervals.clip(self.start, self.end, low, high))

    def clip(self, begin: Int64, end: Int64) -> "Clipped":
        """Cut slices to the first and the last of the stretches that they are in."""
        if not len(self.start):
            nothing = np.zeros(len(begin), dtype=bool)
            return Clipped(begin, end, nothing, nothing)
        first = np.searchsorted(self.end, begin, side="right")
        last = np.searchsorted(self.start, np.maximum(end, begin + 1), side="left") - 1
        kept = first <= last
        at_first, at_last = (np.clip(at, 0, len(self.start) - 1) for at in (first, last))
        low = np.where(kept, np.maximum(begin, self.start[at_first]), begin)
        high = np.where(kept, np.maximum(np.minimum(end, self.end[at_last]), low), end)
        return Clipped(low, high, kept, kept & ((low != begin) | (high != end)))


@dataclass(frozen=True, slots=True)
class Clipped:
    """Slices as they are shown; ``kept`` and ``is_cut`` say which are, and which are shorter than measured."""

    begin: Int64
    end: Int64
    kept: Bool
    is_cut: Bool
