"""The parts of a Lightning step, timed where the strategy carries them out.

``forward`` is what ``training_step`` calls of the module or its children (a loss that is a child is one of them);
``backward`` is Lightning's call of it, without hooks around it; ``optimizer`` is the optimizer's ``step`` without the
closure that Lightning runs inside it. Zeroing and clipping of gradients, schedulers and whatever else ``training_step``
does are in no phase of the step.
"""

import logging
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from chakra_capture.annotations import BACKWARD, FORWARD, H2D, OPTIMIZER
from chakra_capture.errors import RecordingError
from chakra_capture.integrations.hooks import ModuleCalls, OptimizerHooks, Undo
from chakra_capture.recording.patches import Patch
from chakra_capture.recording.session import Session

logger = logging.getLogger(__name__)

_UNSEEN = {
    FORWARD: "the first step called neither the module nor one of its children",
    BACKWARD: "the first step called no backward of Lightning (manual_backward)",
    OPTIMIZER: "in the first step no optimizer stepped through Lightning",
}


class StepParts:
    """Times what happens inside one trainer's steps."""

    def __init__(self, trainer: Any, session: Session) -> None:
        self._trainer = trainer
        self._session = session
        self._strategy = trainer.strategy
        self._forwards = ModuleCalls(session, trainer.lightning_module)
        self._optimizers = OptimizerHooks(session)
        self._has_run_backward = False
        self._is_first = True
        self._watched: list[str] = []
        self._num_asked = self._num_updates = 0

    def install(self) -> None:
        """Hook up all of it."""
        session = self._session
        session.time_phase(FORWARD, self._time_forward)
        session.time_phase(BACKWARD, self._time_backward)
        session.time_phase(OPTIMIZER, self._time_optimizer)
        if self._strategy.root_device.type == "cpu":
            session.measures(H2D, "there is no device to copy to")
        else:
            session.time_phase(H2D, self._time_transfers)

    def end_step(self) -> None:
        """The step that runs is about to end."""
        if self._num_asked and not self._num_updates:
            self._session.skip_update()
        self._num_asked = self._num_updates = 0
        if self._is_first:
            self._is_first = False
            self._say_what_was_not_seen()

    def _say_what_was_not_seen(self) -> None:
        seen = {FORWARD: self._forwards.has_run, BACKWARD: self._has_run_backward, OPTIMIZER: self._optimizers.has_run}
        missing = [name for name in self._watched if not seen[name]]
        if FORWARD in missing and not self._forwards.is_timed:
            missing.remove(FORWARD)  # it is said why
        for name in missing:
            self._session.measures(name, _UNSEEN[name])
        # Of optimizers that step without Lightning the follower says more.
        said = [f"{name} ({_UNSEEN[name]})" for name in missing if name != OPTIMIZER]
        if said:
            logger.warning("Not measured, unless a later step does otherwise: %s.", ", ".join(said))

    def _time_forward(self) -> Undo:
        strategy, calls = self._strategy, self._forwards

        def training_step(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            calls.enter(is_wrapped=strategy.model is not strategy.lightning_module)
            try:
                return original(*args, **kwargs)
            finally:
                calls.leave()

        undo = Patch(strategy, "training_step", training_step).undo
        self._watched.append(FORWARD)
        return undo

    def _time_backward(self) -> Undo:
        session = self._session

        def backward(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if not self._has_run_backward:
                self._has_run_backward = True
                session.measures(BACKWARD)
            session.begin_phase(BACKWARD)
            try:
                return original(*args, **kwargs)
            finally:
                session.end_phase(BACKWARD)

        undo = Patch(self._strategy.precision_plugin, "backward", backward).undo
        self._watched.append(BACKWARD)
        return undo

    def _time_optimizer(self) -> Undo:
        hooks = self._optimizers

        def optimizer_step(original: Callable[..., Any], optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            is_sure, before = hooks.enter(optimizer), hooks.num_steps
            try:
                return original(optimizer, *args, **kwargs)
            finally:
                hooks.is_inside = False
                self._num_asked += is_sure
                self._num_updates += hooks.num_steps - before

        with ExitStack() as undo:
            undo.callback(hooks.install())
            undo.callback(Patch(self._strategy, "optimizer_step", optimizer_step).undo)
            self._watched.append(OPTIMIZER)
            return undo.pop_all().close

    def _time_transfers(self) -> Undo:
        from chakra_capture.recording.transfers import HostToDevice

        trainer, strategy = self._trainer, self._strategy
        if any(_has_own_transform(owner) for owner in (trainer.lightning_module, trainer.datamodule)):
            # It may be compiled, and what watches transfers would be compiled with it.
            raise RecordingError("on_after_batch_transfer is the job's own, and runs in the same call as the transfer")
        transfers = HostToDevice(self._session, strategy.root_device.type)

        def batch_to_device(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if not trainer.training:  # validation uses the same strategy
                return original(*args, **kwargs)
            with transfers:
                return original(*args, **kwargs)

        return Patch(strategy, "batch_to_device", batch_to_device).undo


def _has_own_transform(owner: object) -> bool:
    hook = getattr(owner, "on_after_batch_transfer", None)
    return hook is not None and getattr(hook, "__qualname__", "") != "DataHooks.on_after_batch_transfer"
