"""A recording session: told about steps, it records those of the window, and never stops the training loop.

The one place of the training half that catches everything (``Session._guarded``).
"""

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Any, TypeVar

from chakra_capture.annotations import INPUT_WAIT, PARTIAL, PROFILED, RECORDING, UPDATE_SKIPPED, VALIDATION_PHASE
from chakra_capture.config import ChakraProfileConfig, OnFault, Validation, settings_from
from chakra_capture.errors import ChakraCaptureError, RecordingError, SettingsError
from chakra_capture.layout import RunPaths
from chakra_capture.recording import registry
from chakra_capture.recording.batches import batch_size
from chakra_capture.recording.cycles import Cycles
from chakra_capture.recording.disk import Disk
from chakra_capture.recording.loop_phases import LoopPhases
from chakra_capture.recording.manifest import Reason, settings_in_effect
from chakra_capture.recording.notices import warn_of_what_will_not_be
from chakra_capture.recording.rank import RankInfo, current_rank
from chakra_capture.recording.recorder import Recorder
from chakra_capture.recording.run import Run, job_name, open_run, trace_folder
from chakra_capture.recording.shapes import Moves
from chakra_capture.recording.step_phases import StepPhases
from chakra_capture.recording.summary_process import write_summary
from chakra_capture.recording.trigger import Trigger
from chakra_capture.recording.window import ALWAYS, NEVER

logger = logging.getLogger(__name__)

