"""Phases of a plain training loop, by wrapping what it calls: loader, model, backward, optimizer.

    phases.init()
    loader, forward, optimizer = wrap_dataloader(loader), wrap_forward(model), wrap_optimizer(optimizer)
    for inputs, targets in loader:
        loss = loss_function(forward(inputs), targets)
        wrap_backward(loss).backward()
        optimizer.step()
        optimizer.zero_grad()

A step begins with the request for the first batch of its group and ends where the loop updates: when every wrapped
optimizer has stepped, or, where none is wrapped or none has stepped, with the request for the batch after the group.
What comes after the update, until the next request, is in no step. A loop whose one batch takes several updates, or
whose step is of another shape, brackets it by ``step()``. Steps count on over epochs. An epoch that ends inside a
group, or a loop that is left inside a step, leaves that step cut short (``partial``); its number is used again.

Times are in ``<trace_dir>/<job>_phases/rank-<R>.jsonl``, in ns. ``init`` returns the session, whose ``phase`` names
further parts: ``h2d`` in a step, ``validation`` or ``checkpoint`` between two.
"""

import inspect
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import wraps
from threading import get_ident
from types import TracebackType
from typing import Any, TypeVar, cast
from weakref import WeakSet, ref

import torch

from chakra_capture.annotations import BACKWARD, FORWARD, INPUT_WAIT, OPTIMIZER
from chakra_capture.config import phases_only, settings_from
from chakra_capture.errors import InitError, SettingsError
from chakra_capture.recording import registry
from chakra_capture.recording.session import Session

logger = logging.getLogger(__name__)

_OWNER = "phases"
T = TypeVar("T")


def init(settings: object = None, *, first_step: int = 0) -> Session:
    """Open the process's session; a second call with the same arguments returns it again.

    It closes when the interpreter ends, or by ``close()``.

    Args:
        settings: as for ``capture``; left out: the phases of every step, no window, into ``./chakra_traces``.
        first_step: global number of the first step, for a loop that resumes.

    Raises:
        SettingsError: a setting is wrong.
        InitError: the process is initialised already, with other arguments or by the MONAI integration.
    """
    chosen = phases_only() if settings is None else settings_from(settings)
    claim = registry.claim_init(_OWNER, (chosen, first_step))
    if claim.made is None:
        session = Session(chosen)
        try:
            session.open()
        except BaseException:
            registry.release_init()
            raise
        claim.made = _Loop(session, first_step)
    return cast(_Loop, claim.made).session


def close() -> None:
    """Close the session; what is wrapped stays usable and is no longer timed."""
    claim = registry.current_init()
    if claim is not None and claim.owner == _OWNER:
        registry.release_init()
        claim.made.close()


def wrap_dataloader(loader: T, accumulation_steps: int = 1) -> T:
    """Time the waits for batches (``input_wait``) and let them open the steps.

    Args:
        loader: any iterable, or an iterator; of a loader, length and attributes are passed on.
        accumulation_steps: batches to one update.

    Returns:
        What to iterate over instead. Wrap the training's loader, not that of the validation.

    Raises:
        InitError: ``init`` was not called, or the loader is wrapped already.
        SettingsError: ``accumulation_steps`` is not a count.
    """
    loop = _loop_for(loader)
    if accumulation_steps < 1:
        raise SettingsError(
            f"accumulation_steps is {accumulation_steps}; expected the number of batches to one update, at least 1. "
            "Leave it out where every batch updates."
        )
    if loop is None:
        return loader
    loop.session.measures(INPUT_WAIT)
    source: Any = loader
    if callable(getattr(loader, "__next__", None)):
        return cast(T, _Batches(loop, source, source, accumulation_steps))
    kind = _SizedLoader if hasattr(loader, "__len__") else _Loader
    return cast(T, kind(loop, source, accumulation_steps))


def wrap_forward(module: T) -> T:
    """Time the calls of a module, or of any function: ``forward``.

    Only calls in a step and with gradients count, and of calls inside each other the outermost. Wrap what the loop
    calls: the compiled module, the one in DistributedDataParallel.

    Returns:
        What to call instead; it passes attributes on. The module stays as it was, and is what a copy or pickle holds.

    Raises:
        InitError: ``init`` was not called, or the module is wrapped already.
    """
    loop = _loop_for(module)
    if loop is None:
        return module
    loop.times(FORWARD)
    return cast(T, _Call(loop, module, FORWARD))


