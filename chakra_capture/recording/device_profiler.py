"""The process's torch profiler, handled so that neither ours nor anybody else's session ends the process.

Kineto keeps one session per process behind every Python object (torch 2.13). Preparing a second one cancels the first,
and then stopping or exporting the first is a segmentation fault; so is starting one that was cancelled while it warmed
up. No flag of torch shows a profiler that is only warming up, so the two functions that every Python profiler goes
through are watched while ours is prepared or running.
"""

import gc
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from chakra_capture.errors import RecordingError
from chakra_capture.recording.patches import Patch

if TYPE_CHECKING:
    from torch.profiler import profile

_ON_DEMAND = "KINETO_USE_DAEMON"
_ENVIRONMENT_OBSERVER = "ENABLE_PYTORCH_EXECUTION_TRACE"
_FROM_ANOTHER_THREAD = (
    "the session was closed from another thread than the one that opened it, where torch cannot save its trace. Close "
    "it where the training loop runs."
)
_TAKEN = (
    "another torch profiler was started or stopped inside the window and ended ours. Turn the other one off, or move "
    "the window to steps where it does not run."
)
_IN_CAPTURE = (
    "a CUDA graph is being captured where the recording would begin, and the device is synchronized as the profiler "
    "starts, which ends a capture in an error. Move the window to steps that no longer capture."
)
_NEVER_STARTED = "it was interrupted while it started."


def refuse_other_profilers() -> None:
    """Check that nobody in this process profiles or observes already.

    Raises:
        RecordingError: somebody does; a second session would crash one of the two.
    """
    for reason in other_profilers(os.environ):
        raise RecordingError(reason)


def other_profilers(environ: Mapping[str, str]) -> Iterator[str]:
    """Say who in this process profiles or observes already, or may do so at any moment."""
    import torch.autograd.profiler as autograd

    yield from profilers_asked_for(environ)
    # The C++ query is per thread and misses sessions of all threads; this flag is the process's.
    if autograd._is_profiler_enabled or _is_one_warming_up():
        yield (
            "another torch profiler is running in this process; nested profilers crash it. Turn the other one off "
            "(for example Trainer(profiler=...)) or move the window to steps where it does not run."
        )


def profilers_asked_for(environ: Mapping[str, str]) -> Iterator[str]:
    """Say which variables ask torch for a profiler or an observer beside ours."""
    if environ.get(_ENVIRONMENT_OBSERVER, "0") == "1":
        yield (
            f"{_ENVIRONMENT_OBSERVER} is set to 1, so torch registers an observer of its own with every profiler; a "
            "process has room for one. Unset the variable to record with chakra-capture."
        )
    if environ.get(_ON_DEMAND, "").strip() not in ("", "0"):
        yield (
            f"{_ON_DEMAND} is set, so a daemon may start Kineto in this process at any moment, and a process has room "
            "for one session. Unset the variable to record with chakra-capture."
        )


def _refuse_while_capturing() -> None:
    import torch

    is_in_use = torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    if is_in_use and torch.cuda.is_current_stream_capturing():
        raise RecordingError(_IN_CAPTURE)


def _is_one_warming_up() -> bool:
    import torch.autograd.profiler as autograd

    def is_found() -> bool:
        # Nothing but the object itself tells; the scan costs some 0.1 s, once per cycle.
        sessions = [item for item in gc.get_objects() if type(item) is autograd.profile]
        return any(session.entered and session.kineto_results is None for session in sessions)

    if not is_found():
        return False
    gc.collect()  # It may be one that was dropped.
    return is_found()


