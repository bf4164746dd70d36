"""The module state of the training half: one profiler and one observer exist per process, so somebody keeps count.

Also the process-wide handlers: interpreter exit while a session is open, and a permanent guard in forked children.
"""

import atexit
import os
from collections.abc import Callable
from typing import Protocol

from chakra_capture.errors import RecordingError
from chakra_capture.recording.run import Run


class OpenSession(Protocol):
    """What the registry needs of a session."""

    def close_at_exit(self) -> None:
        """Finish the recording because the interpreter ends."""

    def forget_in_child(self) -> None:
        """Become inert in a forked child."""


class ActiveRecorder(Protocol):
    """What the registry needs of a recorder."""

    def forget_in_child(self) -> None:
        """Let go of the parent's files in a forked child."""


class _Registry:
    def __init__(self) -> None:
        self.sessions: list[OpenSession] = []
        self.recorder: ActiveRecorder | None = None
        self.runs: dict[tuple[str, str, int], Run] = {}
        self.num_runs = 0
        self.has_fork_guard = False
        self.kept: list[object] = []


_registry = _Registry()


def add_session(session: OpenSession) -> None:
    """Note an open session, so that it is closed when the interpreter ends."""
    if not _registry.sessions:
        atexit.register(_close_all)
    _registry.sessions.append(session)


def remove_session(session: OpenSession) -> None:
    """Forget a closed session."""
    if session in _registry.sessions:
        _registry.sessions.remove(session)
        if not _registry.sessions:
            atexit.unregister(_close_all)


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
    if not _registry.has_fork_guard:
        # Permanent: a handler of os.register_at_fork cannot be removed. It does nothing while nothing records.
        os.register_at_fork(after_in_child=_after_fork_in_child)
        _registry.has_fork_guard = True
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


def is_idle() -> bool:
    """Say whether no session is open and nothing records."""
    return not _registry.sessions and _registry.recorder is None


def forget_runs() -> None:
    """Forget the runs of this process, so that the next session is a new run."""
    _registry.runs.clear()


def _close_all() -> None:
    for session in list(_registry.sessions):
        session.close_at_exit()


def _after_fork_in_child() -> None:
    if _registry.recorder is not None:
        _registry.recorder.forget_in_child()
    for session in _registry.sessions:
        session.forget_in_child()
    _registry.recorder = None
    _registry.sessions.clear()
    _registry.runs.clear()
