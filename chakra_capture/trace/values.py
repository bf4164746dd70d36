"""Values of tables as JSON, as text and as the flat columns that CSV has room for."""

import json
import math
from typing import Any

import polars as pl


def as_json(value: Any) -> Any:
    """A value that JSON can hold; a float that it has no number for is a text, never null, which is another thing."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else _not_finite(value)
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, dict):
        return {str(key): as_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple | pl.Series):
        return [as_json(item) for item in value]
    return str(value)


def as_text(value: Any) -> str:
    """A value as a cell of a table."""
    if isinstance(value, str):
        return value
    if isinstance(value, float) and math.isfinite(value):
        return f"{value:.6g}" if abs(value) < 1e6 else f"{value:.1f}"
    plain = as_json(value)
    return plain if isinstance(plain, str) else json.dumps(plain)


def flat(frame: pl.LazyFrame) -> pl.LazyFrame:
    """Turn the columns that CSV cannot hold into text: lists and structs into JSON, bytes into hexadecimal."""
    return frame.with_columns(
        _flat_column(name, dtype)
        for name, dtype in frame.collect_schema().items()
        if dtype.is_nested() or dtype == pl.Binary
    )


def _flat_column(name: str, dtype: pl.DataType) -> pl.Expr:
    if dtype == pl.Binary:
        return pl.col(name).bin.encode("hex")
    return pl.col(name).map_elements(lambda value: json.dumps(as_json(value)), return_dtype=pl.String)


def _not_finite(value: float) -> str:
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
