"""Groups of rows that are alike in several columns, by number: millions of rows are grouped by one integer."""

from collections.abc import Sequence

import numpy as np
import polars as pl

from chakra_capture.trace.columns import Int64

# Up to so many possible combinations are looked up; more are sorted.
_MOST_LOOKED_UP = 1 << 24


def group_of_rows(table: pl.DataFrame, keys: Sequence[str]) -> Int64:
    """Number of the group of each row, from 0 on; nulls are alike.

    Args:
        table: rows.
        keys: columns of texts, integers, truth values or categories.
    """
    number, size = np.zeros(table.height, dtype=np.int64), 1
    for key in keys:
        codes = _codes(table[key])
        num_codes = int(codes.max(initial=0)) + 1
        number, size = _dense(number * num_codes + codes, size * num_codes)
    return number


def _codes(column: pl.Series) -> Int64:
    """A number from 0 on for each value, the same for equal ones."""
    if column.dtype == pl.String:
        column = column.cast(pl.Categorical)
    if column.dtype in (pl.Categorical, pl.Enum):
        return _of_texts(column)
    values, known = column.cast(pl.Int64).fill_null(0).to_numpy(), column.is_not_null().to_numpy()
    low, high = int(values.min(initial=0)), int(values.max(initial=0))
    if high - low >= _MOST_LOOKED_UP:
        return np.where(known, np.unique(values, return_inverse=True)[1] + 1, 0)
    return _dense(np.where(known, values - low + 1, 0), high - low + 2)[0]


def _of_texts(column: pl.Series) -> Int64:
    codes = column.to_physical().cast(pl.Int64).fill_null(-1).to_numpy() + 1
    return _dense(codes, int(codes.max(initial=0)) + 1)[0]


def _dense(codes: Int64, size: int) -> tuple[Int64, int]:
    """Codes below ``size`` without those that do not occur, and how many are left."""
    if size > _MOST_LOOKED_UP:
        values, number = np.unique(codes, return_inverse=True)
        return number.astype(np.int64), len(values)
    occurs = np.zeros(size, dtype=bool)
    occurs[codes] = True
    return (np.cumsum(occurs) - 1)[codes], int(occurs.sum())
