"""The Lightning callback: opens a recording session when training starts and closes it however training ends."""

import importlib
import importlib.util
import logging
import sys
from typing import TYPE_CHECKING, Any

from chakra_capture.config import settings_from
from chakra_capture.errors import MissingDependencyError
from chakra_capture.integrations.ending import close_and_detach
from chakra_capture.integrations.lightning.loggers import LoggedSummary
from chakra_capture.integrations.lightning.steps import StepFollower
from chakra_capture.layout import RunPaths
from chakra_capture.recording.manifest import Reason
from chakra_capture.recording.rank import RankInfo
from chakra_capture.recording.session import Session

logger = logging.getLogger(__name__)

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
        # The fit that records: another one, inside it, calls this object's hooks too.
        self._trainer: Any = None
        self._expected: Any = None
        self._before: list[Any] | None = None
        self._logged: LoggedSummary | None = None

    def __getstate__(self) -> dict[str, Any]:
        # A copy or a pickle of a running callback is one that has not started.
        nothing = dict.fromkeys(("_session", "_follower", "_trainer", "_expected", "_before", "_logged"))
        return {**vars(self), **nothing}

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Note that a fit begins; it may be over without training. One callback follows it, the first."""
        if stage != "fit" or not self.settings.enabled or self._session is not None:
            return
        others = [
            other for other in trainer.callbacks if isinstance(other, ChakraProfileCallback) and other is not self
        ]
        if any(other._expected is trainer for other in others):
            logger.warning(
                "This trainer has two ChakraProfileCallbacks, and every step would count twice: the second one does "
                "nothing. Give one of them all windows (chakra_profile.windows)."
            )
            return
        self._expected = trainer

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Open the session: ranks and process group are known now."""
        if self._session is not None:
            logger.warning(
                "A fit inside another one uses the same ChakraProfileCallback, which is recording the outer one; the "
                "inner one is not recorded. Give its trainer a callback of its own."
            )
            return
        paths = self._open(trainer) if self._expected is trainer else None
        if paths is None:
            return
        if hasattr(pl_module, "_set_chakra_paths"):
            pl_module._set_chakra_paths(paths)
        assert self._session is not None
        self._follower = StepFollower(trainer, self._session)
        self._trainer = trainer
        # First in line, so that no other callback's work at the end of a batch is inside the step. In a new list,
        # for the old one is being gone through.
        before = trainer.callbacks
        self._before = before[: before.index(self)] if self in before else None
        trainer.callbacks = [self, *(other for other in before if other is not self)]

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Open the step if the request for its batch was not seen."""
        follower, session = self._follower, self._session
        if trainer is self._trainer and follower is not None and session is not None:
            follower.begin()
            if session.wants_batch:
                session.received(batch)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Close the step with the last batch of its group."""
        if trainer is self._trainer:
            self._follower.end_batch()  # type: ignore[union-attr]

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Close a step that got no update."""
        if trainer is self._trainer:
            self._follower.end_epoch()  # type: ignore[union-attr]

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Mark validation, so that it can be left out."""
        if trainer is self._trainer and self._session is not None:
            self._session.start_validation()

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """End the mark."""
        if trainer is self._trainer and self._session is not None:
            self._session.end_validation()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Close the session."""
        self._close(trainer, Reason.training_ended)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Close the session; the exception goes its way."""
        self._expected = None
        self._close(trainer, Reason.exception, exception)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Close the session if nothing else has; say that nothing was recorded if training ran no batch."""
        if self._expected is trainer and self._session is None:
            self._open(trainer)
        self._close(trainer, Reason.training_ended)

    def _open(self, trainer: Any) -> RunPaths | None:
        self._expected = None
        self._trainer = trainer
        self._session = Session(self.settings, rank=RankInfo(trainer.global_rank, trainer.world_size))
        self._session.open()
        if self._session.paths is None:
            self._session = self._trainer = None
            return None
        if self.settings.log_to_logger and trainer.is_global_zero:
            self._logged = LoggedSummary(trainer, self._session.paths.summary)
        return self._session.paths

    def _close(self, trainer: Any, reason: Reason, error: BaseException | None = None) -> None:
        if self._trainer is not trainer:
            return
        self._trainer = None
        session, self._session = self._session, None
        follower, self._follower = self._follower, None
        logged, self._logged = self._logged, None
        self._give_back_the_first_place(trainer)
        close_and_detach(session, follower, reason, error)
        if logged is not None:
            logged.attach()

    def _give_back_the_first_place(self, trainer: Any) -> None:
        """Stand again behind those that stood before us; what others have changed in the list stays."""
        before, self._before = self._before, None
        callbacks = trainer.callbacks
        if before and callbacks and callbacks[0] is self:
            rest = callbacks[1:]
            place = max((index + 1 for index, other in enumerate(rest) if other in before), default=0)
            trainer.callbacks = [*rest[:place], self, *rest[place:]]
