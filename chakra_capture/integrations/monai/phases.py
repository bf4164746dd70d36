"""The phases of a MONAI trainer's steps: from its events, its inferer, and hooks of its optimizer."""

import logging
from collections.abc import Callable
from typing import Any

from ignite.engine import Engine
from ignite.handlers import Checkpoint
from monai.engines.utils import IterationEvents
from monai.handlers import CheckpointSaver

from chakra_capture.annotations import BACKWARD, FORWARD, H2D, OPTIMIZER
from chakra_capture.errors import RecordingError
from chakra_capture.integrations.ignite import calls
from chakra_capture.integrations.ignite.phases import EnginePhases
from chakra_capture.integrations.monai.standins import TimedCall
from chakra_capture.recording.session import Session

logger = logging.getLogger(__name__)

_OWN_ITERATION = "the trainer computes in its own way, so its parts are not told apart"


class PartialPhases(EnginePhases):
    """What can be timed of any engine: the wait for input, and the iteration as a whole."""

    checkpoints = (Checkpoint, CheckpointSaver)

    def install(self) -> None:
        """Listen to the engine, and say what is not measured."""
        super().install()
        for name in (H2D, FORWARD, BACKWARD, OPTIMIZER):
            self._session.measures(name, _OWN_ITERATION)


class TrainerPhases(EnginePhases):
    """All phases of a ``SupervisedTrainer`` that runs MONAI's own iteration."""

    inside = ""
    checkpoints = (Checkpoint, CheckpointSaver)

    def __init__(self, engine: Engine, session: Session) -> None:
        super().__init__(engine, session)
        self._is_inside = False
        self._inferer: Any = None
        self._optimizer: Any = None
        self._handles: list[Any] = []
        self._depth = self._num_updates = 0

    def install(self) -> None:
        """Listen to the engine, stand in for its inferer and hook its optimizer."""
        super().install()
        self._session.time_phase(FORWARD, self._stand_in)
        self._session.time_phase(BACKWARD, self._listen_to_backward)
        self._session.time_phase(OPTIMIZER, self._hook_optimizer)
        device = self._engine.state.device
        if device is None or device.type == "cpu":
            self._session.measures(H2D, "there is no device to copy to")

    def end_iteration(self, *, has_updated: bool) -> None:
        """The iteration is over, and perhaps its step."""
        self._is_inside = False
        if has_updated:
            if self._handles and not self._num_updates:
                self._session.skip_update()
            self._num_updates = 0

    def _start(self, engine: Engine) -> None:
        super()._start(engine)
        self._is_inside, self._depth = True, 0
        if engine.inferer is not self._inferer and self._inferer is not None:
            self._notice_inferer(engine)
        if engine.optimizer is not self._optimizer and self._optimizer is not None:
            self._notice_optimizer(engine)

    def _stand_in(self) -> Callable[[], None]:
        engine, inferer = self._engine, self._engine.inferer
        mine = self._inferer = engine.inferer = TimedCall(inferer, self._begin_forward, self._end_forward)

        def restore() -> None:
            if engine.inferer is mine:
                engine.inferer = inferer

        return restore

    def _begin_forward(self) -> None:
        # An inferer that is called by a handler is none of the step's forwards.
        if self._is_inside:
            self._session.begin_phase(FORWARD)

    def _end_forward(self) -> None:
        if self._is_inside:
            self._session.end_phase(FORWARD)

    def _notice_inferer(self, engine: Engine) -> None:
        self._inferer = engine.inferer
        why = "the trainer's inferer was replaced in the middle of the run"
        self._session.measures(FORWARD, why)
        logger.warning("The phase forward is not measured any more: %s.", why)

    def _listen_to_backward(self) -> Callable[[], None]:
        # Inside the handlers of others, so that their work is not taken for backward's.
        calls.add(self._engine, IterationEvents.LOSS_COMPLETED, self._begin_backward)
        calls.add(self._engine, IterationEvents.BACKWARD_COMPLETED, self._end_backward, is_first=True)
        return lambda: self._leave(self._begin_backward, self._end_backward)

    def _begin_backward(self, engine: Engine) -> None:
        self._session.begin_phase(BACKWARD)

    def _end_backward(self, engine: Engine) -> None:
        self._session.end_phase(BACKWARD)

    def _hook_optimizer(self) -> Callable[[], None]:
        optimizer = self._optimizer = self._engine.optimizer
        name = type(optimizer).__name__
        if not hasattr(optimizer, "register_step_pre_hook"):
            raise RecordingError(f"the optimizer {name} has no hooks for its step")
        if hasattr(vars(optimizer).get("step"), "_torchdynamo_orig_callable"):
            raise RecordingError(f"the step of {name} is compiled, and a hook would have it compiled again")
        self._handles.append(optimizer.register_step_pre_hook(self._begin_update))
        self._handles.append(optimizer.register_step_post_hook(self._end_update))
        return self._unhook_optimizer

    def _unhook_optimizer(self) -> None:
        while self._handles:
            self._handles.pop().remove()

    def _notice_optimizer(self, engine: Engine) -> None:
        logger.warning("The trainer's optimizer was replaced in the middle of the run; the new one is timed from here.")
        self._unhook_optimizer()
        self._session.time_phase(OPTIMIZER, self._hook_optimizer)

    def _begin_update(self, *_: Any) -> None:
        # A step() that calls that of its base class is one update; so is none that a handler calls.
        if self._is_inside:
            self._depth += 1
            if self._depth == 1:
                self._session.begin_phase(OPTIMIZER)

    def _end_update(self, *_: Any) -> None:
        if self._is_inside:
            self._depth -= 1
            if self._depth == 0:
                self._num_updates += 1
                self._session.end_phase(OPTIMIZER)
