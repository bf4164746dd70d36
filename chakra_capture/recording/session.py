"""A recording session: told about steps, it records those of the window, and never stops the training loop.

The one place of the training half that catches everything (``Session._guarded``).
"""

import logging
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Any, TypeVar

from chakra_capture.annotations import safe_name
from chakra_capture.config import ChakraProfileConfig, OnFault, TriggerConfig, Validation, settings_from
from chakra_capture.errors import ChakraCaptureError, RecordingError, SettingsError
from chakra_capture.layout import RunPaths
from chakra_capture.recording import registry
from chakra_capture.recording.manifest import CycleRecord, Reason, settings_in_effect
from chakra_capture.recording.rank import RankInfo, current_rank
from chakra_capture.recording.recorder import Recorder
from chakra_capture.recording.run import Run, job_name, open_run, trace_folder
from chakra_capture.recording.window import NEVER, Cycle, StepPlan

logger = logging.getLogger(__name__)

_ALWAYS = -1
Batch = TypeVar("Batch")


def capture(settings: object, *, rank: RankInfo | None = None) -> "Session":
    """Make a session for a training loop: ``with capture(settings) as session:``.

    Args:
        settings: dataclass, mapping or DictConfig; the section, or a configuration that holds ``chakra_profile``.
        rank: this process's place in the job; found out from torch.distributed or the launcher if not given.

    Raises:
        SettingsError: a setting is wrong.
    """
    return Session(settings_from(settings), rank=rank)


