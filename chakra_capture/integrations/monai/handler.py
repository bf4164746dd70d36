"""The handlers: where the update groups of a MONAI trainer end, and which engines have any."""

import logging
import weakref
from typing import Any

from ignite.engine import Engine
from monai.engines import SupervisedTrainer
from monai.handlers import ValidationHandler

from chakra_capture.config import phases_only
from chakra_capture.integrations import ignite
from chakra_capture.integrations.ignite import calls
from chakra_capture.integrations.ignite.phases import EnginePhases
from chakra_capture.integrations.monai.phases import PartialPhases, TrainerPhases
from chakra_capture.recording import registry
from chakra_capture.recording.session import Session

logger = logging.getLogger(__name__)

_MARKER = "_chakra_capture_handler"


def init() -> None:
    """Say that MONAI trainers of this process time their own phases; a second call changes nothing.

    Raises:
        InitError: ``chakra_capture.phases.init`` was called before, which times the process's loop as a whole.
    """
    registry.claim_init("monai", None)


class ChakraProfileHandler(ignite.ChakraProfileHandler):
    """Records the window of ``chakra_profile`` settings during ``trainer.run``: ``train_handlers=[handler]``.

    Args:
        settings: dataclass, mapping or DictConfig; the section, or a configuration that holds ``chakra_profile``.

    Raises:
        SettingsError: a setting is wrong.
    """

    def __init__(self, settings: object) -> None:
        super().__init__(settings)
        self._bound: weakref.ref[Engine] | None = None
        self._has_declined = False

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_bound": None}

    def attach(self, engine: Engine) -> None:
        """Follow the runs of ``engine``; refuses, with a warning, what would count twice."""
        if not self.settings.enabled:
            return
        why_not = self._refusal(engine)
        if why_not:
            logger.warning("%s is not traced by this %s: %s.", type(engine).__name__, type(self).__name__, why_not)
            return
        self._bound = weakref.ref(engine)
        setattr(engine, _MARKER, _Marker(self))
        super().attach(engine)

    def detach(self, engine: Engine | None = None) -> None:
        """Leave the trainer as it was before ``attach``; a run that is being recorded ends to be."""
        engine = engine or (self._bound() if self._bound is not None else None)
        self._bound = None
        if engine is not None:
            super().detach(engine)
            if getattr(engine, _MARKER, None) is not None:
                delattr(engine, _MARKER)

    def _refusal(self, engine: Engine) -> str | None:
        if getattr(engine, _MARKER, None) is not None:
            return "another handler traces it already, and its steps would count twice"
        bound = self._bound() if self._bound is not None else None
        if bound is not None:
            name = type(bound).__name__
            return f"the handler traces a {name} already; give each engine a handler of its own, or detach() it first"
        return None

    def _start(self, engine: Any) -> None:
        if registry.init_owner() == "phases":
            if not self._has_declined:
                self._has_declined = True
                logger.warning(
                    "This run is not traced: chakra_capture.phases.init() times the loops of this process, and every "
                    "batch would count twice. Call chakra_capture.integrations.monai.init() instead."
                )
            return
        for owner in calls.owners(engine):
            # Of a handler that is not known no attribute is read: it may be one that raises.
            if isinstance(owner, ValidationHandler) and isinstance(owner.validator, Engine):
                self.attach_validation(owner.validator)
        super()._start(engine)

    def _make_phases(self, engine: Any, session: Session) -> EnginePhases:
        reason = _why_partial(engine)
        if reason is None:
            return TrainerPhases(engine, session)
        logger.warning("Of the phases of this run input_wait and iteration alone are measured: %s.", reason)
        return PartialPhases(engine, session)

    def _num_steps_before(self, engine: Any, iterations: int) -> int:
        size, length = _group_size(engine), engine.state.epoch_length
        if not length:
            return iterations // size
        epochs, rest = divmod(iterations, length)
        return int(epochs * -(-length // size) + rest // size)

    def _has_updated(self, engine: Any) -> bool:
        size, length, iteration = _group_size(engine), engine.state.epoch_length, engine.state.iteration
        if not length:
            return bool(iteration % size == 0)
        place = (iteration - 1) % length + 1
        return bool(place % size == 0 or place == length)

    def _is_group_lost(self, engine: Any, *, has_run_ended: bool) -> bool:
        # MONAI zeroes gradients at places that it counts in epochs of the length it knows, not where a group began: one
        # that terminate_epoch() has cut goes on, one cut by the end of an epoch of unknown length is zeroed.
        length, iteration = engine.state.epoch_length, engine.state.iteration
        zeroes_next = (iteration % length if length else iteration) % _group_size(engine) == 0
        return not self._num_batches or has_run_ended or zeroes_next

    def _abort(self, engine: Any) -> None:
        """Drop a group that got no update, and say whose gradients are lost."""
        last = engine.state.iteration
        batches = range(last - self._num_batches + 1, last + 1)
        why = "their gradients are zeroed, or never applied, without an update"
        self._is_open = False
        if self._session is not None:
            self._session.abort_step(batches, why if batches else "")
        if batches:
            which = f"iteration {last}" if len(batches) == 1 else f"iterations {batches[0]} to {last}"
            logger.warning(
                "MONAI never updates with %s of this run (accumulation_steps=%d): its gradients are zeroed or left "
                "over, so it is in no step.",
                which,
                _group_size(engine),
            )


class TraceMLHandler(ChakraProfileHandler):
    """Times the phases of a trainer's steps, into ``./chakra_traces``: ``train_handlers=[TraceMLHandler()]``.

    Traces what TraceML's handler of this name traces: a ``SupervisedTrainer`` that runs MONAI's own iteration. Any
    other engine gets one warning and is left alone.
    """

    def __init__(self) -> None:
        super().__init__(phases_only())

    def _refusal(self, engine: Engine) -> str | None:
        return _why_partial(engine) or super()._refusal(engine)


class _Marker:
    """Names the handler of an engine; a copy of the engine has none."""

    def __init__(self, handler: ChakraProfileHandler) -> None:
        self.handler = handler

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


def _why_partial(engine: Any) -> str | None:
    """Why the parts of an engine's iteration are not known; None of a trainer with MONAI's own."""
    process = engine._process_function
    own = getattr(process, "__self__", None) is engine
    if not own or getattr(process, "__func__", None) is not SupervisedTrainer._iteration:
        return f"{type(engine).__name__} does not run the iteration of SupervisedTrainer but one of its own"
    return None


def _group_size(engine: Any) -> int:
    # Known only after the handlers are attached, and only to a SupervisedTrainer.
    return getattr(engine, "accumulation_steps", 1)
