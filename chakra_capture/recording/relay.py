"""A file that torch writes while operators run: kept in memory until a thread has put it on the disk.

A write that blocks holds its operator and with it the step, and no thread can help then, for the writer holds the
interpreter. So torch is given an anonymous file in memory, which never blocks; a thread appends what is there to the
file on the disk, at the end of every step and ten times a second, and gives that memory back. A killed process loses
what was not copied yet; what is on the disk merge can salvage.
"""

import contextlib
import ctypes
import io
import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

from chakra_capture.recording.files import PROBE

logger = logging.getLogger(__name__)

# Like os.sendfile: where to, where from, from which byte on, how many; returns how many it has copied.
Copy = Callable[[int, int, int, int], int]

_INTERVAL_S = 0.1
_BLOCK_BYTES = 4 << 20
# Of fallocate(2).
_KEEP_SIZE, _PUNCH_HOLE = 1, 2
_PAGE_BYTES = 4096


class Relay:
    """The file in memory and its copy on the disk: ``path`` for the writer, ``start``, then ``finish``.

    Args:
        target: the reserved file on the disk.
        memory: the anonymous file, with ``PROBE`` in it.
        copy: ``os.sendfile``, or what a test puts in its place.

    Raises:
        OSError: the reserved file cannot be opened.
    """

    def __init__(self, target: Path, memory: io.FileIO, copy: Copy) -> None:
        self._copy, self._memory = copy, memory
        flags = os.O_WRONLY | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
        self._target = io.FileIO(os.open(target, flags), "w")
        self._name = str(target)
        self._num_copied = 0
        self._fault: OSError | None = None
        self._is_over = False
        self._is_wanted = threading.Event()
        self._copying_since_ns: int | None = None
        self._thread = threading.Thread(target=self._run, name="chakra-capture-relay", daemon=True)
        self._fallocate = getattr(ctypes.CDLL(None), "fallocate", None)

    @property
    def path(self) -> Path:
        """The name under which this process can open the file in memory."""
        return Path(f"/proc/self/fd/{self._memory.fileno()}")

    @property
    def was_opened(self) -> bool:
        """Whether somebody has opened it for writing since, which truncates it."""
        return os.fstat(self._memory.fileno()).st_size == 0

    @property
    def descriptor(self) -> int:
        """Our own descriptor of the file in memory."""
        return self._memory.fileno()

    def start(self) -> None:
        """Begin to copy."""
        self._thread.start()

    def hurry(self) -> None:
        """Have what is there copied now, without waiting for it."""
        self._is_wanted.set()

    def is_stuck(self, limit_s: float) -> bool:
        """Say whether one write to the disk has been going on for longer than this."""
        since_ns = self._copying_since_ns
        return since_ns is not None and time.monotonic_ns() - since_ns > limit_s * 1e9

    @property
    def num_waiting(self) -> int:
        """Bytes that are not on the disk yet."""
        try:
            return os.fstat(self._memory.fileno()).st_size - self._num_copied
        except (ValueError, OSError):  # closed, maybe just now
            return 0

    def finish(self) -> None:
        """Wait until all of it is on the disk and both files are closed.

        Raises:
            OSError: the disk has refused some of it.
        """
        self.leave()
        if self._thread.ident is None:
            self._close()
        else:
            self._thread.join()
        if self._fault is not None:
            raise self._fault

    def leave(self) -> None:
        """Have the thread end once it has copied the rest, without waiting for it."""
        self._is_over = True
        self._is_wanted.set()

    def forget_in_child(self) -> None:
        """Close what a forked child inherits; there is no thread in it."""
        self._close()

    def _run(self) -> None:
        is_last = False
        while not is_last:
            self._is_wanted.wait(_INTERVAL_S)
            self._is_wanted.clear()
            is_last = self._is_over  # Looked at before copying, so that nothing comes after the last time.
            try:
                self._catch_up()
            except OSError as fault:
                self._fault = self._fault or OSError(fault.errno, fault.strerror, self._name)
        self._close()

    def _catch_up(self) -> None:
        source, size = self._memory.fileno(), os.fstat(self._memory.fileno()).st_size
        while self._num_copied < size:
            count = min(_BLOCK_BYTES, size - self._num_copied)
            if self._fault is None:
                self._copying_since_ns = time.monotonic_ns()
                try:
                    count = self._copy(self._target.fileno(), source, self._num_copied, count)
                finally:
                    self._copying_since_ns = None
            # After a fault the rest is dropped: memory must not grow because a disk is full.
            self._num_copied += count
            self._give_back(source)

    def _give_back(self, source: int) -> None:
        # Where the system cannot, the memory is freed at the end.
        whole = self._num_copied // _PAGE_BYTES * _PAGE_BYTES
        if whole and self._fallocate is not None:
            self._fallocate(source, _KEEP_SIZE | _PUNCH_HOLE, ctypes.c_int64(0), ctypes.c_int64(whole))

    def _close(self) -> None:
        for file in (self._memory, self._target):
            with contextlib.suppress(OSError):
                file.close()


def relay_to(target: Path, *, copy: Copy = os.sendfile) -> Relay | None:
    """Return a relay to a reserved file, or None where this system has no files in memory: torch writes by itself then.

    Raises:
        OSError: the reserved file cannot be opened.
    """
    memory = _file_in_memory()
    return None if memory is None else Relay(target, memory, copy)


def _file_in_memory() -> io.FileIO | None:
    if not hasattr(os, "memfd_create"):
        return None
    try:
        memory = io.FileIO(os.memfd_create("chakra-capture"), "r+")
        memory.write(PROBE)
        # Torch would report success where it cannot open the file, and spoil the observer of the process.
        os.close(os.open(f"/proc/self/fd/{memory.fileno()}", os.O_WRONLY))
    except OSError as fault:
        logger.debug("The host trace goes to the disk at once, for a file in memory cannot be had: %s", fault)
        return None
    return memory
