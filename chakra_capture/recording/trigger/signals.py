"""A signal as a trigger: taken only where nobody has it, and given back."""

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
    if (before := signal.getsignal(number)) is not signal.SIG_DFL:
        raise RecordingError(
            f"chakra_profile.trigger.signal is {name}, and {_said(before)}; it is not taken away. Choose another "
            "signal, or use `chakra-capture trigger`."
        )

    def handler(_number: int, _frame: FrameType | None) -> None:
        action()

    def give_back() -> None:
        # What has been put over ours meanwhile stays.
        if signal.getsignal(number) is handler and threading.current_thread() is threading.main_thread():
            signal.signal(number, before)

    signal.signal(number, handler)
    return give_back


def _said(handler: object) -> str:
    if handler is signal.SIG_IGN:
        return "this process ignores it"
    if handler is None:
        return "code that is not Python's handles it"
    return f"{getattr(handler, '__module__', None)}.{getattr(handler, '__qualname__', repr(handler))} handles it"
