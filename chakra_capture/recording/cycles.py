"""The cycles of one session: opened, followed step by step, finished and completed on disk, in order."""

import logging

from chakra_capture.config import ChakraProfileConfig, WindowConfig
from chakra_capture.recording.manifest import CycleRecord, Reason
from chakra_capture.recording.recorder import Recorder
from chakra_capture.recording.run import Run
from chakra_capture.recording.window import ALWAYS, NEVER, Cycle, StepPlan

logger = logging.getLogger(__name__)

_CUT_OFF = (Reason.exception, Reason.terminated)
_EARLY_ENDS = (*_CUT_OFF, Reason.training_ended, Reason.process_exit, Reason.steps_repeated)


class Cycles:
    """What one session records in one run: told about steps, it knows which cycle they belong to."""

    def __init__(self, settings: ChakraProfileConfig, run: Run) -> None:
        self._settings = settings
        self._run = run
        self._plan = StepPlan(settings.step_windows)
        self._records: list[CycleRecord] = []
        self.recorder: Recorder | None = None
        self._pending: Recorder | None = None
        self._next_cycle = 0
        self._first_step: int | None = None
        # Of the cycle at hand; numbers that go back would keep it open for the whole training.
        self._last_entered = self._last_left = -1
        self._num_entered = 0

    @property
    def is_planned(self) -> bool:
        """Say whether anything is to be recorded at all."""
        return bool(self._plan.cycles)

    def add(self, window: WindowConfig, why: str) -> None:
        """Plan one more window, which begins now or later and shares no step with another."""
        self._plan = self._plan.with_window(window, why)

    def free_from(self, step: int, num_steps: int) -> int:
        """Return the first step from ``step`` on that begins ``num_steps`` outside of every window.

        It comes after all that was recorded, also where steps are numbered from 0 again: cycles go on in this order.
        """
        done = self._plan.cycles[: self._next_cycle]
        return self._plan.free_from(max(step, done[-1].last_step + 1) if done else step, num_steps)

    @property
    def at_hand(self) -> tuple[Recorder, ...]:
        """The recorders that still hold the process's profiler or observer."""
        return tuple(recorder for recorder in (self._pending, self.recorder) if recorder is not None)

    @property
    def window_text(self) -> str:
        """The windows as people write them."""
        return ", ".join(f"{w.start_step}..{w.end_step}" for w in self._settings.step_windows)

    def next_step(self, step: int) -> int:
        """Return the smallest step from ``step`` on that must be told."""
        if self.recorder is not None or self._pending is not None:
            return ALWAYS
        return self._plan.next_step(step, self._next_cycle)

    def enter(self, step: int) -> None:
        """Begin a step."""
        if self._first_step is None:
            self._first_step = step
            if self.is_planned and self._plan.next_step(step) == NEVER:
                logger.warning(
                    "The profiling window %s is already past at global_step %d; nothing will be recorded. "
                    "Set chakra_profile.start_step and end_step to later steps.",
                    self.window_text,
                    step,
                )
        if self.recorder is not None:
            self._finish_if_over(self.recorder, step)
        self.settle(only_if_due=True)
        cycle = self._cycle_at(step)
        if cycle is not None:
            recorder = self.recorder or self._open(cycle, step)
            self._last_entered = step
            self._num_entered += not recorder.is_in(step)
            if step >= cycle.first_step:
                recorder.enter_step(step)

    def leave(self, step: int) -> None:
        """End a step."""
        recorder = self.recorder
        if recorder is not None:
            recorder.leave_step(step)
            self._last_left = step
            if step >= recorder.cycle.last_step:
                self.finish(Reason.complete)
        self.settle(only_if_due=True)

    def _finish_if_over(self, recorder: Recorder, step: int) -> None:
        cycle = recorder.cycle
        if step > cycle.last_step:
            self.finish(Reason.steps_skipped)
            return
        # A step may be told twice, and tried again after a failure, but not for ever.
        most = 2 * (cycle.last_step - cycle.prepare_step + 1)
        is_endless = self._num_entered >= most and not recorder.is_in(step)
        if step < self._last_entered or step <= self._last_left or is_endless:
            logger.warning(
                "Step %d begins after step %d inside the profiling window %s, so the recording ends here: steps must "
                "be numbered on through the whole training, not from 0 in every epoch.",
                step,
                max(self._last_entered, self._last_left),
                self.window_text,
            )
            self.finish(Reason.steps_repeated)

    def _cycle_at(self, step: int) -> Cycle | None:
        cycle = self._plan.cycle_at(step)
        return cycle if cycle is not None and cycle.index >= self._next_cycle else None

    def _open(self, cycle: Cycle, step: int) -> Recorder:
        self.settle()
        is_first = cycle.opens_window or not self._records
        self._last_entered = self._last_left = -1
        self._num_entered = 0
        self.recorder = recorder = Recorder(cycle, self._settings, self._run)
        self._records.append(recorder.record)
        self._run.manifest.windows.append(recorder.record)
        recorder.prepare()
        if is_first:
            logger.info("====== Start chakra profiling from global_step %d ======", step)
        return recorder

    def finish(self, reason: Reason) -> None:
        """Stop the cycle at hand; ``settle`` completes its files."""
        recorder = self.recorder
        if recorder is None:
            return
        record, cycle = recorder.record, recorder.cycle
        self._next_cycle = cycle.index + 1
        if reason is Reason.complete and record.steps != list(cycle.steps):
            late = bool(record.steps) and record.steps[0] > record.first_step
            reason = Reason.resumed_inside if late else Reason.steps_skipped
        recorder.stop(reason)
        self._pending, self.recorder = recorder, None
        if record.started is None:
            logger.warning(
                "Training left the profiling window %s while it was warming up; nothing was recorded.", self.window_text
            )
        elif cycle.closes_window or reason in _EARLY_ENDS:
            last = record.partial_step if record.partial_step is not None else max(record.steps, default=-1) + 1
            logger.info("====== End chakra profiling at global_step %d ======", last)

    def settle(self, *, only_if_due: bool = False) -> None:
        """Complete the files of the last cycle; it may be too early, and sleeping inside training is a last resort."""
        pending = self._pending
        if pending is None or (only_if_due and pending.settles_in_ns > 0):
            return
        pending.settle()
        self._pending = None
        # Until the plan is done, a job that is killed leaves what this manifest says.
        is_done = self._next_cycle == len(self._plan.cycles) and self.recorder is None
        self._run.state_outcome(self.outcome(Reason.running, is_faulty=False) if is_done else Reason.running)
        self._run.write_manifest()

    def give_up(self) -> list[str]:
        """Put everything back, keeping what has been recorded; each attempt on its own, for one may fail."""
        faults: list[str] = []
        for recorder in self.at_hand:
            for attempt in (lambda r=recorder: r.stop(Reason.fault), recorder.settle):
                try:
                    attempt()
                except Exception as fault:
                    logger.debug("While giving up the recording: %s", fault, exc_info=fault)
                    faults.append(str(fault))
        self.recorder = self._pending = None
        return faults

    def abandon(self, reason: Reason) -> None:
        """Note that the cycle at hand stays unfinished."""
        for recorder in self.at_hand:
            recorder.record.reason = reason
            if recorder.open_step is not None and recorder.open_step not in recorder.record.steps:
                recorder.record.partial_step = recorder.open_step

    def forget_in_child(self) -> None:
        """Let go of the parent's recorders in a forked child."""
        self.recorder = self._pending = None

    def outcome(self, reason: Reason, *, is_faulty: bool) -> Reason:
        """Say why the recording is as it is."""
        if is_faulty:
            return Reason.fault
        if not self._plan.cycles:
            return Reason.no_window
        if len(self._records) == len(self._plan.cycles) and all(record.is_complete for record in self._records):
            return Reason.complete
        if self._first_step is not None and self._plan.next_step(self._first_step) == NEVER:
            return Reason.already_past
        if self._records and self._next_cycle == len(self._plan.cycles):
            return next((r.reason for r in self._records if not r.is_complete), Reason.resumed_inside)
        if not self._records and reason not in _CUT_OFF:
            return Reason.never_reached
        return reason
