"""Where a loop that knows nothing of us stands: its steps, found from batches, backwards and updates alone; no torch.

A step ends with the request for the first batch after at least one update, or where none is seen with the first
backward after it, and the next one begins there. Batches that nobody runs backward for are none of the training: what
is read so is taken for validation, from then on between the steps. What is read is told apart by a number (of the data
set, not of one pass over it).
"""

from collections.abc import Callable
from threading import get_ident

from chakra_capture.annotations import BACKWARD, INPUT_WAIT, OPTIMIZER
from chakra_capture.recording.session import Session


class LoopWatch:
    """Follows the loop of the thread that first asks for a batch, or runs backward.

    Args:
        open_session: called where a training seems to begin; None where it is not to be recorded.
    """

    def __init__(self, open_session: Callable[[], Session | None]) -> None:
        self._open_session = open_session
        self.session: Session | None = None
        self.is_off = False
        self.num_steps = 0
        # Told when a step begins and when it is about to end.
        self.on_begin: Callable[[], None] = _nothing
        self.on_end: Callable[[], None] = _nothing
        # How many updates run in this thread now, each inside another: asked where one has begun and not ended.
        self.updates_now: Callable[[], int] = int
        self._thread = 0
        # Of the step that is open.
        self._is_open = self._is_waiting = self._is_update_timed = self._is_validating = False
        self._is_in_backward = self._has_batch = False
        self._is_ahead = self._is_ended = False  # a batch is asked for before the one before it is used; none was left
        self._num_updates = self._num_backwards = self._num_updating = 0
        self._asked: dict[int, int] = {}  # requests to each source since the last backward
        self._passes: dict[int, int] = {}  # batches of each pass that the step has asked for
        # What was asked once before a backward: each such set has sufficed for one.
        self._sufficed: set[frozenset[int]] = set()
        self._others: set[int] = set()
        self._latest: int | None = None

    def request(self, source: int, one_pass: int, *, with_gradients: bool) -> bool:
        """A batch is asked for; says whether that is a wait of the training, and then ``received`` is to follow.

        Args:
            source: number of what is read.
            one_pass: number of this pass over it.
            with_gradients: whether gradients are on; where they are off nobody trains.
        """
        if not self._follows() or self._is_waiting:
            return False
        self._drop_raised()
        if self._is_open and self._num_updates:
            self._end()
        if self._is_open and self._is_ended:
            self._abort()
        if self._is_open and with_gradients:
            self._sort_out(source)
        self._latest = source
        if not with_gradients or source in self._others:
            self._begin_validation()
            return False
        if not self._is_open and not self._begin():
            return False
        self._asked[source] = self._asked.get(source, 0) + 1
        self._passes[one_pass] = self._passes.get(one_pass, 0) + 1
        self._is_waiting = True
        if self.session is not None:
            self.session.begin_phase(INPUT_WAIT)
        return True

    def _sort_out(self, source: int) -> None:
        """Drop the open step where it holds nothing but batches that were not trained on."""
        if self._num_backwards or not self._sufficed or not self._asked:
            return
        is_trained_on = any(source in enough for enough in self._sufficed)
        if frozenset({source}) in self._sufficed:
            strangers = self._asked.keys() - {source}
        elif is_trained_on:
            strangers = {one for one, times in self._asked.items() if times > 1 and one != source}
        else:
            strangers = self._asked.keys() & {source}
        if strangers:
            self._others |= strangers
            self._abort()

    def received(self, *, is_end: bool) -> None:
        """The wait is over; at its end there is no batch any more."""
        self._is_waiting = False
        if self.session is not None:
            self.session.end_phase(INPUT_WAIT)
        if is_end and self._is_open and not self._num_backwards:
            self._is_ended = True
            if not self._is_ahead:
                self._abort()
            self._is_ahead = False

    def exhausted(self) -> None:
        """What was read for validation has no batch any more."""
        self._end_validation()

    def left(self, one_pass: int) -> None:
        """Nobody asks for the rest of a pass: if it gave this step its batch, the loop is left.

        One that nobody ran backward for, batch after batch, did not train.
        """
        if one_pass not in self._passes or not self._is_open or self._thread != get_ident():
            return
        if self._num_updates:
            self._end()
        elif not self._num_backwards and (self._is_ended or self._passes[one_pass] > 1):
            self._abort()

    def begin_backward(self) -> bool:
        """Backward begins; says whether it counts, and then ``end_backward`` is to follow."""
        if not self._follows() or self._is_in_backward:  # checkpointing runs another one inside
            return False
        self._drop_raised()
        # Where batches are seen they tell: several optimizers may update with each.
        if self._is_open and self._num_updates and not self._num_updating and not self._has_batch:
            self._end()
        if not self._is_open:
            latest = self._latest
            if not self._begin():
                return False
            if latest is not None:  # it was taken for validation
                self._asked[latest] = 1
        self._num_backwards += 1
        once = frozenset(source for source, times in self._asked.items() if times == 1)
        if len(self._asked) == 1 and not once:
            once, self._is_ahead = frozenset(self._asked), True
        if once:
            self._has_batch = True
            self._sufficed.add(once)
            self._others -= once
        self._asked.clear()
        self._is_in_backward = True
        if self.session is not None:
            self.session.begin_phase(BACKWARD)
        return True

    def end_backward(self) -> None:
        """It is over."""
        self._is_in_backward = False
        if self.session is not None:
            self.session.end_phase(BACKWARD)

    def begin_update(self) -> None:
        """An optimizer begins its step, maybe inside that of another one."""
        # One of them is the one that begins.
        self._num_updating = self._num_updating + 1 if not self._num_updating else max(self.updates_now(), 1)
        if self._num_updating == 1:
            self._end_update_phase()  # of one that raised
        is_timed = self._num_updating == 1 and self._is_open and self._thread == get_ident()
        if is_timed and self.session is not None:
            self._is_update_timed = True
            self.session.begin_phase(OPTIMIZER)

    def end_update(self) -> None:
        """It has stepped; in whatever thread, for autograd may have called it."""
        self._num_updating = max(self._num_updating - 1, 0)
        if self._num_updating or not self._is_open:
            return
        self._end_update_phase()
        self._num_updates += 1

    def _drop_raised(self) -> None:
        """Forget updates that have raised: nobody tells of their end."""
        if self._num_updating:
            self._num_updating = self.updates_now()
            if not self._num_updating:
                self._end_update_phase()

    def _end_update_phase(self) -> None:
        if self._is_update_timed and self.session is not None:
            self._is_update_timed = False
            self.session.end_phase(OPTIMIZER)

    @property
    def num_updates(self) -> int:
        """Outermost updates of the open step so far."""
        return self._num_updates

    def skip_update(self) -> None:
        """A scaler has found that the step must not be taken: the group ends all the same."""
        if self._is_open and self.session is not None:
            self._num_updates += 1
            self.session.skip_update()

    def finish(self) -> None:
        """The loop is over; of a step that only this ends nobody knows where it ended, so it is cut short."""
        self._end_validation()
        if not self._is_open or self.session is None:
            return
        if not self._num_updates:
            self._abort()
            return
        self.on_end()
        self._is_open = False
        self.session.fail_step(self.num_steps)
        self.num_steps += 1

    def _follows(self) -> bool:
        if self.is_off:
            return False
        self._thread = self._thread or get_ident()
        return self._thread == get_ident()

    def _begin(self) -> bool:
        if self.session is None:
            self.session = self._open_session()
            self.is_off = self.session is None
        if self.session is None:
            return False
        self._end_validation()
        self._is_open, self._is_update_timed, self._has_batch, self._is_ended = True, False, False, False
        self._num_updates = self._num_backwards = 0
        self._forget_batches()
        self.session.start_step(self.num_steps)
        self.on_begin()
        return True

    def _end(self) -> None:
        assert self.session is not None
        self.on_end()
        self._is_open = False
        self._forget_batches()
        self.session.end_step(self.num_steps)
        self.num_steps += 1

    def _abort(self) -> None:
        assert self.session is not None
        self.on_end()
        self._is_open = False
        self._forget_batches()
        self.session.abort_step()

    def _forget_batches(self) -> None:
        self._asked.clear()
        self._passes.clear()
        self._latest = None

    def _begin_validation(self) -> None:
        if not self._is_open and not self._is_validating and self.session is not None:
            self._is_validating = True
            self.session.start_validation()

    def _end_validation(self) -> None:
        if self._is_validating and self.session is not None:
            self._is_validating = False
            self.session.end_validation()


def _nothing() -> None:
    """Nobody is told."""
