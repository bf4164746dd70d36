"""Reading a damaged JSON trace element by element: what is whole is kept, what is lost is counted."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

import msgspec


def _constant(name: str) -> str:
    return name  # NaN and Infinity stay text: JSON has no number for them


_DECODER = json.JSONDecoder(strict=False, parse_float=Decimal, parse_int=Decimal, parse_constant=_constant)
_ENCODER = msgspec.json.Encoder(decimal_format="number")
_SPACE = re.compile(r"[\s,]*")
# One JSON escape each; the group is half of a surrogate pair, legal in JSON text but no character.
_ESCAPE = re.compile(
    r"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(u[dD][89a-fA-F][0-9a-fA-F]{2})|.)", re.DOTALL
)
# Bounds the work on a file made to be read again and again; no real damage comes near it.
_MOST_READ_AGAIN = 8
_DEEP = 10_000
_FIRST_TRY = 4096


@dataclass(slots=True)
class Salvage:
    """What happened while reading one file; false when nothing was repaired or lost."""

    counts: dict[str, int] = field(default_factory=dict)
    elements_lost: int = 0

    def note(self, text: str) -> None:
        """Count one repair or loss; the first one of a kind gives the text."""
        self.counts[text] = self.counts.get(text, 0) + 1

    @property
    def notes(self) -> list[str]:
        return [text if count == 1 else f"{text} ({count} times)" for text, count in self.counts.items()]

    def __bool__(self) -> bool:
        return bool(self.counts)


@dataclass(frozen=True, slots=True)
class ArrayShape:
    """Which array holds the elements, and how the next one is found after a damaged one."""

    key: str
    begin: re.Pattern[str]


EVENTS = ArrayShape("traceEvents", re.compile(r'[\n,]\s*\{\s*"(?:ph|name|cat)"\s*:'))
NODES = ArrayShape("nodes", re.compile(r'[\n,]\s*\{\s*"(?:id|name)"\s*:\s*(?:\d|"(?!rf_id)[^"]*",\s*"id")'))


def elements(data: bytes, shape: ArrayShape, salvage: Salvage) -> Iterator[bytes]:
    """Yield each whole element of the array under ``shape.key`` as valid JSON bytes.

    Numbers keep their text. A damaged element is skipped up to the next one; the end of the file
    inside an element ends the reading. Both are noted in ``salvage``.
    """
    text = data.decode("utf-8", "replace")
    if "�" in text:
        salvage.note("invalid UTF-8 replaced")
    if re.search(r"\\u[dD][89a-fA-F]", text):
        text = _ESCAPE.sub(lambda match: r"\ufffd" if match[1] else match[0], text)
    head = re.search(rf'"{shape.key}"\s*:\s*\[', text)
    at = head.end() if head else text.find("[") + 1
    if not at:
        return
    read_again = _MOST_READ_AGAIN * len(text) + 1_000_000
    while True:
        at = _skip(text, at)
        if at >= len(text):
            salvage.note(f"truncated at byte {len(data)}")
            return
        if text[at] == "]":
            return
        try:
            element, at = _decode_at(text, at)
        except _DamagedError as error:
            salvage.elements_lost += 1
            following = shape.begin.search(text, at + 1)
            # A damaged element may be read to its end in vain, and the next one may begin inside it.
            read_again -= error.cost
            if following is None or read_again < 0:
                what = "truncated" if following is None else "too damaged to read on"
                where = len(text[:at].encode())
                salvage.note(f"{what} at byte {len(data)}, inside the element that begins at byte {where}")
                return
            salvage.note("damaged element skipped")
            at = following.start() + 1
            continue
        if isinstance(element, dict):
            yield _ENCODER.encode(element)


def _skip(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    return match.end() if match else at


class _DamagedError(Exception):
    """No whole element begins here; ``cost`` is about how much text was read to see it."""

    def __init__(self, cost: int) -> None:
        super().__init__(cost)
        self.cost = cost


def _decode_at(text: str, at: int) -> tuple[Any, int]:
    """Decode the element that begins at ``at``; also return where it ends.

    Python's decoder counts the lines of its whole text for every error, so it is given the element's
    neighbourhood only, more of it where that may have cut the element.
    """
    size = _FIRST_TRY
    while True:
        part = text[at : at + size]
        try:
            element, end = _DECODER.raw_decode(part)
        except RecursionError:
            raise _DamagedError(_DEEP) from None
        except json.JSONDecodeError as error:
            may_be_cut = error.pos > len(part) - 12 or error.msg.startswith("Unterminated string")
            if at + size >= len(text) or not may_be_cut:
                raise _DamagedError(len(part) if may_be_cut else error.pos) from None
            size *= 8
        else:
            return element, at + end
