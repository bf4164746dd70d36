"""JSON of many rows at once: numbers and names of a column as text, members of an object side by side."""

from collections.abc import Iterable

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


def us(ns: pl.Expr) -> pl.Expr:
    """Nanoseconds as microseconds with all their digits."""
    return thousandths(ns)


def thousandths(number: pl.Expr) -> pl.Expr:
    """An integer divided by a thousand, exactly."""
    size = number.abs()
    sign = pl.when(number < 0).then(pl.lit("-")).otherwise(pl.lit(""))
    return pl.concat_str(sign, size // 1000, pl.lit("."), (size % 1000).cast(_TEXT).str.zfill(3))


def member(key: str, value: pl.Expr) -> pl.Expr:
    """``,"key":value``; null where the value is."""
    return pl.concat_str(pl.lit(f",{text(key)}:"), value.cast(_TEXT))


def joined(parts: Iterable[pl.Expr]) -> pl.Expr:
    """Texts side by side, those that are null left out."""
    return pl.concat_str(*parts, ignore_nulls=True)


def args_of(members: Iterable[pl.Expr]) -> pl.Expr:
    """``,"args":{...}`` of members, each of which begins with a comma."""
    return pl.concat_str(pl.lit(',"args":{'), joined([pl.lit(""), *members]).str.strip_prefix(","), pl.lit("}"))


def columns_as_args(rows: pl.DataFrame, names: Iterable[str]) -> tuple[pl.DataFrame, list[pl.Expr]]:
    """Rows with their texts encoded, and the members that the columns are."""
    members = []
    for name in names:
        if rows.schema[name] in (pl.String, pl.Categorical, pl.Enum):
            rows = rows.with_columns(encoded(rows[name].cast(_TEXT)).alias(name))
        members.append(member(name, pl.col(name)))
    return rows, members
