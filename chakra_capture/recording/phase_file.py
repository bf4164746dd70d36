"""The file of phases: one line of JSON per step, written at most once a second and never waited for long."""

import contextlib
import logging
import os
import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path

from chakra_capture.errors import RecordingError
from chakra_capture.recording.files import FILE_MODE, make_folder

logger = logging.getLogger(__name__)

INTERVAL_NS = 1_000_000_000
SLOW_NS = 50_000_000
_MOST_BYTES_WAITING = 4 << 20
_CLOSE_LIMIT_S = 2.0


class PhaseFile:
    """Collects lines and appends them to a file.

    A daemon thread writes, for a disk that hangs holds whoever does. The loop waits for it, which on a healthy disk
    takes some tens of microseconds; once it has taken longer than ``SLOW_NS`` it is not waited for any more.

    Args:
        path: the working file; created exclusively unless ``is_continued``.
        clock: monotonic ns.
        write: ``os.write``, or what a test puts in its place.

    Raises:
        RecordingError: the file exists already or cannot be created.
    """

    def __init__(
        self,
        path: Path,
        *,
        is_continued: bool = False,
        clock: Callable[[], int] = time.monotonic_ns,
        write: Callable[[int, bytes], int] = os.write,
    ) -> None:
        self.path = path
        self.num_slow_writes = self.num_bytes_lost = 0
        self._clock = clock
        self._file = _open(path, is_continued=is_continued)
        self._writer = _Writer(self._file, write)
        self._is_waited_for = True
        self._lines: list[bytes] = []
        self.next_ns = clock() + INTERVAL_NS

    def add(self, line: bytes) -> None:
        """Take one line, without its end."""
        self._lines.append(line)

    @property
    def is_due(self) -> bool:
        """Whether it is time to write again."""
        return self._clock() >= self.next_ns

    def flush(self) -> None:
        """Have what is there written.

        Raises:
            OSError: it cannot be written.
        """
        self.next_ns = self._clock() + INTERVAL_NS
        data = b"\n".join([*self._lines, b""])
        num_lines = len(self._lines)
        self.num_bytes_lost += self._writer.take(data)
        del self._lines[:num_lines]
        if self._is_waited_for and not self._writer.wait(SLOW_NS / 1e9):
            self.num_slow_writes += 1
            self._is_waited_for = False
            logger.warning(
                "Writing the phases to %s took longer than %d ms once; training does not wait for it from now on.",
                self.path,
                SLOW_NS // 1_000_000,
            )

    def close(self) -> None:
        """Write the rest and close the file.

        Raises:
            OSError: it cannot be written.
        """
        try:
            if self._lines:
                self.flush()
            self.num_bytes_lost += self._writer.stop(_CLOSE_LIMIT_S)
        finally:
            if self._writer.is_done:
                with contextlib.suppress(OSError):
                    os.close(self._file)

    def abandon(self) -> None:
        """Close the file as it is: what was not written is lost."""
        self._lines.clear()
        with contextlib.suppress(OSError):
            self.close()


class _Writer:
    """A daemon thread that writes what it is given, in order."""

    def __init__(self, file: int, write: Callable[[int, bytes], int]) -> None:
        self._file, self._write = file, write
        self._waiting: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._num_waiting = 0
        self._counting = threading.Lock()
        self._is_idle = threading.Event()
        self._fault: OSError | None = None
        self._thread = threading.Thread(target=self._run, name="chakra-capture-phases", daemon=True)
        self._thread.start()

    @property
    def is_done(self) -> bool:
        return not self._thread.is_alive()

    def take(self, data: bytes) -> int:
        """Queue ``data``; returns how many bytes were dropped because the disk does not keep up."""
        if self._fault is not None:
            raise self._fault
        if self._num_waiting + len(data) > _MOST_BYTES_WAITING:
            return len(data)
        with self._counting:
            self._num_waiting += len(data)
            self._is_idle.clear()
        self._waiting.put(data)
        return 0

    def wait(self, limit_s: float) -> bool:
        """Wait until all is written; says whether that is so."""
        is_idle = self._is_idle.wait(limit_s)
        if self._fault is not None:
            raise self._fault
        return is_idle

    def stop(self, limit_s: float) -> int:
        """Wait for the rest to be written; returns how much was not."""
        self._waiting.put(None)
        self._thread.join(limit_s)
        if self._fault is not None:
            raise self._fault
        return self._num_waiting

    def _run(self) -> None:
        while (data := self._waiting.get()) is not None:
            try:
                _write_all(self._file, data, self._write)
            except OSError as fault:
                self._fault = fault
                self._is_idle.set()
                return
            with self._counting:
                self._num_waiting -= len(data)
                if not self._num_waiting:
                    self._is_idle.set()


def _open(path: Path, *, is_continued: bool) -> int:
    flags = os.O_WRONLY | os.O_APPEND | getattr(os, "O_NOFOLLOW", 0) | os.O_CLOEXEC
    make_folder(path.parent)
    try:
        return os.open(path, flags if is_continued else flags | os.O_CREAT | os.O_EXCL, FILE_MODE)
    except OSError as fault:
        raise RecordingError(
            f"{path} cannot be opened: {fault.strerror or fault}; the phases of a rank need this name for themselves. "
            "Remove what is there, or set chakra_profile.job_id to a name of its own."
        ) from fault


def _write_all(file: int, data: bytes, write: Callable[[int, bytes], int]) -> None:
    """Write all of it, or nothing of a line that does not fit."""
    done = 0
    try:
        while done < len(data):
            done += write(file, data[done:])
    except OSError:
        cut = done - (data.rfind(b"\n", 0, done) + 1)
        with contextlib.suppress(OSError):
            if cut:
                os.ftruncate(file, os.fstat(file).st_size - cut)
        raise
