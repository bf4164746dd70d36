"""A window on a trace file that slides over it, and what a scanner that reads from it must be able to do."""

from enum import IntEnum
from typing import Protocol

from chakra_capture.trace.files import ByteSource

BUFFER_SIZE = 1 << 20


class Step(IntEnum):
    """Why a scanner stopped; numbered as in _scan.c."""

    MORE = 0
    END = 1
    ODD = 2
    DAMAGED = 3
    DEEP = 4
    NO_MEMORY = 5


class State(IntEnum):
    """Where in the array a scanner stands; numbered as in _scan.c."""

    AT_FIRST = 0
    AFTER_COMMA = 1
    AFTER_ELEMENT = 2


class Feed:
    """A window on the file that slides and, for an element larger than it, grows."""

    def __init__(self, source: ByteSource, size: int = BUFFER_SIZE) -> None:
        self._source = source
        self.buffer = bytearray(size)
        self.length = 0
        self.base = source.skipped
        self.final = False

    def more(self, keep: int) -> None:
        """Read on; what lies before ``keep`` is dropped, so that ``keep`` is at 0 after it."""
        left = self.length - keep
        size = len(self.buffer)
        if left > size // 2:
            grown = bytearray(size * 2)
            grown[:left] = memoryview(self.buffer)[keep : self.length]
            self.buffer = grown
        elif keep:
            with memoryview(self.buffer) as view:
                view[:left] = view[keep : self.length]
        self.base += keep
        self.length = left
        with memoryview(self.buffer) as view:
            while self.length < len(view):
                got = self._source.readinto(view[self.length :])
                if not got:
                    self.final = True
                    return
                self.length += got


class Taker(Protocol):
    """Reads elements one by one, the slow way; ``num_taken`` counts them."""

    num_taken: int

    def take(self, text: bytes, before: int = 0) -> str | None:
        """Read one element that goes before row ``before`` of a scanner; returns why it was left out, if so."""
        ...

    def take_all(self, array: bytes) -> bool:
        """Read an array of elements; if not all of them are as they should be, none is read and it is false."""
        ...

    def restart(self) -> None:
        """Forget what was read."""
        ...


class Scanner(Protocol):
    """Reads elements that are whole. ``count`` is how many it took so far."""

    state: State

    @property
    def count(self) -> int: ...

    def elements(self, feed: Feed, at: int) -> tuple[Step, int, int]:
        """Read on from ``at``; why it stopped, where to go on, and where that element ends (ODD) or failed."""
        ...

    def value(self, feed: Feed, at: int) -> tuple[Step, int]:
        """Skip one value: END and where it ends, or why not."""
        ...

    def take(self, text: bytes) -> str | None:
        """Read one element the slow way; returns why it was left out, if so."""
        ...

    def restart(self) -> None:
        """Forget what was read: the array is there a second time."""
        ...
