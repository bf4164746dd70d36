"""The scanner without native code: json finds the extent of each element, msgspec reads it.

Only damaged files come here; whole ones are decoded in one go.
"""

import json
from typing import Any

import msgspec

from chakra_capture.trace.feed import Feed, State, Step, Taker
from chakra_capture.trace.mend import EVENTS, TOO_DEEP, Outcome, mend

_SLICE = 1 << 13
_LARGE_SLICE = 1 << 16


def _not_finite(name: str) -> Any:
    raise ValueError(name)


class TextScanner:
    """Finds the extent of each element and hands all of them to the reader; see ``feed.Scanner``."""

    def __init__(self, data: bytes, reader: Taker) -> None:
        self.state = State.AT_FIRST
        self._reader = reader
        self._data = data
        self._text = data.decode("latin-1")
        # The values are not looked at: only whether it is JSON, and where it ends.
        self._decode = json.JSONDecoder(parse_int=len, parse_float=len, parse_constant=_not_finite).raw_decode

    @property
    def count(self) -> int:
        return self._reader.num_taken

    def take(self, text: bytes) -> str | None:
        return self._reader.take(text)

    def restart(self) -> None:
        self._reader.restart()

    def elements(self, feed: Feed, at: int) -> tuple[Step, int, int]:
        text, size = self._text, len(self._text)
        while True:
            while at < size and text[at] in " \t\r\n":
                at += 1
            if at == size:
                return Step.MORE, at, at
            char = text[at]
            if char == "," and self.state is State.AFTER_ELEMENT:
                self.state = State.AFTER_COMMA
                at += 1
                continue
            if char == "]":
                return Step.END, at + 1, at
            if char != "{" or self.state is State.AFTER_ELEMENT:
                return Step.DAMAGED, at, at
            step, end = self.value(feed, at)
            if step != Step.END:
                return step, at, end
            self.state = State.AFTER_ELEMENT
            return Step.ODD, at, end

    def value(self, feed: Feed, at: int) -> tuple[Step, int]:
        try:
            end, step = self._extent(at)
            if step == Step.DAMAGED:
                return step, end
            raw = self._data[at:end]
            msgspec.json.decode(raw, type=msgspec.Raw)
            raw.decode()
        except RecursionError:
            return self._deep_value(at)
        except (ValueError, msgspec.DecodeError):
            return Step.DAMAGED, at
        if self._text[at] in "-0123456789":
            if end == len(self._text):
                return Step.MORE, at  # it might go on
            if self._text[end] not in " \t\r\n,]}":
                return Step.DAMAGED, at  # json takes the number that a broken one begins with
        return Step.END, end

    def _extent(self, at: int) -> tuple[int, Step]:
        """Where the value ends, or where it is damaged.

        Tried on a stretch that grows: an error of json counts the lines of all the text that it was given.
        """
        size = _SLICE
        while True:
            piece = self._text[at : at + size]
            final = at + size >= len(self._text)
            try:
                end = self._decode(piece)[1]
                if final or end < len(piece):
                    return at + end, Step.END
            except json.JSONDecodeError as error:
                may_be_cut = error.msg.startswith("Unterminated") or error.pos + 64 > len(piece)
                if final or not may_be_cut:
                    return at + error.pos, Step.DAMAGED
            size *= 4

    def _deep_value(self, at: int) -> tuple[Step, int]:
        """What json gives up on for its depth: whole, damaged, or deeper than any scanner goes."""
        size = _LARGE_SLICE
        while True:
            final = at + size >= len(self._text)
            mended = mend(self._text[at : at + size], EVENTS, final=final, deep=True)
            if mended.outcome is not Outcome.MORE:
                break
            size *= 4
        if mended.outcome is Outcome.MENDED and not mended.causes:
            return Step.END, at + mended.at
        return (Step.DEEP if TOO_DEEP in mended.causes else Step.DAMAGED), at + mended.at
