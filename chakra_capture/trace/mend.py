"""Mending one damaged element: text that is nearly JSON becomes JSON, or it is said where the next element may begin.

The text comes as Latin-1, one character per byte, so that positions are bytes of the file. Patterns look ahead over a
bounded stretch, and an element is given up where another one visibly begins: the work stays linear in the file.
"""

import re
from dataclasses import dataclass
from enum import Enum, auto

MAX_DEPTH = 1000
"""Deeper nesting than this is damage (the same number stands in _scan.c)."""
LOOK_AHEAD = 1024
"""More than any pattern here looks ahead of where it matches."""
_LONGEST_TEXT = 1 << 16
_LOOK_BACK = 300


@dataclass(frozen=True, slots=True)
class Shape:
    """Which array holds the elements, what one is called, and how one begins.

    Attributes:
        begin: matches at the opening brace of an element as a writer lays it out; keys in any usual order.
        bare: the file may also be the array alone.
        head: keys beside the array that are wanted.
    """

    key: str
    noun: str
    begin: re.Pattern[str]
    bare: bool
    head: tuple[str, ...]


EVENTS = Shape(
    "traceEvents",
    "event",
    re.compile(r'\{\s{0,64}"(?:ph|name|cat|pid|tid|ts|args)"\s{0,8}:'),
    bare=True,
    head=("baseTimeNanoseconds", "distributedInfo"),
)
NODES = Shape(
    "nodes",
    "node",
    re.compile(
        r'\{\s{0,64}"(?:id"\s{0,8}:\s{0,8}\d|name"\s{0,8}:\s{0,8}"[^"\\]{0,400}"\s{0,8},\s{0,64}"'
        r"(?:id|ctrl_deps|inputs|attrs|outputs)\"|(?:ctrl_deps|attrs|fw_parent)\"\s{0,8}:)"
    ),
    bare=False,
    head=("schema", "pid", "finish_ts"),
)

QUOTE = "unescaped quote in a text"
BACKSLASH = "backslash in a text taken literally"
CONTROL = "control character in a text kept"
SURROGATE = "half a surrogate pair replaced"
UTF8 = "invalid UTF-8 replaced"
NOT_A_NUMBER = "NaN or infinity kept as text"
COMMA = "surplus comma"
TOO_DEEP = f"nested deeper than {MAX_DEPTH}"


class Outcome(Enum):
    """How mending ended: MORE needs more of the file; CUT reached its end."""

    MENDED = auto()
    LOST = auto()
    CUT = auto()
    MORE = auto()


@dataclass(frozen=True, slots=True)
class Mended:
    """Result of mending; ``at`` is after the element, or where to look for the next one."""

    outcome: Outcome
    at: int
    text: bytes = b""
    causes: tuple[str, ...] = ()


