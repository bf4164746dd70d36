"""How the command line speaks: times for people, JSON for machines, one sentence for an error."""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from chakra_capture.errors import ChakraCaptureError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

EXIT_OK = 0
EXIT_BAD_INPUT = 1
EXIT_USAGE = 2
EXIT_INCONCLUSIVE = 3
EXIT_REGRESSION = 4


class UsageError(ChakraCaptureError):
    """The options given do not go together."""


def not_negative(_: object, value: object) -> None:
    """Refuse a negative number as wrong usage."""
    if isinstance(value, int) and value < 0:
        raise ValueError(f"{value} is negative; give 0 or more.")


def plain(text: str) -> str:
    """Text for one line of a screen: what names and files hold must not move the cursor or break the line."""
    return "".join(c if c.isprintable() else "\ufffd" for c in text)


def shortened(name: str, width: int) -> str:
    """Fit a name into ``width``: what a trace calls something may hold anything, line breaks too."""
    line = plain(name)
    return line if len(line) <= width else f"{line[: width - 1]}…"


def print_line(text: str) -> None:
    """Print one line on stdout."""
    print(plain(text))


def print_json(content: dict[str, Any]) -> None:
    """Print one JSON object with NaN-free values."""
    print(json.dumps(content, indent=2, allow_nan=False, default=str))


def print_error(message: str) -> None:
    """Print an error sentence on stderr."""
    print(f"chakra-capture: {plain(message)}", file=sys.stderr)


@contextmanager
def status(text: str) -> Iterator[Callable[[str], None]]:
    """Say on a terminal what is going on, in a line that goes away again; gives what changes it."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console

    with Console(stderr=True, markup=False).status(plain(text)) as shown:
        yield lambda text: shown.update(plain(text))


def console() -> "Console":
    """A console for stdout: 80 columns where it is no terminal, colour only on one."""
    from rich.console import Console

    wide = None if sys.stdout.isatty() else 80
    return Console(width=wide, highlight=False, soft_wrap=False, markup=False, emoji=False)


def duration(ns: float | None) -> str:
    """Write a time for people: three significant digits or whole units; ``-`` for not measured."""
    if ns is None:
        return "-"
    for unit, size in (("s", 1e9), ("ms", 1e6), ("us", 1e3)):
        if abs(ns) >= size:
            return f"{ns / size:.2f} {unit}"
    return f"{ns:.0f} ns"


def percent(part: float | None, whole: float | None) -> str:
    """Write a share; ``-`` where it has no meaning. Only the whole is 100 %, only nothing is 0 %."""
    if part is None or not whole:
        return "-"
    text = f"{100 * part / whole:.1f}"
    if text == "100.0" and part < whole:
        return "> 99.9 %"
    return "< 0.1 %" if text == "0.0" and part > 0 else f"{text} %"


def size(num_bytes: int) -> str:
    """Write a file size for people."""
    for unit, step in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(num_bytes) >= step:
            return f"{num_bytes / step:.1f} {unit}"
    return f"{num_bytes} B"


def count_of(number: int, noun: str) -> str:
    """Write a count with its noun: ``1 rank``, ``2 ranks``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def number_ranges(numbers: list[int]) -> str:
    """Write sorted numbers as ranges: ``5-10, 12``; ``none`` if there are none."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1][1:] = [number]
        else:
            parts.append([number])
    return ", ".join("-".join(str(n) for n in part) for part in parts) or "none"


def make_table(title: str, *columns: str) -> "Table":
    """A table as all verbs print them: numbers to the right, one line for a row."""
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, header_style="dim")
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table
