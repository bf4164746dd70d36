"""Walking a trace file from element to element: what is whole goes to a scanner, what is damaged is mended or skipped.

Two scanners take turns here: the C core and the plain-Python one. All that is decided about damage is decided in this
module and in ``mend``, so both read the same rows out of the same file.
"""

import re

import msgspec

from chakra_capture.errors import TraceFileError
from chakra_capture.trace.feed import Feed, Scanner, State, Step
from chakra_capture.trace.mend import COMMA, LOOK_AHEAD, TOO_DEEP, Mended, Outcome, Shape, find_element, mend
from chakra_capture.trace.salvage import Salvage

LARGEST_ELEMENT = 1 << 28
_HEAD_VALUE = 1 << 16
_SLICE = 1 << 13
_SEARCH_SLICE = 1 << 16
# Bounds the work on a file made to be read again and again; no real damage comes near either.
_MOST_READ_AGAIN = 8
_FREE_TO_READ_AGAIN = 1 << 26
_MOST_DAMAGED = 1_000_000
_BLANKS = b" \t\r\n"
# A value that can be made out beside damage: a text, an integer, or an object without another in it.
_SIMPLE_VALUE = r'"[^"\\\x00-\x1f]{0,200}"|-?[0-9]{1,19}(?=[\s,}])|\{[^{}]{0,2000}\}'


