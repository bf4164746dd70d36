"""Shares of a whole, for tables that rank rows."""

import polars as pl


def share_of(column: str) -> pl.Expr:
    """Part of each row in the sum of ``column``; null where the sum is 0, since a share has no meaning there."""
    total = pl.col(column).sum()
    return pl.when(total != 0).then(pl.col(column) / total)
