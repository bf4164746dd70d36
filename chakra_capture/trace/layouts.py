"""Texts that differ in nothing but their digits, read together as rows of characters.

A trace writes the args of its events, and the attributes of its nodes, in a few hundred layouts. Where what stands is
found out once for each; after that a column is a stretch of characters of all rows at once. Two texts have one layout
if they are equal once every digit is a 0, so their digits stand at the same places, too.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Generic, TypeVar

import msgspec
import numpy as np

from chakra_capture.trace.columns import Int64, Positions
from chakra_capture.trace.dictionary import Numbers

Span = tuple[int, int]
Plan = TypeVar("Plan")

# Fewer texts of one layout are read one by one as fast.
_FEWEST = 8

_SAME_DIGITS = bytes.maketrans(b"123456789", b"0" * 9)
_INTEGER = re.compile(rb"-?[0-9]{1,18}")
# A text with none of it could be an integer in some way of writing one; one with it is none, whatever its digits.
_NO_INTEGER = re.compile(rb'[^-+.0-9eE"\s_]')


def by_layout(texts: Sequence[bytes]) -> Iterator[tuple[bytes, Int64]]:
    """Every layout and which of the texts have it."""
    numbers: Numbers[bytes] = Numbers()
    codes = numbers.codes([text.translate(_SAME_DIGITS) for text in texts])
    order = np.argsort(codes, kind="stable")
    ends = np.cumsum(np.bincount(codes, minlength=len(numbers) - 1)).tolist()
    for layout, begin, end in zip(numbers.entries(), [0, *ends], ends, strict=False):
        yield layout, order[begin:end]


def has_digits(text: bytes) -> bool:
    """Whether the texts of one layout can differ here."""
    return text.translate(_SAME_DIGITS).find(b"0") >= 0


def is_integer(value: bytes) -> bool | None:
    """Whether values laid out as this one are integers; None if that is to be looked at one by one."""
    if _INTEGER.fullmatch(value):
        return True
    return False if _NO_INTEGER.search(value) else None


def span(text: bytes, value: msgspec.Raw) -> Span:
    """Where a value that was decoded from ``text`` stands in it: msgspec leaves it there."""
    begin = _address(value) - _address(text)
    end = begin + len(memoryview(value))
    assert text[begin:end] == bytes(value)
    return begin, end


def _address(text: bytes | msgspec.Raw) -> int:
    return int(np.frombuffer(text, dtype=np.uint8).ctypes.data)


class Plans(Generic[Plan]):
    """What was found out about each layout, once, from the first text that has it."""

    def __init__(self, make: Callable[[bytes], Plan | None]) -> None:
        self._make = make
        self._known: dict[bytes, Plan | None] = {}

    def of(self, layout: bytes, text: bytes, count: int) -> Plan | None:
        """The plan for ``count`` texts like ``text``; None where reading one by one is right, or as fast."""
        if count < _FEWEST:
            return None
        if layout not in self._known:
            # Nothing escaped: the text of a value is what it says.
            self._known[layout] = None if b"\\" in layout else self._make(text)
        return self._known[layout]


class Integers:
    """Integers of up to 18 digits that every text of a layout has at the same places."""

    def __init__(self, text: bytes, spans: Iterable[Span]) -> None:
        """Make it for the layout of ``text``."""
        at: list[int] = []
        weights: list[int] = []
        self.starts: list[int] = []
        for begin, end in spans:
            sign = -1 if text[begin : begin + 1] == b"-" else 1
            begin += sign < 0
            self.starts.append(len(at))
            at += range(begin, end)
            weights += [sign * 10**place for place in range(end - begin - 1, -1, -1)]
        self.at, self.weights = np.array(at, dtype=np.intp), np.array(weights, dtype=np.int64)


class Template:
    """A text that every text of a layout gives, put together from pieces of it and what is the same for all."""

    def __init__(self, text: bytes, pieces: Iterable[bytes | Span]) -> None:
        """Make it for the layout of ``text``."""
        self.first = b""
        into: list[int] = []
        source: list[int] = []
        for piece in pieces:
            if not isinstance(piece, bytes):
                digits = [at for at in range(*piece) if text[at : at + 1].isdigit()]
                source += digits
                into += [at - piece[0] + len(self.first) for at in digits]
                piece = text[slice(*piece)]
            self.first += piece
        self.into, self.source = np.array(into, dtype=np.intp), np.array(source, dtype=np.intp)


class Block:
    """Texts of one layout."""

    def __init__(self, texts: Sequence[bytes]) -> None:
        self._size = len(texts)
        self._chars = np.frombuffer(b"".join(texts), dtype=np.uint8).reshape(len(texts), -1)

    def integers(self, integers: Integers) -> Int64:
        """A column for each integer."""
        digits = self._chars[:, integers.at] - np.int64(ord("0"))
        values = np.add.reduceat(digits * integers.weights, integers.starts, axis=1)
        return np.asarray(values.T, dtype=np.int64)

    def texts(self, template: Template) -> list[bytes]:
        """A text for each row."""
        if not len(template.into):
            return [template.first] * self._size
        width = len(template.first)
        chars = np.empty((self._size, width), dtype=np.uint8)
        chars[:] = np.frombuffer(template.first, dtype=np.uint8)
        chars[:, template.into] = self._chars[:, template.source]
        joined = chars.tobytes()
        return [joined[begin : begin + width] for begin in range(0, len(joined), width)]

    def codes(self, template: Template, numbers: Numbers[bytes]) -> Positions:
        """The same, numbered."""
        if not len(template.into):
            return np.full(self._size, numbers[template.first], dtype=np.int32)
        return numbers.codes(self.texts(template))
