"""The functions that autograd runs in backward, and the forward op that each is of.

Both have one sequence number. Ops that need no gradient look at the number without taking it, so several may have one:
the last before the function is its partner. Numbers count anew in each window.
"""

import numpy as np
import polars as pl

from chakra_capture.analysis.ancestry import positions
from chakra_capture.trace.columns import Bool, Int64

ENGINE_PREFIX = "autograd::engine::evaluate_function: "
NEEDED = ("window", "kind", "name", "pid", "ts_ns", "sequence_number")
_PLACE = ("window", "pid", "sequence_number")


def is_function(nodes: pl.DataFrame) -> Bool:
    """Rows that are a function of backward as the engine calls it."""
    called = nodes["name"].str.starts_with(ENGINE_PREFIX).fill_null(value=False)
    return (called & (nodes["kind"] == "host_op")).to_numpy()


def forward_ops(nodes: pl.DataFrame, functions: Bool) -> Int64:
    """The forward op of each row that is a function of backward; -1 for none, and for all other rows.

    Args:
        nodes: rows with the columns ``NEEDED``.
        functions: which of them are functions.
    """
    row, rows = np.arange(nodes.height), nodes.select(*NEEDED).with_columns(pl.Series("function", functions))
    rows = rows.with_columns(row=row).filter(
        (pl.col("kind") == "host_op") & pl.col("sequence_number").is_not_null() & pl.col("ts_ns").is_not_null()
    )
    rows = rows.select(*_PLACE, "ts_ns", "row", "function").sort("ts_ns", "row")
    ops = rows.filter(~pl.col("function")).select(*_PLACE, "ts_ns", op="row")
    pairs = rows.filter("function").join_asof(
        ops, on="ts_ns", by=_PLACE, strategy="backward", allow_exact_matches=False, check_sortedness=False
    )
    found = np.full(nodes.height, -1, dtype=np.int64)
    found[pairs["row"].to_numpy()] = pairs["op"].fill_null(-1).to_numpy()
    return found


def innermost(parent: Int64, accept: Bool) -> Int64:
    """The innermost accepted row around every row, itself included; -1 for none.

    Recorded Python functions nest a hundred deep, so the way up is halved again and again.
    """
    if not accept.any():
        return np.full(len(parent), -1, dtype=np.int64)
    outside = len(parent)
    up = np.append(np.where(parent >= 0, parent, outside), outside)
    up = np.where(np.append(accept, False), np.arange(outside + 1), up)
    while not np.array_equal(further := up[up], up):
        up = further
    found = up[:outside]
    # A row at the top is around itself, accepted or not.
    kept = np.append(accept, False)[found]
    return np.where(kept, found, -1)


def parents(nodes: pl.DataFrame) -> Int64:
    """Position of the row around each row; -1 for none.

    Args:
        nodes: rows with ``node_id``, ascending, and ``parent_id``.
    """
    ids, around = nodes["node_id"].to_numpy(), nodes["parent_id"].fill_null(-1).to_numpy()
    if len(ids) and ids[-1] - ids[0] + 1 == len(ids):  # nothing was cut out
        return np.where((around >= ids[0]) & (around <= ids[-1]), around - ids[0], -1)
    return positions(ids, around)
