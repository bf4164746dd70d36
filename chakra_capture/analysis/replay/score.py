"""How well a replay gives back what was recorded: steps, starts on the device, idle time, waits without a reason."""

from dataclasses import dataclass

import numpy as np

from chakra_capture.analysis.replay.replay import RankReplay, Replay
from chakra_capture.trace.columns import Int64

# More of the window than this waits for nothing known: the trace is not whole, or the rules do not hold for it.
MOST_UNEXPLAINED = 0.05


@dataclass(frozen=True, slots=True)
class StepScore:
    """One step of a rank; None: the step's number is not known."""

    step: int | None
    measured_ns: int
    predicted_ns: int

    @property
    def error(self) -> float:
        """Relative error of the prediction."""
        return self.predicted_ns / self.measured_ns - 1 if self.measured_ns else 0.0


@dataclass(frozen=True, slots=True)
class RankScore:
    """One rank; what concerns the device is None without activities.

    Attributes:
        window: from the first to the last time of all that is replayed.
        start_error_ns: |predicted - recorded| of the start of activities: mean and 95th percentile.
        idle: time between activities in which none runs, measured and predicted.
        unexplained_ns: what activities start later than all they are known to wait for, above 50 us each.
        num_anchored: activities that nothing in the window explains; they stand where they were recorded.
    """

    rank: int
    window: StepScore
    steps: list[StepScore]
    num_activities: int
    start_error_mean_ns: float | None
    start_error_p95_ns: int | None
    idle_measured_ns: int | None
    idle_predicted_ns: int | None
    unexplained_ns: int
    num_unexplained: int
    num_anchored: int
    num_inferred: int

    @property
    def unexplained_share(self) -> float:
        """Unexplained wait as a share of the window."""
        return self.unexplained_ns / self.window.measured_ns if self.window.measured_ns else 0.0

    @property
    def is_replayable(self) -> bool:
        """Whether a prediction from this trace means anything."""
        return self.unexplained_share <= MOST_UNEXPLAINED

    @property
    def worst_error(self) -> float:
        """Largest relative error of the window and its steps."""
        return max((abs(one.error) for one in (self.window, *self.steps)), default=0.0)


def score(replay: Replay) -> list[RankScore]:
    """Score each rank."""
    return [_score(rank, one, replay) for rank, one in replay.ranks.items()]


def _score(rank: int, one: RankReplay, replay: Replay) -> RankScore:
    found, recorded, times = one.activities, replay.graph.recorded, replay.times
    errors = np.sort(np.abs(times[found.starts] - recorded[found.starts]))
    has_device = bool(len(errors))
    unexplained = one.waits.unexplained_ns
    return RankScore(
        rank=rank,
        window=StepScore(None, *(int(np.ptp(all_[one.points])) for all_ in (recorded, times))),
        steps=_steps(one, recorded, times),
        num_activities=len(errors),
        start_error_mean_ns=int(errors.sum()) / len(errors) if has_device else None,
        start_error_p95_ns=int(errors[int(len(errors) * 0.95)]) if has_device else None,
        idle_measured_ns=_idle(found.begin, found.end) if has_device else None,
        idle_predicted_ns=_idle(times[found.starts], times[found.ends]) if has_device else None,
        unexplained_ns=sum(unexplained.values()),
        num_unexplained=len(unexplained),
        num_anchored=len(one.waits.anchored),
        num_inferred=one.waits.num_inferred,
    )


def _steps(one: RankReplay, recorded: Int64, times: Int64) -> list[StepScore]:
    found = [
        StepScore(number, int(recorded[end] - recorded[begin]), int(times[end] - times[begin]))
        for number, begin, end in one.steps
    ]
    return sorted(found, key=lambda step: step.step or 0)


def _idle(begin: Int64, end: Int64) -> int:
    """Time between the first begin and the last end in which nothing runs."""
    order = np.lexsort((end, begin))
    until = np.maximum.accumulate(end[order])
    return int(np.maximum(begin[order][1:] - until[:-1], 0).sum())
