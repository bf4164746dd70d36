"""Columns as the readers hand them on: int64 arrays with one mark for a missing value, and coded text."""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import polars as pl

Int64 = npt.NDArray[np.int64]
Positions = npt.NDArray[np.int32]
Codes = npt.NDArray[np.signedinteger[Any]]
Ints = Int64 | Positions | npt.NDArray[np.int8]
Bool = npt.NDArray[np.bool_]
# Which rows: a stretch of them, or their numbers.
Part = slice | Int64 | Positions

# No time, id or size in a trace comes near it; turned into null where a table is written.
MISSING = int(np.iinfo(np.int64).min)
# Larger numbers are no time, process, thread or id; sums and differences of two smaller ones fit int64.
LARGEST = 2**62 - 1
# So many codes are compared one after the other.
_FEW = 8


def int_column(values: Iterable[object]) -> Int64:
    """Make an int64 column of integers, also quoted ones; anything else becomes ``MISSING``."""
    values = list(values)
    types = set(map(type, values))
    if types == {int}:
        try:
            column = np.array(values, dtype=np.int64)
        except OverflowError:
            pass
        else:
            return np.where((column >= -LARGEST) & (column <= LARGEST), column, MISSING)
    if types == {type(None)}:
        return missing(len(values))
    return np.array([one_int(value) for value in values], dtype=np.int64)


def one_int(value: object) -> int:
    """An integer, also a quoted one; anything else is ``MISSING``."""
    if isinstance(value, str):
        digits = value.isascii() and value.removeprefix("-").isdigit() and len(value) <= 20
        value = int(value) if digits else None
    elif isinstance(value, float):
        value = int(value) if value.is_integer() else None
    return value if type(value) is int and -LARGEST <= value <= LARGEST else MISSING


def missing(size: int) -> Int64:
    """A column of ``size`` missing values."""
    return np.full(size, MISSING, dtype=np.int64)


_Number = TypeVar("_Number", np.int64, np.int32, np.int8)


def pick(values: npt.NDArray[_Number], at: Int64 | Positions, none: int) -> npt.NDArray[_Number]:
    """``values[at]``, and ``none`` where ``at`` is negative."""
    if not len(values):
        return np.full(len(at), none, dtype=values.dtype)
    found = values[at]
    np.putmask(found, at < 0, none)
    return found


def is_one_of(codes: Codes, wanted: Iterable[int]) -> Bool:
    """Rows with one of a few codes: to compare narrow codes is many times faster than to look them up."""
    found = np.zeros(len(codes), dtype=bool)
    for code in wanted:
        found |= codes == code
    return found


def code_dtype(size: int) -> "np.dtype[np.signedinteger[Any]]":
    """The narrowest type for the codes of a dictionary of ``size`` texts."""
    return np.dtype(next(f"i{width}" for width in (1, 2, 4) if size <= 2 ** (8 * width - 1)))


def null_last(codes: Codes | Positions, size: int) -> Positions:
    """Codes for a dictionary of ``size`` texts that has null after them, wide enough for the code of null.

    np.where makes a plain number as narrow as the codes are: 128 beside int8 becomes -128.
    """
    return np.where(codes >= 0, codes, np.int32(size)).astype(np.int32, copy=False)


@dataclass(frozen=True, slots=True)
class Coded:
    """Text column in dictionary form: ``values[codes[i]]`` is row ``i``; code -1 is null.

    The codes of a column that was read are as narrow as its dictionary allows.
    """

    codes: Codes
    values: Sequence[str]

    def __len__(self) -> int:
        return len(self.codes)

    def narrowed(self) -> "Coded":
        """The same in as few bytes per code as the size of the dictionary allows."""
        return Coded(self.codes.astype(code_dtype(len(self.values)), copy=False), self.values)

    def mask(self, accept: Iterable[str]) -> Bool:
        """Rows whose text is one of ``accept``."""
        wanted = set(accept)
        return self.mask_of(np.array([v in wanted for v in self.values], dtype=bool))

    def mask_of(self, per_value: Bool) -> Bool:
        """Rows of the values for which ``per_value`` is true; null rows are false."""
        wanted = np.flatnonzero(per_value).tolist()
        if len(wanted) <= _FEW:
            return is_one_of(self.codes, wanted)
        return np.append(per_value, False)[self.codes]  # null, -1, takes the last

    def accepted(self, rows: Int64 | Positions, accept: Callable[[str], bool]) -> Bool:
        """Which of the given rows have a value that ``accept`` takes; null rows are false."""
        return np.array([*map(accept, self.values), False], dtype=bool)[self.codes[rows]]

    def __getitem__(self, row: int) -> str | None:
        code = int(self.codes[row])
        return None if code < 0 else self.values[code]