# Names of phases whose contexts are kept for the next step.
_MOST_CONTEXTS = 64
_EXIT_WAIT_S = 2.0
_ABANDON_LIMIT_S = 2.0
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

    Attributes:
        is_open: whether the session can still record.
        wants_batch: whether ``received`` should be shown a batch; once a second, for it costs microseconds.
        moves: where ``begin_phase`` and ``end_phase`` take a note and do no more; else None. See ``Journal``.
    """

    def __init__(self, settings: ChakraProfileConfig, *, rank: RankInfo | None = None) -> None:
        self._settings = settings
        self._ranks = rank
        self._run: Run | None = None
        self._cycles: Cycles | None = None
        self._phases = LoopPhases()
        self._trigger: Trigger | None = None
        self._is_faulty = False
        self._asked: _Request | None = None
        # The whole hot path: below this step there is nothing to do.
        self._next_step = NEVER
        self._step_context = _StepContext(self)
        self._contexts: dict[str, _Phase] = {}
        self.is_open = self.wants_batch = False
        self.moves: Moves | None = None

    @property
    def paths(self) -> RunPaths | None:
        """Where this session writes; None while it is not open or switched off."""
        return self._run.paths if self._run is not None else None

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
        steps = self._phases.steps
        if steps is not None:
            try:
                steps.start_step(step)
            except Exception as fault:
                self._give_up_phases(fault)

    def end_step(self, step: int) -> None:
        """Tell that global step ``step`` is over."""
        phases = self._phases
        if phases.annotations:
            self._timed(phases.end_annotation)
        steps = phases.steps
        if steps is not None and steps.open_step == step:
            try:
                recorder = self._cycles.recorder if self._cycles is not None else None
                if recorder is not None and recorder.open_step is not None:
                    steps.flag(PROFILED)
                if steps.end_step() or phases.switch in phases.environ:
                    self._attend(steps)
            except Exception as fault:
                self._give_up_phases(fault)
        if step >= self._next_step:
            self._guarded(self._leave, step)

    def _attend(self, steps: StepPhases) -> None:
        with registry.signals_wait():
            self._phases.attend(steps)
        self.wants_batch = steps.wants_batch
        self._choose_way()

    def abort_step(self, batches: Sequence[int] = (), why: str = "") -> None:
        """End the running step without counting it: it turned out to hold no work, or work for nothing.

        Args:
            batches: the batches that came to nothing, numbered as the framework does.
            why: what became of them.
        """
        self._timed(self._phases.end_annotation)
        if self._phases.steps is not None:
            self._timed(self._phases.steps.abort_step, batches, why)
        recorder = self._recorder
        if recorder is not None:
            self._guarded(recorder.abort_step)

    def fail_step(self, step: int, error: BaseException | None = None) -> None:
        """Tell that global step ``step`` raised: its phases end here, and should it begin again, it is not counted."""
        steps = self._phases.steps
        if steps is not None and steps.open_step == step:
            self._timed(steps.flag, PARTIAL)
            self._timed(self._phases.end_annotation)
            self._timed(self._end_failed_step, steps)
        recorder = self._recorder
        if recorder is not None:
            self._guarded(recorder.fail_step, step)
            self._guarded(recorder.note_error, error)

    def _end_failed_step(self, steps: StepPhases) -> None:
        if self._is_step_recorded:
            steps.flag(PROFILED)
        if steps.end_step() or self._phases.switch in self._phases.environ:
            self._attend(steps)

    def start_validation(self) -> None:
        """Tell that the loop validates, between two steps; with ``validation: exclude`` merge leaves it out."""
        if self._phases.steps is not None:
            self._timed(self._phases.steps.begin, VALIDATION_PHASE)
        recorder = self._recorder
        if recorder is not None and self._settings.validation is Validation.exclude:
            self._guarded(recorder.start_validation)

    def end_validation(self) -> None:
        """Tell that validation is over."""
        if self._phases.steps is not None:
            self._timed(self._phases.steps.end, VALIDATION_PHASE)
        recorder = self._recorder
        if recorder is not None:
            self._guarded(recorder.end_validation)

    @property
    def _recorder(self) -> Recorder | None:
        return self._cycles.recorder if self._cycles is not None else None

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
            self.begin_phase(INPUT_WAIT)
            try:
                batch = next(source)
            except StopIteration:
                self.abort_step()
                return
            finally:
                self.end_phase(INPUT_WAIT)
            self.received(batch)
            yield step, batch
            self.end_step(step)
            step += 1

    def phase(self, name: str) -> AbstractContextManager[object]:
        """Bracket a part of a step, or of the time between two; inside the window it shows in the traces, too.

        Args:
            name: ``input_wait``, ``h2d``, ``forward``, ``backward``, ``optimizer``, between steps ``validation``,
                ``checkpoint``, ``callbacks``; or a name of your own. Time counts for the innermost phase alone.
        """
        if self._phases.steps is None and not self._is_step_recorded:
            return nullcontext()
        context = self._contexts.get(name)
        if context is None:
            context = _Phase(self, name)
            if len(self._contexts) < _MOST_CONTEXTS:
                self._contexts[name] = context
        return context

    def begin_phase(self, name: str) -> None:
        """Enter a phase; ``phase`` is the same as a context."""
        phases = self._phases
        recorder = self._cycles.recorder if self._cycles is not None else None
        if recorder is not None and recorder.open_step is not None:
            self._timed(phases.begin_annotated, name)
        elif phases.steps is not None:
            try:
                phases.steps.begin(name)
            except Exception as fault:
                self._give_up_phases(fault)

    def end_phase(self, name: str) -> None:
        """Leave a phase, and what an exception has left open inside it; one that is not open is passed over."""
        phases = self._phases
        if phases.annotations:
            self._timed(phases.end_annotation, name)
        if phases.steps is not None:
            try:
                phases.steps.end(name)
            except Exception as fault:
                self._give_up_phases(fault)

    @property
    def times_phases(self) -> bool:
        """Say whether phases are recorded now."""
        return self._phases.steps is not None

    def time_phase(self, name: str, install: Callable[[], Callable[[], None]]) -> None:
        """Hook up what times a phase, for as long as phases are recorded; if that fails, it alone is not measured.

        Args:
            name: the phase.
            install: changes what has to be changed and returns what puts it back.
        """
        if self._phases.steps is None:
            return
        try:
            self._phases.hook(name, install)
        except Exception as fault:
            self.measures(name, _said(fault))
            logger.warning("The phase %s is not measured, training goes on: %s", name, _said(fault))

    def in_windows(self, install: Callable[[], Callable[[], None]]) -> None:
        """Hook up something in windows alone, while phases are recorded: ``install`` returns what takes it out."""
        if self._phases.steps is not None:
            self._phases.hook_in_windows(install)

    def begin_annotation(self, label: str) -> None:
        """Show in the traces of a step that is recorded what begins; it is no phase."""
        if self._is_step_recorded:
            self._timed(self._phases.begin_annotation, label)

    def end_annotation(self, label: str) -> None:
        """Show that it ends, and what an exception has left open inside it."""
        if self._phases.annotations:
            self._timed(self._phases.end_annotation, label)

    def measures(self, name: str, why_not: str | None = None) -> None:
        """Note that a phase is timed from now on, or why it is not: it is missing then, not zero."""
        if self._phases.steps is not None:
            self._timed(self._phases.steps.measures, name, why_not)

    def received(self, batch: object) -> None:
        """Show what a request for a batch has given: how many samples that are is noted once a second."""
        steps = self._phases.steps
        if steps is not None and self.wants_batch:
            self.wants_batch = False
            try:
                size = batch_size(batch)
            except Exception:  # it is the user's, and may answer nothing
                size = None
            self._timed(steps.note_batch, size)

    def skip_update(self) -> None:
        """Tell that the running step ends without its update, as when a scaler has found infinite gradients."""
        if self._phases.steps is not None:
            self._timed(self._phases.steps.flag, UPDATE_SKIPPED)

    @property
    def _is_step_recorded(self) -> bool:
        cycles = self._cycles
        return cycles is not None and cycles.recorder is not None and cycles.recorder.open_step is not None

    def close(self, reason: Reason = Reason.training_ended, error: BaseException | None = None) -> None:
        """Finish what is being recorded and say in the manifest what was and why; later calls do nothing."""
        run = self._run
        with registry.signals_wait():
            self._close_trigger()
            self._next_step = NEVER
            if self._run is None:
                registry.remove_session(self)
                return
            # Nobody waits for an exception at the end of the process, or in the middle of a training step.
            may_raise = error is None and reason not in (Reason.process_exit, Reason.terminated)
            try:
                self._guarded(self._close, reason, error, may_raise=may_raise)
                if self._run.disk.is_lost and self._records and reason is not Reason.terminated:
                    self._guarded(self._say_what_was_lost, may_raise=False)
            except BaseException:
                # A second interrupt, say: the profiler must not outlive the session. If this is interrupted too, the
                # session stays known and is closed when the interpreter ends.
                self._disarm()
                raise
            finally:
                if self._cycles is None or not self._cycles.at_hand:
                    self._let_go()
                    registry.remove_session(self)
        # After SIGTERM there is no time to lose; and what another thread still records has not ended.
        if run is not None and self._run is None and reason is not Reason.terminated:
            self._summarise(run)

    def discard(self) -> None:
        """Close, and remove what was written: what looked like a training was none."""
        with registry.signals_wait():
            run = self._run
            self._phases.forget()
            self._disarm()
            self._let_go()
            registry.remove_session(self)
        if run is not None and run.manifest.world_size == 1:
            registry.forget_run(run)
            self._timed(run.remove)

    def _summarise(self, run: Run) -> None:
        """Rank 0 has the phases of all ranks summed up, as far as they have come."""
        if run.manifest.rank == 0 and run.has_phases and not run.disk.is_lost:
            write_summary(run.paths)

    def close_early(self, reason: Reason) -> None:
        """Finish because the process ends; where another thread records, it is asked to, for only it can."""
        recorder = self._recorder
        if recorder is not None and recorder.thread != threading.get_ident() and _is_alive(recorder.thread):
            asked = _Request(reason)
            self._asked = asked
            asked.is_answered.wait(_EXIT_WAIT_S)
        self.close(reason)

    def abandon(self, reason: Reason) -> None:
        """Note that the process ends with the recording unfinished; the working files stay, to be salvaged."""
        run, cycles = self._run, self._cycles
        if run is not None and cycles is not None:
            cycles.abandon(reason)
            run.state_outcome(reason, is_final=True)
            run.write_manifest(limit_s=_ABANDON_LIMIT_S)

    def forget_in_child(self) -> None:
        """Become inert in a forked child, which shares the parent's files."""
        self._next_step = NEVER
        self._phases = LoopPhases()
        self._let_go()
        trigger, self._trigger = self._trigger, None
        if trigger is not None:
            trigger.forget_in_child()

    def _let_go(self) -> None:
        self._run = self._cycles = None
        self.is_open = False
        self._choose_way()

    def _choose_way(self) -> None:
        """Have phases noted at once where nothing else has to be known: a step enters and leaves some ten of them."""
        # Each call of Python's between two computations takes a microsecond, so there is none in between. (Not by
        # vars(self): an object whose dict somebody has held is slower from then on.)
        steps, had = self._phases.steps, self.moves is not None
        self.moves = steps.moves if steps is not None and self._recorder is None else None
        if steps is not None and self.moves is not None:
            for name, call in (("begin_phase", steps.begin), ("end_phase", steps.end)):
                setattr(self, name, call)
        elif had:
            for name in ("begin_phase", "end_phase"):
                delattr(self, name)

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy must not share the process's profiler: a module that holds a session is copied (EMA) and pickled.
        return Session, (ChakraProfileConfig(),)

    def _guarded(self, action: Callable[..., None], *arguments: object, may_raise: bool = True) -> None:
        """Run ``action``; whatever goes wrong in it ends the recording, not the training."""
        with registry.signals_wait():
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
                        f"recording failed with {type(fault).__name__}: {fault}; chakra_profile.on_fault is 'raise'. "
                        "Set it to 'warn' to train on without the recording."
                    ) from fault
            finally:
                self._choose_way()

    def _timed(self, action: Callable[..., None], *arguments: object) -> None:
        """Run ``action`` of the phases; whatever goes wrong in it ends the phases, neither training nor recording."""
        try:
            action(*arguments)
        except Exception as fault:
            self._give_up_phases(fault)

    def _give_up_phases(self, fault: Exception) -> None:
        self._phases.forget()
        self._choose_way()
        message, run = _said(fault), self._run
        # A file system that is gone is said once: the manifest, if this rank writes one, will meet it, too.
        # Without a run, SIGTERM has closed the session in the middle of the action.
        is_said = run is None or self._is_faulty or (run.disk.is_lost and self._records)
        level = logging.DEBUG if is_said else logging.WARNING
        logger.log(level, "Phases of steps are no longer recorded, training goes on: %s", message)
        if run is not None:
            run.manifest.faults.append(f"phases: {message}")

    def _report(self, fault: Exception) -> None:
        # Once: what fails after that, closing a session whose folder is gone, has the same cause.
        level = logging.DEBUG if self._is_faulty else logging.ERROR
        self._is_faulty = True
        rank = f" on rank {self._ranks.rank}" if self._ranks else ""
        is_expected, message = isinstance(fault, ChakraCaptureError), _said(fault)
        # Of a fault that explains itself the traceback tells a user nothing.
        logger.log(
            level, "Recording stops%s, training goes on: %s", rank, message, exc_info=None if is_expected else fault
        )
        if is_expected:
            logger.debug("Where recording stopped:", exc_info=fault)
        if self._run is not None:
            self._run.manifest.faults.append(message)

    def _disarm(self) -> None:
        """Put everything back, keeping what has been recorded."""
        self._close_trigger()
        self._next_step = NEVER
        self._timed(self._phases.leave_window)
        run, cycles = self._run, self._cycles
        if run is None or cycles is None:
            registry.remove_session(self)
            return
        for fault in cycles.give_up():
            if fault not in run.manifest.faults:
                run.manifest.faults.append(fault)
        run.state_outcome(Reason.fault, is_final=True)
        try:
            run.write_manifest()
        except Exception as fault:
            logger.debug("The manifest cannot be written: %s", fault, exc_info=fault)

    def _open(self) -> None:
        settings = self._settings
        self._ranks = ranks = self._ranks or current_rank(os.environ)
        folder, job = str(trace_folder(settings)), job_name(settings, os.environ)
        disk = Disk(trace_folder(settings))

        def make(number: int) -> Run:
            return disk.open(lambda: open_run(settings, ranks, os.environ, number=number))

        run = registry.run_of(folder, job, ranks.rank, make)
        run.manifest.settings = settings_in_effect(settings)  # of the latest fit, if there are several
        self._run, self._cycles = run, Cycles(settings, run)
        self.is_open = True
        self._is_faulty = False
        if settings.trigger.opens_windows:
            self._trigger = trigger = Trigger(settings, run, self._wake)
            trigger.start()
        if settings.phases:
            watch = self._trigger.watch if self._trigger is not None else None
            self._timed(
                lambda: self._phases.open(
                    run, settings.max_recorded_steps, is_live=settings.live, watch=watch, guard=self._timed
                )
            )
            self.wants_batch = self._phases.steps is not None
        if ranks.rank == 0:
            warn_of_what_will_not_be(settings, ranks)
        if self._records and self._cycles.is_planned:
            self._next_step = ALWAYS
        registry.handle_sigterm()

    @property
    def _records(self) -> bool:
        ranks = self._ranks
        return self._settings.ranks is None or (ranks is not None and ranks.rank in self._settings.ranks)

    def _enter(self, step: int) -> None:
        if self._asked is not None:
            self._answer(self._asked)
        elif self._cycles is not None:
            before = self._recorder
            self._open_on_demand(int(step), self._cycles)
            if self._records:
                self._apart(self._cycles.enter, int(step))
            self._note_window(before)
            self._look_ahead(step, self._cycles)

    def _leave(self, step: int) -> None:
        if self._cycles is not None:
            before = self._recorder
            self._apart(self._cycles.leave, int(step))
            self._note_window(before)
            self._look_ahead(step + 1, self._cycles)
        if self._asked is not None:
            self._answer(self._asked)

    def _open_on_demand(self, step: int, cycles: Cycles) -> None:
        if self._trigger is not None and (found := self._trigger.attend(step, cycles.free_from)) is not None:
            cycles.add(found.window, found.why)

    def _look_ahead(self, step: int, cycles: Cycles) -> None:
        # In this order: the trigger's thread may wake this one in between, and that must not be undone.
        self._next_step = cycles.next_step(step) if self._records else NEVER
        if self._trigger is not None and (wanted := self._trigger.next_step) < self._next_step:
            self._next_step = wanted

    def _wake(self) -> None:
        """Have the next step told to the trigger; called from its thread."""
        self._next_step = ALWAYS

    def _close_trigger(self) -> None:
        trigger, self._trigger = self._trigger, None
        if trigger is not None:
            trigger.close()

    def _apart(self, action: Callable[[int], None], step: int) -> None:
        """Run ``action`` of the window; a window that ends may take minutes, and they are not the training's."""
        steps = self._phases.steps
        if steps is not None:
            self._timed(steps.begin, RECORDING)
        action(step)
        if steps is not None:
            self._timed(steps.end, RECORDING)

    def _note_window(self, before: Recorder | None) -> None:
        """Note both clocks where a window starts or ends."""
        steps = self._phases.steps
        if steps is None or self._recorder is before:
            return
        self._timed(steps.anchor, "window_start" if before is None else "window_end")
        self._timed(self._phases.leave_window)
        if self._recorder is not None:
            try:
                self._phases.enter_window()
            except Exception as fault:
                logger.warning("Handlers have no names in the traces, training goes on: %s", _said(fault))

    def _answer(self, asked: "_Request") -> None:
        self._asked = None
        try:
            self.close(asked.reason)
        finally:
            asked.is_answered.set()
        # At exit only daemon threads are left, and one that computes then ends the process (torch).
        while asked.reason is Reason.process_exit and threading.current_thread().daemon:
            time.sleep(3600)

    def _close(self, reason: Reason, error: BaseException | None) -> None:
        run, cycles = self._run, self._cycles
        assert run is not None
        assert cycles is not None
        self._timed(self._phases.close)
        if cycles.recorder is not None:
            cycles.recorder.note_error(error)
        cycles.finish(reason)
        cycles.settle()
        if not self._records:
            return
        outcome = cycles.outcome(reason, is_faulty=self._is_faulty)
        run.state_outcome(outcome, is_final=True)
        if error is not None:
            run.manifest.detail = type(error).__name__
        if outcome is Reason.never_reached:
            logger.warning(
                "The profiling window %s was never reached; nothing was recorded. Set chakra_profile.start_step and "
                "end_step to steps that training reaches.",
                cycles.window_text,
            )
        run.write_manifest()

    def _say_what_was_lost(self) -> None:
        """Write the manifest after all if the file system has come back by now."""
        run = self._run
        assert run is not None
        run.disk.try_again()
        run.write_manifest()


def _said(fault: Exception) -> str:
    return str(fault) if isinstance(fault, ChakraCaptureError) else f"{type(fault).__name__}: {fault}"


def _is_alive(thread: int) -> bool:
    return any(found.ident == thread for found in threading.enumerate())


class _Request:
    """What one thread asks of the thread that records: to finish, and to say so."""

    def __init__(self, reason: Reason) -> None:
        self.reason = reason
        self.is_answered = threading.Event()


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
        else:
            self._session.fail_step(self.step, error)


class _Phase:
    """What ``Session.phase`` returns; one object per name, for it holds nothing of a step."""

    __slots__ = ("_name", "_session")

    def __init__(self, session: Session, name: str) -> None:
        self._session, self._name = session, name

    def __enter__(self) -> None:
        self._session.begin_phase(self._name)

    def __exit__(self, *error: object) -> None:
        self._session.end_phase(self._name)
