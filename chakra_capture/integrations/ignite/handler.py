"""The handler: which iterations of an engine are a step, told to a recording session."""

import logging
import weakref
from typing import Any

from ignite.engine import Engine, Events

from chakra_capture.annotations import CALLBACKS, INPUT_WAIT
from chakra_capture.config import Validation, settings_from
from chakra_capture.errors import SettingsError
from chakra_capture.integrations.ignite import calls
from chakra_capture.integrations.ignite.phases import EnginePhases
from chakra_capture.recording.manifest import Reason
from chakra_capture.recording.session import Session

logger = logging.getLogger(__name__)

_RUNNING = ("_session", "_engine", "_interrupted", "_step", "_past", "_phases")


class ChakraProfileHandler:
    """Records the window of ``chakra_profile`` settings during ``engine.run``: ``handler.attach(engine)``.

    Args:
        settings: dataclass, mapping or DictConfig; the section, or a configuration that holds ``chakra_profile``.
        gradient_accumulation_steps: iterations to one update, as given to ``create_supervised_trainer``.

    Raises:
        SettingsError: a setting is wrong.
    """

    def __init__(self, settings: object, *, gradient_accumulation_steps: int = 1) -> None:
        if gradient_accumulation_steps < 1:
            raise SettingsError(
                f"gradient_accumulation_steps is {gradient_accumulation_steps}; expected the number of iterations to "
                "one update, at least 1. Leave it out where every iteration updates."
            )
        self.settings = settings_from(settings)
        self._size = gradient_accumulation_steps
        self._session: Session | None = None
        self._engine: Engine | None = None  # the one whose run records
        self._interrupted: Engine | None = None
        self._phases: EnginePhases | None = None
        # Handlers of STARTED load checkpoints, so the count is read at the first request.
        self._step: int | None = None
        # Where the last run stopped: engine, iteration, step. How many updates that were, the iteration does not say.
        self._past: tuple[weakref.ref[Engine], int, int] | None = None
        self._is_open = False
        self._num_batches = 0
        self._has_place = False  # in this epoch; handlers are also added while an engine runs
        self._knows_validation = False

    def __getstate__(self) -> dict[str, Any]:
        # A copy or a pickle of a running handler is one that has not started.
        return {**vars(self), **dict.fromkeys(_RUNNING), "_is_open": False}

    def attach(self, engine: Engine) -> None:
        """Follow the runs of ``engine``; does nothing when recording is off."""
        if self.settings.enabled and not calls.is_attached(engine, Events.STARTED, self._start):
            for event, handler in self._handlers():
                calls.add(engine, event, handler)

    def detach(self, engine: Engine) -> None:
        """Leave ``engine`` as it was before ``attach``; a run of it that is being recorded ends to be."""
        self._end(engine)
        calls.remove(engine, lambda function: getattr(function, "__self__", None) is self)

    def attach_validation(self, evaluator: Engine) -> None:
        """Mark the runs of ``evaluator`` as validation, which ``validation: exclude`` leaves out."""
        self._knows_validation = True
        if self.settings.enabled and not calls.is_attached(evaluator, Events.STARTED, self._start_validation):
            calls.add(evaluator, Events.STARTED, self._start_validation, is_first=True)
            for event in (Events.TERMINATE, Events.COMPLETED, Events.INTERRUPT):
                calls.add(evaluator, event, self._end_validation)
            calls.add(evaluator, Events.EXCEPTION_RAISED, self._fail_validation)

    def _start_validation(self, evaluator: Engine) -> None:
        calls.place(evaluator, Events.COMPLETED, self._end_validation, is_first=False)
        if self._session is not None:
            self._session.start_validation()

    def _end_validation(self, evaluator: Engine) -> None:
        if self._session is not None:
            self._session.end_validation()

    def _fail_validation(self, evaluator: Engine, error: BaseException) -> None:
        self._end_validation(evaluator)
        if calls.nobody_else_listens(evaluator, self._fail_validation):
            raise error

    def _handlers(self) -> tuple[tuple[Events, calls.Handler], ...]:
        return (
            (Events.STARTED, self._start),
            (Events.GET_BATCH_STARTED, self._request_batch),
            (Events.ITERATION_STARTED, self._start_iteration),
            (Events.ITERATION_COMPLETED, self._end_iteration),
            (Events.TERMINATE_SINGLE_EPOCH, self._cut_epoch),
            (Events.EPOCH_COMPLETED, self._end_epoch),
            (Events.INTERRUPT, self._interrupt),
            (Events.TERMINATE, self._end),
            (Events.COMPLETED, self._end),
            (Events.EXCEPTION_RAISED, self._fail),
        )

    def _first_step(self, engine: Engine, iterations: int) -> int:
        if self._past is not None and self._past[0]() is engine and self._past[1] == iterations:
            return self._past[2]
        return self._num_steps_before(engine, iterations)

    def _num_steps_before(self, engine: Engine, iterations: int) -> int:
        return iterations // self._size

    def _has_updated(self, engine: Engine) -> bool:
        return bool(engine.state.iteration % self._size == 0)

    def _is_group_lost(self, engine: Engine, *, has_run_ended: bool) -> bool:
        """Whether nothing comes of the step that is open, at the end of an epoch or of the run."""
        return not self._num_batches

    def _start(self, engine: Engine) -> None:
        if self._engine is not None and self._engine is not engine:
            logger.warning(
                "An engine that runs inside another one has the same ChakraProfileHandler, which is recording the "
                "outer one; the inner one is not recorded. Attach a handler of its own."
            )
            return
        self._close(Reason.training_ended)  # a run that was interrupted and left so
        self._go_first(engine)
        self._open(engine)

    def _open(self, engine: Engine) -> None:
        self._interrupted = self._step = None
        self._is_open = self._has_place = False
        session = Session(self.settings)
        session.open()
        if session.paths is None:
            return
        self._session, self._engine = session, engine
        if session.times_phases:
            self._phases = self._make_phases(engine, session)
            self._phases.install()
        if self.settings.validation is Validation.exclude and not self._knows_validation:
            logger.warning(
                "chakra_profile.validation is 'exclude', but no engine is known to validate, so validation inside the "
                "window stays in the tables. Call handler.attach_validation(evaluator) before training."
            )

    def _make_phases(self, engine: Engine, session: Session) -> EnginePhases:
        return EnginePhases(engine, session)

    def _go_first(self, engine: Engine) -> None:
        """Stand before handlers that were attached earlier, and behind them where a batch is requested."""
        for event, handler in self._handlers():
            if event is not Events.STARTED:
                calls.place(engine, event, handler, is_first=event is not Events.GET_BATCH_STARTED)

    def _keep_place(self, engine: Engine) -> None:
        self._has_place = True
        if engine is self._engine and self._session is not None:
            self._go_first(engine)
            if self._phases is not None and self._session.times_phases:
                self._phases.keep_place()

    def _request_batch(self, engine: Engine) -> None:
        if not self._has_place:
            self._keep_place(engine)
        if not self._is_open:
            self._begin(engine, engine.state.iteration)
        session = self._session
        if self._phases is not None and session is not None and engine is self._engine:
            session.end_phase(CALLBACKS)
            session.begin_phase(INPUT_WAIT)

    def _start_iteration(self, engine: Engine) -> None:
        if not self._has_place:
            self._keep_place(engine)
        # Already open, unless the engine runs without data and so requests nothing.
        if not self._is_open:
            self._begin(engine, engine.state.iteration - 1)
        session = self._session
        if session is not None and session.wants_batch and self._engine is not None and engine is self._engine:
            session.received(engine.state.batch)

    def _begin(self, engine: Engine, iterations: int) -> None:
        if engine is self._interrupted:
            self._open(engine)
        if engine is not self._engine or self._session is None:
            return
        if self._step is None:
            self._step = self._first_step(engine, iterations)
        self._is_open = True
        self._num_batches = 0
        self._session.start_step(self._step)

    def _end_iteration(self, engine: Engine) -> None:
        if engine is not self._engine or self._session is None or self._step is None or not self._is_open:
            return
        self._num_batches += 1
        has_updated, phases = self._has_updated(engine), self._phases
        if phases is not None:
            phases.end_iteration(has_updated=has_updated)
        if has_updated:
            self._is_open = False
            self._session.end_step(self._step)
            self._step += 1
        if phases is not None:
            # What follows is no work of a step: handlers, until the next request.
            self._session.begin_phase(CALLBACKS)

    def _cut_epoch(self, engine: Engine, iter_counter: int) -> None:
        self._end_epoch(engine)

    def _end_epoch(self, engine: Engine) -> None:
        """Close a step that got no batch, or no update."""
        if engine is not self._engine or self._session is None:
            return
        self._has_place = False
        if self._is_open and self._is_group_lost(engine, has_run_ended=False):
            self._abort(engine)
        if self._phases is not None:
            self._phases.end_epoch()

    def _abort(self, engine: Engine) -> None:
        self._is_open = False
        if self._session is not None:
            self._session.abort_step()

    def _interrupt(self, engine: Engine) -> None:
        # The run may go on later, or never; until then the process is free for other things.
        if engine is self._engine:
            if self._is_open and not self._num_batches:
                self._abort(engine)
            self._close(Reason.training_ended)
            self._interrupted = engine

    def _end(self, engine: Engine) -> None:
        if engine is self._engine:
            if self._is_open and self._is_group_lost(engine, has_run_ended=True):
                self._abort(engine)
            self._close(Reason.training_ended)

    def _fail(self, engine: Engine, error: BaseException) -> None:
        if engine is self._engine:
            self._close(Reason.exception, error)
        if calls.nobody_else_listens(engine, self._fail):
            raise error

    def _close(self, reason: Reason, error: BaseException | None = None) -> None:
        session, self._session = self._session, None
        if self._engine is not None and self._step is not None:
            self._past = (weakref.ref(self._engine), self._engine.state.iteration, self._step)
        self._engine = self._interrupted = self._phases = None
        self._is_open = False
        if session is not None:
            session.close(reason, error)


def handlers_of(engine: Engine) -> list[ChakraProfileHandler]:
    """The handlers of ours that follow the runs of an engine."""
    return [owner for owner in calls.followers(engine) if isinstance(owner, ChakraProfileHandler)]
