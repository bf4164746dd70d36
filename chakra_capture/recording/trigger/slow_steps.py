"""Which step is so slow, beside those before it, that somebody should look at the next ones."""

from bisect import bisect_left, insort
from collections import deque

# A median of fewer says little, and the first steps of a job warm up.
_FEWEST = 20
_MOST = 256


class SlowSteps:
    """Compares each step with the median of up to 256 before it; after a slow one it begins anew.

    Args:
        factor: how many times the median is slow.
    """

    def __init__(self, factor: float) -> None:
        self._factor = factor
        self._recent: deque[int] = deque()
        self._ordered: list[int] = []

    def add(self, step: int, ns: int) -> str | None:
        """Take the time of a step; says what is wrong with it if it is slow."""
        median = self._median()
        if median is not None and ns > self._factor * median:
            self._recent.clear()
            self._ordered.clear()
            return f"step {step} took {ns / 1e6:.2f} ms, {ns / median:.1f} times the median of the steps before it"
        if len(self._recent) == _MOST:
            del self._ordered[bisect_left(self._ordered, self._recent.popleft())]
        self._recent.append(ns)
        insort(self._ordered, ns)
        return None

    def _median(self) -> float | None:
        times = self._ordered
        if len(times) < _FEWEST:
            return None
        half = len(times) // 2
        return max((times[half] + times[~half]) / 2, 1.0)
