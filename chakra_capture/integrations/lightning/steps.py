"""Where Lightning's training loop stands, told to a recording session as steps."""

import logging
from typing import Any

from chakra_capture.recording.session import Session

logger = logging.getLogger(__name__)

_FETCH_HOOK = "_on_before_fetch"


class StepFollower:
    """Follows one trainer's loop from the start of training to its end.

    The loop has no public event for "a batch is requested", so its private hook is wrapped on the instance while we
    record; each epoch hands the hook on to the data fetcher of the time.
    """

    def __init__(self, trainer: Any, session: Session) -> None:
        self._trainer = trainer
        self._session = session
        self._loop = trainer.fit_loop.epoch_loop
        self._is_manual = not trainer.lightning_module.automatic_optimization
        # The loop corrects its counts for a resume after on_train_start, so they are read at the first request.
        self._step: int | None = None
        self._is_open = False
        self._num_batches = 0
        self._updates_before = 0
        self._fetch_hook = getattr(self._loop, _FETCH_HOOK, None)
        self._wrapper = self._before_fetch
        if self._fetch_hook is None:
            logger.warning(
                "This version of Lightning does not tell when a batch is requested, so steps begin after the batch has "
                "arrived and waiting for input is in no step."
            )
        else:
            setattr(self._loop, _FETCH_HOOK, self._wrapper)

    @property
    def is_attached(self) -> bool:
        """Say whether the loop's hook is wrapped."""
        return vars(self._loop).get(_FETCH_HOOK) is self._wrapper

    def detach(self) -> None:
        """Put the loop back as it was."""
        if self.is_attached:
            delattr(self._loop, _FETCH_HOOK)
        fetcher = getattr(self._trainer.fit_loop, "_data_fetcher", None)
        if fetcher is not None and getattr(fetcher, "_start_profiler", None) is self._wrapper:
            fetcher._start_profiler = self._fetch_hook

    def begin(self) -> None:
        """Open the next step unless one is open: a batch was requested, or is here already."""
        if self._is_open:
            return
        if self._step is None:
            self._step = self._steps_so_far()
        self._is_open = True
        self._num_batches = 0
        if self._is_manual:
            self._updates_before = self._trainer.global_step
        self._session.start_step(self._step)

    def end_batch(self, batch_idx: int) -> None:
        """Close the step if the loop updated after this batch."""
        if self._is_open and self._step is not None:
            self._num_batches += 1
            if self._has_updated(batch_idx):
                self._session.end_step(self._step)
                self._step += 1
                self._is_open = False

    def end_epoch(self) -> None:
        """Close a step without an update: no batch came, or the epoch was cut short (a hook returned -1).

        Only with manual optimization a group may go on in the next epoch.
        """
        if self._is_open and not (self._is_manual and self._num_batches):
            self._session.abort_step()
            self._is_open = False

    def _before_fetch(self) -> None:
        self.begin()
        assert self._fetch_hook is not None
        self._fetch_hook()

    def _has_updated(self, batch_idx: int) -> bool:
        if self._is_manual:
            return bool(self._trainer.global_step != self._updates_before)
        size = self._trainer.accumulate_grad_batches
        if size == 1:
            return True
        # The loop's own answer knows strategies that accumulate over the end of an epoch.
        should_accumulate = getattr(self._loop, "_should_accumulate", None)
        if should_accumulate is not None:
            return not should_accumulate()
        return (batch_idx + 1) % size == 0 or bool(self._trainer.is_last_batch)

    def _steps_so_far(self) -> int:
        updates = int(self._trainer.global_step)
        if not self._is_manual:
            return updates
        # global_step counts every optimizer, the other every batch; groups are at most as many as either.
        return min(updates, int(getattr(self._loop, "_batches_that_stepped", updates)))
