"""What a rank is in an operation, and whom it waits for there."""

from enum import IntEnum

import numpy as np
import numpy.typing as npt
import polars as pl

from chakra_capture.merge.across.matching import Matches, differs
from chakra_capture.trace.columns import Bool


class Role(IntEnum):
    """A rank's part in an operation.

    UNKNOWN: an operation of a kind that nothing tells. LOOSE: one in which it is not certain who waits for whom
    (nothing is transferred, or splits are uneven and may be empty). ALL: everyone waits for everyone. SOURCE and
    TAKER: root and others of broadcast and scatter. SINK and GIVER: root and others of reduce and gather.
    """

    UNKNOWN = 0
    LOOSE = 1
    ALL = 2
    SOURCE = 3
    TAKER = 4
    SINK = 5
    GIVER = 6
    SEND = 7
    RECV = 8


SYNCHRONISING = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier")
_SPREADING, _COLLECTING = ("broadcast", "scatter"), ("reduce", "gather")

# WAITS_FOR[a, b]: a rank in role a does not end before one in role b has arrived.
_WAITING = (
    (Role.ALL, Role.ALL),
    (Role.TAKER, Role.SOURCE),
    (Role.SINK, Role.GIVER),
    (Role.RECV, Role.SEND),
)


def waits_for(who: npt.NDArray[np.int8], whom: npt.NDArray[np.int8]) -> Bool:
    """Whether a rank in the one role does not end before a rank in the other role has arrived."""
    found: Bool = np.zeros(len(who), dtype=np.bool_)
    for one, other in _WAITING:
        found |= (who == one) & (whom == other)
    return found


def roles(matches: Matches) -> npt.NDArray[np.int8]:
    """The role of every row.

    An operation of no bytes need not wait for anybody; nor does a rank for one that sends it nothing, which uneven
    splits of all_to_all may hide.
    """
    collective, is_root = pl.col("collective"), pl.col("root") == pl.col("rank")
    rows = matches.rows
    role = (
        pl.when(collective.is_in(SYNCHRONISING))
        .then(pl.lit(Role.ALL))
        .when(collective.is_in(_SPREADING))
        .then(pl.when(is_root).then(Role.SOURCE).when(~is_root).then(Role.TAKER).otherwise(Role.UNKNOWN))
        .when(collective.is_in(_COLLECTING))
        .then(pl.when(is_root).then(Role.SINK).when(~is_root).then(Role.GIVER).otherwise(Role.UNKNOWN))
        .when(collective == "send")
        .then(pl.lit(Role.SEND))
        .when(collective == "recv")
        .then(pl.lit(Role.RECV))
        .otherwise(Role.UNKNOWN)
    )
    is_empty = (pl.col("comm_bytes") == 0) & (collective != "barrier")
    loose = (is_empty | ((collective == "all_to_all") & pl.col("uneven"))).fill_null(value=False)
    found = rows.select(role=role.cast(pl.Int8), loose=loose)
    starts = matches.starts
    if not len(starts):
        return found["role"].to_numpy()
    is_loose = np.logical_or.reduceat(found["loose"].to_numpy(), starts)
    sizes = pl.when(collective == "all_to_all").then("comm_bytes").alias("sizes")
    is_loose |= differs(rows.select(sizes).to_series(), starts)
    codes = found["role"].to_numpy()
    return np.where(is_loose[matches.op] & (codes != Role.UNKNOWN), Role.LOOSE, codes).astype(np.int8)
