"""Writing one rank's tables; nodes go out block by block, so that no text of the whole trace is ever put together."""

import io
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import polars as pl
from polars.io.plugins import register_io_source

from chakra_capture import layout
from chakra_capture.errors import TraceFileError
from chakra_capture.merge.tables import Columns, collectives
from chakra_capture.trace.columns import MISSING, Coded, Int64
from chakra_capture.trace.schema import KINDS, NODES

_BLOCK_ROWS = 1 << 14


class _Text:
    """A text column whose dictionary is handed to polars once."""

    def __init__(self, column: Coded, form: str = "{}") -> None:
        self._codes = column.codes
        values = column.values if form == "{}" else [form.format(value) for value in column.values]
        self._dictionary = pl.Series(list(values), dtype=pl.String)

    def rows(self, part: slice) -> pl.Series:
        codes = pl.Series(self._codes[part])
        at = pl.select(pl.when(codes >= 0).then(codes).cast(pl.UInt32)).to_series()
        return self._dictionary.gather(at)


class _Nodes:
    """The nodes table of one window, a block of rows at a time."""

    def __init__(self, columns: Columns, window: int, first: int) -> None:
        self._columns, self._window, self._first = columns, window, first
        self._texts = {
            "kind": _Text(Coded(columns.kind.astype(np.int32), KINDS)),
            "name": _Text(columns.name),
            "collective": _Text(collectives(columns)),
            "input_shapes": _Text(columns.input_shapes),
            "input_types": _Text(columns.input_types),
        }
        inner = Coded(columns.residue.codes, [value[1:-1] for value in columns.residue.values])
        self._head = _Text(columns.category, '{{"cat":{}')
        self._residue = _Text(inner, ",{}")
        begin = columns.host_rest[:1]
        self._host = [*(_Text(part, '"host":{}') for part in begin), *map(_Text, columns.host_rest[1:])]

    def blocks(self) -> Iterator[pl.DataFrame]:
        size = len(self._columns)
        for start in range(0, size, _BLOCK_ROWS):
            yield self._block(slice(start, min(start + _BLOCK_ROWS, size)))

    def _block(self, part: slice) -> pl.DataFrame:
        columns, size = self._columns, part.stop - part.start

        def rows(values: Int64) -> pl.Series:
            return _ints(np.where(values[part] >= 0, values[part] + self._first, MISSING))

        data: dict[str, Any] = {
            "node_id": pl.Series(np.arange(self._first + part.start, self._first + part.stop)),
            "window": pl.repeat(self._window, size, dtype=pl.Int32, eager=True),
            "parent_id": rows(columns.parent),
            "launch_id": rows(columns.launch),
            "ts_ns": _ints(columns.ts_ns[part]),
            "dur_ns": _ints(columns.dur_ns[part]),
            "self_dur_ns": _ints(columns.self_ns[part]),
            "repaired": pl.Series(columns.repaired[part]),
            "pid": _ints(columns.pid[part]),
            "tid": _ints(columns.tid[part]),
            "host_id": _ints(columns.host_id[part]),
            "step": _ints(columns.step[part]),
            "args": self._args(part),
            **{key: _ints(values[part]) for key, values in columns.ids.items()},
            **{key: text.rows(part) for key, text in self._texts.items()},
        }
        for column in NODES.columns:
            if column.name not in data:
                data[column.name] = pl.repeat(None, size, dtype=column.dtype, eager=True)
        return pl.DataFrame([data[c.name].cast(c.dtype).alias(c.name) for c in NODES.columns])

    def _args(self, part: slice) -> pl.Series:
        """One JSON text per row: category, args of the device trace, and under "host" what only the host trace has.

        The text is put together from pieces that are null where a row has none of the kind.
        """
        columns = self._columns
        pieces = [self._head.rows(part).fill_null("{"), self._residue.rows(part)]
        for key, values in columns.wide.items():
            pieces.append(pl.select(pl.concat_str(pl.lit(f',"{key}":'), _ints(values[part]))).to_series())
        if self._host:
            both = pl.Series((columns.category.codes[part] >= 0) & (columns.host_rest[0].codes[part] >= 0))
            pieces.append(pl.select(pl.when(both).then(pl.lit(","))).to_series())
            pieces += [text.rows(part) for text in self._host]
        return pl.select(pl.concat_str(*pieces, pl.lit("}"), ignore_nulls=True)).to_series()


def _ints(values: Int64) -> pl.Series:
    known = pl.Series(values != MISSING)
    return pl.select(pl.when(known).then(pl.Series(values))).to_series()


@dataclass(frozen=True, slots=True)
class RankTables:
    """What is written for one rank: its windows' columns, and the small tables."""

    windows: list[Columns]
    edges: pl.DataFrame
    steps: pl.DataFrame
    link: dict[str, Any]


def write_rank(out: Path, tables: RankTables) -> None:
    """Write all files of one rank; link.json comes last, for the folder counts as merged only with it.

    Raises:
        TraceFileError: the folder cannot be written to.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        (out / layout.LINK_FILE).unlink(missing_ok=True)
        for name, frame in (
            (layout.NODES_FILE, _lazy_nodes(tables.windows)),
            (layout.EDGES_FILE, tables.edges.lazy()),
            (layout.STEPS_FILE, tables.steps.lazy()),
        ):
            # In memory first: polars does not say why a file cannot be written.
            content = io.BytesIO()
            frame.sink_parquet(
                content, compression="zstd", compression_level=1, statistics=False, row_group_size=_BLOCK_ROWS
            )
            _replace(out / name, content.getbuffer())
        _replace(out / layout.LINK_FILE, msgspec.json.format(msgspec.json.encode(tables.link), indent=1))
    except OSError as error:
        raise TraceFileError(
            f"{out} cannot be written: {error.strerror or error}. Give a writable folder with -o."
        ) from error


def _lazy_nodes(windows: list[Columns]) -> pl.LazyFrame:
    def blocks(
        with_columns: list[str] | None, predicate: pl.Expr | None, n_rows: int | None, batch_size: int | None
    ) -> Iterator[pl.DataFrame]:
        first = 0
        for window, columns in enumerate(windows):
            yield from _Nodes(columns, window, first).blocks()
            first += len(columns)

    return register_io_source(blocks, schema=NODES.schema)


def _replace(path: Path, content: bytes | memoryview) -> None:
    part = layout.part_path(path)
    try:
        part.write_bytes(content)
        os.replace(part, path)
    except OSError:
        part.unlink(missing_ok=True)
        raise
