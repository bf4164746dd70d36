"""Rows as events: text of a block of rows at a time, put together by columns."""

from collections.abc import Iterator

import msgspec
import numpy as np
import polars as pl

from chakra_capture.export.perfetto.rows import ROWS_AT_ONCE, Shown
from chakra_capture.export.perfetto.texts import block, encoded, joined, member, members_of, text, us
from chakra_capture.export.perfetto.tracks import RankTracks
from chakra_capture.trace.columns import MISSING

_CATEGORY = r'^\{"cat":(null|"(?:[^"\\]|\\.)*")'
_HEAD = '{"cat":'
_HOST = ',"host":{'
# Columns of nodes under the names that Kineto gives them.
_IDS = {
    "External id": "external_id", "correlation": "correlation_id", "Sequence number": "sequence_number",
    "Record function id": "record_function_id", "device": "device", "stream": "stream",
}  # fmt: skip
# Text is put together in pieces that a processor's cache holds.
_AT_ONCE = 1 << 14
_COLUMNS = ("kind", "name", "input_shapes", "input_types", "phase", "args", *_IDS.values())
_MEMBERS = {**_IDS, "Input Dims": "input_shapes", "Input type": "input_types", "step": "step", "phase": "phase"}


def slice_texts(shown: Shown, tracks: RankTracks, base_ns: int) -> Iterator[tuple[int, str]]:
    """Events of the rows that are shown, in the order of the table, so each track by time; none of samples."""
    is_event = ~shown.rows.is_kind("memory")[shown.row]
    drawn = pl.DataFrame(
        {
            "row": shown.row, "pid": tracks.pid, "tid": tracks.tid, "ts": shown.begin - base_ns,
            "dur": shown.end - shown.begin, "is_cut": shown.is_cut, "is_slice": shown.is_slice,
            "node_id": shown.rows.node_id[shown.row], "step": shown.rows.step[shown.row],
            "whole": shown.rows.dur[shown.row],
        }
    ).filter(pl.Series(is_event))  # fmt: skip
    rows = drawn["row"].to_numpy()
    for begin in range(0, len(shown.rows), ROWS_AT_ONCE):
        first, last = rows.searchsorted([begin, begin + ROWS_AT_ONCE])
        if first == last:
            continue
        part = drawn[int(first) : int(last)]
        table = shown.rows.table.slice(begin, ROWS_AT_ONCE).select(_COLUMNS).collect()
        table = table[part["row"].to_numpy() - begin]
        both = part.hstack(table)
        for at in range(0, both.height, _AT_ONCE):
            some = both.slice(at, _AT_ONCE)
            yield some.height, _events(some)


def _events(rows: pl.DataFrame) -> str:
    rows = _with_args(rows.with_columns(encoded(rows["name"].fill_null("")), encoded(rows["phase"])))
    # Kineto's annotations on the device name no stream, and HTA takes what names one for work of it.
    places = (pl.when(pl.col("kind") != "device_annotation").then(name).alias(name) for name in ("device", "stream"))
    rows = rows.with_columns(*places, step=pl.when(pl.col("step") != MISSING).then("step"))
    sized = pl.concat_str(pl.lit(',"ph":"X","dur":'), *us(pl.col("dur")))
    cut = pl.concat_str(pl.lit(',"clipped":true,"whole_ns":'), pl.col("whole").cast(pl.String))
    event = joined(
        [
            '{"name":', pl.col("name"), member("cat", pl.col("cat")), ',"pid":', pl.col("pid").cast(pl.String),
            ',"tid":', pl.col("tid").cast(pl.String), ',"ts":', us(pl.col("ts")),
            sized if rows["is_slice"].all() else pl.when("is_slice").then(sized).otherwise(pl.lit(',"ph":"i","s":"t"')),
            ',"args":{"node_id":', pl.col("node_id").cast(pl.String), members_of(rows, _MEMBERS), pl.col("args"),
            pl.when("is_cut").then(cut) if rows["is_cut"].any() else "", "}}",
        ]
    )  # fmt: skip
    return block(rows, event)


def _with_args(rows: pl.DataFrame) -> pl.DataFrame:
    """Rows with their category, and with the members of args that the event had itself, each after a comma.

    As merge writes them: the category first, what only the host trace has last.
    """
    given = rows["args"]
    parts = rows.select("args", cat=pl.col("args").str.extract(_CATEGORY, 1))
    # A quote right after a comma begins a key or a text: within a text it would be escaped.
    host = pl.col("args").str.find(_HOST, literal=True).cast(pl.Int64)
    parts = parts.with_columns(begin=len(_HEAD) + pl.col("cat").str.len_bytes().cast(pl.Int64), host=host)
    length = pl.coalesce("host", pl.col("args").str.len_bytes().cast(pl.Int64) - 1) - pl.col("begin")
    parts = parts.with_columns(args=pl.col("args").cast(pl.Binary).bin.slice("begin", length).cast(pl.String))
    # Such a key may also stand in an object of the event's own.
    is_odd = parts.select(pl.col("host").is_not_null() & pl.col("args").str.contains("{", literal=True)).to_series()
    odd = np.flatnonzero(is_odd.fill_null(value=False).to_numpy())
    members = parts["args"]
    if len(odd):
        members = members.scatter(odd, [_members(args) for args in given.gather(odd)])
    return rows.with_columns(members, cat=parts["cat"].replace({"null": None}))


def _members(args: str) -> str:
    found = msgspec.json.decode(args, type=dict[str, msgspec.Raw])
    return "".join(
        f",{text(key)}:{bytes(value).decode()}" for key, value in found.items() if key not in ("cat", "host")
    )
