"""The leak guard: after every test the process is as it was before."""

import functools
import gc
import inspect
import os
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import warm
from hypothesis import settings

from chakra_capture.recording import registry

# Nothing is timed against an absolute clock: the machine is shared.
settings.register_profile("shared", deadline=None)
settings.load_profile("shared")

# A process at the end of every training would double the time of the tests; those of it put it on.
os.environ["CHAKRA_CAPTURE_NO_SUMMARY"] = "1"

# Written by pytest itself, or once per process by torch, Lightning and polars on first use; threads also by Dask.
_NOT_OURS = {"PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR", "PL_GLOBAL_SEED", "PL_SEED_WORKERS", "_RJEM_MALLOC_CONF"}
_FOREIGN_THREADS = ("Dask-", "IO loop", "execnet", "pytest", "tqdm", "Dummy")


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in _NOT_OURS}


# Where the classes live whose objects must not be left in use; a module that nobody has imported has none.
_WATCHED = {
    "ExecutionTraceObserver": "torch.profiler",
    "Patch": "chakra_capture.recording.patches",
    "_TimedCall": "chakra_capture.integrations.hooks",
    "OptimizerHooks": "chakra_capture.integrations.hooks",
    "StepFollower": "chakra_capture.integrations.lightning.steps",
}


# Files that take minutes, most of it in processes of their own. They begin first, or at the end one core would wait.
_LONG = (
    "test_chaos", "integrations/", "test_demo", "runner/", "test_dataloading_study", "test_interrupts", "phases/",
    "recording/", "test_gpu_check", "test_submitit",
    "test_packaging", "test_hydra", "test_config", "test_examples", "merge/many", "test_merge_ranks",
)  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Order files by how long they take; those of one worker stay together."""

    def place(item: pytest.Item) -> int:
        return next((at for at, part in enumerate(_LONG) if part in item.nodeid), len(_LONG))

    items.sort(key=place)


class _Watch:
    """Knows whether an object of a watched class was made: only then are all objects gone through, which is slow."""

    def __init__(self) -> None:
        self.classes: dict[type, str] = {}
        self.is_due = False

    def meet_classes(self) -> None:
        """Have classes that were imported since the last call tell when an object is made."""
        for name, module in _WATCHED.items():
            cls = getattr(sys.modules.get(module), name, None)
            if cls is not None and cls not in self.classes:
                self.classes[cls] = name
                self.is_due = True  # some may be there already
                cls.__init__ = self._telling(cls.__init__)

    def _telling(self, init: Any) -> Any:
        @functools.wraps(init)
        def tell(*args: Any, **kwargs: Any) -> None:
            self.is_due = True
            init(*args, **kwargs)

        return tell

    def alive(self) -> dict[str, list[Any]]:
        """The objects of the watched classes, if there may be new ones."""
        found: dict[str, list[Any]] = {name: [] for name in _WATCHED}
        self.meet_classes()
        for one in gc.get_objects() if self.is_due else []:
            if (name := self.classes.get(type(one))) is not None:
                found[name].append(one)
        self.is_due = False
        return found


_watch = _Watch()


def _check_torch_is_free(observers: list[Any]) -> None:
    autograd = sys.modules.get("torch.autograd.profiler")
    if autograd is None:
        return
    assert not autograd._is_profiler_enabled, "a torch profiler is still running"
    watched = (autograd._prepare_profiler, autograd._enable_profiler)
    watched += (sys.modules["torch.profiler.profiler"]._add_execution_trace_observer,)
    assert all(inspect.isbuiltin(function) for function in watched), "torch is still patched"
    busy = [o for o in observers if o.is_registered or o.is_running()]
    assert not busy, "an ExecutionTraceObserver is still registered"


def _check_loops_are_unpatched(alive: dict[str, list[Any]]) -> None:
    left = [patch for patch in alive["Patch"] if not patch.is_undone]
    assert not left, f"still replaced: {[(type(patch._owner).__name__, patch._name) for patch in left]}"
    timed = [o for o in alive["_TimedCall"] if any(type(r) is dict for r in gc.get_referrers(o))]
    assert not timed, "the calls of a module are still timed"
    assert not [o for o in alive["OptimizerHooks"] if o._handles], "an optimizer is still hooked"
    assert not [f for f in alive["StepFollower"] if f.is_attached], "a training loop is still patched"
    optimizer = sys.modules.get("torch.optim.optimizer")
    assert optimizer is None or not optimizer._global_optimizer_post_hooks, "an optimizer hook is left"


def _signal_handling() -> tuple[object, int, set[signal.Signals]]:
    descriptor = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(descriptor)
    blocked = {signal.Signals(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, [])}
    return {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)}, descriptor, blocked


@pytest.fixture(scope="session", autouse=True)
def warm_interpreters() -> Iterator[None]:
    """End the interpreters that tests have had started."""
    yield
    warm.close_all()


@pytest.fixture(autouse=True)
def leak_guard() -> Iterator[None]:
    """Fail a test that leaves a profiler, observer, session, exit or signal handler, patch, thread or variable."""
    _watch.meet_classes()
    environment, threads, signals = _environment(), set(threading.enumerate()), _signal_handling()
    yield
    # The exit handler is registered exactly while a session is open.
    assert registry.is_idle(), "a recording session or recorder is still open"
    assert registry.init_owner() is None, "the process is still initialised"
    registry.forget_runs()
    assert _signal_handling() == signals, "a signal handler, wakeup descriptor or signal mask is left"
    alive = _watch.alive()
    _check_torch_is_free(alive["ExecutionTraceObserver"])
    _check_loops_are_unpatched(alive)
    left = [t.name for t in set(threading.enumerate()) - threads if not t.name.startswith(_FOREIGN_THREADS)]
    assert not left, f"threads left behind: {left}"
    assert _environment() == environment, "an environment variable was changed"