class Walker:
    """One walk through one file.

    Attributes:
        head: raw JSON of the values beside the array, the long ones left out.
        found: the array was there.
    """

    def __init__(self, feed: Feed, scanner: Scanner, shape: Shape, salvage: Salvage) -> None:
        self.head: dict[str, bytes] = {}
        self.found = False
        self._feed = feed
        self._scanner = scanner
        self._shape = shape
        self._salvage = salvage
        self._at = 0
        self._read_again = 0
        self._damaged = 0
        self._ended = False

    def run(self) -> None:
        """Walk to the end of the file, as far as it makes sense."""
        first = self._next()
        if first == "[" and self._shape.bare:
            self._at += 1
            self._array()
        elif first == "{":
            self._at += 1
            self._members()
        if not self._ended and self.found:
            self._after_end()

    # --- the file around the array

    def _members(self) -> None:
        """Keys and values of the outermost object, from after its brace or after a comma on."""
        while True:
            char = self._next()
            if char == "}":
                self._at += 1
                return
            if char == ",":
                self._at += 1
                continue
            if char != '"' or not self._member():
                if not self._ended:
                    self._lost_head() if not self.found else self._lost_tail()
                return
            if self._ended:
                return

    def _member(self) -> bool:
        raw = self._value()
        key = None if raw is None else _decode_key(raw)
        if key is None or self._next() != ":":
            return False
        self._at += 1
        opens = self._next() == "["
        if key == self._shape.key and opens:
            self._at += 1
            self._array()
            return True
        raw = self._value()
        if raw is None:
            return False
        if key == self._shape.key and self.found:
            self._scanner.restart()
            self.found = False
        if len(raw) <= _HEAD_VALUE:
            self.head[key] = raw
        return True

    def _value(self) -> bytes | None:
        """Raw text of the value at the current place, which moves behind it; None if it is damaged or not whole."""
        while True:
            step, end = self._scanner.value(self._feed, self._at)
            if step == Step.END:
                raw = bytes(self._feed.buffer[self._at : min(end, self._at + _HEAD_VALUE + 1)])
                self._at = end
                return raw
            if step != Step.MORE or not self._can_grow():
                return None
            self._fill()

    def _lost_head(self) -> None:
        """Damage before the array: look for the array itself."""
        pattern = re.compile(rf'"{self._shape.key}"\s{{0,64}}:\s{{0,64}}\[')
        where = self._feed.base + self._at
        while True:
            text = self._text(_SEARCH_SLICE)
            self._search_head(text)
            match = pattern.search(text)
            if match:
                self._salvage.note(f"damaged text before the {self._shape.noun}s skipped", where)
                self._at += match.end()
                self._array()
                if not self._ended:
                    self._members()
                return
            if self._reaches_end(len(text)):
                return
            self._at += max(1, len(text) - LOOK_AHEAD)

    def _lost_tail(self) -> None:
        """Damage after the array: take the wanted keys as far as they can be seen."""
        where = self._feed.base + self._at
        last = ""
        while True:
            text = self._text(_SEARCH_SLICE)
            self._search_head(text)
            last = text.rstrip()[-1:] or last
            if self._reaches_end(len(text)):
                break
            self._at += max(1, len(text) - LOOK_AHEAD)
        self._ended = True
        if last != "}":
            self._salvage.note(f"truncated after the last {self._shape.noun}", self._feed.base + self._feed.length)
        else:
            self._salvage.note(f"damaged text after the {self._shape.noun}s skipped", where)

    def _search_head(self, text: str) -> None:
        for key in self._shape.head:
            for match in re.finditer(rf'"{key}"\s{{0,9}}:\s{{0,9}}({_SIMPLE_VALUE})', text):
                self.head[key] = match[1].encode("latin-1")

    def _after_end(self) -> None:
        """A forked child that inherits the observer ends the file early; the parent goes on writing elements."""
        while self._next() is not None:
            where = self._feed.base + self._at
            text = self._text(LOOK_AHEAD)
            begin = re.match(r"[\s,]{0,64}(?=\{)", text)
            if not begin or not self._shape.begin.match(text, begin.end()):
                self._salvage.note("text after the end of the file's JSON left out", where)
                return
            self._salvage.note(f"more {self._shape.noun}s after an early end, as a forked process writes", where)
            self._at += begin.end()
            self._array(fresh=False)
            if self._ended:
                return
            self._members()
            if self._ended:
                return

    # --- the array

    def _array(self, *, fresh: bool = True) -> None:
        if fresh and self.found:
            self._scanner.restart()
        self.found = True
        self._scanner.state = State.AT_FIRST if fresh else State.AFTER_COMMA
        while not self._ended:
            step, at, end = self._scanner.elements(self._feed, self._at)
            self._at = at
            if step == Step.END:
                if self._scanner.state == State.AFTER_COMMA:
                    self._salvage.note(COMMA, self._feed.base + at - 1)
                return
            if step == Step.MORE and self._can_grow():
                self._fill()
            elif step == Step.MORE and at >= self._feed.length:
                self._truncated(None)
            elif step == Step.ODD:
                self._take(bytes(self._feed.buffer[at:end]))
                self._at = end
            elif step == Step.NO_MEMORY:
                raise MemoryError("not enough memory for the columns of this trace")
            else:
                self._read_again += end - at
                self._damage(step)

    def _take(self, text: bytes) -> bool:
        reason = self._scanner.take(text)
        if reason:
            self._salvage.elements_lost += 1
            self._salvage.note(f"{self._shape.noun} with {reason} skipped", self._feed.base + self._at)
        return reason is None

    def _damage(self, step: Step) -> None:
        """Something at the current place is no whole element."""
        char = chr(self._feed.buffer[self._at])
        where = self._feed.base + self._at
        if char == ",":
            self._salvage.note(COMMA, where)
            self._at += 1
        elif char == "{" and self._scanner.state == State.AFTER_ELEMENT:
            self._salvage.note("missing comma", where)
            self._scanner.state = State.AFTER_COMMA
        elif char == "{":
            self._element(step)
        else:
            self._salvage.note(f"text that is no {self._shape.noun} skipped", where)
            self._skip_to_element(0, where)
        self._damaged += 1
        if self._damaged > _MOST_DAMAGED:
            raise TraceFileError(
                f"the file is damaged in more than {_MOST_DAMAGED:,} places, the last one at byte {where}, so it is "
                "no trace that could be saved. Record it again."
            )

    def _element(self, step: Step) -> None:
        where = self._feed.base + self._at
        if self._read_again > _MOST_READ_AGAIN * (self._feed.base + self._feed.length) + _FREE_TO_READ_AGAIN:
            self._salvage.tail_lost = True
            self._salvage.note(f"too damaged to read on, after {self._scanner.count} whole {self._shape.noun}s", where)
            self._ended = True
            return
        mended = self._mend(deep=step == Step.DEEP)
        if mended.outcome is Outcome.MENDED:
            for cause in mended.causes:
                self._salvage.note(cause, where)
            if self._take(mended.text):
                self._salvage.elements_repaired += bool(mended.causes)
            self._scanner.state = State.AFTER_ELEMENT
            self._at += mended.at
            return
        if mended.outcome is Outcome.CUT:
            self._truncated(self._at)
            return
        self._salvage.elements_lost += 1
        noun = self._shape.noun
        fault = f"{noun} {TOO_DEEP}" if TOO_DEEP in mended.causes else f"damaged {noun}"
        self._salvage.note(f"{fault} skipped", where)
        self._skip_to_element(max(1, mended.at), where)

    def _mend(self, *, deep: bool) -> Mended:
        size = _SLICE
        while True:
            text = self._text(size)
            mended = mend(text, self._shape, final=self._reaches_end(len(text)), deep=deep)
            if mended.outcome is not Outcome.MORE:
                return mended
            if size > LARGEST_ELEMENT:
                return Mended(Outcome.LOST, len(text) - LOOK_AHEAD)
            size *= 4

    def _skip_to_element(self, offset: int, where: int) -> None:
        """Go on at the next element that begins ``offset`` bytes on or later; without one the array is over."""
        self._at += offset
        last = ""
        while True:
            text = self._text(_SEARCH_SLICE)
            final = self._reaches_end(len(text))
            found = find_element(text, 0, self._shape, final=final)
            if found is not None:
                self._at += found
                self._scanner.state = State.AFTER_COMMA
                return
            self._search_head(text)
            last = text.rstrip()[-1:] or last
            if final:
                break
            self._at += max(1, len(text) - LOOK_AHEAD - 300)
        self._ended = True
        if last not in ("}", "]"):
            self._note_truncated(where)

    def _truncated(self, at: int | None) -> None:
        """The file ends inside the element at ``at``, or between two."""
        self._ended = True
        where = None if at is None else self._feed.base + at
        self._salvage.elements_lost += at is not None
        self._at = self._feed.length
        self._note_truncated(where)

    def _note_truncated(self, where: int | None) -> None:
        while not self._feed.final:
            self._at = self._feed.length
            self._fill()
        noun, count = self._shape.noun, self._scanner.count
        inside = "" if where is None else f", inside the {noun} that begins at byte {where}"
        plural = "" if count == 1 else "s"
        end = self._feed.base + self._feed.length
        self._salvage.tail_lost = True
        self._salvage.note(f"truncated at byte {end}{inside}, after {count} whole {noun}{plural}")

    # --- the window

    def _next(self) -> str | None:
        """Go to the next byte that is not blank; None at the end of the file."""
        while True:
            buffer, length = self._feed.buffer, self._feed.length
            while self._at < length:
                if buffer[self._at] not in _BLANKS:
                    return chr(buffer[self._at])
                self._at += 1
            if self._feed.final:
                return None
            self._fill()

    def _fill(self) -> None:
        self._feed.more(self._at)
        self._at = 0

    def _can_grow(self) -> bool:
        return not self._feed.final and self._feed.length - self._at < LARGEST_ELEMENT

    def _text(self, size: int) -> str:
        """Up to ``size`` bytes from the current place on, one character per byte."""
        while self._feed.length - self._at < size and not self._feed.final:
            self._fill()
        stop = min(self._feed.length, self._at + size)
        return str(self._feed.buffer[self._at : stop], "latin-1")

    def _reaches_end(self, size: int) -> bool:
        return self._feed.final and self._at + size >= self._feed.length


def _decode_key(raw: bytes) -> str | None:
    try:
        return msgspec.json.decode(raw, type=str)
    except msgspec.DecodeError:
        return None
