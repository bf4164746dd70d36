"""What stands in traces as it may stand on a page: nothing reorders a line, nothing is endless, no path is told."""

import re
import unicodedata
from collections.abc import Callable

from markupsafe import Markup

LONGEST = 400
_HIDDEN = ("Cc", "Cf", "Co", "Cs", "Zl", "Zp")
# Two parts at least: "/s" of a rate is no path, nor is "and/or" one.
_PLACE = re.compile(r"(?<![\w/.<])(?:[A-Za-z]:\\|~?/)(?:[^\s/\\:'\"]+[/\\])+([^\s/\\:'\"]*)")


def shown(text: str) -> str:
    """Write control and direction characters as escapes, and cut the middle out of what is too long."""
    if len(text) > LONGEST:
        half = LONGEST // 2
        text = f"{text[:half]}…{text[-half + 1 :]}"
    if text.isascii() and text.isprintable():
        return text
    return "".join(_escaped(c) if unicodedata.category(c) in _HIDDEN else c for c in text)


def _escaped(character: str) -> str:
    return {"\n": "\\n", "\t": "\\t", "\r": "\\r"}.get(character, f"\\u{{{ord(character):x}}}")


def without_places(text: str) -> str:
    """Cut the folders off paths: a report is mailed to others."""
    return _PLACE.sub(r"…/\1", text)


def finalizer(*, show_paths: bool) -> Callable[[object], object]:
    """What the page does with each value before it escapes it; markup of our own passes."""

    def finalize(value: object) -> object:
        if value is None or isinstance(value, Markup):
            return "" if value is None else value
        text = str(value)
        return shown(text if show_paths else without_places(text))

    return finalize
