"""Reports to a ``LoopWatch`` what a script does with torch: batches, backwards, updates and calls of its modules.

Put in once, as torch is imported, and left in: a script may train at any time. Where ``torch.compile`` reads our code,
it finds that it is compiling and goes on as without us.
"""

import gc
import sys
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import partial, wraps
from types import CodeType, ModuleType
from typing import TYPE_CHECKING, Any

from chakra_capture.annotations import FORWARD, RECORDING
from chakra_capture.recording.patches import Patch, Replacement
from chakra_capture.runner.loop_watch import LoopWatch

if TYPE_CHECKING:
    from chakra_capture.integrations.hooks import ModuleCalls

_WRAPPED = ("module", "_orig_mod", "_fsdp_wrapped_module", "_forward_module")


class TorchCalls:
    """What of torch is replaced, and by what."""

    def __init__(self, watch: LoopWatch) -> None:
        self._watch = watch
        self._modules: list[ModuleCalls] = []
        self._known: set[int] = set()  # parameters of optimizers whose modules were looked for
        self._passes: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._sources: dict[int, int] = {}  # numbers of data sets by id, for as long as they live
        self._num_passes = self._num_sources = 0
        watch.on_begin, watch.on_end = self._enter_modules, self._leave_modules

    def torch_imported(self, torch: ModuleType) -> None:
        """Have backwards and updates told."""
        _leave_uncompiled()
        from torch.optim.optimizer import (
            Optimizer,
            register_optimizer_step_post_hook,
            register_optimizer_step_pre_hook,
        )

        # What torch puts around the step of every class of optimizers, the hooks within, is the same code for all.
        step: Any = Optimizer.profile_hook_step(_nothing)
        self._watch.updates_now = partial(_num_running, step.__code__)
        Patch(torch.autograd, "backward", self._backward)
        register_optimizer_step_pre_hook(self._begin_update)
        register_optimizer_step_post_hook(self._end_update)

    def loader_imported(self, dataloader: ModuleType) -> None:
        """Have batches told."""
        cls = dataloader._BaseDataLoaderIter
        original = cls.__next__
        calls = self

        @wraps(original)
        def fetch(iterator: Any) -> Any:
            return calls._fetch(original, iterator)

        _leave_uncompiled(fetch)
        cls.__next__ = fetch

    def scaler_imported(self, scaler: ModuleType) -> None:
        """Have it told when a scaler skips an update."""
        cls = scaler.GradScaler
        original = cls.step
        watch = self._watch

        @wraps(original)
        def step(self: Any, *arguments: Any, **options: Any) -> Any:
            before = watch.num_updates
            found = original(self, *arguments, **options)
            if watch.num_updates == before:
                watch.skip_update()
            return found

        _leave_uncompiled(step)
        cls.step = step

    def _fetch(self, original: Callable[[Any], Any], iterator: Any) -> Any:
        import torch

        watch, is_training = self._watch, torch.is_grad_enabled()
        is_wait = watch.request(self._source_of(iterator._dataset), self._pass_of(iterator), with_gradients=is_training)
        is_end = False
        try:
            batch = original(iterator)
            if is_wait and watch.session is not None:
                watch.session.received(batch)
            return batch
        except StopIteration:
            is_end = True
            raise
        finally:
            if is_wait:
                watch.received(is_end=is_end)
            elif is_end:
                watch.exhausted()

    def _source_of(self, dataset: Any) -> int:
        number = self._sources.get(id(dataset))
        if number is None:
            self._num_sources += 1
            self._sources[id(dataset)] = number = self._num_sources
            with suppress(TypeError):  # a list, say, has no weak references
                weakref.finalize(dataset, self._sources.pop, id(dataset)).atexit = False
        return number

    def _pass_of(self, iterator: Any) -> int:
        number = self._passes.get(iterator)
        if number is None:
            self._num_passes += 1
            self._passes[iterator] = number = self._num_passes
            weakref.finalize(iterator, self._watch.left, number).atexit = False
        return number

    def _backward(self, original: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        import torch

        if torch.compiler.is_compiling() or not self._watch.begin_backward():
            return original(*arguments, **options)
        try:
            return original(*arguments, **options)
        finally:
            self._watch.end_backward()

    def _begin_update(self, optimizer: Any, *_: Any) -> None:
        import torch

        if not torch.compiler.is_compiling():
            self._watch.begin_update()

    def _end_update(self, optimizer: Any, *_: Any) -> None:
        import torch

        if not torch.compiler.is_compiling():
            self._watch.end_update()
            self._meet(optimizer)

    def _meet(self, optimizer: Any) -> None:
        """Time the calls of what an optimizer updates, once it is known which modules that are."""
        parameters = {id(one) for group in optimizer.param_groups for one in group["params"]}
        session = self._watch.session
        if session is None or not session.times_phases or parameters <= self._known:
            return
        self._known |= parameters
        from chakra_capture.integrations.hooks import ModuleCalls

        session.begin_phase(RECORDING)  # it is we who take this time
        found = [ModuleCalls(session, module, around=around) for module, around in _roots_with(parameters)]
        session.end_phase(RECORDING)
        self._modules += found
        if not self._modules:
            session.measures(FORWARD, "no module holds what the optimizer updates")

    def _enter_modules(self) -> None:
        for calls in self._modules:
            calls.enter()

    def _leave_modules(self) -> None:
        for calls in self._modules:
            calls.leave()


def _leave_uncompiled(*functions: Any) -> None:
    """Have torch.compile pass over our code: between two graphs it would compile what is called there, ours too."""
    try:
        from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
    except ImportError:  # another version: then it may
        return
    alone = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.DEFAULT)  # what it calls is the script's
    whole = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)
    around = (Replacement.__call__, TorchCalls._backward, TorchCalls._fetch, *functions)
    hooks = (TorchCalls._begin_update, TorchCalls._end_update, TorchCalls._pass_of, TorchCalls._source_of)
    of_watch = (one for name, one in vars(LoopWatch).items() if callable(one) and not name.startswith("_"))
    for strategy, marked in ((alone, around), (whole, (*hooks, *of_watch))):
        for function in marked:
            set_code_exec_strategy(function.__code__, strategy)


def _num_running(code: CodeType) -> int:
    """How many calls of a function this thread is in."""
    frame, number = sys._getframe(), 0
    while (frame := frame.f_back) is not None:  # type: ignore[assignment]
        number += frame.f_code is code
    return number


def _nothing() -> None:
    """No step."""


def _roots_with(parameters: set[int]) -> list[tuple[Any, list[Any]]]:
    """The modules of this process that hold one of these parameters and are in no other module.

    Returns:
        Each with what stands around it (DDP, a compiled module), outermost first.
    """
    from torch.nn import Module

    # Nothing else knows them; the scan takes some 0.1 s, once for each optimizer. Not isinstance: a proxy may lie.
    modules = [one for one in gc.get_objects() if issubclass(type(one), Module)]
    inner = {id(child) for module in modules for child in module._modules.values()}
    found = []
    for module in modules:
        if id(module) in inner or not any(id(one) in parameters for one in module.parameters()):
            continue
        around = []
        while (under := next((module._modules[n] for n in _WRAPPED if n in module._modules), None)) is not None:
            around.append(module)
            module = under
        found.append((module, around))
    return found
