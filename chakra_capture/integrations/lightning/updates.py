"""When a Lightning loop with manual optimization has updated; Lightning itself does not always know."""

import logging
from typing import Any

logger = logging.getLogger(__name__)

# A loop that goes on for so many batches without an update has updates that nobody sees.
_MOST_BATCHES = 1000


class _GlobalStep:
    """``trainer.global_step`` under the name that Lightning's own count has."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    @property
    def completed(self) -> int:
        return int(self._trainer.global_step)


class ManualUpdates:
    """Tells after which batch a loop with manual optimization has updated.

    Optimizers of torch say so themselves, whether or not the loop goes through Lightning (``use_pl_optimizer=False``
    does not, and ``trainer.global_step`` stands still); for others ``trainer.global_step`` tells.
    """

    def __init__(self, trainer: Any) -> None:
        from torch.optim.optimizer import register_optimizer_step_post_hook

        self._trainer = trainer
        # What trainer.global_step reads in the end, without the three properties on the way.
        loop = getattr(trainer.fit_loop.epoch_loop, "manual_optimization", None)
        progress = getattr(getattr(loop, "optim_step_progress", None), "total", None)
        self._progress: Any = progress if hasattr(progress, "completed") else _GlobalStep(trainer)
        self._hook = register_optimizer_step_post_hook(self._note)
        self._has_stepped = False
        self._has_ever_updated = False
        self._is_each_batch = False
        self._known: int | None = None

    def detach(self) -> None:
        """Take the hook out of torch."""
        self._hook.remove()

    def has_updated(self, num_batches: int) -> bool:
        """Say whether the loop has updated since the last call, in the ``num_batches``-th batch of a step."""
        if self._has_stepped:
            self._has_stepped = False
            self._known = None
            if not self._has_ever_updated:
                self._has_ever_updated = True
                self._say_if_unnoticed()
            return True
        known, self._known = self._known, self._progress.completed
        if known is not None and self._known != known:
            self._has_ever_updated = True
            return True
        if num_batches >= _MOST_BATCHES and not self._has_ever_updated and not self._is_each_batch:
            self._is_each_batch = True
            logger.warning(
                "No optimizer has stepped in %d batches of this manual optimization, so from here on every batch is "
                "one step.",
                num_batches,
            )
        return self._is_each_batch

    def begin(self) -> None:
        """Note where the count stands before the first batch."""
        self._has_stepped = False
        self._known = self._progress.completed

    def _note(self, *_: Any) -> None:
        self._has_stepped = True

    def _say_if_unnoticed(self) -> None:
        if not self._trainer.global_step:
            logger.warning(
                "The optimizers of this loop step without Lightning (use_pl_optimizer=False), so trainer.global_step "
                "stays 0. A step is a batch, or a group of batches, after which an optimizer has stepped."
            )
