"""Times the calls of a module and the steps of optimizers, where torch.compile, copies and pickles do not meet us."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from threading import get_ident
from time import monotonic_ns
from types import FunctionType, MethodType
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling
from torch.utils.hooks import RemovableHandle

from chakra_capture.annotations import FORWARD, OPTIMIZER
from chakra_capture.errors import RecordingError
from chakra_capture.recording.journal import MOST_MOVES
from chakra_capture.recording.patches import Patch
from chakra_capture.recording.session import Session
from chakra_capture.recording.shapes import BEGIN, END

Undo = Callable[[], None]
_CALL, _INNER = "_compiled_call_impl", "_orig_mod"
_METHODS = (MethodType, staticmethod, classmethod)


def time_calls(session: Session, name: str, owner: object, method: str) -> Undo:
    """Time the calls of a method of one object as a phase; returns what ends it."""

    def timed(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        session.begin_phase(name)
        try:
            return original(*args, **kwargs)
        finally:
            session.end_phase(name)

    return Patch(owner, method, timed).undo


class ModuleCalls:
    """Times the calls of a module, or of its children, that a training step makes: each outermost call once.

    A child is a module that the module holds itself or in a list or dict of modules; what only deeper modules compute
    is not seen. A module's calls are timed while a training step runs and no longer, in the place where torch puts the
    compiled call of a module: what is being compiled never looks there, and copies and pickles leave it out.

    Args:
        session: what is told.
        module: the module that trains.
        around: what a training step calls it through (DDP, a compiled module), if anything.
    """

    def __init__(self, session: Session, module: torch.nn.Module, *, around: Sequence[torch.nn.Module] = ()) -> None:
        self.session = session
        self._module, self._around = module, around
        self._calls: list[tuple[dict[str, Any], Any, _TimedCall]] = []  # attributes, what they held, what they get
        self._thread = 0
        self.is_inside = self._is_wrapped_call = self._is_found = False
        self.has_run = False

    @property
    def is_timed(self) -> bool:
        """Whether calls are timed in training steps."""
        return bool(self._calls)

    def enter(self, *, is_wrapped: bool = False) -> None:
        """The training step begins.

        Args:
            is_wrapped: the step itself runs inside a call of the module, made by what stands around it (DDP).
        """
        if not self._is_found:
            # Not before the first step: until then a job may compile its modules.
            self._is_found = True
            self.session.time_phase(FORWARD, self._find)
        self._thread, self.is_inside, self._is_wrapped_call = get_ident(), False, is_wrapped
        for attributes, _, timed in self._calls:
            attributes[_CALL] = timed

    def leave(self) -> None:
        """The training step is over."""
        self._thread = 0
        for attributes, before, timed in self._calls:
            if attributes.get(_CALL) is timed:  # else somebody has compiled the module in the step
                # Not deleted, until it is for good: a dict that something is put in and taken from grows each time.
                attributes[_CALL] = before

    def begin(self) -> bool:
        """A module is called, and not inside a forward; says whether that is one of the step: then it is inside."""
        # Activation checkpointing calls modules again in a thread of autograd.
        if get_ident() != self._thread:
            return False
        if self._is_wrapped_call:
            self._is_wrapped_call = False
            return False
        self.is_inside = True
        if not self.has_run:
            self.has_run = True
            self.session.measures(FORWARD)
        moves = self.session.moves
        if moves is not None and len(moves) < MOST_MOVES:
            moves += BEGIN, FORWARD, monotonic_ns()
        else:
            self.session.begin_phase(FORWARD)
        return True

    def _find(self) -> Undo:
        own = [vars(self._module), *(vars(cls) for cls in type(self._module).__mro__)]
        compiled = [name for each in own for name, found in each.items() if name != _CALL and _is_compiled(found)]
        if compiled:
            # Where a step calls it, what the module's children compute in it would be missing from the rest.
            raise RecordingError(f"{type(self._module).__name__}.{compiled[0]} is compiled, and not seen from outside")
        modules = [*self._around, *_with_children(self._module)]
        # A compiled module calls what it was made from, and compiles that call: it is left alone.
        inside = {id(inner) for each in modules if _INNER in each._modules for inner in each._modules[_INNER].modules()}
        kept = [each for each in modules if id(each) not in inside]
        if len(kept) < len(modules) and not self._around:
            raise RecordingError("a child is compiled under another name, so its calls are not all seen")
        for module in kept:
            before = vars(module).get(_CALL)
            self._calls.append((vars(module), before, _TimedCall(self, before or module._call_impl)))

        def undo() -> None:
            self.leave()
            for attributes, before, _ in self._calls:
                if before is None and attributes.get(_CALL, self) is None:
                    del attributes[_CALL]
            self._calls = []

        return undo


class _TimedCall:
    """Calls a module."""

    __slots__ = ("_call", "_calls")

    def __init__(self, calls: ModuleCalls, call: Callable[..., Any]) -> None:
        self._calls, self._call = calls, call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        calls = self._calls
        # Somebody may have compiled the module where we do not see it; then this is compiled as if we were not here.
        if is_dynamo_compiling() or calls.is_inside or not calls.begin():
            return self._call(*args, **kwargs)
        try:
            return self._call(*args, **kwargs)
        finally:
            calls.is_inside = False
            moves = calls.session.moves
            if moves is not None:
                moves += END, FORWARD, monotonic_ns()
            else:
                calls.session.end_phase(FORWARD)


class OptimizerHooks:
    """Times the steps that the loop's optimizers take while ``is_inside``, without what a closure does."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._handles: dict[int, RemovableHandle] = {}  # of the hook before the step, by id of the optimizer
        self._undo = ExitStack()
        self._latest: Any = None
        self._is_sure = self._is_timing = self._is_refused = False
        self.is_inside = False  # the loop steps: from ``enter`` until who has called that sets it back
        self._depth = 0
        self.num_steps = 0
        self.has_run = False

    def install(self) -> Undo:
        """Begin; an optimizer is hooked up when it first steps, for the loop may replace it."""
        return self._unhook

    def enter(self, optimizer: Any) -> bool:
        """The loop is about to step; says whether it is sure to be noticed if the optimizer then does."""
        self.is_inside, self._is_timing, self._depth = True, False, 0
        if optimizer is not self._latest:
            self._meet(optimizer)
        return self._is_sure

    def _meet(self, optimizer: Any) -> None:
        if not self.has_run:
            self.has_run = True
            self._session.measures(OPTIMIZER)
        if not self._is_refused and not self._is_hooked(optimizer):
            self._session.time_phase(OPTIMIZER, partial(self._hook, optimizer))
            # What one of several optimizers takes alone is not the optimizers' time.
            self._is_refused = not self._is_hooked(optimizer)
            if self._is_refused:
                self._unhook()
        own = vars(optimizer).get("step") if not self._is_refused else None
        # A scheduler of torch puts a step of its own on the optimizer, which calls that of the class.
        self._is_sure = not self._is_refused and (own is None or hasattr(own, "_wrapped_by_lr_sched"))
        self._latest = optimizer

    def _is_hooked(self, optimizer: Any) -> bool:
        handle = self._handles.get(id(optimizer))
        return handle is not None and handle.id in getattr(optimizer, "_optimizer_step_pre_hooks", ())

    def _hook(self, optimizer: Any) -> Undo:
        name = type(optimizer).__name__
        if not hasattr(optimizer, "register_step_post_hook"):
            raise RecordingError(f"the optimizer {name} has no hooks for its step")
        if _is_compiled(vars(optimizer).get("step")):
            raise RecordingError(f"the step of {name} is compiled, and hooks would have it compiled again")
        before = optimizer.register_step_pre_hook(self._begin)
        self._undo.callback(before.remove)
        self._undo.callback(optimizer.register_step_post_hook(self._end).remove)
        self._handles[id(optimizer)] = before
        return self._unhook

    def _unhook(self) -> None:
        self._undo.close()
        self._handles.clear()
        self._latest = None

    def _begin(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self.is_inside:
            return None
        self._depth += 1
        if self._depth > 1:  # a step that calls that of its base class
            return None
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            self._is_timing = True
            self._session.begin_phase(OPTIMIZER)
            return None
        timed = partial(self._run, closure)
        return ((*args[:1], timed, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": timed})

    def _run(self, closure: Callable[[], Any]) -> Any:
        if self._is_timing:
            self._is_timing = False
            self._session.end_phase(OPTIMIZER)
        try:
            return closure()
        finally:
            self._is_timing = True
            self._session.begin_phase(OPTIMIZER)

    def _end(self, *_: Any) -> None:
        if self.is_inside:
            self._depth -= 1
            if not self._depth:
                self.num_steps += 1
                if self._is_timing:
                    self._is_timing = False
                    self._session.end_phase(OPTIMIZER)


def _with_children(module: torch.nn.Module) -> Iterator[Any]:
    yield module
    for child in module.children():
        if isinstance(child, torch.nn.ModuleList | torch.nn.ModuleDict):
            yield from child.children()
        else:
            yield child


def _is_compiled(found: object) -> bool:
    function = getattr(found, "__func__", found) if isinstance(found, _METHODS) else found
    return (
        isinstance(function, FunctionType)
        and hasattr(function, "_torchdynamo_orig_callable")
        and not hasattr(function, "_torchdynamo_disable")
    )
