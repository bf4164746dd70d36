"""A signal as a trigger: taken only where nobody has it, and given back."""

import ctypes
import signal
import threading
from collections.abc import Callable
from types import FrameType

from chakra_capture.errors import RecordingError


def on_signal(name: str, action: Callable[[], None]) -> Callable[[], None]:
    """Have ``action`` called when the signal comes; returns what gives the signal back.

    Raises:
        RecordingError: somebody has the signal, or this is not the main thread.
    """
    number = signal.Signals[name]
    if threading.current_thread() is not threading.main_thread():
        raise RecordingError(
            f"chakra_profile.trigger.signal is {name}, and the training runs in a thread that may not take signals. "
            "Use `chakra-capture trigger`, or train in the main thread."
        )
    before = signal.getsignal(number)
    if before is not signal.SIG_DFL or is_caught_in_c(number):
        raise RecordingError(
            f"chakra_profile.trigger.signal is {name}, and {_said(before)}; it is not taken away. Choose another "
            "signal, or use `chakra-capture trigger`."
        )

    def handler(_number: int, _frame: FrameType | None) -> None:
        action()

    def give_back() -> None:
        # What has been put over ours meanwhile stays.
        is_ours = signal.getsignal(number) is handler and _action(number) == ours
        if is_ours and threading.current_thread() is threading.main_thread():
            signal.signal(number, before)

    signal.signal(number, handler)
    ours = _action(number)
    return give_back


def is_caught_in_c(number: signal.Signals) -> bool:
    """Say whether a library handles a signal that Python believes to be free, as ``faulthandler.register`` does."""
    return signal.getsignal(number) is signal.SIG_DFL and bool(_action(number))


def _action(number: signal.Signals) -> int | None:
    """Return what the system calls at a signal; it stands first in its record."""
    record = ctypes.create_string_buffer(512)
    if ctypes.CDLL(None).sigaction(int(number), None, record):
        return None
    return ctypes.c_void_p.from_buffer(record).value


def _said(handler: object) -> str:
    if handler is signal.SIG_IGN:
        return "this process ignores it"
    if handler in (None, signal.SIG_DFL):
        return "code that is not Python's handles it"
    return f"{getattr(handler, '__module__', None)}.{getattr(handler, '__qualname__', repr(handler))} handles it"
