"""Readers of single settings: each takes a full key and the value as given, and returns it clean or raises.

Values come from YAML, from a command line or from Python, so a number may arrive as text and a switch as ``off``.
"""

import difflib
import math
import os
import re
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from enum import Enum
from numbers import Integral, Real
from typing import Any, TypeVar

from chakra_capture.errors import SettingsError

T = TypeVar("T")
E = TypeVar("E", bound=Enum)
Reader = Callable[[str, object], T]

# What OmegaConf's typed boolean accepts, which is what YAML 1.1 means by these words, plus 1 and 0.
_TRUE = frozenset({"true", "yes", "on", "y", "1"})
_FALSE = frozenset({"false", "no", "off", "n", "0"})
_MISSING = "???"
_WHOLE_TEXT = re.compile(r"[+-]?(?:0|[1-9][0-9]{0,17})")
_LEADING_ZERO = re.compile(r"[+-]?0[0-9_]+")
_LARGEST = 10**15
# A job id becomes the first part of folder names; a separator in it would lead out of trace_dir.
_JOB_ID = re.compile(r"[^\s/\\\x00-\x1f\x7f]{1,200}")
# The others cannot be caught, or mean something to Python, torch, a terminal or a scheduler.
_FREE_SIGNALS = ("SIGUSR1", "SIGUSR2")
# Kineto writes a path into its file without escapes, and drops what it cannot write.
_UNSAFE_IN_PATH = re.compile(r"[\\\x00-\x1f\x7f]")


def abridged(value: object) -> str:
    """Repr of a value as given, long enough for a path and short enough for a message."""
    shortener = reprlib.Repr()
    shortener.maxstring = shortener.maxother = 160
    return shortener.repr(value)


def shown(value: object) -> str:
    """Show a value as given, with its type where a reader could take it for something else."""
    if value is None:
        return "null"
    if isinstance(value, str):
        return f"the text {abridged(value)}"
    return f"{abridged(value)} ({type(value).__name__})"


def wrong(key: str, value: object, expected: str, fix: str) -> SettingsError:
    """Make the error for one value: what it is, what was expected, what to do."""
    return SettingsError(f"{key} is {shown(value)}; expected {expected}. {fix}")


def read_value(key: str, value: object, read: Reader[T]) -> T:
    """Read one value; OmegaConf's mark for a mandatory value is an error whatever the type."""
    if isinstance(value, str) and value == _MISSING:
        raise SettingsError(
            f"{key} is mandatory (???) and was given no value; expected a value from the application. "
            f"Add {key}=... to the command line or the configuration."
        )
    return read(key, value)


def boolean(key: str, value: object) -> bool:
    """Read a switch; the YAML spellings mean in text what they mean unquoted."""
    if isinstance(value, bool):
        return value
    word = value.strip().lower() if isinstance(value, str) else str(value) if isinstance(value, int) else ""
    if word in _TRUE:
        return True
    if word in _FALSE:
        return False
    raise wrong(key, value, "true or false (also yes/no, on/off)", f"Write {key}=true or {key}=false.")


def whole(minimum: int, noun: str = "a whole number") -> Reader[int]:
    """Make a reader of whole numbers from ``minimum`` on."""
    expected = f"{noun} of at least {minimum}"

    def read(key: str, value: object) -> int:
        if isinstance(value, str) and _LEADING_ZERO.fullmatch(value.strip()):
            # YAML 1.1 reads 010 as eight, Python's int() as ten: neither is a safe guess.
            raise wrong(key, value, f"{expected}, without leading zeros", "Remove the leading zeros.")
        number = _as_int(value)
        if number is None or not minimum <= number <= _LARGEST:
            raise wrong(key, value, expected, f"Write a number, for example {key}={max(minimum, 1)}.")
        return number

    return read


def _as_int(value: object) -> int | None:
    if isinstance(value, bool):
        return None
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, str):
        text = value.strip()
        if _WHOLE_TEXT.fullmatch(text):
            return int(text)
        # YAML libraries differ on whether 1e3 is a number or text.
        value = _as_float(text)
    return int(value) if isinstance(value, float) and value.is_integer() else None


