"""Where Lightning's training loop stands, told to a recording session as steps.

A step opens with the loop's request for a batch. A loader without a length is read one batch ahead, so there the
request that opens a step is the one for the batch of the next step: the input time in a step is that of the step after
it. Where nothing is left to request, a step opens when its batch is there.
"""

import logging
from typing import Any

from chakra_capture.annotations import CALLBACKS, INPUT_WAIT
from chakra_capture.integrations.lightning.phases import FitPhases
from chakra_capture.integrations.lightning.updates import ManualUpdates
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
        self._batch_progress = self._loop.batch_progress
        self._is_manual = not trainer.lightning_module.automatic_optimization
        self._updates = ManualUpdates(trainer) if self._is_manual else None
        # The loop corrects its counts for a resume after on_train_start, so they are read at the first request.
        self._step: int | None = None
        self.is_open = False  # a step is
        self._num_batches = 0
        self._fetch_hook = getattr(self._loop, _FETCH_HOOK, None)
        self._wrapper = self._before_fetch
        if self._fetch_hook is None:
            logger.warning(
                "This version of Lightning does not tell when a batch is requested, so steps begin after the batch has "
                "arrived and waiting for input is in no step."
            )
        else:
            setattr(self._loop, _FETCH_HOOK, self._wrapper)
        self._phases: FitPhases | None = None
        if session.times_phases:
            self._phases = FitPhases(trainer, session)
            self._phases.install()

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
        if self._updates is not None:
            self._updates.detach()

    def begin(self) -> None:
        """Open the next step unless one is open: a batch was requested, or is here already."""
        phases = self._phases
        if phases is not None and phases.is_paused:
            phases.resume()
        if self.is_open:
            return
        if self._step is None:
            self._step = self._steps_so_far()
            if self._updates is not None:
                self._updates.begin()
        self.is_open = True
        self._num_batches = 0
        self._session.start_step(self._step)

    def end_batch(self) -> None:
        """Close the step if the loop updated after this batch."""
        if self.is_open and self._step is not None:
            self._num_batches += 1
            phases = self._phases
            # Where no batches are gathered each one updates: of that the loop need not be asked.
            if (self._updates is None and self._trainer.accumulate_grad_batches == 1) or self._has_updated():
                if phases is not None:
                    phases.parts.end_step()
                self._session.end_step(self._step)
                self._step += 1
                self.is_open = False
            if phases is not None and phases.sees_pauses:
                phases.is_paused = True
                self._session.begin_phase(CALLBACKS)

    def end_epoch(self) -> None:
        """Close a step without an update: no batch came, or the epoch was cut short (a hook returned -1).

        Only with manual optimization a group may go on in the next epoch.
        """
        if self.is_open and not (self._is_manual and self._num_batches):
            self._session.abort_step()
            self.is_open = False

    def _before_fetch(self) -> None:
        phases = self._phases
        if not self.is_open or phases is not None:
            self.begin()
        assert self._fetch_hook is not None
        self._fetch_hook()
        if phases is not None and phases.sees_answers:
            self._session.begin_phase(INPUT_WAIT)

    def _has_updated(self) -> bool:
        if self._updates is not None:
            return self._updates.has_updated(self._num_batches)
        trainer, progress = self._trainer, self._batch_progress
        size = trainer.accumulate_grad_batches
        ready = progress.current.ready
        if ready % size == 0:
            return True
        if ready != trainer.num_training_batches and not progress.is_last_batch:
            return False
        # The loop's own answer knows strategies that accumulate over the end of an epoch.
        should_accumulate = getattr(self._loop, "_should_accumulate", None)
        return should_accumulate is None or not should_accumulate()

    def _steps_so_far(self) -> int:
        updates = int(self._trainer.global_step)
        if not self._is_manual:
            return updates
        # global_step counts every optimizer, the other every batch; groups are at most as many as either.
        batches = int(getattr(self._loop, "_batches_that_stepped", updates))
        return min(updates, batches) if updates else batches
