"""The walk back from an end over whatever set each point's time: parts that follow each other without a gap."""

from dataclasses import dataclass

import numpy as np

from chakra_capture.analysis.replay.calibrated import KINDS, NONE, Calibrated
from chakra_capture.analysis.replay.graph import ReplayError
from chakra_capture.trace.columns import Int64

_IS_LAG = np.array([kind not in ("thread", "run", "hand_over", "input", "collective", "begin") for kind in KINDS])


@dataclass(frozen=True, slots=True)
class Stretches:
    """Parts of a path, the last first; times in ns.

    Attributes:
        edge: why a part took its time; -1 where nothing says what the point before it waited for.
        excess: how much of it is more than the lag that edges of its class usually have.
        point: where it ends, unless a later one begins before that.
    """

    begin: Int64
    end: Int64
    edge: Int64
    excess: Int64
    point: Int64


class Walker:
    """Paths through one solution of a replay.

    Raises:
        ReplayError: what points wait for goes round in a circle.
    """

    def __init__(self, model: Calibrated, times: Int64, lag: Int64) -> None:
        self._model, self._times, self._lag = model, times, lag
        self._reasons = model.reasons(times, lag)
        before = np.where(self._reasons == NONE, NONE, model.src[self._reasons] if len(model.src) else NONE)
        _check_ends(before)
        self._before, self._time_of = before.tolist(), times.tolist()

    def walk(self, end: int, begin_ns: int) -> Stretches:
        """Give the parts of the path to a point, the last first, back to a time: their sum is the time between.

        A lag may be negative: a start that was recorded before what it waits for was over. The part before it is then
        the shorter, so none is negative.
        """
        found, before, time_of, point = list[int](), self._before, self._time_of, end
        while point != NONE and time_of[point] > begin_ns:
            found.append(point)
            point = before[point]
        points = np.asarray(found, dtype=np.int64)
        until = np.minimum.accumulate(self._times[points])
        first = begin_ns if point == NONE else max(time_of[point], begin_ns)
        begin = np.append(until[1:], np.minimum(until[-1:], first))
        edge, lasts = self._reasons[points], begin < until
        over = np.zeros(len(points), dtype=np.int64)
        is_lag = (edge != NONE) & _IS_LAG[self._model.kind[edge]]
        over[is_lag] = (self._lag - np.maximum(self._model.usual, 0))[edge[is_lag]]
        excess = np.clip(over, 0, until - begin)
        return Stretches(begin[lasts], until[lasts], edge[lasts], excess[lasts], points[lasts])


def _check_ends(before: Int64) -> None:
    """Go back from all points at once, twice as far each time: they reach one that waits for nothing, or circle."""
    for _ in range(len(before).bit_length()):
        before = np.where(before == NONE, NONE, before[before])
    if (before != NONE).any():
        raise ReplayError(
            f"{int((before != NONE).sum())} of {len(before)} points wait for each other in a circle; a path needs an "
            "order. This is a fault of the replay: please report it with the trace."
        )
