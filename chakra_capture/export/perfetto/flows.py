"""Arrows: from launch to kernel, from forward to backward, between the ranks of a collective, along the critical path.

An arrow begins and ends inside a slice of its track, or is left out and counted: outside what is shown, or backward.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import polars as pl

from chakra_capture.export.perfetto.rows import Rows, Shown
from chakra_capture.export.perfetto.texts import block, joined, text, us
from chakra_capture.export.perfetto.tracks import RankTracks
from chakra_capture.trace.columns import MISSING, Int64

LAUNCH, BACKWARD, COLLECTIVE, PATH = "ac2g", "fwdbwd", "collective", "critical path"
# Of the collectives of more ranks only the longest waits get an arrow.
MOST_RANKS, MOST_ARROWS = 64, 8
_AT_ONCE = 1 << 14

PLACES: dict[str, pl.DataType | type[pl.DataType]] = {
    "rank": pl.Int64, "node_id": pl.Int64, "pid": pl.Int64, "tid": pl.Int64, "begin": pl.Int64, "end": pl.Int64,
}  # fmt: skip


@dataclass(slots=True)
class Ids:
    """Numbers of arrows, unique over kinds and ranks."""

    next: int = 1

    def take(self, count: int) -> Int64:
        first = self.next
        self.next += count
        return np.arange(first, self.next, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class Counted:
    """Arrows of a kind: written; one end not shown; backward, by a fault of the clocks."""

    written: int = 0
    outside: int = 0
    backward: int = 0

    def __add__(self, other: "Counted") -> "Counted":
        return Counted(self.written + other.written, self.outside + other.outside, self.backward + other.backward)


@dataclass(frozen=True, slots=True)
class Arrows:
    """Arrows of a kind as columns ``pid``, ``tid``, ``ts`` of both ends (``_to``)."""

    kind: str
    table: pl.DataFrame
    counted: Counted

    def texts(self, ids: Ids, base_ns: int) -> Iterator[tuple[int, str]]:
        for begin in range(0, self.table.height, _AT_ONCE):
            part = self.table.slice(begin, _AT_ONCE)
            part = part.with_columns(pl.Series("id", ids.take(part.height)))
            kind = text(self.kind)
            event = joined(
                [
                    f'{{"cat":{kind},"name":{kind},"id":', pl.col("id").cast(pl.String), ',"ph":"s","pid":',
                    pl.col("pid").cast(pl.String), ',"tid":', pl.col("tid").cast(pl.String), ',"ts":',
                    us(pl.col("ts") - base_ns),
                    f'}},\n{{"cat":{kind},"name":{kind},"id":', pl.col("id").cast(pl.String),
                    ',"ph":"f","bp":"e","pid":', pl.col("pid_to").cast(pl.String), ',"tid":',
                    pl.col("tid_to").cast(pl.String), ',"ts":',
                    us(pl.col("ts_to") - base_ns), "}",
                ]
            )  # fmt: skip
            yield 2 * part.height, block(part, event)


def launch_arrows(shown: Shown, tracks: RankTracks) -> Arrows:
    """From the start of the launch call to the start of what it launched."""
    rows = shown.rows
    launched = np.flatnonzero(rows.is_kind("kernel", "memcpy", "memset") & (rows.launch != MISSING))
    return _between(LAUNCH, shown, tracks, rows.positions(rows.launch[launched]), launched)


def backward_arrows(shown: Shown, tracks: RankTracks, is_engine: "np.typing.NDArray[np.bool_]") -> Arrows:
    """From a forward op to the function of the backward pass with its sequence number."""
    rows = shown.rows
    known = (rows.sequence != MISSING) & (rows.begin != MISSING) & (rows.dur != MISSING) & rows.is_kind("host_op")
    functions, ops = (np.flatnonzero(known & chosen) for chosen in (is_engine, ~is_engine))
    forward = _table(rows, ops).with_columns(op=pl.col("row"), begin=pl.col("ts")).drop("row").sort("ts")
    # Ops that need no gradient look at the number without taking it, so the last one before it counts.
    found = _table(rows, functions).sort("ts").join_asof(
        forward, on="ts", by=["window", "sequence"], strategy="backward", check_sortedness=False
    ).filter(pl.col("op").is_not_null())  # fmt: skip
    return _between(BACKWARD, shown, tracks, found["op"].to_numpy(), found["row"].to_numpy())


def _table(rows: Rows, row: Int64) -> pl.DataFrame:
    columns = {"row": row, "window": rows.window[row], "sequence": rows.sequence[row], "ts": rows.begin[row]}
    return pl.DataFrame(columns)


def _between(kind: str, shown: Shown, tracks: RankTracks, source: Int64, target: Int64) -> Arrows:
    """Arrows between the starts of rows, given by their numbers."""
    at, to = (_slices(shown, rows) for rows in (source, target))
    both = (at >= 0) & (to >= 0)
    outside = int(np.count_nonzero(~both & ((at >= 0) | (to >= 0))))
    at, to = at[both], to[both]
    table = pl.DataFrame(
        {
            "pid": tracks.pid[at], "tid": tracks.tid[at], "ts": shown.begin[at], "pid_to": tracks.pid[to],
            "tid_to": tracks.tid[to], "begin": shown.begin[to], "end": shown.end[to],
        }
    )  # fmt: skip
    return _forward(kind, table, outside)


def _slices(shown: Shown, rows: Int64) -> Int64:
    """Positions of rows that are shown as slices; -1 for others."""
    at = shown.positions(rows)
    found = at[at >= 0]
    at[at >= 0] = np.where(shown.is_slice[found], found, -1)
    return at


def _forward(kind: str, table: pl.DataFrame, outside: int) -> Arrows:
    """The arrows that can end inside their second slice without going back in time.

    At the very end of a slice a viewer takes the one that begins there instead.
    """
    ahead = table.with_columns(ts_to=pl.max_horizontal("begin", "ts"))
    ahead = ahead.filter(pl.col("ts_to") <= _last_ns())
    return Arrows(kind, ahead, Counted(ahead.height, outside, table.height - ahead.height))


def _last_ns() -> pl.Expr:
    """The last ns of a slice, or the only instant of one without a length."""
    return pl.max_horizontal("begin", pl.col("end") - 1)


def places_of(rank: int, shown: Shown, tracks: RankTracks, node_ids: Int64) -> pl.DataFrame:
    """Where these rows are shown as slices; of ``PLACES``."""
    rows = shown.rows
    at = _slices(shown, rows.positions(np.unique(node_ids)))
    at = at[at >= 0]
    return pl.DataFrame(
        {
            "rank": np.full(len(at), rank), "node_id": rows.node_id[shown.row[at]], "pid": tracks.pid[at],
            "tid": tracks.tid[at], "begin": shown.begin[at], "end": shown.end[at],
        },
        schema=PLACES,
    )  # fmt: skip


def collective_arrows(collectives: pl.DataFrame, places: pl.DataFrame) -> Arrows:
    """From the rank that arrived last to each other rank that took part.

    Args:
        collectives: the table of the run.
        places: of its rows, of all ranks that are shown.
    """
    known = collectives.filter(
        pl.col("node_id").is_not_null() & pl.col("last_rank").is_not_null() & (pl.col("num_found") > 1)
    ).with_columns(pl.col("rank").cast(pl.Int64), pl.col("last_rank").cast(pl.Int64))
    placed = known.join(places, on=["rank", "node_id"], how="left", maintain_order="left")
    last = placed.filter(pl.col("rank") == pl.col("last_rank")).select(
        "collective_id", "pid", "tid", ts="begin"
    ).unique("collective_id", keep="first")  # fmt: skip
    others = placed.filter(pl.col("rank") != pl.col("last_rank")).select(
        "collective_id", "wait_ns", "num_found", pid_to="pid", tid_to="tid", begin="begin", end="end"
    )
    order = pl.col("wait_ns").rank("ordinal", descending=True).over("collective_id")
    others = others.filter((pl.col("num_found") <= MOST_RANKS) | (order <= MOST_ARROWS))
    both = others.join(last, on="collective_id", how="left", maintain_order="left", validate="m:1")
    is_there = pl.col("pid").is_not_null(), pl.col("pid_to").is_not_null()
    outside = both.filter(is_there[0] != is_there[1]).height
    return _forward(COLLECTIVE, both.filter(is_there[0] & is_there[1]), outside)


def path_arrows(path: pl.DataFrame, places: pl.DataFrame) -> Arrows:
    """Along the critical path, where it goes on on another track.

    Args:
        path: its parts in order.
        places: of their rows.
    """
    parts = path.filter(pl.col("node_id").is_not_null()).with_columns(pl.col("rank").cast(pl.Int64))
    placed = parts.join(places, on=["rank", "node_id"], how="left", maintain_order="left")
    # The part may be a lag before its row: the arrow stays inside the row.
    inside = [pl.col(name).clip(pl.col("begin"), _last_ns()) for name in ("begin_ns", "end_ns")]
    placed = placed.select("pid", "tid", begin=inside[0], ts=inside[1], end="end")
    after = placed.shift(-1).select(pid_to="pid", tid_to="tid", begin="begin", end="end")
    pairs = pl.concat([placed.select("pid", "tid", "ts"), after], how="horizontal").head(-1)
    is_there = pl.col("pid").is_not_null(), pl.col("pid_to").is_not_null()
    outside = pairs.filter(is_there[0] != is_there[1]).height
    return _forward(PATH, pairs.filter(is_there[0] & is_there[1] & (pl.col("tid") != pl.col("tid_to"))), outside)
