"""What steps and windows would have taken after changes, with what a replay is off by where nothing is changed."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import polars as pl

from chakra_capture.analysis.replay.calibrated import Calibrated, calibrate
from chakra_capture.analysis.replay.replay import Replay, replay
from chakra_capture.analysis.replay.run import windows_of
from chakra_capture.analysis.replay.score import RankScore, score
from chakra_capture.analysis.what_if.changes import Changes, Switch
from chakra_capture.analysis.what_if.lags import Variants
from chakra_capture.trace.columns import Int64
from chakra_capture.trace.merged import MergedRun, MergedTrace
from chakra_capture.trace.schema import Column

SCHEMA = (
    Column("window", pl.Int32, "recorded window"),
    Column("rank", pl.Int32, "rank"),
    Column("step", pl.Int64, "number of the step, as its CPU thread brackets it; null: the whole window, device work "
           "included"),
    Column("measured_ns", pl.Int64, "what it took", "ns"),
    Column("fastest_ns", pl.Int64, "what it would take after the change, if all that the trace cannot tell turns out "
           "well", "ns"),
    Column("slowest_ns", pl.Int64, "the same, if it turns out badly; equal to fastest_ns where the trace tells all",
           "ns"),
    Column("change", pl.Float64, "fastest_ns as a part of measured_ns, less 1"),
    Column("replay_error", pl.Float64, "what a replay without a change, one median lag per class, is off by, as a part "
           "of measured_ns; the error of a prediction is at least of that size"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Span:
    """A step of a rank, or its whole window (``step`` None)."""

    rank: int
    step: int | None
    measured_ns: int
    replay_error: float


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a span takes after a change: between ``fastest_ns`` and ``slowest_ns``."""

    span: Span
    fastest_ns: int
    slowest_ns: int


class WindowModel:
    """One window of a run, its ranks together, on which changes are tried."""

    def __init__(self, window: int, plain: Replay, model: Calibrated) -> None:
        self.window, self.model, self.variants = window, model, Variants(model)
        self.scores = score(plain)
        self._all = {rank: one.points for rank, one in model.replay.ranks.items()}
        self._steps = {rank: one.steps for rank, one in model.replay.ranks.items()}
        self.spans = [span for one in self.scores for span in self._spans(one)]

    @property
    def not_replayable(self) -> list[RankScore]:
        """Ranks from which nothing can be predicted."""
        return [one for one in self.scores if not one.is_replayable]

    def predict(self, changes: Changes) -> list[Prediction]:
        """Make changes together.

        Raises:
            ChangeError: nothing in the trace is what should change.
        """
        outcomes = self.variants.lags(changes)
        fast = self._durations(outcomes.fast, changes)
        same = np.array_equal(outcomes.fast, outcomes.slow)
        slow = fast if same else self._durations(outcomes.slow, changes)
        # A step that begins later may be the shorter one, though all its work is done later.
        found = [Prediction(span, min(times), max(times)) for span, *times in zip(self.spans, fast, slow, strict=True)]
        found = [one for one in found if one.span.rank not in changes.gone]
        return _balanced(found) if changes.balanced else found

    def _spans(self, one: RankScore) -> Iterator[Span]:
        times = self.model.times
        yield Span(one.rank, None, int(np.ptp(times[self._all[one.rank]])), one.window.error)
        errors: dict[int | None, list[float]] = defaultdict(list)
        for step in one.steps:
            errors[step.step].append(step.error)
        for number, begin, end in self._steps[one.rank]:
            yield Span(one.rank, number, int(times[end] - times[begin]), max(errors[number], key=abs))

    def _durations(self, lag: Int64, changes: Changes) -> list[int]:
        """Duration of each span with other lags."""
        times = self.model.solve(lag)
        ends = self._overlapped_ends(times) if Switch.OVERLAP_COMM in changes.switches else {}
        found = []
        for one in self.scores:
            found.append(int(np.ptp(times[self._all[one.rank]])))
            for _, begin, end in self._steps[one.rank]:
                found.append(int(max(times[end], ends.get(end, times[end])) - times[begin]))
        return found

    def _overlapped_ends(self, times: Int64) -> dict[int, int]:
        """When what gloo communicates for a step is over: nothing waits for it, but the update needs it."""
        found: dict[int, int] = {}
        for rank, one in self.model.replay.ranks.items():
            for _, begin, end in self._steps[rank]:
                starts = self.model.times[one.gloo.starts]
                inside = (self.model.times[begin] <= starts) & (starts < self.model.times[end])
                if inside.any():
                    found[end] = int(times[one.gloo.ends[inside]].max())
        return found


def models(run: MergedRun, traces: list[MergedTrace]) -> Iterator[WindowModel]:
    """Give a model of each window that has anything with a time.

    Raises:
        ReplayError: the dependencies of a window go round in a circle.
    """
    for (window, meetings, clocks), ranks in windows_of(run, traces):
        if not ranks:
            continue
        full = replay(ranks, meetings, clocks, inputs=True)
        knows_inputs = any(one.inputs.are_known for one in full.ranks.values())
        # How well it fits is told without the times at which batches were ready.
        yield WindowModel(window, replay(ranks, meetings, clocks) if knows_inputs else full, calibrate(full))


def what_if(windows: list[WindowModel], changes: Changes) -> pl.DataFrame:
    """Predict all spans of some windows after changes.

    Raises:
        ChangeError: nothing in the trace is what should change.
    """
    rows = [
        (
            one.window, found.span.rank, found.span.step, found.span.measured_ns, found.fastest_ns, found.slowest_ns,
            found.fastest_ns / found.span.measured_ns - 1 if found.span.measured_ns else 0.0, found.span.replay_error,
        )
        for one in windows for found in one.predict(changes)
    ]  # fmt: skip
    schema = pl.Schema({column.name: column.dtype for column in SCHEMA})
    return pl.DataFrame(rows, schema=schema, orient="row")


def _balanced(found: list[Prediction]) -> list[Prediction]:
    """Every rank takes the mean of all: the same work, evenly spread."""
    alike: dict[int | None, list[Prediction]] = defaultdict(list)
    for one in found:
        alike[one.span.step].append(one)
    return [
        Prediction(
            one.span,
            sum(other.fastest_ns for other in alike[one.span.step]) // len(alike[one.span.step]),
            sum(other.slowest_ns for other in alike[one.span.step]) // len(alike[one.span.step]),
        )
        for one in found
    ]
