"""Where a plain loop stands: when its steps begin and end, told by what is wrapped of it."""

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from threading import get_ident
from time import monotonic_ns
from types import TracebackType
from typing import Any
from weakref import ref

import torch
from torch import is_grad_enabled

from chakra_capture.annotations import BACKWARD, FORWARD, INPUT_WAIT, OPTIMIZER
from chakra_capture.recording.journal import MOST_MOVES
from chakra_capture.recording.session import Session
from chakra_capture.recording.shapes import BEGIN, END

logger = logging.getLogger(__name__)

# Other than -1 where autograd runs on this thread: an optimizer may step in it, and checkpointing runs forwards again.
_backward_id: Callable[[], int] = getattr(torch._C, "_current_graph_task_id", lambda: -1)


@dataclass(eq=False, slots=True)
class Reading:
    """One iteration over a wrapped loader; ``size`` batches are one update."""

    loader: object
    size: int


class PlainLoop:
    """Follows one training loop, in the thread that requests its first batch: when its steps begin and end."""

    def __init__(self, session: Session, first_step: int) -> None:
        self.session = session
        self._first_step = self._step = first_step
        self._thread = 0
        self._said: set[str] = set()
        self._unseen: dict[str, int] = {}  # what is wrapped and was in no step yet, and since which step
        self.timed: set[str] = set()  # phases
        self.is_update_compiled = False
        self.optimizers: dict[int, ref[Any]] = {}  # that are wrapped, by id
        self._put_back: list[Callable[[], None]] = []
        # Of the step that is open.
        self._is_open = self._is_block = self._has_worked = False
        self._reading: Reading | None = None
        self.num_batches = 0  # that have come; who requests them counts
        self._inside: list[str] = []
        self.stepped: set[int] = set()  # ids of the optimizers that have

    def close(self) -> None:
        """Close the session, and put back what it has not."""
        self.session.close()
        while self._put_back:
            self._put_back.pop()()

    def times(self, name: str) -> None:
        """Note that a phase is timed from now on."""
        if name not in self.timed:
            self.timed.add(name)
            self._unseen[name] = self._step
            self.session.measures(name)

    def follow(self, optimizer: Any, replace_step: Callable[["PlainLoop", Any], Callable[[], None]]) -> None:
        """Time the updates of an optimizer; ``replace_step`` has it tell them, and returns what undoes that."""

        def install() -> Callable[[], None]:
            put_back, key = replace_step(self, optimizer), id(optimizer)
            self.timed.add(OPTIMIZER)

            def forget(_: object = None) -> None:
                self.optimizers.pop(key, None)

            # An optimizer that is gone, and with it its number, is waited for no more.
            self.optimizers[key] = ref(optimizer, forget)

            def remove() -> None:
                forget()
                put_back()

            return remove

        if self.session.times_phases:
            self.session.time_phase(OPTIMIZER, install)
        else:  # A window alone: its steps end with the updates all the same.
            self._put_back.append(install())

    def follows(self, reading: Reading) -> bool:
        """Say whether these batches are those of the training."""
        if not self.session.is_open:
            return False
        self._thread = self._thread or get_ident()
        why = None
        if self._thread != get_ident():
            why = "in another thread than before. Wrap what the training loop itself iterates over."
        elif not is_grad_enabled():
            why = "with gradients switched off, as for validation. Wrap the loader of the training alone."
        elif self._is_open and not self._is_block and self._reading and self._reading.loader is not reading.loader:
            why = "inside a step that iterates over another one. Bracket the steps by `with phases.step():`."
        if why is not None:
            self._say(f"A wrapped loader is passed over, its batches are in no step: it is iterated {why}")
        return why is None

    def requests(self, reading: Reading) -> bool:
        """Take a request for a batch, and begin to wait for it; False where it is none of this training."""
        # Mostly it is the next batch of the same iteration, and here each call of Python's takes a microsecond.
        is_next = self._reading is reading and self._thread == get_ident() and is_grad_enabled()
        if not (is_next and self.session.is_open) and not self.follows(reading):
            return False
        if not self._is_block:
            if self._is_open and self._reading is not reading:
                self._cut()
            if self._is_open and (self.num_batches >= reading.size or self._is_updated):
                self._close()
            self._reading = reading
            if not self._is_open:
                self._open()
        moves = self.session.moves
        if moves is not None and len(moves) < MOST_MOVES:
            moves += BEGIN, INPUT_WAIT, monotonic_ns()
        else:
            self.session.begin_phase(INPUT_WAIT)
        return True

    def exhausted(self) -> None:
        """There is no batch any more."""
        if self._is_block or not self._is_open:
            return
        if self.num_batches == 0:
            self._abort()
        elif self.optimizers and not self.stepped:
            self._cut()
        else:
            self._close()

    def left(self, reading: Reading) -> None:
        """Nobody asks for the rest of these batches."""
        if self._is_open and self._reading is reading and not self._is_block and self._thread == get_ident():
            self._cut()

    def begin(self, name: str) -> bool:
        """Enter a phase; False where it does not count."""
        inside = self._inside
        if not self._is_open:
            if name != FORWARD and self._step > self._first_step:
                self._say(
                    f"A wrapped {name} ran after the update of step {self._step - 1} and before the next batch: it is "
                    "in no step. If it belongs to the training, bracket the steps by `with phases.step():`."
                )
            return False
        if name in inside or get_ident() != self._thread:
            return False
        if name == FORWARD and (not is_grad_enabled() or (_backward_id() != -1 and BACKWARD not in inside)):
            return False
        inside.append(name)
        self._has_worked = True
        if self._unseen:
            self._unseen.pop(name, None)
        moves = self.session.moves
        if moves is not None and len(moves) < MOST_MOVES:
            moves += BEGIN, name, monotonic_ns()
        else:
            self.session.begin_phase(name)
        return True

    def end(self, name: str) -> None:
        """Leave a phase, and the step where that was its update."""
        inside = self._inside
        if inside and inside[-1] == name:
            inside.pop()
        elif name in inside:
            del inside[inside.index(name) :]
        else:
            return
        moves = self.session.moves
        if moves is not None:
            moves += END, name, monotonic_ns()
        else:
            self.session.end_phase(name)
        # Gradient hooks may have updated, so the end of backward may be that of the step.
        is_over = self.stepped and name != FORWARD and not inside and self.stepped >= self.optimizers.keys()
        if is_over and not self._is_block and _backward_id() == -1:
            self._close()

    def block(self) -> "AbstractContextManager[object]":
        """Bracket a step."""
        if self._is_block:
            self._say(
                f"step() is called inside step {self._step}: the inner one is passed over, its time is in the outer."
            )
            return nullcontext()
        return Block(self)

    def enter_block(self) -> None:
        """Begin a step, unless the request for its batch has."""
        self._thread = self._thread or get_ident()
        if not self._is_open:
            self._open()
            self._reading = None
        self._is_block = True

    def exit_block(self, error: BaseException | None) -> None:
        """End it, unless batches of its group are missing."""
        self._is_block = False
        if not self._is_open:
            return
        if error is not None:
            self._fail(error)
        elif self._reading is None or self.num_batches >= self._reading.size or self._is_updated:
            self._close()

    @property
    def _is_updated(self) -> bool:
        return bool(self.stepped) and self.stepped >= self.optimizers.keys()

    def _open(self) -> None:
        self._is_open, self._has_worked = True, False
        self.num_batches = 0
        self._inside.clear()
        self.stepped.clear()
        self.session.start_step(self._step)

    def _close(self) -> None:
        if self.is_update_compiled:
            self.session.measures(OPTIMIZER, "optimizer.step() is inside a compiled function")
        elif self.optimizers and not self.stepped:
            self.session.skip_update()
        self._is_open = False
        self.session.end_step(self._step)
        self._step += 1
        if self._unseen:
            self._say_what_was_not_called()

    def _say_what_was_not_called(self) -> None:
        for name in [name for name, since in self._unseen.items() if self._step >= since + 2]:
            del self._unseen[name]
            why = f"what is wrapped was not called in steps {self._step - 2} and {self._step - 1}"
            self.session.measures(name, why)
            self._say(f"The phase {name} is not measured: {why}. Wrap what the loop calls, and call what is returned.")

    def _cut(self) -> None:
        # Somebody has only looked at a batch, if nothing of what is wrapped has run.
        if self.num_batches == 0 or (self.timed and not self._has_worked):
            self._abort()
        else:
            self._fail(None)

    def _abort(self) -> None:
        self._is_open = False
        self.session.abort_step()

    def _fail(self, error: BaseException | None) -> None:
        self._is_open = False
        self.session.fail_step(self._step, error)

    def _say(self, message: str) -> None:
        key = message.partition(":")[0].translate(str.maketrans("", "", "0123456789"))
        if key not in self._said:
            self._said.add(key)
            logger.warning("%s", message)


class Block:
    """What ``step`` returns."""

    __slots__ = ("_loop",)

    def __init__(self, loop: PlainLoop) -> None:
        self._loop = loop

    def __enter__(self) -> None:
        self._loop.enter_block()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.exit_block(error)
