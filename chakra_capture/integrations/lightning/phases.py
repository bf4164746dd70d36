"""The phases of a Lightning loop: its steps' and those of the time between.

``input_wait`` is the loop's request for a batch until it is answered. ``callbacks``, between steps and between the
batches of one step, is the time from the end of a batch to the next request, or to the end of the epoch;
``validation`` and ``checkpoint`` are not in it.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from chakra_capture.annotations import CALLBACKS, CHECKPOINT, INPUT_WAIT, VALIDATION_PHASE, handler_label
from chakra_capture.errors import RecordingError
from chakra_capture.integrations.handler_names import Named, is_ours, overridden
from chakra_capture.integrations.hooks import Undo, time_calls
from chakra_capture.integrations.lightning.parts import StepParts
from chakra_capture.recording.patches import Patch
from chakra_capture.recording.session import Session

_FETCHED_HOOK = "_on_after_fetch"


class FitPhases:
    """Times the phases of one fit, told by its ``StepFollower`` where the loop stands."""

    def __init__(self, trainer: Any, session: Session) -> None:
        self._trainer = trainer
        self._session = session
        self._loop = trainer.fit_loop.epoch_loop
        self.parts = StepParts(trainer, session)
        # Whether it is seen when a batch has come, and when an epoch ends: else nobody is told that it begins.
        self.sees_answers = self.sees_pauses = False
        self.is_paused = False  # a batch is over, and the loop does not go on with another one yet

    def install(self) -> None:
        """Hook up what is not told by the follower."""
        session = self._session
        self.parts.install()
        session.in_windows(self._name_hooks)
        session.time_phase(INPUT_WAIT, self._see_answers)
        session.time_phase(CALLBACKS, self._see_end_of_epoch)
        session.time_phase(VALIDATION_PHASE, partial(time_calls, session, VALIDATION_PHASE, self._loop.val_loop, "run"))
        session.time_phase(CHECKPOINT, partial(time_calls, session, CHECKPOINT, self._trainer, "save_checkpoint"))

    def resume(self) -> None:
        """The loop goes on with a batch, or ends an epoch."""
        if self.is_paused:
            self.is_paused = False
            self._session.end_phase(CALLBACKS)

    def _name_hooks(self) -> Undo:
        """Show hooks of callbacks and of the module in the traces, where Lightning tells its own profiler of them."""
        trainer = self._trainer
        module = type(trainer.lightning_module).__name__
        told = [(f"[LightningModule]{module}", module, trainer.lightning_module)]
        others = [each for each in trainer.callbacks if not is_ours(each)]
        told += [(f"[Callback]{each.state_key}", type(each).__name__, each) for each in others]
        named = {
            f"{action}.{hook}": Named(self._session, handler_label(f"{name}.{hook}"))
            for action, name, owner in told
            for hook in overridden(owner)
        }

        def profile(original: Callable[[str], Any], action_name: str) -> Any:
            mine = named.get(action_name)
            return original(action_name) if mine is None else mine.around(original(action_name))

        return Patch(trainer.profiler, "profile", profile).undo

    def _see_answers(self) -> Undo:
        if not hasattr(self._loop, _FETCHED_HOOK):
            raise RecordingError("this version of Lightning does not tell when a batch has arrived")

        def after_fetch(original: Callable[[], None]) -> None:
            self._session.end_phase(INPUT_WAIT)
            original()

        patch = Patch(self._loop, _FETCHED_HOOK, after_fetch)
        self.sees_answers = True

        def undo() -> None:
            self.sees_answers = False
            patch.undo()
            # Each epoch hands the hook on to the data fetcher of the time.
            fetcher = getattr(self._trainer.fit_loop, "_data_fetcher", None)
            if fetcher is not None and fetcher._stop_profiler is patch.replacement:
                fetcher._stop_profiler = getattr(self._loop, _FETCHED_HOOK)

        return undo

    def _see_end_of_epoch(self) -> Undo:
        def on_advance_end(original: Callable[[], None]) -> None:
            original()
            self.resume()

        patch = Patch(self._trainer.fit_loop, "on_advance_end", on_advance_end)
        self.sees_pauses = True

        def undo() -> None:
            self.sees_pauses = self.is_paused = False
            patch.undo()

        return undo
