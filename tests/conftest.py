"""The leak guard: after every test the process is as it was before."""

import gc
import inspect
import os
import signal
import sys
import threading
from collections.abc import Iterator

import pytest
from hypothesis import settings

from chakra_capture.recording import registry

# Nothing is timed against an absolute clock: the machine is shared.
settings.register_profile("shared", deadline=None)
settings.load_profile("shared")

# Written by pytest itself, or once per process by torch, Lightning and polars on first use.
_NOT_OURS = {"PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR", "PL_GLOBAL_SEED", "PL_SEED_WORKERS", "_RJEM_MALLOC_CONF"}
_FOREIGN_THREADS = ("execnet", "pytest", "tqdm", "Dummy")


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in _NOT_OURS}


def _check_torch_is_free() -> None:
    autograd = sys.modules.get("torch.autograd.profiler")
    if autograd is None:
        return
    assert not autograd._is_profiler_enabled, "a torch profiler is still running"
    watched = (autograd._prepare_profiler, autograd._enable_profiler)
    watched += (sys.modules["torch.profiler.profiler"]._add_execution_trace_observer,)
    assert all(inspect.isbuiltin(function) for function in watched), "torch is still patched"
    observer = sys.modules["torch.profiler"].ExecutionTraceObserver
    busy = [o for o in gc.get_objects() if type(o) is observer and (o.is_registered or o.is_running())]
    assert not busy, "an ExecutionTraceObserver is still registered"


def _check_loops_are_unpatched() -> None:
    steps = sys.modules.get("chakra_capture.integrations.lightning.steps")
    if steps is None:
        return
    followers = [o for o in gc.get_objects() if type(o) is steps.StepFollower]
    assert not [f for f in followers if f.is_attached], "a training loop is still patched"
    assert not sys.modules["torch.optim.optimizer"]._global_optimizer_post_hooks, "an optimizer hook is left"


def _signal_handling() -> tuple[object, int, set[signal.Signals]]:
    descriptor = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(descriptor)
    blocked = {signal.Signals(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, [])}
    return {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)}, descriptor, blocked


@pytest.fixture(autouse=True)
def leak_guard() -> Iterator[None]:
    """Fail a test that leaves a profiler, observer, session, exit or signal handler, patch, thread or variable."""
    environment, threads, signals = _environment(), set(threading.enumerate()), _signal_handling()
    yield
    # The exit handler is registered exactly while a session is open.
    assert registry.is_idle(), "a recording session or recorder is still open"
    assert registry.init_owner() is None, "the process is still initialised"
    registry.forget_runs()
    assert _signal_handling() == signals, "a signal handler, wakeup descriptor or signal mask is left"
    _check_torch_is_free()
    _check_loops_are_unpatched()
    left = [t.name for t in set(threading.enumerate()) - threads if not t.name.startswith(_FOREIGN_THREADS)]
    assert not left, f"threads left behind: {left}"
    assert _environment() == environment, "an environment variable was changed"
