"""JSON of many rows at once: numbers and names of a column as text, members of an object side by side."""

from collections.abc import Iterable, Mapping

import msgspec
import polars as pl

_TEXT = pl.String


def text(value: str) -> str:
    """JSON of one text."""
    return str(msgspec.json.encode(value), "utf-8")


def encoded(column: pl.Series) -> pl.Series:
    """JSON of each text; null stays so. Names repeat, so each is encoded once."""
    names = column.drop_nulls().unique()
    if names.is_empty():
        return pl.Series(column.name, [None], dtype=_TEXT).new_from_index(0, len(column))
    made = pl.Series([text(name) for name in names.to_list()], dtype=_TEXT)
    return column.replace_strict(names, made, default=None, return_dtype=_TEXT)


def us(ns: pl.Expr) -> list[pl.Expr]:
    """Nanoseconds, not negative, as microseconds with all their digits: two texts."""
    return [(ns // 1000).cast(_TEXT), pl.lit(pl.Series([f".{rest:03d}" for rest in range(1000)])).gather(ns % 1000)]


def member(key: str, *value: pl.Expr) -> pl.Expr:
    """``,"key":value``; null where the value is."""
    return pl.concat_str(pl.lit(f",{text(key)}:"), *(part.cast(_TEXT) for part in value))


def joined(parts: Iterable[pl.Expr | str | list[pl.Expr]]) -> pl.Expr:
    """Texts side by side, those that are null left out."""
    flat: list[pl.Expr] = []
    for part in parts:
        flat += part if isinstance(part, list) else [pl.lit(part) if isinstance(part, str) else part]
    return pl.concat_str(flat, ignore_nulls=True)


def block(rows: pl.DataFrame, event: pl.Expr) -> str:
    """The texts of all rows in one, as elements of a list."""
    return str(rows.select(event.str.join(",\n")).item())


def members_of(rows: pl.DataFrame, columns: Mapping[str, str]) -> list[pl.Expr]:
    """Members for the columns in which anything stands."""
    return [member(key, pl.col(name)) for key, name in columns.items() if rows[name].null_count() < rows.height]


def with_texts(rows: pl.DataFrame, names: Iterable[str]) -> pl.DataFrame:
    """Rows with the texts in these columns encoded."""
    some = (name for name in names if rows.schema[name] in (pl.String, pl.Categorical, pl.Enum))
    return rows.with_columns(encoded(rows[name].cast(_TEXT)).alias(name) for name in some)