def wrap_backward(loss: T) -> T:
    """Time ``backward``: of a loss, or of what the loop calls instead (``fabric.backward``).

    Returns:
        For a loss, an object whose ``backward(...)`` is timed; for a function, one to call instead.

    Raises:
        InitError: ``init`` was not called, or it is wrapped already.
        TypeError: it is neither.
    """
    is_loss = callable(getattr(loss, "backward", None))
    if isinstance(loss, torch.nn.Module) or not (is_loss or callable(loss)):
        raise TypeError(
            f"wrap_backward got a {type(loss).__name__}, which has no backward(); expected a loss or a function that "
            "runs backward. Call wrap_backward(loss).backward(), or wrap_backward(fabric.backward)."
        )
    loop = _loop_for(loss)
    if loop is None:
        return loss
    loop.times(BACKWARD)
    return cast(T, _Loss(loop, loss) if is_loss else _Call(loop, loss, BACKWARD))


def wrap_optimizer(optimizer: T) -> T:
    """Time ``optimizer.step`` (``optimizer``) and let it end the steps.

    ``step`` is replaced on this object until phases are no longer recorded; closures and schedulers stay outside its
    time where they are timed by themselves.

    Returns:
        The same object.

    Raises:
        InitError: ``init`` was not called, or the optimizer is wrapped already.
        TypeError: it has no ``step``.
    """
    if not callable(getattr(optimizer, "step", None)):
        raise TypeError(
            f"wrap_optimizer got a {type(optimizer).__name__}, which has no step(); expected an optimizer. "
            "Give the object whose step() updates the weights."
        )
    loop = _loop_for(optimizer)
    if loop is not None:
        loop.follow(optimizer)
    return optimizer


def step() -> AbstractContextManager[object]:
    """Bracket a step: ``with step():``, for loops whose steps end elsewhere than at the first update.

    Inside a loop over a wrapped loader it ends the step that the request for the batch has begun; under accumulation
    the last block of the group does.

    Raises:
        InitError: ``init`` was not called.
    """
    loop = _loop_for(None)
    return nullcontext() if loop is None else loop.block()


def _loop_for(thing: object) -> "_Loop | None":
    """Return the loop that ``init`` has made; None where recording is off."""
    claim = registry.current_init()
    if claim is None or claim.owner != _OWNER:
        who = "nobody has called init()" if claim is None else f"{claim.owner}.init() was called"
        raise InitError(
            f"Nothing can be wrapped: {who} in this process; expected chakra_capture.phases.init(). Call it first, "
            "once."
        )
    loop = cast(_Loop, claim.made)
    if isinstance(thing, _Proxy | _Batches) or loop.has(thing):
        raise InitError(
            f"This {type(thing).__name__.lstrip('_').lower()} is wrapped already; expected one that is not, or it "
            "would be timed twice. Wrap it once, where it is made."
        )
    return loop if loop.session.is_open else None


@dataclass(eq=False, slots=True)
class _Reading:
    """One iteration over a wrapped loader; ``size`` batches are one update."""

    loader: object
    size: int