def coded(values: Iterable[str | None]) -> Coded:
    """Make a dictionary-coded column; None becomes null."""
    known: dict[str, int] = {}
    codes = [-1 if v is None else known.setdefault(v, len(known)) for v in values]
    return Coded(np.array(codes, dtype=np.int32), list(known))


def parse_ints(texts: Sequence[bytes | None]) -> Int64:
    """Read JSON integers, quoted or not; anything else becomes ``MISSING``."""
    if not len(texts):
        return np.zeros(0, dtype=np.int64)
    joined = b"\n".join([b"" if t is None else t for t in texts]).decode("utf-8", "replace")
    text = pl.Series(joined.replace('"', "").split("\n"), dtype=pl.String)
    if len(text) != len(texts):  # a text with a line break in it: no integer, but it shifts the rows
        return int_column(bytes(t or b"").decode("utf-8", "replace").strip('"') for t in texts)
    return text.cast(pl.Int64, strict=False).fill_null(MISSING).to_numpy()


_PLAIN_INTS = re.compile(rb"(?:-?[0-9]{1,18}\n)*+")


def parse_ids(texts: Sequence[bytes | None]) -> Int64:
    """Read JSON integers that are small enough to be an id; anything else becomes ``MISSING``."""
    present = [text for text in texts if text is not None]
    lines = b"\n".join([*present, b""])
    if _PLAIN_INTS.fullmatch(lines):
        values = np.fromstring(lines, dtype=np.int64, sep="\n") if present else np.zeros(0, dtype=np.int64)
        if len(present) == len(texts):
            return values
        column = missing(len(texts))
        column[[text is not None for text in texts]] = values
        return column
    numbers = parse_ints(texts)
    return np.where((numbers >= -LARGEST) & (numbers <= LARGEST), numbers, MISSING)


def nulls(size: int) -> Coded:
    """A text column of ``size`` nulls."""
    return Coded(np.full(size, -1, dtype=np.int32), [])


def concat_coded(first: Coded, second: Coded) -> Coded:
    """Append ``second`` to ``first``, with one dictionary."""
    # A dictionary can be larger than the rest of the trace; most columns of one side have none.
    if first.values is second.values or not len(second.values):
        return Coded(np.concatenate([first.codes, second.codes]), first.values)
    if not len(first.values):
        return Coded(np.concatenate([first.codes, second.codes]), second.values)
    known = {value: code for code, value in enumerate(first.values)}
    table = np.array([known.setdefault(v, len(known)) for v in second.values] or [-1], dtype=np.int32)
    moved = np.where(second.codes >= 0, table[second.codes], np.int32(-1)).astype(np.int32)
    return Coded(np.concatenate([first.codes, moved]), list(known))


@dataclass(frozen=True, slots=True)
class Sparse:
    """Integer column that few rows have, or that has a value of its own on each: ``values[i]`` is of ``rows[i]``."""

    rows: Int64 | Positions
    values: Int64


class IntColumn(Protocol):
    """An integer column, ``MISSING`` for none, however it is stored."""

    def __len__(self) -> int: ...
    def __getitem__(self, part: Any, /) -> Any:
        """Values of the given rows."""
        ...


@dataclass(slots=True)
class Rows:
    """Columns by name, as a scanner leaves them: integers, coded texts and sparse integers."""

    ints: dict[str, IntColumn]
    texts: dict[str, Coded]
    wide: dict[str, Sparse]

    def __len__(self) -> int:
        return len(next(iter(self.ints.values())))


def insert_rows(base: Rows, extra: Rows, before: Int64) -> Rows:
    """Put row ``i`` of ``extra`` before row ``before[i]`` of ``base``; ``before`` never falls."""
    size = len(base)
    moved = np.arange(size) + np.searchsorted(before, np.arange(size), side="right")
    placed = before + np.arange(len(before))
    order = np.empty(size + len(before), dtype=np.int64)
    order[moved], order[placed] = np.arange(size), size + np.arange(len(before))
    texts = {key: concat_coded(column, extra.texts[key]) for key, column in base.texts.items()}
    return Rows(
        ints={key: np.concatenate([column[:], extra.ints[key][:]])[order] for key, column in base.ints.items()},
        texts={key: Coded(column.codes[order], column.values) for key, column in texts.items()},
        wide={key: _insert_sparse(base.wide[key], extra.wide[key], moved, placed) for key in base.wide},
    )


def _insert_sparse(base: Sparse, extra: Sparse, moved: Int64, placed: Int64) -> Sparse:
    rows = np.concatenate([moved[base.rows], placed[extra.rows]])
    order = np.argsort(rows, kind="stable")
    return Sparse(rows[order], np.concatenate([base.values, extra.values])[order])
