"""Rows as events: text of a block of rows at a time, put together by columns."""

from collections.abc import Iterator

import msgspec
import numpy as np
import polars as pl

from chakra_capture.export.perfetto.rows import ROWS_AT_ONCE, Shown
from chakra_capture.export.perfetto.texts import args_of, encoded, joined, member, text, us
from chakra_capture.export.perfetto.tracks import RankTracks
from chakra_capture.trace.columns import MISSING

_CATEGORY = r'^\{"cat":(null|"(?:[^"\\]|\\.)*")'
_HOST = ',"host":{'
# Columns of nodes under the names that Kineto gives them.
_IDS = {
    "External id": "external_id", "correlation": "correlation_id", "Sequence number": "sequence_number",
    "Record function id": "record_function_id", "device": "device", "stream": "stream",
}  # fmt: skip
_COLUMNS = ("name", "input_shapes", "input_types", "phase", "args", *_IDS.values())


def slice_texts(shown: Shown, tracks: RankTracks, base_ns: int) -> Iterator[list[str]]:
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
        yield _events(part.hstack(table))


def _events(rows: pl.DataFrame) -> list[str]:
    rows = _with_args(rows.with_columns(encoded(rows["name"].fill_null("")), encoded(rows["phase"])))
    sized = pl.when("is_slice").then(pl.concat_str(pl.lit(',"ph":"X","dur":'), us(pl.col("dur"))))
    members = [
        *(member(name, pl.col(column)) for name, column in _IDS.items()),
        member("Input Dims", pl.col("input_shapes")), member("Input type", pl.col("input_types")),
        pl.col("args"), member("node_id", pl.col("node_id")),
        member("step", pl.when(pl.col("step") != MISSING).then("step")), member("phase", pl.col("phase")),
        pl.when("is_cut").then(pl.concat_str(pl.lit(',"clipped":true,"whole_ns":'), pl.col("whole"))),
    ]  # fmt: skip
    event = joined(
        [
            pl.lit('{"name":'), pl.col("name"), member("cat", pl.col("cat")), member("pid", pl.col("pid")),
            member("tid", pl.col("tid")), member("ts", us(pl.col("ts"))), sized.fill_null(',"ph":"i","s":"t"'),
            args_of(members), pl.lit("}"),
        ]
    )  # fmt: skip
    return rows.select(event).to_series().to_list()


def _with_args(rows: pl.DataFrame) -> pl.DataFrame:
    """Rows with their category, and with the members of args that the event had itself, each after a comma.

    As merge writes them: the category first, what only the host trace has last.
    """
    rows = rows.with_columns(cat=pl.col("args").str.extract(_CATEGORY, 1), given=pl.col("args"))
    begin = pl.concat_str(pl.lit('{"cat":'), "cat")
    body = pl.when(pl.col("cat").is_not_null()).then(pl.col("args").str.strip_prefix(begin)).otherwise(pl.lit("}"))
    # A quote right after a comma begins a key or a text: within a text it would be escaped.
    parts = rows.select(body.alias("body")).with_columns(pl.col("body").str.split_exact(_HOST, 1).alias("parts"))
    before, host = (pl.col("parts").struct.field(f"field_{at}") for at in (0, 1))
    parts = parts.select(
        args=pl.when(host.is_null()).then(pl.col("body").str.strip_suffix("}")).otherwise(before),
        # Such a key may also stand in an object of the event's own.
        is_odd=host.is_not_null() & before.str.contains("{", literal=True),
    )
    members = parts["args"]
    odd = np.flatnonzero(parts["is_odd"].fill_null(value=False).to_numpy())
    if len(odd):
        members = members.scatter(odd, [_members(args) for args in rows["given"].gather(odd)])
    cat = pl.when(pl.col("cat") != "null").then("cat")
    return rows.with_columns(cat.alias("cat"), members.alias("args"))


def _members(args: str) -> str:
    found = msgspec.json.decode(args, type=dict[str, msgspec.Raw])
    return "".join(
        f",{text(key)}:{bytes(value).decode()}" for key, value in found.items() if key not in ("cat", "host")
    )
