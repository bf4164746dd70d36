"""The process's ExecutionTraceObserver, handled so that it neither crashes the process nor loses its file.

Torch keeps one observer per process behind every Python object (torch 2.13). Opening happens at registration and
truncates; a registration that cannot open its file, or that comes second, reports success and poisons or finalises the
other's. So: reserve the file first, look whether it was opened, let nobody register a second one while ours is, and
never let a stray object be destroyed "registered".
"""

import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from chakra_capture.errors import RecordingError
from chakra_capture.recording.files import was_opened
from chakra_capture.recording.patches import Patch
from chakra_capture.recording.replay import ReplayData

if TYPE_CHECKING:
    from torch.profiler import ExecutionTraceObserver

logger = logging.getLogger(__name__)

# Unregistering sooner after the stop crashes threads that still run operators (torch 2.13).
SETTLE_NS = 250_000_000
_CUT_OFF_S = 1.0


class HostObserver:
    """One registration of the observer, writing to one file that was reserved for it."""

    def __init__(self, part: Path, replay: ReplayData | None = None) -> None:
        from torch.profiler import ExecutionTraceObserver

        self._observer: ExecutionTraceObserver | None = ExecutionTraceObserver()
        self._part = part
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
            observer.register_callback(str(self._part))
        else:
            with self._replay.variables():
                observer.register_callback(str(self._replay.path))
                observer.set_extra_resource_collection(True)
        if not observer.is_registered or not was_opened(self._part):
            self._let_go()
            raise RecordingError(
                f"torch did not open {self._part}: an ExecutionTraceObserver is registered in this process already, "
                "or an earlier one could not open its file, which blocks all later ones. Unregister the other "
                "observer, or restart the process."
            )
        self._descriptor = _descriptor_of(self._part)
        if self._descriptor is not None:
            self._identity = _identity_of(self._descriptor)
        import torch.profiler.profiler as module

        self._patch = Patch(module, "_add_execution_trace_observer", _refuse_second)

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

    def cut_off(self) -> None:
        """Have the rest written nowhere: the file's own file system does not answer, and would hold the process."""
        descriptor = self._descriptor
        if descriptor is None:
            self._let_go()  # It stays registered: closing the file could take for ever.
            return
        null = os.open(os.devnull, os.O_WRONLY)
        self._identity = wanted = _identity_of(null)
        # The descriptor is replaced at once; closing what it stood for may not come back.
        threading.Thread(target=os.dup2, args=(null, descriptor), name="chakra-capture-disk", daemon=True).start()
        deadline = time.monotonic() + _CUT_OFF_S
        while _identity_of(descriptor) != wanted and time.monotonic() < deadline:
            time.sleep(0.001)

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


def _descriptor_of(path: Path) -> int | None:
    wanted = path.stat()
    try:
        names = os.listdir("/proc/self/fd")
    except OSError:
        return None
    for name in names:
        try:
            found = os.fstat(int(name))
        except OSError:
            continue
        if (found.st_dev, found.st_ino) == (wanted.st_dev, wanted.st_ino):
            return int(name)
    return None