class _Loop:
    """Follows one training loop, in the thread that requests its first batch: when its steps begin and end."""

    def __init__(self, session: Session, first_step: int) -> None:
        self.session = session
        self._first_step = self._step = first_step
        self._thread = 0
        self._said: set[str] = set()
        self._unseen: dict[str, int] = {}  # what is wrapped and was in no step yet, and since which step
        self._timed: set[str] = set()
        self.is_update_compiled = False
        self._optimizers: WeakSet[Any] = WeakSet()
        self._put_back: list[Callable[[], None]] = []
        # Of the step that is open.
        self._is_open = self._is_block = self._has_worked = False
        self._reading: _Reading | None = None
        self._num_batches = 0
        self._inside: list[str] = []
        self._stepped: set[int] = set()

    def close(self) -> None:
        """Close the session, and put back what it has not."""
        self.session.close()
        while self._put_back:
            self._put_back.pop()()

    def has(self, thing: object) -> bool:
        """Say whether this is an optimizer that is wrapped."""
        return any(thing is one for one in self._optimizers)

    def times(self, name: str) -> None:
        """Note that a phase is timed from now on."""
        if name not in self._timed:
            self._timed.add(name)
            self._unseen[name] = self._step
            self.session.measures(name)

    def follow(self, optimizer: Any) -> None:
        """Time the updates of an optimizer."""

        def install() -> Callable[[], None]:
            put_back = _replace_step(self, optimizer)
            self._optimizers.add(optimizer)
            self._timed.add(OPTIMIZER)
            gone = ref(optimizer)

            def remove() -> None:
                if (one := gone()) is not None:
                    self._optimizers.discard(one)
                    put_back()

            return remove

        if self.session.times_phases:
            self.session.time_phase(OPTIMIZER, install)
        else:  # A window alone: its steps end with the updates all the same.
            self._put_back.append(install())

    def follows(self, reading: _Reading) -> bool:
        """Say whether these batches are those of the training."""
        if not self.session.is_open:
            return False
        self._thread = self._thread or get_ident()
        why = None
        if self._thread != get_ident():
            why = "in another thread than before. Wrap what the training loop itself iterates over."
        elif not torch.is_grad_enabled():
            why = "with gradients switched off, as for validation. Wrap the loader of the training alone."
        elif self._is_open and not self._is_block and self._reading and self._reading.loader is not reading.loader:
            why = "inside a step that iterates over another one. Bracket the steps by `with phases.step():`."
        if why is not None:
            self._say(f"A wrapped loader is passed over, its batches are in no step: it is iterated {why}")
        return why is None

    def requests(self, reading: _Reading) -> bool:
        """Take a request for a batch; False where it is none of this training."""
        if not self.follows(reading):
            return False
        if not self._is_block:
            if self._is_open and self._reading is not reading:
                self._cut()
            if self._is_open and self._num_batches >= reading.size:
                self._close()
            if not self._is_open:
                self._open()
            self._reading = reading
        return True

    def received(self) -> None:
        """Count a batch."""
        self._num_batches += 1

    def exhausted(self) -> None:
        """There is no batch any more."""
        if self._is_block or not self._is_open:
            return
        if self._num_batches == 0:
            self._abort()
        elif self._optimizers and not self._stepped:
            self._cut()
        else:
            self._close()

    def left(self, reading: _Reading) -> None:
        """Nobody asks for the rest of these batches."""
        if self._is_open and self._reading is reading and not self._is_block and self._thread == get_ident():
            self._cut()

    def begin(self, name: str) -> bool:
        """Enter a phase; False where it does not count."""
        if not self._is_open:
            if name != FORWARD and self._step > self._first_step:
                self._say(
                    f"A wrapped {name} ran after the update of step {self._step - 1} and before the next batch: it is "
                    "in no step. If it belongs to the training, bracket the steps by `with phases.step():`."
                )
            return False
        if name in self._inside or get_ident() != self._thread:
            return False
        if name == FORWARD and (not torch.is_grad_enabled() or (BACKWARD not in self._inside and _is_in_backward())):
            return False
        self._inside.append(name)
        self._has_worked = True
        self._unseen.pop(name, None)
        self.session.begin_phase(name)
        return True

    def end(self, name: str) -> None:
        """Leave a phase, and the step where that was its update."""
        if name not in self._inside:
            return
        del self._inside[self._inside.index(name) :]
        self.session.end_phase(name)
        if self._stepped and not self._inside and not self._is_block and self._is_updated and not _is_in_backward():
            self._close()

    def stepped(self, optimizer: object) -> None:
        """Note an update."""
        if self._is_open:
            self._stepped.add(id(optimizer))

    def block(self) -> "AbstractContextManager[object]":
        """Bracket a step."""
        if self._is_block:
            self._say(
                f"step() is called inside step {self._step}: the inner one is passed over, its time is in the outer."
            )
            return nullcontext()
        return _Block(self)

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
        elif self._reading is None or self._num_batches >= self._reading.size or (self._stepped and self._is_updated):
            self._close()

    @property
    def _is_updated(self) -> bool:
        return all(id(one) in self._stepped for one in self._optimizers)

    def _open(self) -> None:
        self._is_open, self._has_worked, self._num_batches = True, False, 0
        self._inside.clear()
        self._stepped.clear()
        self.session.start_step(self._step)

    def _close(self) -> None:
        if self.is_update_compiled:
            self.session.measures(OPTIMIZER, "optimizer.step() is inside a compiled function")
        elif self._optimizers and not self._stepped:
            self.session.skip_update()
        self._is_open = False
        self.session.end_step(self._step)
        self._step += 1
        for name in [name for name, since in self._unseen.items() if self._step >= since + 2]:
            del self._unseen[name]
            why = f"what is wrapped was not called in steps {self._step - 2} and {self._step - 1}"
            self.session.measures(name, why)
            self._say(f"The phase {name} is not measured: {why}. Wrap what the loop calls, and call what is returned.")

    def _cut(self) -> None:
        # Somebody has only looked at a batch, if nothing of what is wrapped has run.
        if self._num_batches == 0 or (self._timed and not self._has_worked):
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


def _is_in_backward() -> bool:
    """Whether autograd runs on this thread: an optimizer may step in it, and checkpointing runs forwards again."""
    running: Any = getattr(torch._C, "_current_graph_task_id", None)
    return running is not None and bool(running() != -1)


