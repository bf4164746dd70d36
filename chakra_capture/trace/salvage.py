"""Reading a damaged JSON trace element by element: what is whole is kept, what is lost is counted."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

import msgspec

_ENCODER = msgspec.json.Encoder(decimal_format="number")
_SPACE = re.compile(r"[\s,]*")


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
    head = re.search(rf'"{shape.key}"\s*:\s*\[', text)
    at = head.end() if head else text.find("[") + 1
    if not at:
        return
    decoder = json.JSONDecoder(strict=False, parse_float=Decimal, parse_constant=_constant)
    while True:
        at = _skip(text, at)
        if at >= len(text):
            salvage.note(f"truncated at byte {len(data)}")
            return
        if text[at] == "]":
            return
        try:
            element, at = decoder.raw_decode(text, at)
        except (json.JSONDecodeError, RecursionError):
            salvage.elements_lost += 1
            following = shape.begin.search(text, at + 1)
            where = len(text[:at].encode()) if len(text) != len(data) else at
            if following is None:
                salvage.note(f"truncated at byte {len(data)}, inside the element that begins at byte {where}")
                return
            salvage.note("damaged element skipped")
            at = following.start() + 1
            continue
        if isinstance(element, dict):
            yield _encode(element)


def _skip(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    return match.end() if match else at


def _constant(name: str) -> str:
    return name  # NaN and Infinity stay text: JSON has no number for them


def _encode(element: dict[str, Any]) -> bytes:
    return _ENCODER.encode(element)
