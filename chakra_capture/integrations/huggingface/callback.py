"""The callback: which update of a trainer is a step, told to a recording session."""

import logging
import sys
from collections.abc import Sequence
from types import FrameType
from typing import Any

from transformers import Trainer, TrainerCallback

from chakra_capture.annotations import BACKWARD, FORWARD, H2D, INPUT_WAIT, OPTIMIZER
from chakra_capture.config import settings_from
from chakra_capture.integrations.ending import close_and_detach
from chakra_capture.integrations.huggingface.follower import TrainerFollower
from chakra_capture.integrations.huggingface.phases import TrainerPhases
from chakra_capture.recording.manifest import Reason
from chakra_capture.recording.session import Session

logger = logging.getLogger(__name__)

_RUNNING = ("_session", "_follower", "_phases", "_state")


class ChakraProfileCallback(TrainerCallback):  # type: ignore[misc]
    """Records the window of ``chakra_profile`` settings during ``Trainer.train``: ``callbacks=[callback]``.

    Args:
        settings: dataclass, mapping or DictConfig; the section, or a configuration that holds ``chakra_profile``.

    Raises:
        SettingsError: a setting is wrong.
    """

    def __init__(self, settings: object) -> None:
        self.settings = settings_from(settings)
        self._session: Session | None = None
        self._follower: TrainerFollower | None = None
        self._phases: TrainerPhases | None = None
        # Of the training that records: another one, inside it, calls this object's hooks too.
        self._state: Any = None
        self._is_open = False

    def __getstate__(self) -> dict[str, Any]:
        # A copy or a pickle of a running callback is one that has not started.
        return {**vars(self), **dict.fromkeys(_RUNNING), "_is_open": False}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Open the session."""
        if not self.settings.enabled:
            return
        trainer = _calling_trainer(sys._getframe(1))
        if self._session is not None:
            if self._follower is None or self._follower.trainer is not trainer:
                logger.warning(
                    "A training inside another one uses the same ChakraProfileCallback, which is recording the outer "
                    "one; the inner one is not recorded. Give its trainer a callback of its own."
                )
                return
            self._close(Reason.training_ended)  # a training that ended in a way we did not see
        session = Session(self.settings)
        session.open()
        if session.paths is None:
            return
        self._session, self._state = session, state
        if trainer is None:
            logger.warning(
                "ChakraProfileCallback is not called by a transformers Trainer, so steps begin after their batches "
                "have arrived, validation is not told apart, and a training that ends by an exception leaves its "
                "window open until the process ends."
            )
            for name in (INPUT_WAIT, H2D, FORWARD, BACKWARD, OPTIMIZER):
                session.measures(name, "the loop is not that of a transformers Trainer")
            return
        self._follower = TrainerFollower(trainer, self)
        if session.times_phases:
            self._phases = TrainerPhases(trainer, session)
            self._phases.install()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Open the step if the request for its batches was not seen."""
        if state is self._state and not self._is_open:
            self.begin(state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Close the step."""
        if state is self._state and self._is_open and self._session is not None:
            self._is_open = False
            self._session.end_step(state.global_step - 1)  # it counts this one already
            if self._phases is not None:
                self._phases.pause()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Look at the optimizer that is about to step."""
        if state is self._state and self._phases is not None:
            self._phases.begin_update()

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Look no longer."""
        if state is self._state and self._phases is not None:
            self._phases.end_update()

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Close a step that got no update."""
        if state is self._state:
            self.abort()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Close the session."""
        if state is self._state:
            self._close(Reason.training_ended)

    def begin(self, step: int) -> None:
        """Open a step: its batches are requested, or there."""
        if self._session is not None:
            self._is_open = True
            self._session.start_step(step)

    def begin_request(self, step: int) -> None:
        """Open a step and wait for its batches."""
        self.begin(step)
        if self._phases is not None and self._session is not None:
            self._session.begin_phase(INPUT_WAIT)

    def end_request(self, batches: Sequence[Any]) -> None:
        """The batches are there; without any the step held none."""
        if self._phases is not None and self._session is not None:
            self._session.end_phase(INPUT_WAIT)
        if not batches:
            self.abort()
        elif self._session is not None:
            self._session.received(batches[0])

    def abort(self) -> None:
        """Close a step that held no update."""
        if self._is_open and self._session is not None:
            self._is_open = False
            self._session.abort_step()

    def start_validation(self) -> None:
        """Mark that the trainer validates."""
        if self._session is not None:
            self._session.start_validation()

    def end_validation(self) -> None:
        """End the mark."""
        if self._session is not None:
            self._session.end_validation()

    def fail(self, error: BaseException) -> None:
        """Close the session because training raised."""
        self._close(Reason.exception, error)

    def _close(self, reason: Reason, error: BaseException | None = None) -> None:
        session, self._session = self._session, None
        follower, self._follower = self._follower, None
        self._phases = self._state = None
        self._is_open = False
        close_and_detach(session, follower, reason, error)


def _calling_trainer(frame: FrameType | None) -> Trainer | None:
    """Find the trainer that called a callback; callbacks are given its model and its state, but not itself."""
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, Trainer):
            return caller
        frame = frame.f_back
    return None