class _Block:
    """What ``step`` returns."""

    __slots__ = ("_loop",)

    def __init__(self, loop: _Loop) -> None:
        self._loop = loop

    def __enter__(self) -> None:
        self._loop.enter_block()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.exit_block(error)


def _itself(thing: T) -> T:
    return thing


class _Proxy:
    """Stands before something of the user's: what he reads, writes, copies and pickles is his own."""

    def __init__(self, loop: _Loop, thing: Any) -> None:
        object.__setattr__(self, "_loop", loop)
        object.__setattr__(self, "_thing", thing)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._thing, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._thing, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._thing, name)

    def __reduce__(self) -> tuple[Any, ...]:
        return _itself, (self._thing,)


class _Call(_Proxy):
    """A timed function or module."""

    def __init__(self, loop: _Loop, thing: Any, name: str) -> None:
        super().__init__(loop, thing)
        object.__setattr__(self, "_name", name)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        # Known to the compiler as true, so of ours nothing is in what it compiles.
        if torch.compiler.is_compiling() or not self._loop.begin(self._name):
            return self._thing(*arguments, **options)
        try:
            return self._thing(*arguments, **options)
        finally:
            self._loop.end(self._name)


class _Loss(_Proxy):
    """A loss whose ``backward`` is timed."""

    def backward(self, *arguments: Any, **options: Any) -> Any:
        return _Call(self._loop, self._thing.backward, BACKWARD)(*arguments, **options)


class _Loader(_Proxy):
    """A loader whose iterations are followed."""

    def __init__(self, loop: _Loop, thing: Any, size: int) -> None:
        super().__init__(loop, thing)
        object.__setattr__(self, "_size", size)

    def __iter__(self) -> "_Batches":
        return _Batches(self._loop, self._thing, None, self._size)


class _SizedLoader(_Loader):
    def __len__(self) -> int:
        return len(self._thing)


class _Batches:
    """The batches of one iteration over a wrapped loader; gone when nobody asks for them any more."""

    def __init__(self, loop: _Loop, loader: Iterable[Any], source: Iterator[Any] | None, size: int) -> None:
        self._loop, self._reading = loop, _Reading(loader, size)
        if source is not None:
            self._source = source
        elif loop.follows(self._reading):
            # No request yet, so no step; but the workers of a loader start here.
            with loop.session.phase(INPUT_WAIT):
                self._source = iter(loader)
        else:
            self._source = iter(loader)

    def __iter__(self) -> "_Batches":
        return self

    def __next__(self) -> Any:
        loop = self._loop
        if not loop.requests(self._reading):
            return next(self._source)
        try:
            with loop.session.phase(INPUT_WAIT):
                batch = next(self._source)
        except StopIteration:
            loop.exhausted()
            raise
        loop.received()
        return batch

    def __del__(self) -> None:
        self._loop.left(self._reading)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _note_compiled_update() -> None:
    """Runs when the compiler reads it, and is not in what it compiles: from then on updates are not seen."""
    claim = registry.current_init()
    if claim is not None and isinstance(claim.made, _Loop):
        claim.made.is_update_compiled = True


def _replace_step(loop: _Loop, optimizer: Any) -> Callable[[], None]:
    """Time ``optimizer.step``, not by torch's hooks, which run inside its annotation; returns what puts it back.

    A scheduler replaces ``step`` the same way, and asks for ``__func__`` when it does.
    """
    before = vars(optimizer).get("step")
    original = optimizer.step
    function = getattr(original, "__func__", original)
    # The optimizer must not keep itself alive, so of a method we keep the function.
    this, is_method = ref(optimizer), before is None and inspect.ismethod(original)
    call: Any = function if is_method else original

    def timed(self: Any, *arguments: Any, **options: Any) -> Any:
        given = (self, *arguments) if is_method else arguments
        if torch.compiler.is_compiling():
            _note_compiled_update()
            return call(*given, **options)
        is_timed = loop.begin(OPTIMIZER)
        try:
            found = call(*given, **options)
            loop.stepped(self)
            return found
        finally:
            if is_timed:
                loop.end(OPTIMIZER)

    @wraps(function)
    def step(*arguments: Any, **options: Any) -> Any:
        return timed(this(), *arguments, **options)

    placed: Any = step
    placed.__func__, placed.__signature__ = wraps(function)(timed), inspect.signature(original)
    optimizer.step = step

    def put_back() -> None:
        one = this()
        if one is not None and vars(one).get("step") is step:
            if before is None:
                del one.step
            else:
                one.step = before

    return put_back
