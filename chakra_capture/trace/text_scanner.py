"""The scanner without native code: msgspec reads many elements at once; json finds the extent of one where that fails.

An array that is cut behind one of its elements and closed there is whole only if all before the cut is, whatever
comes after it. So a stretch of the file that ends where an element seems to end is tried in one go.
"""

import json
import re
from typing import Any

import msgspec

from chakra_capture.trace.feed import Feed, State, Step, Taker
from chakra_capture.trace.mend import EVENTS, TOO_DEEP, Outcome, Shape, mend

_SLICE = 1 << 13
_LARGE_SLICE = 1 << 16
_BLANKS = b" \t\r\n"


def _not_finite(name: str) -> Any:
    raise ValueError(name)


class TextScanner:
    """Finds whole elements and hands all of them to the reader; see ``feed.Scanner``."""

    def __init__(self, reader: Taker, shape: Shape) -> None:
        self.state = State.AT_FIRST
        self._reader = reader
        self._begin = re.compile(rb"\}\s{0,64}(,)\s{0,64}(?=" + shape.begin.pattern.encode() + rb")")
        # Up to here, in bytes of the file, a stretch was tried in vain.
        self._one_by_one = 0
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
        while True:
            while at < feed.length and feed.buffer[at] in _BLANKS:
                at += 1
            if at == feed.length:
                return Step.MORE, at, at
            char = chr(feed.buffer[at])
            if char == "," and self.state is State.AFTER_ELEMENT:
                self.state = State.AFTER_COMMA
                at += 1
                continue
            if char == "]":
                return Step.END, at + 1, at
            if char != "{" or self.state is State.AFTER_ELEMENT:
                return Step.DAMAGED, at, at
            is_untried = feed.base + at >= self._one_by_one
            stretch = self._last_end(feed, at) if is_untried else at
            if stretch > at and self._take_all(feed, at, stretch):
                self.state = State.AFTER_ELEMENT
                at = stretch
                continue
            if stretch == at and is_untried and at > feed.length // 2 and not feed.final:
                return Step.MORE, at, at  # the last element of the window goes on behind it
            self._one_by_one = max(self._one_by_one, feed.base + (stretch if stretch > at else feed.length))
            step, end = self.value(feed, at)
            if step == Step.END:
                self.state = State.AFTER_ELEMENT
                step = Step.ODD
            return step, at, end

    def _take_all(self, feed: Feed, at: int, end: int) -> bool:
        with memoryview(feed.buffer) as view:
            array = b"".join((b"[", view[at:end], b"]"))
        return self._reader.take_all(array)

    def _last_end(self, feed: Feed, at: int) -> int:
        """Where the last element seems to end that another one follows; ``at`` if none is seen."""
        size = _LARGE_SLICE
        while True:
            begin = max(at, feed.length - size)
            ends = [match.start(1) for match in self._begin.finditer(feed.buffer, begin, feed.length)]
            if ends or begin == at:
                return ends[-1] if ends else at
            size *= 4

    def value(self, feed: Feed, at: int) -> tuple[Step, int]:
        try:
            end, step = self._extent(feed, at)
            if step != Step.END:
                return step, end
            raw = bytes(feed.buffer[at:end])
            msgspec.json.decode(raw, type=msgspec.Raw)
            raw.decode()
        except RecursionError:
            return self._deep_value(feed, at)
        except (ValueError, msgspec.DecodeError):
            return Step.DAMAGED, at
        if chr(feed.buffer[at]) in "-0123456789":
            if end == feed.length:
                return Step.MORE, at  # it might go on
            if chr(feed.buffer[end]) not in " \t\r\n,]}":
                return Step.DAMAGED, at  # json takes the number that a broken one begins with
        return Step.END, end

    def _extent(self, feed: Feed, at: int) -> tuple[int, Step]:
        """Where the value ends, or where it is damaged.

        Tried on a stretch that grows: an error of json counts the lines of all the text that it was given.
        """
        size = _SLICE
        while True:
            piece = _text(feed, at, size)
            is_all = at + size >= feed.length
            try:
                end = self._decode(piece)[1]
                if is_all or end < len(piece):
                    return at + end, Step.END
            except json.JSONDecodeError as error:
                may_be_cut = error.msg.startswith("Unterminated") or error.pos + 64 > len(piece)
                if not may_be_cut or (is_all and feed.final):
                    return at + error.pos, Step.DAMAGED
                if is_all:
                    return at, Step.MORE
            size *= 4

    def _deep_value(self, feed: Feed, at: int) -> tuple[Step, int]:
        """What json gives up on for its depth: whole, damaged, or deeper than any scanner goes."""
        size = _LARGE_SLICE
        while True:
            is_all = at + size >= feed.length
            mended = mend(_text(feed, at, size), EVENTS, final=is_all and feed.final, deep=True)
            if mended.outcome is not Outcome.MORE:
                break
            if is_all:
                return Step.MORE, at
            size *= 4
        if mended.outcome is Outcome.MENDED and not mended.causes:
            return Step.END, at + mended.at
        return (Step.DEEP if TOO_DEEP in mended.causes else Step.DAMAGED), at + mended.at


def _text(feed: Feed, at: int, size: int) -> str:
    """So many bytes, one character each."""
    with memoryview(feed.buffer) as view:
        return str(view[at : min(feed.length, at + size)], "latin-1")
