"""Columns as the readers hand them on: int64 arrays with one mark for a missing value, and coded text."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import polars as pl

Int64 = npt.NDArray[np.int64]
Bool = npt.NDArray[np.bool_]

# No time, id or size in a trace comes near it; turned into null where a table is written.
MISSING = int(np.iinfo(np.int64).min)
# Larger numbers are no time, process, thread or id; sums and differences of two smaller ones fit int64.
LARGEST = 2**62 - 1


def int_column(values: Iterable[object]) -> Int64:
    """Make an int64 column of integers, also quoted ones; anything else becomes ``MISSING``."""
    return np.array([_one_int(v) for v in values], dtype=np.int64)


def _one_int(value: object) -> int:
    if isinstance(value, str):
        digits = value.isascii() and value.removeprefix("-").isdigit() and len(value) <= 20
        value = int(value) if digits else None
    elif isinstance(value, float):
        value = int(value) if value.is_integer() else None
    return value if type(value) is int and -LARGEST <= value <= LARGEST else MISSING


def missing(size: int) -> Int64:
    """A column of ``size`` missing values."""
    return np.full(size, MISSING, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class Coded:
    """Text column in dictionary form: ``values[codes[i]]`` is row ``i``; code -1 is null."""

    codes: npt.NDArray[np.int32]
    values: Sequence[str]

    def __len__(self) -> int:
        return len(self.codes)

    def mask(self, accept: Iterable[str]) -> Bool:
        """Rows whose text is one of ``accept``."""
        wanted = set(accept)
        return self.mask_of(np.array([v in wanted for v in self.values], dtype=bool))

    def mask_of(self, per_value: Bool) -> Bool:
        """Rows of the values for which ``per_value`` is true; null rows are false."""
        if not len(per_value):
            return np.zeros(len(self.codes), dtype=bool)
        return np.asarray(per_value[self.codes] & (self.codes >= 0))

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