class Session:
    """Records the window of one training loop.

    ``start_step`` and ``end_step`` take the global step, 0-based; a step runs from the request for its first batch to
    the end of its update. Outside the window each costs one comparison.
    """

    def __init__(self, settings: ChakraProfileConfig, *, rank: RankInfo | None = None) -> None:
        self._settings = settings
        self._ranks = rank
        self._plan = StepPlan(())
        self._run: Run | None = None
        self._records: list[CycleRecord] = []
        self._recorder: Recorder | None = None
        self._pending: Recorder | None = None
        self._next_cycle = 0
        self._first_step: int | None = None
        self._is_faulty = False
        # The whole hot path: below this step there is nothing to do.
        self._next_step = NEVER
        self._step_context = _StepContext(self)

    @property
    def paths(self) -> RunPaths | None:
        """Where this session writes; None while it is not open or switched off."""
        return self._run.paths if self._run is not None else None

    @property
    def is_open(self) -> bool:
        """Say whether the session can still record."""
        return self._run is not None

    def __enter__(self) -> "Session":
        self.open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(Reason.training_ended if error is None else Reason.exception, error)

    def open(self) -> None:
        """Agree on the run with the other ranks and get ready; does nothing when recording is off.

        Raises:
            SettingsError: a setting cannot work here, on every rank alike.
        """
        settings = settings_from(self._settings)
        if settings.enabled and self._run is None:
            registry.add_session(self)
            self._guarded(self._open)

    def start_step(self, step: int) -> None:
        """Tell that global step ``step`` begins; telling it twice is harmless."""
        if step >= self._next_step:
            self._guarded(self._enter, step)

    def end_step(self, step: int) -> None:
        """Tell that global step ``step`` is over."""
        if step >= self._next_step:
            self._guarded(self._leave, step)

    def abort_step(self) -> None:
        """End the running step without counting it: it turned out to hold no work."""
        if self._recorder is not None:
            self._guarded(self._recorder.abort_step)

    def step(self, step: int) -> "_StepContext":
        """Bracket one global step: ``with session.step(g):``."""
        self._step_context.step = step
        return self._step_context

    def steps(self, batches: Iterable[Batch], first_step: int = 0) -> Iterator[tuple[int, Batch]]:
        """Number the batches of a plain loop: ``for step, batch in session.steps(loader): ...``.

        Each step begins with the request for its batch and ends with the loop's body. A loop left by ``break`` or an
        exception leaves its last step cut short.

        Args:
            batches: what the loop goes over; one batch is one step.
            first_step: global number of the first step, for a loop that resumes.
        """
        source = iter(batches)
        step = first_step
        while True:
            self.start_step(step)
            try:
                batch = next(source)
            except StopIteration:
                self.abort_step()
                return
            yield step, batch
            self.end_step(step)
            step += 1

    def phase(self, name: str) -> AbstractContextManager[object]:
        """Bracket a part of a step; it shows in the traces under ``name``."""
        if self._recorder is None or self._recorder.open_step is None:
            return nullcontext()
        from torch.autograd.profiler import record_function

        return record_function(safe_name(name))

    def close(self, reason: Reason = Reason.training_ended, error: BaseException | None = None) -> None:
        """Finish what is being recorded and say in the manifest what was and why; later calls do nothing."""
        if self._run is None:
            registry.remove_session(self)
            return
        try:
            self._guarded(self._close, reason, error, may_raise=error is None)
        finally:
            self._next_step = NEVER
            self._run = None
            registry.remove_session(self)

    def close_at_exit(self) -> None:
        """Finish because the interpreter ends."""
        self.close(Reason.process_exit)

    def forget_in_child(self) -> None:
        """Become inert in a forked child, which shares the parent's files."""
        self._next_step = NEVER
        self._run = self._recorder = self._pending = None

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy must not share the process's profiler: a module that holds a session is copied (EMA) and pickled.
        return Session, (ChakraProfileConfig(),)

    def _guarded(self, action: Callable[..., None], *arguments: object, may_raise: bool = True) -> None:
        """Run ``action``; whatever goes wrong in it ends the recording, not the training."""
        try:
            action(*arguments)
        except SettingsError:
            self._disarm()
            raise
        except Exception as fault:
            is_first = not self._is_faulty
            self._report(fault)
            self._disarm()
            if is_first and may_raise and self._settings.on_fault is OnFault["raise"]:
                if isinstance(fault, ChakraCaptureError):
                    raise
                raise RecordingError(
                    f"recording failed with {type(fault).__name__}: {fault}; chakra_profile.on_fault is 'raise'. Set "
                    "it to 'warn' to train on without the recording."
                ) from fault

    def _report(self, fault: Exception) -> None:
        # Once: what fails after that, closing a session whose folder is gone, has the same cause.
        level = logging.DEBUG if self._is_faulty else logging.ERROR
        self._is_faulty = True
        rank = f" on rank {self._ranks.rank}" if self._ranks else ""
        logger.log(level, "Recording stops%s, training goes on: %s", rank, fault, exc_info=fault)
        if self._run is not None:
            message = str(fault) if isinstance(fault, ChakraCaptureError) else f"{type(fault).__name__}: {fault}"
            self._run.manifest.faults.append(message)

    def _disarm(self) -> None:
        """Put everything back, keeping what has been recorded; each attempt on its own, for one may fail."""
        self._next_step = NEVER
        for recorder in (self._pending, self._recorder):
            if recorder is not None:
                for attempt in (lambda r=recorder: r.stop(Reason.fault), recorder.settle):
                    try:
                        attempt()
                    except Exception as fault:
                        logger.debug("While giving up the recording: %s", fault, exc_info=fault)
                        if self._run is not None and str(fault) not in self._run.manifest.faults:
                            self._run.manifest.faults.append(str(fault))
        self._recorder = self._pending = None
        if self._run is None:
            registry.remove_session(self)
            return
        self._run.manifest.complete = False
        self._run.manifest.reason = Reason.fault
        try:
            self._run.write_manifest()
        except Exception as fault:
            logger.debug("The manifest cannot be written: %s", fault, exc_info=fault)

    def _open(self) -> None:
        settings = self._settings
        self._ranks = ranks = self._ranks or current_rank(os.environ)
        folder, job = str(trace_folder(settings)), job_name(settings, os.environ)
        self._run = registry.run_of(folder, job, ranks.rank, lambda: open_run(settings, ranks, os.environ))
        self._run.manifest.settings = settings_in_effect(settings)  # of the latest fit, if there are several
        if ranks.rank == 0:
            _warn_of_what_will_not_be(settings, ranks)
        if settings.ranks is None or ranks.rank in settings.ranks:
            self._plan = StepPlan(settings.step_windows)
            if self._plan.cycles:
                self._next_step = _ALWAYS

    def _enter(self, step: int) -> None:
        if self._first_step is None:
            self._first_step = step
            if self._plan.next_step(step) == NEVER:
                logger.warning(
                    "The profiling window %s is already past at global_step %d; nothing will be recorded. "
                    "Set chakra_profile.start_step and end_step to later steps.",
                    self._window_text(),
                    step,
                )
        if self._recorder is not None and step > self._recorder.cycle.last_step:
            self._finish_cycle(Reason.steps_skipped)
        self._settle(only_if_due=True)
        cycle = self._cycle_at(step)
        if cycle is not None:
            recorder = self._recorder or self._open_cycle(cycle, step)
            if step >= cycle.first_step:
                recorder.enter_step(step)
        self._plan_from(step)

    def _leave(self, step: int) -> None:
        recorder = self._recorder
        if recorder is not None:
            recorder.leave_step(step)
            if step >= recorder.cycle.last_step:
                self._finish_cycle(Reason.complete)
        self._settle(only_if_due=True)
        self._plan_from(step + 1)

    def _cycle_at(self, step: int) -> Cycle | None:
        cycle = self._plan.cycle_at(step)
        return cycle if cycle is not None and cycle.index >= self._next_cycle else None

    def _plan_from(self, step: int) -> None:
        if self._recorder is not None or self._pending is not None:
            self._next_step = _ALWAYS
        else:
            self._next_step = self._plan.next_step(step)

    def _open_cycle(self, cycle: Cycle, step: int) -> Recorder:
        assert self._run is not None
        self._settle()
        if cycle.opens_window or not self._records:
            logger.info("====== Start chakra profiling from global_step %d ======", step)
        self._recorder = recorder = Recorder(cycle, self._settings, self._run)
        self._records.append(recorder.record)
        self._run.manifest.windows.append(recorder.record)
        recorder.prepare()
        return recorder

    def _finish_cycle(self, reason: Reason) -> None:
        recorder, self._recorder = self._recorder, None
        assert recorder is not None
        self._pending = recorder
        self._next_cycle = recorder.cycle.index + 1
        record = recorder.record
        if reason is Reason.complete and record.steps != list(recorder.cycle.steps):
            late = bool(record.steps) and record.steps[0] > record.first_step
            reason = Reason.resumed_inside if late else Reason.steps_skipped
        recorder.stop(reason)
        if recorder.cycle.closes_window or reason in (Reason.training_ended, Reason.exception, Reason.process_exit):
            last = record.partial_step if record.partial_step is not None else max(record.steps, default=-1) + 1
            logger.info("====== End chakra profiling at global_step %d ======", last)

    def _settle(self, *, only_if_due: bool = False) -> None:
        """Complete the files of the last cycle; it may be too early, and sleeping inside training is a last resort."""
        pending = self._pending
        if pending is None or (only_if_due and pending.settles_in_ns > 0):
            return
        pending.settle()
        self._pending = None
        if self._run is not None:
            self._run.write_manifest()

    def _close(self, reason: Reason, error: BaseException | None) -> None:
        if self._recorder is not None:
            self._finish_cycle(reason)
        self._settle()
        assert self._run is not None
        if (
            self._ranks is not None
            and self._settings.ranks is not None
            and self._ranks.rank not in self._settings.ranks
        ):
            return
        outcome = self._outcome(reason)
        manifest = self._run.manifest
        if outcome not in (Reason.complete, Reason.no_window):
            manifest.complete = False
            manifest.reason = outcome
        elif not manifest.windows:
            manifest.reason = outcome
        if error is not None:
            manifest.detail = type(error).__name__
        if outcome is Reason.never_reached:
            logger.warning(
                "The profiling window %s was never reached; nothing was recorded. Set chakra_profile.start_step and "
                "end_step to steps that training reaches.",
                self._window_text(),
            )
        self._run.write_manifest()

    def _outcome(self, reason: Reason) -> Reason:
        """Say why the recording is as it is."""
        if self._is_faulty:
            return Reason.fault
        if not self._plan.cycles:
            return Reason.no_window
        if len(self._records) == len(self._plan.cycles) and all(record.is_complete for record in self._records):
            return Reason.complete
        if self._first_step is not None and self._plan.next_step(self._first_step) == NEVER:
            return Reason.already_past
        if self._records and self._next_cycle == len(self._plan.cycles):
            return next((r.reason for r in self._records if not r.is_complete), Reason.resumed_inside)
        if not self._records and reason is not Reason.exception:
            return Reason.never_reached
        return reason

    def _window_text(self) -> str:
        return ", ".join(f"{w.start_step}..{w.end_step}" for w in self._settings.step_windows)


