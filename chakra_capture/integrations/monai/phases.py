"""The phases of a MONAI trainer's steps: from its events, its inferer, and hooks of its optimizer."""

import logging
from collections.abc import Callable
from typing import Any

from ignite.engine import Engine
from ignite.handlers import Checkpoint
from monai.engines.utils import IterationEvents
from monai.handlers import CheckpointSaver

from chakra_capture.annotations import BACKWARD, CALLBACKS, DECOLLATE, FORWARD, H2D, OPTIMIZER, POSTPROCESSING
from chakra_capture.integrations.hooks import OptimizerHooks
from chakra_capture.integrations.ignite import calls
from chakra_capture.integrations.ignite.phases import EnginePhases
from chakra_capture.integrations.monai.standins import TimedCall
from chakra_capture.recording.session import Session
from chakra_capture.recording.transfers import HostToDevice

logger = logging.getLogger(__name__)

# MONAI registers these functions as handlers of its own.
_LABELS = {"_decollate_data": DECOLLATE, "_run_postprocessing": POSTPROCESSING}
_OWN_ITERATION = "the trainer computes in its own way, so its parts are not told apart"


class PartialPhases(EnginePhases):
    """What can be timed of any engine: the wait for input, and the iteration as a whole."""

    checkpoints = (Checkpoint, CheckpointSaver)
    labels = _LABELS

    def install(self) -> None:
        """Listen to the engine, and say what is not measured."""
        super().install()
        for name in (H2D, FORWARD, BACKWARD, OPTIMIZER):
            self._session.measures(name, _OWN_ITERATION)


class TrainerPhases(EnginePhases):
    """All phases of a ``SupervisedTrainer`` that runs MONAI's own iteration."""

    inside = ""
    checkpoints = (Checkpoint, CheckpointSaver)
    labels = _LABELS

    def __init__(self, engine: Engine, session: Session) -> None:
        super().__init__(engine, session)
        self._is_inside = False
        self._inferer: Any = None
        self._prepare: Any = None
        self._optimizer: Any = None
        self._updates = OptimizerHooks(session)
        self._is_sure_of_update = False

    def install(self) -> None:
        """Listen to the engine, stand in for its inferer and hook its optimizer."""
        super().install()
        self._session.time_phase(FORWARD, self._stand_in_for_inferer)
        self._session.time_phase(BACKWARD, self._listen_to_backward)
        self._session.time_phase(OPTIMIZER, self._updates.install)
        device = self._engine.state.device
        if device is None or device.type == "cpu":
            self._session.measures(H2D, "there is no device to copy to")
        else:
            self._session.time_phase(H2D, self._stand_in_for_prepare)

    def keep_place(self) -> None:
        """Stand where handlers that were added since are told from the work of the step."""
        super().keep_place()
        calls.place(self._engine, IterationEvents.LOSS_COMPLETED, self._begin_backward, is_first=False)
        calls.place(self._engine, IterationEvents.BACKWARD_COMPLETED, self._end_backward, is_first=True)

    def end_iteration(self, *, has_updated: bool) -> None:
        """The iteration is over, and perhaps its step."""
        self._is_inside = False
        self._updates.is_inside = False
        if has_updated:
            if self._is_sure_of_update and not self._updates.num_steps:
                self._session.skip_update()
            self._updates.num_steps = 0

    def _start(self, engine: Engine) -> None:
        if self._has_early:
            self._session.end_phase(CALLBACKS)
        self._is_inside = True
        trainer: Any = engine
        if trainer.inferer is not self._inferer and self._inferer is not None:
            self._inferer = None
            self._notice_replaced("inferer", FORWARD)
        if trainer.prepare_batch is not self._prepare and self._prepare is not None:
            self._prepare = None
            self._notice_replaced("prepare_batch", H2D)
        if trainer.optimizer is not self._optimizer:
            if self._optimizer is not None:
                logger.warning(
                    "The trainer's optimizer was replaced in the middle of the run; the new one is timed from here."
                )
            self._optimizer = trainer.optimizer
        self._is_sure_of_update = self._updates.enter(trainer.optimizer)

    def _stand_in_for_inferer(self) -> Callable[[], None]:
        self._inferer = TimedCall(self._engine.inferer, self._begin_forward, self._end_forward)
        return self._stand_in("inferer", self._inferer)

    def _stand_in_for_prepare(self) -> Callable[[], None]:
        copies: Any = HostToDevice(self._session, self._engine.state.device.type)
        self._prepare = TimedCall(
            self._engine.prepare_batch, copies.__enter__, lambda: copies.__exit__(None, None, None)
        )
        return self._stand_in("prepare_batch", self._prepare)

    def _stand_in(self, part: str, mine: TimedCall) -> Callable[[], None]:
        engine, before = self._engine, getattr(self._engine, part)
        setattr(engine, part, mine)

        def restore() -> None:
            if getattr(engine, part) is mine:
                setattr(engine, part, before)

        return restore

    def _begin_forward(self) -> None:
        # An inferer that is called by a handler is none of the step's forwards.
        if self._is_inside:
            self._session.begin_phase(FORWARD)

    def _end_forward(self) -> None:
        if self._is_inside:
            self._session.end_phase(FORWARD)

    def _notice_replaced(self, part: str, name: str) -> None:
        why = f"the trainer's {part} was replaced in the middle of the run"
        self._session.measures(name, why)
        logger.warning("The phase %s is not measured any more: %s.", name, why)

    def _listen_to_backward(self) -> Callable[[], None]:
        # Inside the handlers of others, so that their work is not taken for backward's.
        calls.add(self._engine, IterationEvents.LOSS_COMPLETED, self._begin_backward)
        calls.add(self._engine, IterationEvents.BACKWARD_COMPLETED, self._end_backward, is_first=True)
        return lambda: self._leave(self._begin_backward, self._end_backward)

    def _begin_backward(self, engine: Engine) -> None:
        self._session.begin_phase(BACKWARD)

    def _end_backward(self, engine: Engine) -> None:
        self._session.end_phase(BACKWARD)
