"""What a trainer tells no callback: when batches are requested, that it validates, that an exception ends it."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from transformers import Trainer

from chakra_capture.integrations.hooks import Undo
from chakra_capture.recording.patches import Patch

# What a trainer calls on itself, all through training; releases without _run_epoch have the others.
_PARTS = ("_run_epoch", "_finalize_training")
_OLDER_PARTS = ("get_batch_samples", "training_step", "_maybe_log_save_evaluate")
_VALIDATION = ("evaluate", "predict")


class Listener(Protocol):
    """Who is told."""

    def begin_request(self, step: int) -> None:
        """Batches are requested."""

    def end_request(self, batches: Sequence[Any]) -> None:
        """The request is answered."""

    def start_validation(self) -> None:
        """Validation begins."""

    def end_validation(self) -> None:
        """Validation is over."""

    def fail(self, error: BaseException) -> None:
        """Training has raised."""


class TrainerFollower:
    """Replaces, on one trainer and while it trains, methods of its own."""

    def __init__(self, trainer: Trainer, callback: Listener) -> None:
        self.trainer = trainer
        self._callback = callback
        self._handler = trainer.callback_handler
        self._before = self._handler.callbacks
        self._undo: list[Undo] = []
        self._wrap(trainer, "get_batch_samples", self._request)
        for part in _PARTS if hasattr(trainer, _PARTS[0]) else _OLDER_PARTS:
            self._wrap(trainer, part, self._guard)
        self._wrap(self._handler, "call_event", self._guard)
        for part in _VALIDATION:
            self._wrap(trainer, part, self._validate)
        # First in line, so that no other callback's work at the end of a step is inside it. In a new list, for the
        # old one is being gone through.
        self._handler.callbacks = [callback, *(other for other in self._before if other is not callback)]

    def detach(self) -> None:
        """Put the trainer back as it was; what others have changed since stays."""
        while self._undo:
            self._undo.pop()()
        now = self._handler.callbacks
        if now and now[0] is self._callback and self._callback in self._before:
            before = self._before[: self._before.index(self._callback)]
            rest = now[1:]
            place = max((index + 1 for index, other in enumerate(rest) if other in before), default=0)
            self._handler.callbacks = [*rest[:place], self._callback, *rest[place:]]

    def _wrap(self, owner: Any, name: str, instead: Callable[..., Any]) -> None:
        if hasattr(owner, name):
            self._undo.append(Patch(owner, name, instead).undo)

    def _request(self, request: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._callback.begin_request(self.trainer.state.global_step)
        batches, num_items = request(*args, **kwargs)
        self._callback.end_request(batches)
        return batches, num_items

    def _validate(self, part: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._callback.start_validation()
        try:
            return part(*args, **kwargs)
        finally:
            self._callback.end_validation()

    def _guard(self, part: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            return part(*args, **kwargs)
        except BaseException as error:
            self._callback.fail(error)
            raise
