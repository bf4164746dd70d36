"""The phases of an engine's run, from its events."""

from collections.abc import Callable, Mapping
from typing import Any

from ignite.engine import Engine, Events
from ignite.handlers import Checkpoint

from chakra_capture.annotations import CALLBACKS, CHECKPOINT, INPUT_WAIT, ITERATION, VALIDATION_PHASE, handler_label
from chakra_capture.integrations.handler_names import Named, name_of
from chakra_capture.integrations.ignite import calls
from chakra_capture.recording.session import Session

_BEFORE_ITERATION = (Events.GET_BATCH_COMPLETED, Events.ITERATION_STARTED)


class EnginePhases:
    """Times the phases of one engine while a session records them.

    The handler that has the steps says when a batch is requested and a step is over, for their order counts.
    """

    inside = ITERATION
    checkpoints: tuple[type, ...] = (Checkpoint,)
    # What handlers of the framework's own are called in the traces, by their names.
    labels: Mapping[str, str] = {}

    def __init__(self, engine: Engine, session: Session) -> None:
        self._engine, self._session = engine, session
        self._is_naming = False
        self._has_early = False  # handlers of others between a batch and its iteration

    def install(self) -> None:
        """Listen to the engine."""
        self._session.time_phase(INPUT_WAIT, self._listen)
        if self._engine.state.dataloader is None:
            self._session.measures(INPUT_WAIT, "the engine runs without data and requests none")
        self._session.time_phase(CHECKPOINT, self._surround_checkpoints)
        self._session.in_windows(self._name_handlers)
        self._session.measures(CALLBACKS)
        self._session.measures(VALIDATION_PHASE)
        if self.inside:
            self._session.measures(self.inside)

    def keep_place(self) -> None:
        """Stand where handlers that were added since are told from the work of the step."""
        calls.place(self._engine, Events.GET_BATCH_COMPLETED, self._receive, is_first=True)
        calls.place(self._engine, Events.ITERATION_STARTED, self._start, is_first=False)
        self._leave(self._begin_checkpoint, self._end_checkpoint)
        self._surround_checkpoints()
        if self._is_naming:
            self._name_no_handlers()
            self._name_handlers()
        self._has_early = any(calls.has_others(self._engine, event) for event in _BEFORE_ITERATION)

    def end_iteration(self, *, has_updated: bool) -> None:
        """The process function has returned."""
        self._session.end_phase(ITERATION)

    def end_epoch(self) -> None:
        """The last request of an epoch of unknown length has got no batch."""
        self._session.end_phase(INPUT_WAIT)
        self._session.begin_phase(CALLBACKS)

    def _receive(self, engine: Engine) -> None:
        self._session.end_phase(INPUT_WAIT)
        # A phase costs microseconds: none is begun for nobody.
        if self._has_early:
            self._session.begin_phase(CALLBACKS)

    def _start(self, engine: Engine) -> None:
        if self._has_early:
            self._session.end_phase(CALLBACKS)
        if self.inside:
            self._session.begin_phase(self.inside)

    def _listen(self) -> Any:
        calls.add(self._engine, Events.GET_BATCH_COMPLETED, self._receive, is_first=True)
        calls.add(self._engine, Events.ITERATION_STARTED, self._start)
        return lambda: self._leave(self._receive, self._start)

    def _surround_checkpoints(self) -> Any:
        pair = (self._begin_checkpoint, self._end_checkpoint)
        calls.surround(
            self._engine, lambda handler: pair if isinstance(calls.owner_of(handler), self.checkpoints) else None
        )
        return lambda: self._leave(*pair)

    def _name_handlers(self) -> Callable[[], None]:
        def pair(handler: Any) -> tuple[calls.Handler, calls.Handler]:
            name = name_of(handler)
            named = Named(self._session, self.labels.get(name) or handler_label(name))
            return named.begin, named.end

        self._is_naming = True
        calls.surround(self._engine, pair)
        return self._name_no_handlers

    def _name_no_handlers(self) -> None:
        self._is_naming = False
        calls.remove(self._engine, lambda function: isinstance(getattr(function, "__self__", None), Named))

    def _begin_checkpoint(self, engine: Engine) -> None:
        self._session.begin_phase(CHECKPOINT)

    def _end_checkpoint(self, engine: Engine) -> None:
        self._session.end_phase(CHECKPOINT)

    def _leave(self, *functions: calls.Handler) -> None:
        calls.remove(self._engine, lambda function: function in functions)
