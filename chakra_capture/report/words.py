"""How the page writes numbers: one unit for a table, four significant digits, no 0 for what is unknown."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import floor, log10
from statistics import median

NOT_RECORDED = "not recorded"
MINUS, DASH = "\u2212", "\u2013"
_DIGITS = 4
_CODE = re.compile(r"`([^`]*)`|(\{\})")


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of a sentence; a name or a setting is code."""

    text: str
    is_code: bool = False


Prose = tuple[Part, ...]


def prose(sentence: str, *names: str) -> Prose:
    """A sentence of our own: what stands in backquotes is code, and so are the names put in for ``{}``."""
    parts, rest, at = [], iter(names), 0
    for match in _CODE.finditer(sentence):
        parts.append(Part(sentence[at : match.start()]))
        parts.append(Part(match[1] if match[2] is None else next(rest), is_code=True))
        at = match.end()
    parts.append(Part(sentence[at:]))
    return tuple(part for part in parts if part.text or part.is_code)


def plain(text: str) -> Prose:
    """A sentence that an analysis wrote, as it stands."""
    return (Part(text),)


def number(value: float, decimals: int) -> str:
    """Write a number with at most so many decimals and four significant digits."""
    whole = floor(log10(abs(value))) + 1 if value else 1
    text = f"{value:,.{max(0, min(decimals, _DIGITS - max(whole, 1)))}f}"
    return text.replace("-", MINUS)


@dataclass(frozen=True, slots=True)
class Unit:
    """The unit that times of one table share."""

    name: str
    ns: float
    decimals: int

    def cell(self, ns: float | None) -> str:
        """A time as a number alone; nothing where there is none."""
        if ns is None:
            return ""
        text = number(ns / self.ns, self.decimals)
        is_nothing = ns and float(text.replace(",", "").replace(MINUS, "-")) == 0
        return f"< {10**-self.decimals:.{self.decimals}f}" if is_nothing else text

    def text(self, ns: float | None) -> str:
        """The same with its unit; "not recorded" where there is none."""
        return NOT_RECORDED if ns is None else f"{self.cell(ns)} {self.name}"


def unit_for(values: Iterable[float | None], decimals: int = 2) -> Unit:
    """The unit of a table: ms; s where a value is 10 s or more; µs where most are below 0.1 ms."""
    known = [abs(value) for value in values if value is not None]
    if known and max(known) >= 1e10:
        return Unit("s", 1e9, decimals)
    some = [value for value in known if value]
    return Unit("µs", 1e3, decimals) if some and median(some) < 1e5 else Unit("ms", 1e6, decimals)


def span(ns: float | None) -> str:
    """A time in a sentence."""
    if ns is None:
        return NOT_RECORDED
    return unit_for([ns], 1).text(ns)


def exact(ns: int) -> str:
    """A time of which equality is the claim, to the microsecond."""
    return f"{ns / 1e6:,.3f} ms"


def share(part: float | None) -> str:
    """A share: no decimals from 10 % on, one below; only the whole is 100 %, only nothing is 0 %."""
    if part is None:
        return NOT_RECORDED
    hundred = round(100 * part, 1)
    if abs(hundred) >= 10:
        text = f"{hundred:.0f}"
        return "> 99 %" if text == "100" and part < 1 else f"{text} %".replace("-", MINUS)
    if not hundred:
        return "< 0.1 %" if part else "0 %"
    return f"{hundred:.1f} %".replace("-", MINUS)


def share_of(part: float | None, whole: float | None) -> str:
    """The share of a part in a whole."""
    return NOT_RECORDED if part is None or not whole else share(part / whole)


def saving(ns: float, *, at_most: bool = False) -> str:
    """What a step would be shorter by."""
    return f"{'up to ' if at_most else ''}{MINUS}{span(ns)}"


def size(num_bytes: float | None) -> str:
    """A number of bytes."""
    if num_bytes is None:
        return ""
    for unit, step in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= step:
            return f"{number(num_bytes / step, 1)} {unit}"
    return f"{num_bytes:.0f} B"


def bandwidth(bytes_per_s: float | None) -> str:
    """A rate in GB/s, as a number alone; nothing where it is not known."""
    if bytes_per_s is None:
        return ""
    value = bytes_per_s / 1e9
    return number(value, 1) if value >= 1 else f"{value:.3f}" if value >= 0.001 else "< 0.001"


def count(value: float | None) -> str:
    """A count; nothing where it is not known."""
    return "" if value is None else f"{value:,.0f}"


def count_of(value: int, noun: str) -> str:
    """A count with its noun."""
    return f"{value:,} {noun}{'' if value == 1 else 's'}"


def ranges(numbers: Sequence[int]) -> str:
    """Sorted numbers as ranges: 4–6, 9."""
    parts: list[list[int]] = []
    for value in numbers:
        if parts and value == parts[-1][-1] + 1:
            parts[-1][1:] = [value]
        else:
            parts.append([value])
    return ", ".join(DASH.join(str(value) for value in part) for part in parts)


def display_name(name: str) -> str:
    """A kernel's name without its return type and its arguments; what stands in angle brackets is kept."""
    bare, depth = name.removeprefix("void "), 0
    for at, character in enumerate(bare):
        depth += (character == "<") - (character == ">")
        if character == "(" and depth == 0 and at > 0 and not bare.startswith("(anonymous", at):
            return bare[:at]
    return bare
