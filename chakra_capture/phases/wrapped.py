"""What stands before a loader, a model, a loss or an optimizer of the user's, and tells the loop of its calls."""

import inspect
from collections.abc import Callable, Iterable, Iterator
from functools import wraps
from time import monotonic_ns
from typing import Any, TypeVar
from weakref import ref

import torch

from chakra_capture.annotations import BACKWARD, INPUT_WAIT, OPTIMIZER
from chakra_capture.phases.loop import PlainLoop, Reading
from chakra_capture.recording import registry
from chakra_capture.recording.shapes import END
from chakra_capture.recording.standin import StandIn

T = TypeVar("T")


class Call(StandIn):
    """A timed function or module."""

    def __init__(self, loop: PlainLoop, thing: Any, name: str) -> None:
        # One attribute for all: of a class that passes attributes on each takes Python a long way.
        super().__init__(thing, _chakra_call=(loop, thing, name))

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        loop, thing, name = self._chakra_call
        # Known to the compiler as true, so of ours nothing is in what it compiles.
        if torch.compiler.is_dynamo_compiling() or not loop.begin(name):
            return thing(*arguments, **options)
        try:
            return thing(*arguments, **options)
        finally:
            loop.end(name)


class Loss:
    """A loss whose ``backward`` is timed; made anew in every step."""

    __slots__ = ("_call",)

    def __init__(self, loop: PlainLoop, loss: Any) -> None:
        self._call = loop, loss

    def __getattr__(self, name: str) -> Any:
        return getattr(self._call[1], name)

    def backward(self, *arguments: Any, **options: Any) -> Any:
        """Run ``backward`` of the loss."""
        loop, loss = self._call
        if torch.compiler.is_dynamo_compiling() or not loop.begin(BACKWARD):
            return loss.backward(*arguments, **options)
        try:
            return loss.backward(*arguments, **options)
        finally:
            loop.end(BACKWARD)


class Loader(StandIn):
    """A loader whose iterations are followed."""

    def __init__(self, loop: PlainLoop, thing: Any, size: int) -> None:
        super().__init__(thing, _chakra_loop=loop, _chakra_size=size)

    def __iter__(self) -> "Batches":
        return Batches(self._chakra_loop, self._chakra_thing, None, self._chakra_size)


class SizedLoader(Loader):
    def __len__(self) -> int:
        return len(self._chakra_thing)


class Batches:
    """The batches of one iteration over a wrapped loader; gone when nobody asks for them any more."""

    def __init__(self, loop: PlainLoop, loader: Iterable[Any], source: Iterator[Any] | None, size: int) -> None:
        self._loop, self._reading = loop, Reading(loader, size)
        if source is not None:
            self._source = source
        elif loop.follows(self._reading):
            # No request yet, so no step; but the workers of a loader start here.
            with loop.session.phase(INPUT_WAIT):
                self._source = iter(loader)
        else:
            self._source = iter(loader)

    def __iter__(self) -> "Batches":
        return self

    def __next__(self) -> Any:
        loop = self._loop
        if not loop.requests(self._reading):
            return next(self._source)
        session = loop.session
        try:
            batch = next(self._source)
        except BaseException as error:
            session.end_phase(INPUT_WAIT)
            if isinstance(error, StopIteration):
                loop.exhausted()
            raise
        moves = session.moves
        if moves is not None:
            moves += END, INPUT_WAIT, monotonic_ns()
        else:
            session.end_phase(INPUT_WAIT)
        loop.num_batches += 1
        if session.wants_batch:
            session.received(batch)
        return batch

    def __del__(self) -> None:
        self._loop.left(self._reading)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _note_compiled_update() -> None:
    """Runs when the compiler reads it, and is not in what it compiles: from then on updates are not seen."""
    claim = registry.current_init()
    if claim is not None and isinstance(claim.made, PlainLoop):
        claim.made.is_update_compiled = True


def replace_step(loop: PlainLoop, optimizer: Any) -> Callable[[], None]:
    """Time ``optimizer.step``, not by torch's hooks, which run inside its annotation; returns what puts it back.

    A scheduler replaces ``step`` the same way, and asks for ``__func__`` when it does.
    """
    before = vars(optimizer).get("step")
    original = optimizer.step
    function = getattr(original, "__func__", original)
    # The optimizer must not keep itself alive, so of a method we keep the function.
    this, is_method = ref(optimizer), before is None and inspect.ismethod(original)
    call: Any = function if is_method else original

    @wraps(function)
    def step(*arguments: Any, **options: Any) -> Any:
        one = this()
        given = (one, *arguments) if is_method else arguments
        if torch.compiler.is_dynamo_compiling():
            _note_compiled_update()
            return call(*given, **options)
        is_timed = loop.begin(OPTIMIZER)
        try:
            found = call(*given, **options)
            loop.stepped.add(id(one))
            return found
        finally:
            if is_timed:
                loop.end(OPTIMIZER)

    @wraps(function)
    def timed(self: Any, *arguments: Any, **options: Any) -> Any:
        if self is this():
            return step(*arguments, **options)
        return call(self, *arguments, **options) if is_method else call(*arguments, **options)

    placed: Any = step
    placed.__func__, placed.__signature__ = timed, inspect.signature(original)
    optimizer.step = step

    def put_back() -> None:
        one = this()
        if one is not None and vars(one).get("step") is step:
            if before is None:
                del one.step
            else:
                one.step = before

    return put_back