_BLANK = r"[ \t\r\n]"
_SPACE = re.compile(rf"{_BLANK}*")
_STRICT = re.compile(r'"[^"\\\x00-\x1f]*(?:\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})[^"\\\x00-\x1f]*)*"')
_LENIENT = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?(?=[\s,\]}])")
_WORD = re.compile(r"(?:true|false|null)(?=[\s,\]}])")
_NOT_FINITE = re.compile(r"[+-]?(?:nan|inf(?:inity)?|1\.#(?:inf|ind|qnan|snan)[0-9]{0,3})(?=[\s,\]}])", re.IGNORECASE)
_AFTER_KEY = re.compile(rf"{_BLANK}{{0,256}}:")
# What follows the closing quote of a member's text: the next member, or the end of the object and what ends that.
_AFTER_TEXT = re.compile(
    rf'{_BLANK}{{0,256}}(?:,{_BLANK}{{0,256}}"[^"\\]{{0,120}}"{_BLANK}{{0,256}}:'
    rf"|,?{_BLANK}{{0,256}}\}}{_BLANK}{{0,256}}(?:[,}}\]]|\Z))"
)
_TO_MEND = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})|([\\"\x00-\x1f])', re.DOTALL)
_SURROGATES = re.compile(
    r"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(u[dD][89a-fA-F][0-9a-fA-F]{2})|.)", re.DOTALL
)
_CLOSER = {"{": "}", "[": "]"}


def mend(text: str, shape: Shape, *, final: bool, deep: bool = False) -> Mended:
    """Mend the element at the front of ``text``, which begins with a brace.

    Args:
        text: the file from the element on, as far as it is at hand.
        final: ``text`` reaches to the end of the file.
        deep: the element nests too deep; then only the place where it does is looked for.
    """
    mender = _Mender(text, shape, deep)
    try:
        mender.run()
        result = mender.result()
    except _GiveUpError as stop:
        result = Mended(Outcome.LOST, stop.at, causes=stop.causes)
    except IndexError:  # the text ended
        return Mended(Outcome.CUT if final else Outcome.MORE, len(text))
    if not final and result.at + LOOK_AHEAD > len(text):
        return Mended(Outcome.MORE, result.at)
    return result


def find_element(text: str, start: int, shape: Shape, *, final: bool) -> int | None:
    """Where the next element begins at or after ``start``; None if none is seen before the end of ``text``."""
    for match in shape.begin.finditer(text, start):
        if not final and match.end() + LOOK_AHEAD > len(text):
            return None
        before = text[max(0, match.start() - _LOOK_BACK) : match.start()].rstrip(" \t\r\n")
        if not before.endswith(":"):  # else it is the value of a member
            return match.start()
    return None


class _GiveUpError(Exception):
    def __init__(self, at: int, *causes: str) -> None:
        self.at = at
        self.causes = causes


class _Mender:
    def __init__(self, text: str, shape: Shape, deep: bool) -> None:
        self.text = text
        self.shape = shape
        self.deep = deep
        self.at = 0
        self.open: list[str] = []
        self.expects = False  # a member or item stands next
        self.out: list[str] = []
        self.causes: list[str] = []

    def result(self) -> Mended:
        raw = "".join(self.out)
        if "\\u" in raw:
            raw = _SURROGATES.sub(self._surrogate, raw)
        data = raw.encode("latin-1")
        try:
            data.decode()
        except UnicodeDecodeError:
            data = data.decode("utf-8", "replace").encode()
            self.causes.append(UTF8)
        return Mended(Outcome.MENDED, self.at, data, tuple(dict.fromkeys(self.causes)))

    def run(self) -> None:
        self._value()
        while self.open:
            if self.expects:
                self.expects = False
                self._item()
                continue
            self._space()
            char = self.text[self.at]
            if char == ",":
                self._comma()
            elif char == _CLOSER[self.open[-1]]:
                self._close()
            else:
                raise _GiveUpError(self.at)

    def _comma(self) -> None:
        """One or more commas, then a member or item, unless the container ends here."""
        first = self.at
        while self.text[self.at] == ",":
            self.at += 1
            self._space()
        if self.text[first : self.at].count(",") > 1:
            self.causes.append(COMMA)
        if self.text[self.at] == _CLOSER[self.open[-1]]:
            self.causes.append(COMMA)
            return
        self.out.append(",")
        self.expects = True

    def _item(self) -> None:
        if self.open[-1] == "{":
            self._key()
        self._value()

    def _key(self) -> None:
        if self.text[self.at] != '"':
            raise _GiveUpError(self.at)
        self._copy(_STRICT, _LENIENT)
        self._space()
        if self.text[self.at] != ":":
            raise _GiveUpError(self.at)
        self.at += 1
        self.out.append(":")
        self._space()

    def _value(self) -> None:
        char = self.text[self.at]
        if char in "{[":
            self._enter(char)
        elif char == '"':
            self._string()
        else:
            self._scalar()

    def _enter(self, char: str) -> None:
        in_array = bool(self.open) and self.open[-1] == "["
        if in_array and not self.deep and self.shape.begin.match(self.text, self.at):
            raise _GiveUpError(self.at)  # the array was never closed: here is the next element
        self.open.append(char)
        if len(self.open) > MAX_DEPTH:
            raise _GiveUpError(self.at, TOO_DEEP)
        self.out.append(char)
        self.at += 1
        self._space()
        while self.text[self.at] == ",":
            self.causes.append(COMMA)
            self.at += 1
            self._space()
        if self.text[self.at] == _CLOSER[char]:
            self._close()
        else:
            self.expects = True

    def _close(self) -> None:
        self.out.append(_CLOSER[self.open.pop()])
        self.at += 1

    def _space(self) -> None:
        match = _SPACE.match(self.text, self.at)
        if match and match.end() > self.at:
            self.out.append(match[0])
            self.at = match.end()

    def _scalar(self) -> None:
        match = _NUMBER.match(self.text, self.at) or _WORD.match(self.text, self.at)
        if match:
            self.out.append(match[0])
        else:
            match = _NOT_FINITE.match(self.text, self.at)
            if not match:
                self._missing_text()
                raise _GiveUpError(self.at)
            self.out.append(f'"{match[0]}"')
            self.causes.append(NOT_A_NUMBER)
        self.at = match.end()

    def _missing_text(self) -> None:
        """At the end of the text a number or word may go on."""
        if len(self.text) - self.at < 24:
            raise IndexError

    def _string(self) -> None:
        """A text as a value: whole as it stands, or up to the first quote that what follows shows to be its end."""
        if self.open and self.open[-1] == "[":
            self._copy(_STRICT, _LENIENT)
            return
        whole = _STRICT.match(self.text, self.at)
        if whole and _AFTER_TEXT.match(self.text, whole.end()):
            self.out.append(whole[0])
            self.at = whole.end()
            return
        end = self._closing_quote()
        if end is None:
            if not whole:
                raise _GiveUpError(self.at)
            end = whole.end() - 1
        self._put(self.text[self.at + 1 : end])
        self.at = end + 1

    def _closing_quote(self) -> int | None:
        """Looked for in a stretch that grows, together with the beginning of another element before it."""
        size = 256
        while True:
            stop = min(len(self.text), self.at + size)
            end = self.text.find('"', self.at + 1, stop)
            while end >= 0 and not _AFTER_TEXT.match(self.text, end + 1):
                end = self.text.find('"', end + 1, stop)
            begins = self.shape.begin.search(self.text, self.at, stop if end < 0 else end)
            if begins:
                raise _GiveUpError(begins.start())
            if end >= 0:
                return end
            if stop == len(self.text):
                raise IndexError
            if size >= _LONGEST_TEXT:
                return None
            size *= 4

    def _copy(self, strict: re.Pattern[str], lenient: re.Pattern[str]) -> None:
        match = strict.match(self.text, self.at)
        if match:
            self.out.append(match[0])
        else:
            stop = min(len(self.text), self.at + _LONGEST_TEXT)
            match = lenient.match(self.text, self.at, stop)
            if not match:
                if stop == len(self.text):
                    raise IndexError
                raise _GiveUpError(self.at)
            begins = self.shape.begin.search(self.text, self.at, match.end())
            if begins:
                raise _GiveUpError(begins.start())
            self._put(match[0][1:-1])
        self.at = match.end()

    def _put(self, body: str) -> None:
        self.out.append(f'"{_TO_MEND.sub(self._character, body)}"')

    def _character(self, match: re.Match[str]) -> str:
        char = match[1]
        if char is None:
            return match[0]
        if char == "\\":
            self.causes.append(BACKSLASH)
            return r"\\"
        if char == '"':
            self.causes.append(QUOTE)
            return r"\""
        self.causes.append(CONTROL)
        return f"\\u{ord(char):04x}"

    def _surrogate(self, match: re.Match[str]) -> str:
        if match[1] is None:
            return match[0]
        self.causes.append(SURROGATE)
        return r"\ufffd"
