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

from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar, cast

import torch

from chakra_capture.annotations import BACKWARD, FORWARD, INPUT_WAIT
from chakra_capture.config import phases_only, settings_from
from chakra_capture.errors import InitError, SettingsError
from chakra_capture.phases.loop import PlainLoop
from chakra_capture.phases.wrapped import Batches, Call, Loader, Loss, SizedLoader, replace_step
from chakra_capture.recording import registry
from chakra_capture.recording.session import Session
from chakra_capture.recording.standin import StandIn

_OWNER = "phases"
_WRAPPED = (StandIn, Loss, Batches)
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
        claim.made = PlainLoop(session, first_step)
    return cast(PlainLoop, claim.made).session


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
        return cast(T, Batches(loop, source, source, accumulation_steps))
    kind = SizedLoader if hasattr(loader, "__len__") else Loader
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
    return cast(T, Call(loop, module, FORWARD))


def wrap_backward(loss: T) -> T:
    """Time ``backward``: of a loss, or of what the loop calls instead (``fabric.backward``).

    Returns:
        For a loss, an object whose ``backward(...)`` is timed; for a function, one to call instead.

    Raises:
        InitError: ``init`` was not called, or it is wrapped already.
        TypeError: it is neither.
    """
    claim = registry.current_init()
    if type(loss) is torch.Tensor and claim is not None and claim.owner == _OWNER:
        # In every step, and no more than this has to be known of a tensor.
        ready: PlainLoop = claim.made
        if BACKWARD in ready.timed and ready.session.is_open:
            return Loss(ready, loss)  # type: ignore[return-value]
    is_loss = isinstance(loss, torch.Tensor) or callable(getattr(loss, "backward", None))
    if not is_loss and (isinstance(loss, torch.nn.Module) or not callable(loss)):
        raise TypeError(
            f"wrap_backward got a {type(loss).__name__}, which has no backward(); expected a loss or a function that "
            "runs backward. Call wrap_backward(loss).backward(), or wrap_backward(fabric.backward)."
        )
    loop = _loop_for(loss)
    if loop is None:
        return loss
    loop.times(BACKWARD)
    return cast(T, Loss(loop, loss) if is_loss else Call(loop, loss, BACKWARD))


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
        loop.follow(optimizer, replace_step)
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


def _loop_for(thing: object) -> "PlainLoop | None":
    """Return the loop that ``init`` has made; None where recording is off."""
    claim = registry.current_init()
    if claim is None or claim.owner != _OWNER:
        who = "nobody has called init()" if claim is None else f"{claim.owner}.init() was called"
        raise InitError(
            f"Nothing can be wrapped: {who} in this process; expected chakra_capture.phases.init(). Call it first, "
            "once."
        )
    loop: PlainLoop = claim.made
    if isinstance(thing, _WRAPPED) or id(thing) in loop.optimizers:
        raise InitError(
            f"This {type(thing).__name__.lstrip('_').lower()} is wrapped already; expected one that is not, or it "
            "would be timed twice. Wrap it once, where it is made."
        )
    return loop if loop.session.is_open else None
