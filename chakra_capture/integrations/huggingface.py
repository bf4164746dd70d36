"""Hugging Face Transformers: a callback that records the window of a ``Trainer``.

A step is one update: one batch, or ``gradient_accumulation_steps`` of them, the rest at the end of an epoch included.
It runs from the trainer's request for all batches of its group, which come before any is computed with, to
``on_step_end``; logging, evaluation, saving and other callbacks' ``on_step_end`` are in no step. (Accelerate's loader
reads one batch ahead: the request that opens a step is the one for its batches all the same.) Steps are numbered by
``state.global_step``, which a resume continues. Validation is ``Trainer.evaluate`` and ``Trainer.predict``, whoever
calls them.
"""

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from types import FrameType
from typing import Any

from chakra_capture.config import settings_from
from chakra_capture.integrations.frameworks import require
from chakra_capture.recording.manifest import Reason
from chakra_capture.recording.session import Session

require("transformers", "accelerate", framework="Transformers with Accelerate", extra="huggingface")

from transformers import Trainer, TrainerCallback  # noqa: E402 (after the check that names the extra)

logger = logging.getLogger(__name__)

# What a trainer calls on itself, all through training; releases without _run_epoch have the others.
_PARTS = ("_run_epoch", "_finalize_training")
_OLDER_PARTS = ("get_batch_samples", "training_step", "_maybe_log_save_evaluate")
_VALIDATION = ("evaluate", "predict")


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
        self._follower: _TrainerFollower | None = None
        # Of the training that records: another one, inside it, calls this object's hooks too.
        self._state: Any = None
        self._is_open = False

    def __getstate__(self) -> dict[str, Any]:
        # A copy or a pickle of a running callback is one that has not started.
        return {**vars(self), "_session": None, "_follower": None, "_state": None, "_is_open": False}

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
        else:
            self._follower = _TrainerFollower(trainer, self)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Open the step if the request for its batches was not seen."""
        if state is self._state and not self._is_open:
            self.begin(state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Close the step."""
        if state is self._state and self._is_open and self._session is not None:
            self._is_open = False
            self._session.end_step(state.global_step - 1)  # it counts this one already

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Close a step that got no update."""
        if state is self._state:
            self.abort()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Close the session."""
        if state is self._state:
            self._close(Reason.training_ended)

    def begin(self, step: int) -> None:
        """Open a step."""
        if self._session is not None:
            self._is_open = True
            self._session.start_step(step)

    def abort(self) -> None:
        """Close a step that held no update."""
        if self._is_open and self._session is not None:
            self._is_open = False
            self._session.abort_step()

    @contextmanager
    def validation(self) -> Iterator[None]:
        """Mark what happens inside as validation."""
        if self._session is not None:
            self._session.start_validation()
        try:
            yield
        finally:
            if self._session is not None:
                self._session.end_validation()

    def fail(self, error: BaseException) -> None:
        """Close the session because training raised."""
        self._close(Reason.exception, error)

    def _close(self, reason: Reason, error: BaseException | None = None) -> None:
        session, self._session = self._session, None
        follower, self._follower = self._follower, None
        self._state = None
        self._is_open = False
        if follower is not None:
            follower.detach()
        if session is not None:
            session.close(reason, error)


class _TrainerFollower:
    """Wraps, on one trainer and while it trains, the methods that tell what callbacks are not told.

    That is when batches are requested, and that an exception ends the training.
    """

    def __init__(self, trainer: Trainer, callback: ChakraProfileCallback) -> None:
        self.trainer = trainer
        self._callback = callback
        self._handler = trainer.callback_handler
        self._before = self._handler.callbacks
        self._wrapped: list[tuple[Any, str, Any, Any]] = []  # owner, name, ours, what the owner itself had
        if hasattr(trainer, "get_batch_samples"):
            self._wrap(trainer, "get_batch_samples", self._requesting)
        for part in _PARTS if hasattr(trainer, _PARTS[0]) else _OLDER_PARTS:
            if hasattr(trainer, part):
                self._wrap(trainer, part, self._guarding)
        self._wrap(self._handler, "call_event", self._guarding)
        for part in _VALIDATION:
            self._wrap(trainer, part, self._marking)
        # First in line, so that no other callback's work at the end of a step is inside it. In a new list, for the
        # old one is being gone through.
        self._handler.callbacks = [callback, *(other for other in self._before if other is not callback)]

    def detach(self) -> None:
        """Put the trainer back as it was; what others have changed since stays."""
        for owner, name, wrapper, before in reversed(self._wrapped):
            if vars(owner).get(name) is not wrapper:
                continue
            if before is None:
                delattr(owner, name)
            else:
                setattr(owner, name, before)
        self._wrapped.clear()
        now = self._handler.callbacks
        if now and now[0] is self._callback and self._callback in self._before:
            before = self._before[: self._before.index(self._callback)]
            rest = now[1:]
            place = max((index + 1 for index, other in enumerate(rest) if other in before), default=0)
            self._handler.callbacks = [*rest[:place], self._callback, *rest[place:]]

    def _wrap(self, owner: Any, name: str, wrapping: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        wrapper = wrapping(getattr(owner, name))
        self._wrapped.append((owner, name, wrapper, vars(owner).get(name)))
        setattr(owner, name, wrapper)

    def _requesting(self, request: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(request)
        def get_batch_samples(*args: Any, **kwargs: Any) -> Any:
            self._callback.begin(self.trainer.state.global_step)
            batches, num_items = request(*args, **kwargs)
            if not batches:
                self._callback.abort()
            return batches, num_items

        return get_batch_samples

    def _marking(self, part: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(part)
        def marked(*args: Any, **kwargs: Any) -> Any:
            with self._callback.validation():
                return part(*args, **kwargs)

        return marked

    def _guarding(self, part: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(part)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            try:
                return part(*args, **kwargs)
            except BaseException as error:
                self._callback.fail(error)
                raise

        return guarded


def _calling_trainer(frame: FrameType | None) -> Trainer | None:
    """Find the trainer that called a callback; callbacks are given its model and its state, but not itself."""
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, Trainer):
            return caller
        frame = frame.f_back
    return None