def _warn_of_what_will_not_be(settings: ChakraProfileConfig, ranks: RankInfo) -> None:
    for name in _settings_without_effect(settings):
        logger.warning("chakra_profile.%s has no effect in this version of chakra-capture.", name)
    if not settings.step_windows:
        logger.warning(
            "chakra_profile.start_step is null, and this version of chakra-capture records no phases: nothing will be "
            "recorded. Set start_step and end_step."
        )
    if settings.ranks is not None and not any(rank < ranks.world_size for rank in settings.ranks):
        logger.warning(
            "chakra_profile.ranks is %s but the job has %d rank(s), numbered from 0: nothing will be recorded.",
            list(settings.ranks),
            ranks.world_size,
        )


def _settings_without_effect(settings: ChakraProfileConfig) -> list[str]:
    """Name the settings that were changed but belong to parts that do not exist yet."""
    names = [name for name in ("live", "log_to_logger", "replay_data", "memory_snapshot") if getattr(settings, name)]
    names += ["validation"] if settings.validation is not Validation.keep else []
    names += ["max_recorded_steps"] if settings.max_recorded_steps is not None else []
    names += ["trigger"] if settings.trigger != TriggerConfig() else []
    return names


class _StepContext:
    """What ``Session.step`` returns; one object per session, for steps do not nest."""

    __slots__ = ("_session", "step")

    def __init__(self, session: Session) -> None:
        self._session = session
        self.step = 0

    def __enter__(self) -> None:
        self._session.start_step(self.step)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # A step that failed stays open: if the loop goes on, the next one ends it as not counted.
        if error is None:
            self._session.end_step(self.step)
