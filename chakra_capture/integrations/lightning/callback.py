"""The Lightning callback: opens a recording session when training starts and closes it however training ends."""

import importlib
import importlib.util
import sys
from typing import TYPE_CHECKING, Any

from chakra_capture.config import settings_from
from chakra_capture.errors import MissingDependencyError
from chakra_capture.integrations.lightning.steps import StepFollower
from chakra_capture.recording.manifest import Reason
from chakra_capture.recording.rank import RankInfo
from chakra_capture.recording.session import Session

_PACKAGES = ("pytorch_lightning", "lightning.pytorch")


def _callback_classes() -> tuple[type, ...]:
    """Find the callback class of the package the job uses; of both, if that is not known yet.

    The two packages are copies of each other, and a trainer takes callbacks of its own.
    """
    names = [name for name in _PACKAGES if name in sys.modules]
    names = names or [name for name in _PACKAGES if importlib.util.find_spec(name.partition(".")[0])]
    classes = tuple(importlib.import_module(name).Callback for name in names)
    if not classes:
        raise MissingDependencyError(
            "chakra_capture.integrations.lightning needs PyTorch Lightning, which is not installed; expected "
            'pytorch-lightning or lightning. Run: pip install "chakra-capture[lightning]"'
        )
    return classes


if TYPE_CHECKING:
    from pytorch_lightning import Callback as _Callback
else:
    _Callback = type("_Callback", _callback_classes(), {})


class ChakraProfileCallback(_Callback):
    """Records the window of ``chakra_profile`` settings during ``Trainer.fit``.

    Args:
        settings: dataclass, mapping or DictConfig; the section, or a configuration that holds ``chakra_profile``.

    Raises:
        SettingsError: a setting is wrong.
    """

    def __init__(self, settings: object) -> None:
        super().__init__()
        self.settings = settings_from(settings)
        self._session: Session | None = None
        self._follower: StepFollower | None = None
        self._callbacks: tuple[list[Any], list[Any]] | None = None

    def __getstate__(self) -> dict[str, Any]:
        # A copy or a pickle of a running callback is one that has not started.
        return {**vars(self), "_session": None, "_follower": None, "_callbacks": None}

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Open the session: ranks and process group are known now."""
        if not self.settings.enabled:
            return
        self._session = Session(self.settings, rank=RankInfo(trainer.global_rank, trainer.world_size))
        self._session.open()
        paths = self._session.paths
        if paths is None:
            return
        if hasattr(pl_module, "_set_chakra_paths"):
            pl_module._set_chakra_paths(paths)
        self._follower = StepFollower(trainer, self._session)
        # First in line, so that no other callback's work at the end of a batch is inside the step.
        before = trainer.callbacks
        trainer.callbacks = [self, *(other for other in before if other is not self)]
        self._callbacks = (before, trainer.callbacks)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Open the step if the request for its batch was not seen."""
        if self._follower is not None:
            self._follower.begin()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Close the step with the last batch of its group."""
        if self._follower is not None:
            self._follower.end_batch(batch_idx)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Close a step that got no update."""
        if self._follower is not None:
            self._follower.end_epoch()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Close the session."""
        self._close(trainer, Reason.training_ended)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Close the session; the exception goes its way."""
        self._close(trainer, Reason.exception, exception)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Close the session if nothing else has."""
        self._close(trainer, Reason.training_ended)

    def _close(self, trainer: Any, reason: Reason, error: BaseException | None = None) -> None:
        session, self._session = self._session, None
        follower, self._follower = self._follower, None
        callbacks, self._callbacks = self._callbacks, None
        if callbacks is not None and trainer.callbacks is callbacks[1]:
            trainer.callbacks = callbacks[0]
        if follower is not None:
            follower.detach()
        if session is not None:
            session.close(reason, error)
