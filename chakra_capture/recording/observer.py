"""The process's ExecutionTraceObserver, handled so that it neither crashes the process nor loses its file.

Torch keeps one observer per process behind every Python object (torch 2.13). Opening happens at registration and
truncates; a registration that cannot open its file, or that comes second, reports success and poisons or finalises the
other's. So: reserve the file first, look whether it was opened, let nobody register a second one while ours is, and
never let a stray object be destroyed "registered".
"""

import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from chakra_capture.errors import RecordingError
from chakra_capture.recording.files import was_opened
from chakra_capture.recording.patches import Patch
from chakra_capture.recording.relay import Relay
from chakra_capture.recording.replay import ReplayData

if TYPE_CHECKING:
    from torch.profiler import ExecutionTraceObserver

logger = logging.getLogger(__name__)

# Unregistering sooner after the stop crashes threads that still run operators (torch 2.13).
SETTLE_NS = 250_000_000


class HostObserver:
    """One registration of the observer, writing to one file that was reserved for it."""

    def __init__(self, part: Path, *, relay: Relay | None = None, replay: ReplayData | None = None) -> None:
        from torch.profiler import ExecutionTraceObserver

        self._observer: ExecutionTraceObserver | None = ExecutionTraceObserver()
        self._part = part
        self._relay = relay
        self._replay = replay
        self._descriptor: int | None = None
        self._identity: tuple[int, int] | None = None
        self._patch: Patch | None = None
        self.stopped_ns: int | None = None
        self.was_taken = False

    @property
    def torch_observer(self) -> "ExecutionTraceObserver":
        """The object to hand to ``torch.profiler.profile``."""
        assert self._observer is not None
        return self._observer

    def register(self) -> None:
        """Open the reserved file.

        Raises:
            RecordingError: the process has another observer, or torch could not open the file.
        """
        observer = self.torch_observer
        if self._replay is None:
            observer.register_callback(str(self._path))
        else:
            with self._replay.variables():
                observer.register_callback(str(self._replay.path))
                observer.set_extra_resource_collection(True)
        was_truncated = was_opened(self._part) if self._relay is None else self._relay.was_opened
        if not observer.is_registered or not was_truncated:
            self._let_go()
            raise RecordingError(
                f"torch did not open {self._part}: an ExecutionTraceObserver is registered in this process already, "
                "or an earlier one could not open its file, which blocks all later ones. Unregister the other "
                "observer, or restart the process."
            )
        self._descriptor = _descriptor_of(self._path, but=self._relay.descriptor if self._relay is not None else None)
        if self._descriptor is not None:
            self._identity = _identity_of(self._descriptor)
        if self._relay is not None:
            self._relay.start()
        import torch.profiler.profiler as module

        self._patch = Patch(module, "_add_execution_trace_observer", _refuse_second)

    @property
    def _path(self) -> Path:
        return self._part if self._relay is None else self._relay.path

    def stop(self) -> None:
        """Stop observing; the file stays open."""
        self._check_ownership()
        if self._observer is not None and self.stopped_ns is None:
            self._observer.stop()
            self.stopped_ns = time.monotonic_ns()

    def _check_ownership(self) -> None:
        # Whoever ended our registration has closed our file: touching the observer once more ends the process.
        if self._descriptor is not None and _identity_of(self._descriptor) != self._identity:
            self.was_taken = True
            self._let_go()

    @property
    def settles_in_ns(self) -> int:
        """How long to wait until the file may be closed."""
        if self.stopped_ns is None:
            return 0
        return max(0, self.stopped_ns + SETTLE_NS - time.monotonic_ns())

    def unregister(self) -> None:
        """Write the end of the file and close it."""
        self._check_ownership()
        observer = self._observer
        if observer is None:
            return
        try:
            observer.unregister_callback()
        finally:
            if observer.is_registered:  # interrupted in torch's own code
                observer.unregister_callback()
            self._let_go()

    def forget_in_child(self) -> None:
        """Make the observer that a forked child inherits harmless, without ending the parent's file."""
        if self._observer is None:
            return
        if self._descriptor is not None:
            # The child has the stream's unwritten buffer too, and would append it to the parent's file at its end.
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self._descriptor)
            os.close(null)
        from torch.profiler.profiler import _disable_execution_trace_observer  # type: ignore[attr-defined]

        _disable_execution_trace_observer()
        self._let_go()

    def _let_go(self) -> None:
        # Its destructor and unregister_callback act on the process's observer, whoever registered that.
        if self._observer is not None:
            self._observer._registered = False
            self._observer._execution_trace_running = False
            self._observer = None
        self._descriptor = None
        if self._patch is not None:
            self._patch.undo()
            self._patch = None


def _refuse_second(register: Callable[..., Any], path: str) -> bool:
    # Torch would report success, and its end would end ours: a crash of the process in one of the two.
    logger.warning(
        "Another ExecutionTraceObserver asks to write %s while chakra-capture records; a process has one, so it "
        "records nothing. Turn it off, or move the window to steps where it does not run.",
        path,
    )
    return False


def _identity_of(descriptor: int) -> tuple[int, int] | None:
    try:
        found = os.fstat(descriptor)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _descriptor_of(path: Path, *, but: int | None) -> int | None:
    wanted = path.stat()
    try:
        names = os.listdir("/proc/self/fd")
    except OSError:
        return None
    for name in names:
        if int(name) == but:
            continue
        try:
            found = os.fstat(int(name))
        except OSError:
            continue
        if (found.st_dev, found.st_ino) == (wanted.st_dev, wanted.st_ino):
            return int(name)
    return None
