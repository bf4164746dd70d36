"""Prizes by replay: what the recorded windows would have taken after a change, where a replay of them can tell.

A replay of a large window costs more than all the rules together, so one of more rows than these is not replayed: then
a prize is what was measured, at most.
"""

from collections.abc import Sequence
from functools import cached_property

from chakra_capture.analysis.findings import Prize
from chakra_capture.analysis.replay.graph import ReplayError
from chakra_capture.analysis.what_if.changes import ChangeError, Changes
from chakra_capture.analysis.what_if.predict import WindowModel, models
from chakra_capture.trace.merged import MergedRun, MergedTrace

MOST_ROWS = 100_000


class Replays:
    """Models of the windows of some ranks, made when first asked for."""

    def __init__(self, run: MergedRun, traces: Sequence[MergedTrace]) -> None:
        self._run, self._traces = run, traces

    @cached_property
    def _windows(self) -> list[WindowModel]:
        """None of them where one is too large or not replayable: what it would take is not known then."""
        if sum(trace.some_of_nodes("node_id").height for trace in self._traces) > MOST_ROWS:
            return []
        try:
            found = list(models(self._run, list(self._traces)))
        except ReplayError:
            return []
        return [] if any(one.not_replayable for one in found) else found

    def prize(self, changes: Changes, step_ns: float) -> Prize | None:
        """What a step would be shorter by after some changes; None where no replay tells.

        Args:
            step_ns: mean time of a step.
        """
        measured = fastest = slowest = 0
        for window in self._windows:
            try:
                found = window.predict(changes)
            except ChangeError:
                return None
            for one in found:
                if one.span.step is None:
                    measured += one.span.measured_ns
                    fastest += one.fastest_ns
                    slowest += one.slowest_ns
        if not measured:
            return None
        # What a window is shorter by is spread over its steps, as what the device still does after the last one is.
        most, least = ((measured - time) / measured * step_ns for time in (fastest, slowest))
        return Prize(least_ns=max(0.0, least), most_ns=max(0.0, most), step_ns=step_ns, is_predicted=True)
