"""The module state of the training half: one profiler and one observer exist per process, so somebody keeps count.

Also the process-wide handlers: interpreter exit and SIGTERM while a session is open, and a permanent guard in forked
children.
"""

import atexit
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from chakra_capture.errors import InitError, RecordingError
from chakra_capture.recording.manifest import Reason
from chakra_capture.recording.run import Run
from chakra_capture.recording.termination import Termination


class OpenSession(Protocol):
    """What the registry needs of a session."""

    def close_early(self, reason: Reason) -> None:
        """Finish the recording because the process ends."""

    def abandon(self, reason: Reason) -> None:
        """Note, from any thread, that the process ends with the recording unfinished."""

    def forget_in_child(self) -> None:
        """Become inert in a forked child."""


class ActiveRecorder(Protocol):
    """What the registry needs of a recorder."""

    def forget_in_child(self) -> None:
        """Let go of the parent's files in a forked child."""


@dataclass(slots=True)
class Init:
    """Who has initialised this process, with which settings, and what he has made of them."""

    owner: str
    key: object
    made: Any = None


class _Registry:
    def __init__(self) -> None:
        self.sessions: list[OpenSession] = []
        self.recorder: ActiveRecorder | None = None
        self.runs: dict[tuple[str, str, int], Run] = {}
        self.num_runs = 0
        self.init: Init | None = None
        self.has_fork_guard = False
        self.kept: list[object] = []
        self.termination: Termination | None = None
        self.finalizer: Any = None
        self.masks: dict[int, set[int]] = {}


_registry = _Registry()


def add_session(session: OpenSession) -> None:
    """Note an open session, so that it is closed when the interpreter ends."""
    if not _registry.sessions:
        atexit.register(_close_all)
        _registry.finalizer = _finalizer_of_child()
    _registry.sessions.append(session)
    if not _registry.has_fork_guard:
        # Permanent: handlers of os.register_at_fork cannot be removed. They do nothing while no session is open.
        os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork_in_child)
        _registry.has_fork_guard = True


def _finalizer_of_child() -> Any:
    """Have the sessions closed at the end of a child of multiprocessing, which leaves by ``os._exit``."""
    process = sys.modules.get("multiprocessing.process")
    if process is None or process.parent_process() is None:
        return None
    from multiprocessing.util import Finalize

    # Early: what else is finalised may be what the training loop uses.
    return Finalize(None, _close_all, exitpriority=1000)


def handle_sigterm() -> None:
    """Finish recordings when SIGTERM comes, until no session is open; only the main thread can ask for it."""
    if _registry.termination is not None and not _registry.termination.is_active:
        _restore_handler()
        _registry.termination = None  # If it is wrapped by somebody, ours wraps him in turn.
    if _registry.termination is None:
        termination = Termination(_close_all_on_sigterm, _abandon_all)
        if termination.install():
            _registry.termination = termination


@contextmanager
def signals_wait() -> Iterator[None]:
    """Keep the SIGTERM handler from entering our code in its middle; it is called at the end of the block."""
    termination = _registry.termination
    if termination is None:
        yield
        return
    termination.hold()
    try:
        yield
    finally:
        termination.release()


def remove_session(session: OpenSession) -> None:
    """Forget a closed session."""
    if session in _registry.sessions:
        _registry.sessions.remove(session)
        if not _registry.sessions:
            atexit.unregister(_close_all)
            finalizer, _registry.finalizer = _registry.finalizer, None
            if finalizer is not None:
                finalizer.cancel()
    if not _registry.sessions:
        _restore_handler()


def _restore_handler() -> None:
    if _registry.termination is not None and _registry.termination.restore():
        _registry.termination = None


def acquire_recorder(recorder: ActiveRecorder) -> None:
    """Reserve the process's only profiler and observer.

    Raises:
        RecordingError: another recording of this process has them.
    """
    if _registry.recorder is not None:
        raise RecordingError(
            "another chakra-capture session of this process is recording, and torch has one profiler and one observer "
            "per process; this session records nothing. Use one callback or one capture() per training loop."
        )
    _registry.recorder = recorder


def release_recorder(recorder: ActiveRecorder) -> None:
    """Give profiler and observer back."""
    if _registry.recorder is recorder:
        _registry.recorder = None


def keep_for_ever(thing: object) -> None:
    """Keep an object from being destroyed."""
    _registry.kept.append(thing)


def run_of(trace_dir: str, job: str, rank: int, make: Callable[[int], Run]) -> Run:
    """Return this process's run under these names; the first session makes it, given its number, later ones go on."""
    key = (trace_dir, job, rank)
    if key not in _registry.runs:
        # Counted before it is made: a rank that fails here must stay in step with the others.
        number, _registry.num_runs = _registry.num_runs, _registry.num_runs + 1
        _registry.runs[key] = make(number)
    return _registry.runs[key]


def claim_init(owner: str, key: object) -> Init:
    """Initialise this process for ``owner``; once more with an equal ``key`` gives what is there already.

    Raises:
        InitError: it is initialised with another key, or by another owner.
    """
    init = _registry.init
    if init is None:
        init = _registry.init = Init(owner, key)
    elif init.owner != owner:
        raise InitError(
            f"{owner}.init() was called, but this process is initialised by {init.owner}.init(); expected one of them, "
            "or the same step would be counted twice. Remove one of the two calls."
        )
    elif init.key != key:
        raise InitError(
            f"{owner}.init() was called before with other settings; expected one call, or the same settings again. "
            f"Call {owner}.close() before a training with other settings."
        )
    return init


def current_init() -> Init | None:
    """Return how this process is initialised."""
    return _registry.init


def init_owner() -> str | None:
    """Return who has initialised this process: ``phases``, ``monai``, or nobody."""
    return _registry.init.owner if _registry.init is not None else None


def release_init() -> None:
    """Let the process be initialised anew."""
    _registry.init = None


def is_idle() -> bool:
    """Say whether no session is open and nothing records."""
    return not _registry.sessions and _registry.recorder is None


def runs_of_process() -> list[Run]:
    """Return the runs that this process has had a part in."""
    return list(_registry.runs.values())


def forget_run(run: Run) -> None:
    """Forget a run whose files are gone."""
    _registry.runs = {key: one for key, one in _registry.runs.items() if one is not run}


def forget_runs() -> None:
    """Forget the runs of this process, so that the next session is a new run."""
    _registry.runs.clear()


def _close_all() -> None:
    for session in list(_registry.sessions):
        session.close_early(Reason.process_exit)


def _close_all_on_sigterm() -> None:
    for session in list(_registry.sessions):
        session.close_early(Reason.terminated)


def _abandon_all() -> None:
    for session in list(_registry.sessions):
        session.abandon(Reason.terminated)


def _before_fork() -> None:
    # A child that got the signal before it has let go of our handler would report it to the parent's watchdog.
    if _registry.termination is not None:
        before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        _registry.masks[threading.get_ident()] = {int(number) for number in before}


def _after_fork() -> None:
    before = _registry.masks.pop(threading.get_ident(), None)
    if before is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _after_fork_in_child() -> None:
    if _registry.recorder is not None:
        _registry.recorder.forget_in_child()
    for session in _registry.sessions:
        session.forget_in_child()
    if _registry.sessions:
        atexit.unregister(_close_all)
    if _registry.termination is not None:
        _registry.termination.forget_in_child()
    _after_fork()
    _registry.masks.clear()
    _registry.recorder = _registry.termination = _registry.finalizer = _registry.init = None
    _registry.sessions.clear()
    _registry.runs.clear()
