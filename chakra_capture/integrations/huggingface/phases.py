"""The phases of a trainer's steps, and of the time between them."""

import logging
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

from transformers import Trainer

from chakra_capture.annotations import (
    BACKWARD,
    CALLBACKS,
    CHECKPOINT,
    FORWARD,
    H2D,
    INPUT_WAIT,
    OPTIMIZER,
    handler_label,
)
from chakra_capture.annotations import VALIDATION_PHASE as VALIDATION
from chakra_capture.errors import RecordingError
from chakra_capture.integrations.handler_names import Named, is_ours, overridden
from chakra_capture.integrations.hooks import ModuleCalls, OptimizerHooks, Undo, time_calls
from chakra_capture.recording.patches import Patch
from chakra_capture.recording.session import Session

logger = logging.getLogger(__name__)

_EPOCH = "_run_epoch"
# What callbacks are told inside a step.
_IN_STEP = {"on_step_begin", "on_pre_optimizer_step", "on_optimizer_step", "on_substep_end"}
_UNSEEN = "the first step called neither the model nor one of its children"


class TrainerPhases:
    """Times the phases of one training, told by the callback where it stands."""

    def __init__(self, trainer: Trainer, session: Session) -> None:
        self._trainer = trainer
        self._session = session
        self._forwards = ModuleCalls(session, trainer.model, around=_wrappers(trainer))
        self._optimizers = OptimizerHooks(session)
        self._sees_pauses = False
        self._is_first = True

    def install(self) -> None:
        """Hook up what callbacks are not told."""
        session, trainer = self._session, self._trainer
        for name in (INPUT_WAIT, VALIDATION):
            session.measures(name)
        session.in_windows(self._name_callbacks)
        session.time_phase(FORWARD, self._time_forward)
        session.time_phase(BACKWARD, partial(time_calls, session, BACKWARD, trainer.accelerator, "backward"))
        session.time_phase(OPTIMIZER, self._optimizers.install)
        session.time_phase(CALLBACKS, self._see_end_of_epoch)
        session.time_phase(CHECKPOINT, partial(time_calls, session, CHECKPOINT, trainer, "_save_checkpoint"))
        is_host = trainer.args.device.type == "cpu"
        session.measures(H2D, "there is no device to copy to" if is_host else "the loader copies: it is in input_wait")

    def begin_update(self) -> None:
        """The optimizer is about to step."""
        optimizer = self._trainer.optimizer
        self._optimizers.enter(getattr(optimizer, "optimizer", optimizer))

    def end_update(self) -> None:
        """The optimizer has stepped, or its scaler has found that it must not."""
        self._optimizers.is_inside = False
        if self._is_first and self._forwards.is_timed and not self._forwards.has_run:
            self._session.measures(FORWARD, _UNSEEN)
            logger.warning("The phase forward is not measured, unless a later step does otherwise: %s.", _UNSEEN)
        self._is_first = False
        if self._trainer.accelerator.optimizer_step_was_skipped:
            self._session.skip_update()

    def pause(self) -> None:
        """The step has ended."""
        if self._sees_pauses:
            self._session.begin_phase(CALLBACKS)

    def _name_callbacks(self) -> Undo:
        """Show callbacks in the traces; of one whose methods cannot be replaced it does not."""
        with ExitStack() as undo:
            for callback in self._trainer.callback_handler.callbacks:
                if is_ours(callback) or not hasattr(callback, "__dict__"):
                    continue
                for hook in _IN_STEP.intersection(overridden(callback)):
                    named = Named(self._session, handler_label(f"{type(callback).__name__}.{hook}"))
                    undo.callback(Patch(callback, hook, named.call).undo)
            return undo.pop_all().close

    def _time_forward(self) -> Undo:
        calls = self._forwards

        def training_step(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            calls.enter()
            try:
                return original(*args, **kwargs)
            finally:
                calls.leave()

        return Patch(self._trainer, "training_step", training_step).undo

    def _see_end_of_epoch(self) -> Undo:
        if not hasattr(self._trainer, _EPOCH):
            raise RecordingError("this release of Transformers does not tell where an epoch ends")

        def run_epoch(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            try:
                return original(*args, **kwargs)
            finally:
                self._session.end_phase(CALLBACKS)

        patch = Patch(self._trainer, _EPOCH, run_epoch)
        self._sees_pauses = True

        def undo() -> None:
            self._sees_pauses = False
            patch.undo()

        return undo


def _wrappers(trainer: Trainer) -> list[Any]:
    """The modules that the trainer calls its model through (DDP, a compiled one), outermost first."""
    found, module = [], getattr(trainer, "model_wrapped", None)
    while module is not None and module is not trainer.model:
        found.append(module)
        module = getattr(module, "module", None) or getattr(module, "_orig_mod", None)
    return found
