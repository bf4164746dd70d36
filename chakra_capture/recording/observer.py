"""The process's ExecutionTraceObserver, handled so that it neither crashes the process nor loses its file.

Torch keeps one observer per process behind every Python object (torch 2.13). Opening happens at registration and
truncates; a registration that cannot open its file, or that comes second, reports success and poisons or finalises the
other's. So: reserve the file first, look whether it was opened, and never let a stray object be destroyed "registered".
"""

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from chakra_capture.errors import RecordingError
from chakra_capture.recording.files import was_opened

if TYPE_CHECKING:
    from torch.profiler import ExecutionTraceObserver

# Unregistering sooner after the stop crashes threads that still run operators (torch 2.13).
SETTLE_NS = 250_000_000
_ENVIRONMENT_OBSERVER = "ENABLE_PYTORCH_EXECUTION_TRACE"


def refuse_other_profilers() -> None:
    """Check that nobody in this process profiles or observes already.

    Raises:
        RecordingError: somebody does; a second session would crash one of the two.
    """
    import torch.autograd.profiler

    if os.environ.get(_ENVIRONMENT_OBSERVER, "0") == "1":
        raise RecordingError(
            f"{_ENVIRONMENT_OBSERVER} is set to 1, so torch registers an observer of its own with every profiler; a "
            "process has room for one. Unset the variable to record with chakra-capture."
        )
    # The C++ query is per thread and misses sessions of all threads; this flag is the process's.
    if torch.autograd.profiler._is_profiler_enabled:
        raise RecordingError(
            "another torch profiler is running in this process; nested profilers crash it. Turn the other one off "
            "(for example Trainer(profiler=...)) or move the window to steps where it does not run."
        )


class HostObserver:
    """One registration of the observer, writing to one file that was reserved for it."""

    def __init__(self, part: Path) -> None:
        from torch.profiler import ExecutionTraceObserver

        self._observer: ExecutionTraceObserver | None = ExecutionTraceObserver()
        self._part = part
        self._descriptor: int | None = None
        self.stopped_ns: int | None = None

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
        observer.register_callback(str(self._part))
        if not observer.is_registered or not was_opened(self._part):
            self._let_go()
            raise RecordingError(
                f"torch did not open {self._part}: an ExecutionTraceObserver is registered in this process already, "
                "or an earlier one could not open its file, which blocks all later ones. Unregister the other "
                "observer, or restart the process."
            )
        self._descriptor = _descriptor_of(self._part)

    def stop(self) -> None:
        """Stop observing; the file stays open."""
        if self._observer is not None:
            self._observer.stop()
            self.stopped_ns = time.monotonic_ns()

    @property
    def settles_in_ns(self) -> int:
        """How long to wait until the file may be closed."""
        if self.stopped_ns is None:
            return 0
        return max(0, self.stopped_ns + SETTLE_NS - time.monotonic_ns())

    def unregister(self) -> None:
        """Write the end of the file and close it."""
        if self._observer is not None:
            self._observer.unregister_callback()
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
