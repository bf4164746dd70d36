"""Work on files that may never come back: a file system that does not answer must not hold the training.

A thread does the work and the training thread waits for it for a while. What Kineto writes cannot be left to a thread,
for it keeps the interpreter locked meanwhile; so before it is asked to write, we look whether a file can be opened and
closed at all. What the observer writes while operators run goes to memory first (``relay``).
"""

import contextlib
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from chakra_capture.errors import RecordingError

_Result = TypeVar("_Result")
# What a busy file system takes at most; it is waited for once per run.
LIMIT_S = 4.0
_OPEN_LIMIT_S = 30.0
_SLOWEST_BYTES_PER_S = 5_000_000


class Disk:
    """The file system of one run; once it has not answered it is not asked again."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.is_lost = False
        self._last: threading.Thread | None = None

    def do(self, action: Callable[[], _Result], *, num_bytes: int = 0, limit_s: float | None = None) -> _Result:
        """Return what ``action`` returns, or raise what it raises; what the operating system says is explained.

        Args:
            action: works on files only; it may still be at it, or at its end, when this has given up.
            num_bytes: how much it reads or writes.
            limit_s: how long to wait for an action on small files; ``LIMIT_S`` if not given.

        Raises:
            RecordingError: the file system does not answer, or refuses.
        """
        if self.is_lost:
            raise self._fault()
        limit_s = (LIMIT_S if limit_s is None else limit_s) + num_bytes / _SLOWEST_BYTES_PER_S
        if self._last is not None and self._last.is_alive():
            # An interrupt has left it; two at a time could take files from each other.
            self._last.join(limit_s)
            if self._last.is_alive():
                raise self.give_up()
        found: list[_Result] = []
        raised: list[BaseException] = []

        def work() -> None:
            try:
                found.append(action())
            except BaseException as fault:  # noqa: BLE001 (raised again below)
                raised.append(fault)

        self._last = thread = threading.Thread(target=work, name="chakra-capture-disk", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # no more threads, or the interpreter ends
            work()
        else:
            thread.join(limit_s)
        if not thread.is_alive():
            self._last = None
        if raised:
            # Taken out: a fault that this frame held would hold the frames of training in turn.
            raise self._explained(raised.pop())
        if not found:
            raise self.give_up()
        return found[0]

    def give_up(self) -> RecordingError:
        """Note that the file system does not answer, and return the error that says so."""
        self.is_lost = True
        return self._fault()

    def try_again(self) -> None:
        """Ask it once more: at the end, to say what was lost."""
        self.is_lost = False
        self._last = None

    def open(self, action: Callable[[], _Result]) -> _Result:
        """Do what opens a run, which may have to wait for other ranks too."""
        return self.do(action, limit_s=_OPEN_LIMIT_S)

    def check(self, path: Path) -> None:
        """Look whether a file can be opened and closed; that it is gone is for others to find.

        Raises:
            RecordingError: the file system does not answer.
        """

        def touch() -> None:
            with contextlib.suppress(OSError):
                os.close(os.open(path, os.O_WRONLY | os.O_APPEND))

        self.do(touch)

    def _explained(self, fault: BaseException) -> BaseException:
        if not isinstance(fault, OSError):
            return fault
        explained = RecordingError(
            f"{fault.filename or self._folder} cannot be written: {fault.strerror or fault}; recording needs a folder "
            "it can write to, with space left. Free space, change the permissions or set chakra_profile.trace_dir to "
            "another folder."
        )
        explained.__cause__ = fault
        return explained

    def _fault(self) -> RecordingError:
        return RecordingError(
            f"{self._folder} does not answer: its file system took longer than {LIMIT_S:g} s for a small file. What "
            "was recorded since is lost; see to the file system or set chakra_profile.trace_dir to another one."
        )