def _as_float(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def number_above(limit: float) -> Reader[float]:
    """Make a reader of finite numbers greater than ``limit``."""

    def read(key: str, value: object) -> float:
        number = _as_float(value) if isinstance(value, str) else value
        if isinstance(number, bool) or not isinstance(number, Real) or not limit < _finite(number):
            raise wrong(key, value, f"a number greater than {limit:g}", f"Write for example {key}={limit + 1:g}.")
        return float(number)

    return read


def _finite(number: Real) -> float:
    try:
        value = float(number)
    except OverflowError:
        return -math.inf
    return value if math.isfinite(value) else -math.inf


def optional(read: Reader[T]) -> Reader[T | None]:
    """Make a reader that lets null through."""

    def read_optional(key: str, value: object) -> T | None:
        return None if value is None else read(key, value)

    return read_optional


def member(choices: type[E]) -> Reader[E]:
    """Make a reader of an enum, by the name of its member."""

    def read(key: str, value: object) -> E:
        if isinstance(value, choices):
            return value
        if isinstance(value, str) and value in choices.__members__:
            return choices[value]
        names = list(choices.__members__)
        raise wrong(key, value, f"one of {', '.join(names)}", f"Write for example {key}={names[0]}.")

    return read


def _text(key: str, value: object, expected: str) -> str:
    if not isinstance(value, str):
        raise wrong(key, value, expected, f"Write {key}='...', or null.")
    if value.strip().lower() in {"none", "null", ""}:
        raise wrong(key, value, f"null or {expected}", "Write null (not None, not quotes) if there is none.")
    if "${" in value:
        fix = "Read the configuration with OmegaConf, or write the value itself."
        raise wrong(key, value, f"{expected}, not an unresolved interpolation", fix)
    return value


def path(key: str, value: object) -> str:
    """Read a folder; ``~`` is expanded here, once, because no function of the standard library does."""
    expected = "the path of a folder"
    text = _text(key, os.fspath(value) if isinstance(value, os.PathLike) else value, expected)
    if _UNSAFE_IN_PATH.search(text):
        fix = "Choose a folder whose name has none of these characters."
        raise wrong(key, value, f"{expected} without backslashes, line breaks or control characters", fix)
    expanded = os.path.expanduser(text)
    if expanded.startswith("~"):
        raise wrong(key, value, f"{expected} that exists or can be created", "Write the whole path.")
    return expanded


def job_name(key: str, value: object) -> str:
    """Read a job id, which becomes part of folder names; YAML reads an unquoted id as a number."""
    given = str(value) if isinstance(value, int) and not isinstance(value, bool) else value
    expected = "a job id: no spaces, no / or \\, at most 200 characters"
    text = _text(key, given, expected)
    if not _JOB_ID.fullmatch(text) or text.startswith("."):
        raise wrong(key, value, expected, "Choose a name that can be part of a folder name, for example run-7.")
    return text


def signal_name(key: str, value: object) -> str:
    """Read the name of a signal that is free for our use."""
    expected = f"the name of a signal that nothing else uses: {' or '.join(_FREE_SIGNALS)}"
    text = _text(key, value, expected).strip().upper()
    name = text if text.startswith("SIG") else f"SIG{text}"
    if name not in _FREE_SIGNALS:
        raise wrong(key, value, expected, f"Write for example {key}=SIGUSR1.")
    return name


def rank_list(key: str, value: object) -> list[int]:
    """Read the global ranks that record; each once, at least one."""
    ranks = [whole(0, "a global rank")(f"{key}[{i}]", item) for i, item in enumerate(_items(key, value, "[0]"))]
    if not ranks or len(set(ranks)) != len(ranks):
        raise wrong(key, ranks, "a list of different global ranks, at least one", "Write null to record all ranks.")
    return ranks


def list_of(read: Reader[T], example: str) -> Reader[list[T]]:
    """Make a reader of lists that hold at least one item."""

    def read_list(key: str, value: object) -> list[T]:
        items = [read_value(f"{key}[{i}]", item, read) for i, item in enumerate(_items(key, value, example))]
        if not items:
            raise wrong(key, value, "null or a list with at least one item", f"Write for example {key}={example}.")
        return items

    return read_list


def _items(key: str, value: object, example: str) -> Sequence[object]:
    if isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray):
        return value
    raise wrong(key, value, "a list", f"Write for example {key}={example}.")


def section_of(shape: Callable[..., T]) -> Reader[T]:
    """Make a reader of a nested dataclass, given as an instance or a mapping."""

    def read(key: str, value: object) -> T:
        if isinstance(value, Mapping):
            check_known(key, value, (f.name for f in fields(shape)))  # type: ignore[arg-type]
            value = shape(**value)
        elif not isinstance(value, shape):  # type: ignore[arg-type]
            raise wrong(
                key, value, "a section of settings", f"Write its keys below it, for example {_first(shape, key)}."
            )
        return shape(**read_fields(key, value))

    return read


def _first(shape: Any, key: str) -> str:
    return f"{key}.{fields(shape)[0].name}=..."


def read_fields(key: str, given: Any) -> dict[str, Any]:
    """Read every field of a dataclass with the reader that its metadata names."""
    return {f.name: read_value(f"{key}.{f.name}", getattr(given, f.name), f.metadata["read"]) for f in fields(given)}


def nearest(key: str, names: Iterable[str], likeness: float = 0.6) -> str | None:
    """Return the name that ``key`` was most likely meant to be, None if none is near."""
    return next(iter(difflib.get_close_matches(key, list(names), n=1, cutoff=likeness)), None)


def check_known(section: str, given: Mapping[Any, object], known: Iterable[str]) -> None:
    """Refuse a key that is no setting, naming the nearest one that is.

    Raises:
        SettingsError: a key is unknown; the first one is named.
    """
    names = list(known)
    for key, value in given.items():
        if key in names:
            continue
        near = nearest(str(key), names)
        if near:
            fix = f"Did you mean {section}.{near}?"
        elif isinstance(value, Mapping) and section in value:
            fix = f"Give the section itself: {key}.{section}."
        else:
            fix = f"Remove it; the settings are {', '.join(names)}."
        raise SettingsError(f"{section}.{key}, given as {shown(value)}, is not a setting; expected a known key. {fix}")
