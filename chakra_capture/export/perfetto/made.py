"""Intervals and counters as events."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import polars as pl

from chakra_capture.export.perfetto.cut import Spans
from chakra_capture.export.perfetto.given import INTERVALS, Counter, Intervals
from chakra_capture.export.perfetto.texts import block, encoded, joined, members_of, text, us, with_texts
from chakra_capture.export.perfetto.tracks import Process
from chakra_capture.merge.lanes import assign_lanes, slice_order

_AT_ONCE = 1 << 14


@dataclass(frozen=True, slots=True)
class Drawn:
    """Intervals as they are shown: ``tid``, ``begin`` and ``end`` of each row."""

    pid: int
    category: str
    rows: pl.DataFrame

    def texts(self, base_ns: int) -> Iterator[tuple[int, str]]:
        own = ("tid", "begin", "end", "is_cut", *INTERVALS)
        for at in range(0, self.rows.height, _AT_ONCE):
            part = self.rows.slice(at, _AT_ONCE)
            args = [name for name in part.columns if name not in own]
            part = with_texts(part.with_columns(encoded(part["name"].cast(pl.String).fill_null(""))), args)
            members = members_of(part, {name: name for name in args})
            members.append(pl.when("is_cut").then(pl.lit(',"clipped":true')))
            event = joined(
                [
                    '{"name":', pl.col("name"), f',"cat":{text(self.category)},"ph":"X","pid":{self.pid},"tid":',
                    pl.col("tid").cast(pl.String), ',"ts":', us(pl.col("begin") - base_ns), ',"dur":',
                    us(pl.col("end") - pl.col("begin")), ',"args":{',
                    joined(["", *members]).str.strip_prefix(","), "}}",
                ]
            )  # fmt: skip
            yield part.height, block(part, event)


def draw(one: Intervals, process: Process, spans: Spans, shift_ns: int) -> Drawn:
    """Clip intervals, and give them a track with as many lanes as they need."""
    begin, end = (one.rows[name].to_numpy() + shift_ns for name in ("begin_ns", "end_ns"))
    clipped = spans.clip(begin, end)
    rows = one.rows.with_columns(
        pl.Series("begin", clipped.begin), pl.Series("end", clipped.end), pl.Series("is_cut", clipped.is_cut)
    ).filter(pl.Series(clipped.kept))
    begin, end = rows["begin"].to_numpy(), rows["end"].to_numpy()
    track = np.zeros(len(begin), dtype=np.int64)
    lane = assign_lanes(track, begin, end - begin)
    first = process.add(one.track, int(lane.max(initial=0)) + 1)
    rows = rows.with_columns(pl.Series("tid", first + lane.astype(np.int64)))
    return Drawn(process.pid, one.category, rows[slice_order(track, begin, end - begin)])


def counter_texts(one: Counter, pid: int, spans: Spans, shift_ns: int, bounds: tuple[int, int]) -> tuple[int, str]:
    """Samples where the value changes, and the last value once more at the end of what is shown.

    Args:
        bounds: start of the file, from which its times count, and end of what is shown of the process.
    """
    base_ns, last_ns = bounds
    rows = one.rows.select(ts=pl.col("ts_ns") + shift_ns, value="value").unique("ts", keep="last", maintain_order=True)
    if rows.is_empty() or not len(spans.start):
        return 0, ""
    low, high = max(int(spans.start[0]), base_ns), min(int(spans.end[-1]), last_ns)
    rows = rows.filter((pl.col("ts") < int(spans.end[-1])) & (pl.col("ts") <= high))
    before = rows.filter(pl.col("ts") <= low).tail(1).with_columns(ts=pl.lit(low, dtype=pl.Int64))
    during = rows.filter(pl.col("ts") > low)
    shown = pl.concat([before, during])
    if shown.is_empty():
        return 0, ""
    shown = shown.filter(pl.col("value").ne_missing(pl.col("value").shift(1)) | (pl.int_range(pl.len()) == 0))
    after = shown.tail(1).with_columns(ts=pl.lit(high, dtype=pl.Int64))
    value = us(pl.col("value")) if one.in_thousandths else [pl.col("value").cast(pl.String)]
    event = joined(
        [
            f'{{"ph":"C","name":{text(one.name)},"pid":{pid},"ts":', us(pl.col("ts") - base_ns), ',"args":{"value":',
            value, "}}",
        ]
    )  # fmt: skip
    events = pl.concat([shown, after])
    return events.height, block(events, event)
