"""The walk back from an end over whatever set each point's time: parts that follow each other without a gap."""

from collections.abc import Iterator
from dataclasses import dataclass

from chakra_capture.analysis.replay.calibrated import KINDS, NONE, Calibrated
from chakra_capture.trace.columns import Int64


@dataclass(frozen=True, slots=True)
class Stretch:
    """A part of a path.

    Attributes:
        edge: why it took this time; -1 where nothing says what the point before it waited for.
        excess_ns: how much of it is more than the lag that edges of its class usually have.
        point: where it ends, unless a later one begins before that.
    """

    begin: int
    end: int
    edge: int
    excess_ns: int
    point: int


class Walker:
    """Paths through one solution of a replay."""

    def __init__(self, model: Calibrated, times: Int64, lag: Int64) -> None:
        self._times, self._reasons = times.tolist(), model.reasons(times, lag).tolist()
        self._lag, self._usual, self._src = lag.tolist(), model.usual.tolist(), model.src.tolist()
        self._is_lag = [kind not in ("thread", "run", "hand_over", "input", "collective", "begin") for kind in KINDS]
        self._kind = model.kind.tolist()

    def walk(self, end: int, begin_ns: int) -> Iterator[Stretch]:
        """Give the parts of the path to a point, the last first, back to a time: their sum is the time between.

        A lag may be negative: a start that was recorded before what it waits for was over. The part before it is then
        the shorter, so none is negative.
        """
        point, until = end, self._times[end]
        while until > begin_ns:
            edge = self._reasons[point]
            if edge == NONE:
                yield Stretch(begin_ns, until, NONE, 0, point)
                return
            src = self._src[edge]
            begin = max(min(self._times[src], until), begin_ns)
            if begin < until:
                over = self._lag[edge] - max(self._usual[edge], 0) if self._is_lag[self._kind[edge]] else 0
                yield Stretch(begin, until, edge, min(max(over, 0), until - begin), point)
            point, until = src, begin
