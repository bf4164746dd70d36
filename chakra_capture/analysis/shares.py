"""Shares of a whole and quantiles, for tables that rank rows."""

import polars as pl


def share_of(column: str) -> pl.Expr:
    """Part of each row in the sum of ``column``; null where the sum is 0, since a share has no meaning there."""
    total = pl.col(column).sum()
    return pl.when(total != 0).then(pl.col(column) / total)


def quantile_of(column: str, part: int, of: int) -> pl.Expr:
    """The smallest value that ``part`` of ``of`` values do not exceed (nearest rank), within a group; null of none."""
    values = pl.col(column).drop_nulls().sort()
    at = (part * pl.col(column).count().cast(pl.Int64) + of - 1) // of - 1
    return values.get(at, null_on_oob=True)
