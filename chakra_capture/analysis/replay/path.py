"""The walk back from an end over whatever set each point's time: parts that follow each other without a gap."""

from dataclasses import dataclass

import numpy as np

from chakra_capture.analysis.replay.calibrated import NONE, Calibrated
from chakra_capture.analysis.replay.graph import KINDS, ReplayError
from chakra_capture.analysis.replay.loops import walk
from chakra_capture.trace.columns import Int64, Positions, pick

_IS_LAG = np.array([kind not in ("thread", "run", "hand_over", "input", "collective", "begin") for kind in KINDS])


@dataclass(frozen=True, slots=True)
class Stretches:
    """Parts of a path, the last first; times in ns.

    Attributes:
        edge: why a part took its time; -1 where nothing says what the point before it waited for.
        point: where it ends, unless a later one begins before that.
        lags: places of the parts that are a lag.
        excess: of these how much is more than the lag that edges of their class usually have.
    """

    begin: Int64
    end: Int64
    edge: Positions
    point: Positions
    lags: Int64
    excess: Int64


class Walker:
    """Paths through one solution of a replay."""

    def __init__(self, model: Calibrated, times: Int64, lag: Int64) -> None:
        self._model, self._times, self._lag = model, times, lag
        self._reasons = model.reasons(times, lag)
        self._before = pick(model.src, self._reasons, NONE)

    def walk(self, end: int, begin_ns: int) -> Stretches:
        """Give the parts of the path to a point, the last first, back to a time: their sum is the time between.

        A lag may be negative: a start that was recorded before what it waits for was over. The part before it is then
        the shorter, so none is negative.

        Raises:
            ReplayError: what the points wait for goes round in a circle.
        """
        points = walk(self._before, self._times, end, begin_ns)
        if points is None:
            raise ReplayError(
                f"The path to point {end} of {len(self._times)} goes round in a circle; a path needs an order. "
                "This is a fault of the replay: please report it with the trace."
            )
        end_ns, last = self._times[points], self._before[points[-1]] if len(points) else end
        np.minimum.accumulate(end_ns, out=end_ns)
        first = begin_ns if last == NONE else max(int(self._times[last]), begin_ns)
        begin = np.append(end_ns[1:], np.minimum(end_ns[-1:], first))
        lasts = begin < end_ns
        points, begin, end_ns = points[lasts], begin[lasts], end_ns[lasts]
        edge = self._reasons[points]
        late = np.flatnonzero((edge != NONE) & _IS_LAG[self._model.kind[edge]])
        over = self._lag[edge[late]] - np.maximum(self._model.usual[edge[late]], 0)
        return Stretches(begin, end_ns, edge, points, late, np.clip(over, 0, end_ns[late] - begin[late]))
