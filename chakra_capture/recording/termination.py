"""SIGTERM while a session records: the recording is finished first, then happens what would have happened without us.

A handler written in Python waits for the main thread to come out of C code, so a process that hangs in a collective
would no longer be ended by the signal. Where nobody handles it, a thread therefore sees to it that the process ends
in time: the signal's arrival reaches that thread through a file descriptor, whatever the main thread does.
"""

import ctypes
import logging
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

logger = logging.getLogger(__name__)

# Schedulers give 30 s and more; a recording is finished in a fraction of a second unless its disk is in trouble.
_LIMIT_S = 7.0
_JOIN_S = 1.0
_STOP = b"\0"


class Termination:
    """The SIGTERM handler of this process while sessions record.

    Args:
        finish: ends all recordings; may take a while.
        abandon: notes, from another thread and quickly, that they cannot be ended.
    """

    def __init__(self, finish: Callable[[], None], abandon: Callable[[], None]) -> None:
        self._finish = finish
        self._abandon = abandon
        self._previous: Any = None
        self._is_active = False
        self._num_holds = 0
        self._waiting: FrameType | None = None
        self._is_waiting = False
        self._watchdog: _Watchdog | None = None

    def install(self) -> bool:
        """Take the signal over; False where that is not possible, or not asked for because it is ignored."""
        if threading.current_thread() is not threading.main_thread():
            return False
        previous = signal.getsignal(signal.SIGTERM)
        # None: a handler written in C, which cannot be called from here.
        if previous is None or previous == signal.SIG_IGN:
            return False
        self._previous = previous
        self._is_active = True
        signal.signal(signal.SIGTERM, self)
        if previous == signal.SIG_DFL:
            self._watchdog = _Watchdog(self._end_process)
            self._watchdog.start()
        return True

    @property
    def is_active(self) -> bool:
        """Say whether a signal finishes recordings; if not, it only does what the handler before would do."""
        return self._is_active

    def restore(self) -> bool:
        """Put the handler before ours back; False if that must be tried again later.

        Only the main thread may set handlers, and where somebody has wrapped ours, who may put it back when he is
        done, it stays as a mere passage.
        """
        self._is_active = False
        if threading.current_thread() is not threading.main_thread():
            return False
        is_installed = self._is_installed
        if is_installed:
            signal.signal(signal.SIGTERM, self._previous)
        if self._watchdog is not None:
            self._watchdog.stop()
            self._watchdog = None
        return is_installed

    def forget_in_child(self) -> None:
        """Put everything back in a forked child."""
        self._is_active = self._is_waiting = False
        self._num_holds = 0
        if self._is_installed:
            signal.signal(signal.SIGTERM, self._previous)
        if self._watchdog is not None:
            self._watchdog.forget_in_child()
            self._watchdog = None

    def hold(self) -> None:
        """Let a signal wait: our own code runs, and must not be entered a second time in its middle."""
        if threading.current_thread() is threading.main_thread():
            self._num_holds += 1

    def release(self) -> None:
        """Answer the signal that came meanwhile."""
        if threading.current_thread() is threading.main_thread():
            self._num_holds -= 1
            if self._is_waiting and not self._num_holds:
                frame, self._waiting, self._is_waiting = self._waiting, None, False
                self(signal.SIGTERM, frame)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Finish the recording, then do what the handler before would have done."""
        if self._num_holds and self._is_active:
            self._waiting, self._is_waiting = frame, True
            return
        if self._is_active:
            self._num_holds += 1
            try:
                self._finish()
            finally:
                self._num_holds -= 1
            # Also of a second signal that came meanwhile: one is answered.
            self._waiting, self._is_waiting = None, False
        if self._watchdog is not None:
            self._watchdog.is_answered.set()
        if callable(self._previous):
            self._previous(number, frame)
        elif signal.getsignal(signal.SIGTERM) in (self, signal.SIG_DFL):
            # Called by somebody who has wrapped us, nothing: without us he would have found nobody to call.
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)

    @property
    def _is_installed(self) -> bool:
        return signal.getsignal(signal.SIGTERM) is self

    def _end_process(self) -> None:
        """End the process from another thread, unless somebody has taken the signal over from us."""
        if self._is_installed:
            self._abandon()
            # Python lets only the main thread, which hangs, set a handler.
            ctypes.CDLL(None).signal(int(signal.SIGTERM), None)
            os.kill(os.getpid(), signal.SIGTERM)


class _Watchdog:
    """A thread that learns of SIGTERM at once and acts if nobody has answered it in time."""

    def __init__(self, act: Callable[[], None]) -> None:
        self._act = act
        self.is_answered = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="chakra-capture-sigterm", daemon=True)
        self._read = self._write = -1

    def start(self) -> None:
        if not hasattr(signal, "set_wakeup_fd"):
            return
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        others = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        if others != -1:
            # An event loop has it, and answers signals itself.
            signal.set_wakeup_fd(others)
            self._close()
            return
        self._thread.start()

    def stop(self) -> None:
        if self._write == -1:
            return
        self._give_back()
        self.is_answered.set()
        os.write(self._write, _STOP)
        self._thread.join(_JOIN_S)
        if not self._thread.is_alive():
            self._close()

    def forget_in_child(self) -> None:
        if self._write != -1:
            self._give_back()
            self._close()

    def _give_back(self) -> None:
        current = signal.set_wakeup_fd(-1)
        if current != self._write:
            signal.set_wakeup_fd(current)

    def _close(self) -> None:
        os.close(self._read)
        os.close(self._write)
        self._read = self._write = -1

    def _watch(self) -> None:
        while True:
            received = os.read(self._read, 64)
            if not received or _STOP in received:
                return
            if signal.SIGTERM in received and not self.is_answered.wait(_LIMIT_S):
                self._act()