class _Watch:
    """Counts what other profilers do while it is attached."""

    def __init__(self) -> None:
        self.num_prepared = 0
        self.num_started = 0
        self._is_own = False
        self._patches: list[Patch] = []

    def attach(self) -> None:
        import torch.autograd.profiler as autograd

        self._patches = [
            Patch(autograd, "_prepare_profiler", self._prepare),
            Patch(autograd, "_enable_profiler", self._enable),
        ]

    def detach(self) -> None:
        for patch in self._patches:
            patch.undo()
        self._patches = []

    @contextmanager
    def ignoring_ours(self) -> Iterator[None]:
        self._is_own = True
        try:
            yield
        finally:
            self._is_own = False

    def _prepare(self, original: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        self.num_prepared += not self._is_own
        return original(*arguments, **options)

    def _enable(self, original: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        self.num_started += not self._is_own
        return original(*arguments, **options)


class DeviceProfiler:
    """One session of torch's profiler: ``prepare``, ``start``, ``stop``, then ``export`` unless the trace is lost."""

    def __init__(self, make: Callable[[], "profile"]) -> None:
        self._make = make
        self._profiler: profile | None = None
        self._thread = threading.get_ident()
        self._watch = _Watch()
        self._is_started = False

    def prepare(self) -> None:
        """Warm up.

        Raises:
            RecordingError: somebody else profiles or observes, or a CUDA graph is being captured.
        """
        _refuse_while_capturing()
        refuse_other_profilers()
        self._watch.attach()
        self._warm_up()

    def start(self) -> None:
        """Begin to record, together with the observer.

        Raises:
            RecordingError: somebody else's profiler has come in between, or a CUDA graph is being captured.
        """
        import torch

        _refuse_while_capturing()
        if self._watch.num_prepared or self._watch.num_started:
            # It has cancelled ours; if it is over, ours can warm up once more.
            self._forget()
            refuse_other_profilers()
            self._watch.num_prepared = self._watch.num_started = 0
            self._warm_up()
        if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()
        assert self._profiler is not None
        with self._watch.ignoring_ours():
            self._profiler.start_trace()
        self._is_started = True

    def stop(self) -> str | None:
        """Stop, unless the session is somebody else's by now; say why the trace is lost, if it is."""
        import torch.autograd.profiler as autograd

        profiler = self._profiler
        if profiler is None or self._watch.num_started:
            # Theirs has replaced ours whole: nothing of ours runs, and theirs must not be touched.
            self._let_go()
            return _TAKEN
        session: Any = profiler.profiler
        is_running = autograd._is_profiler_enabled or session.kineto_results is not None
        is_whole = self._is_started and is_running and not self._watch.num_prepared
        try:
            if session.kineto_results is None:
                profiler.stop_trace()
        finally:
            # An interrupt in torch's own code must leave nothing running; stopping twice is harmless.
            if session.kineto_results is None:
                profiler.stop_trace()
            autograd._run_on_profiler_stop()  # type: ignore[no-untyped-call]
            self._watch.detach()
        if threading.get_ident() != self._thread:
            self._let_go()
            return _FROM_ANOTHER_THREAD
        if not is_whole:
            was_started = self._is_started
            self._let_go()
            return _TAKEN if was_started else _NEVER_STARTED
        return None

    def export(self, path: Path) -> None:
        """Write the trace; torch reports no failure, so look at the file."""
        if self._profiler is not None:
            try:
                self._profiler.export_chrome_trace(str(path))
            finally:
                self._forget()

    def drop(self) -> None:
        """Give up a profiler that was not started."""
        self._let_go()

    def forget_in_child(self) -> None:
        """Take the callbacks out of a forked child: it would collect events for the rest of its life."""
        import torch

        torch._C._autograd._clear_callbacks()  # type: ignore[attr-defined]
        self._let_go()

    def _warm_up(self) -> None:
        self._profiler = self._make()
        with self._watch.ignoring_ours():
            self._profiler.prepare_trace()

    def _let_go(self) -> None:
        self._watch.detach()
        self._forget()
        self._is_started = False

    def _forget(self) -> None:
        profiler, self._profiler = self._profiler, None
        session: Any = profiler.profiler if profiler is not None else None
        if session is not None:
            session.entered = False  # The next search for profilers that warm up must not find it.
            # With shapes its events refer weakly to every tensor, and a sharded module cannot be moved meanwhile
            # (torch.utils.swap_tensors); the profiler is in a cycle and would live until the next collection.
            session.kineto_results = None
