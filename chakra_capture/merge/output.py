"""Writing one rank's tables; nodes go out block by block, so that no text of the whole trace is ever put together."""

import os
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import msgspec
import numpy as np
import polars as pl
from polars.io.plugins import register_io_source

from chakra_capture import layout
from chakra_capture.errors import TraceFileError
from chakra_capture.merge.communication import Communication
from chakra_capture.merge.join import NumberPiece, Piece, TextPiece, join
from chakra_capture.merge.tables import Columns
from chakra_capture.trace.columns import MISSING, Coded, Int64, Ints, Positions, pick
from chakra_capture.trace.packed import Texts, texts
from chakra_capture.trace.schema import KINDS, NODES
from chakra_capture.trace.sinks import faults_of_disk

# Rows that are put together, and written as one row group, at a time.
_FEWEST_ROWS, _MOST_ROWS, _BLOCKS = 1 << 13, 1 << 16, 1 << 6


# Nobody writes any more to a file that has not grown for so long: its merge was killed.
_ABANDONED_S = 3600

_KINDS = pl.Series(KINDS, dtype=pl.Enum(KINDS))


class _Nodes:
    """The nodes table of one window, a block of rows at a time."""

    def __init__(self, columns: Columns, communication: Communication, window: int, first: int) -> None:
        self._columns, self._window, self._first = columns, window, first
        self._communication = communication
        self._args = _Args(columns)
        texts = {
            "name": columns.name.values,
            "phase": columns.phase.values,
            "collective": communication.collective.values,
            "process_group": communication.groups.values,
            **{key: _both_dictionaries(columns, key) for key in _IO_TEXTS},
        }
        self._dictionaries = {key: pl.Series(list(values) or [None], dtype=pl.String) for key, values in texts.items()}
        self._dictionaries["kind"] = _KINDS
        # One query for all columns of a block: what polars needs for each query costs more than the rows of one.
        self._table = [self._made(column.name).cast(column.dtype).alias(column.name) for column in NODES.columns]

    def _made(self, name: str) -> pl.Expr:
        """A column of the table from that of the same name in ``_block``."""
        column = pl.col(name)
        if name in self._dictionaries:
            return pl.lit(self._dictionaries[name]).gather(pl.when(column >= 0).then(column))
        return pl.when(column != MISSING).then(column) if name in _INTEGERS else column

    def blocks(self) -> Iterator[pl.DataFrame]:
        size = len(self._columns)
        rows = _rows_per_block(size)
        for start in range(0, size, rows):
            yield self._block(slice(start, min(start + rows, size)))

    def _block(self, part: slice) -> pl.DataFrame:
        columns = self._columns
        groups, num_bytes = self._communication.of_rows(part)
        codes = {
            "kind": columns.kind[part],
            "name": columns.name.codes[part],
            "phase": columns.phase.codes[part],
            "collective": self._communication.collective.codes[part],
            "process_group": groups,
            **{key: _both_codes(columns, key, part) for key in _IO_TEXTS},
        }
        others = {"comm_bytes": num_bytes, "repaired": columns.repaired[part], "args": self._args.rows(part)}
        return pl.DataFrame({**self._integers(part), **codes, **others}).select(self._table)

    def _integers(self, part: slice) -> dict[str, Ints]:
        """Integer columns, ``MISSING`` for null."""
        columns, size = self._columns, part.stop - part.start
        made = {
            "node_id": np.arange(self._first + part.start, self._first + part.stop),
            "window": np.full(size, self._window),
            "parent_id": self._node_ids(columns.parent[part]),
            "launch_id": self._node_ids(columns.launch[part]),
            "ts_ns": columns.ts_ns[part],
            "dur_ns": columns.dur_ns[part],
            "self_dur_ns": columns.self_ns[part],
            "step": columns.step[part],
        }
        return {
            key: made[key] if key in made else columns.integers(key, part) for key in _INTEGERS if key != "comm_bytes"
        }

    def _node_ids(self, rows: Positions) -> Int64:
        return np.where(rows >= 0, rows + np.int64(self._first), MISSING)


_INTEGERS = (
    "node_id", "window", "parent_id", "launch_id", "ts_ns", "dur_ns", "self_dur_ns", "pid", "tid", "device", "stream",
    "host_id", "record_function_id", "external_id", "correlation_id", "sequence_number", "step", "comm_bytes",
)  # fmt: skip
_IO_TEXTS = ("input_shapes", "input_types")
# Members of the column args that no event has.
_MADE = frozenset(("cat", "host"))


def _both_dictionaries(columns: Columns, key: str) -> list[str]:
    """Texts of the device trace, then those of the host trace."""
    traces = [trace for trace in (columns.device, columns.host) if trace is not None]
    return [text for trace in traces for text in getattr(trace, key).values]


def _both_codes(columns: Columns, key: str, part: slice) -> Positions:
    """Codes in both dictionaries: what the host trace says where it has the op, else the device trace."""
    device, host = (None if t is None else getattr(t, key) for t in (columns.device, columns.host))
    codes = np.full(part.stop - part.start, -1, dtype=np.int32)
    if device is not None:
        codes = pick(device.codes, columns.device_row[part], -1)
    if host is not None:
        of_host = pick(host.codes, columns.host_node[part], -1)
        shift = 0 if device is None else len(device.values)
        codes = np.where(columns.host_node[part] >= 0, np.where(of_host >= 0, of_host + np.int32(shift), -1), codes)
    return codes.astype(np.int32, copy=False)


class _Args:
    """The column args: category and args of the device trace, and under "host" what only the host trace has."""

    def __init__(self, columns: Columns) -> None:
        self._columns = columns
        device, host = columns.device, columns.host
        self._head, self._residue, self._wide = Texts.of(["{"]), None, {}
        if device is not None:
            categories = [str(msgspec.json.encode(value), "utf-8", "replace") for value in device.category.values]
            self._head = Texts.of([*(f'{{"cat":{text}' for text in [*categories, "null"]), "{"])
            self._residue = Texts.of(f",{_members(text)}" for text in device.residue.values)
            self._wide = {key: Texts.of([f',"{key}":']) for key, column in device.wide.items() if len(column.rows)}
        self._host: list[Coded] = []
        if host is not None:
            begin, middle, end = host.frames
            begin = Coded(begin.codes, [f'"host":{text}' for text in begin.values])
            parts = (begin, host.input_values, middle, host.output_values, end)
            self._host = [Coded(part.codes, texts(part.values)) for part in parts]
        self._comma, self._end = Texts.of([","]), Texts.of(["}"])

    def rows(self, part: slice) -> pl.Series:
        """One JSON text per row."""
        columns, size = self._columns, part.stop - part.start
        row, node = columns.device_row[part], columns.host_node[part]
        pieces: list[Piece] = []
        last = np.full(size, len(self._head) - 1, dtype=np.int32)
        if columns.device is None or self._residue is None:
            pieces.append(TextPiece(last, self._head))
        else:
            category = pick(columns.device.category.codes, row, -1)
            category = np.where(category >= 0, category, last - 1)
            pieces.append(TextPiece(np.where(row >= 0, category, last), self._head))
            pieces.append(TextPiece(pick(columns.device.residue.codes, row, -1), self._residue))
            pieces += [NumberPiece(before, columns.wide(key, part)) for key, before in self._wide.items()]
        if self._host:
            both = (row >= 0) & (node >= 0)
            pieces.append(TextPiece(np.where(both, 0, -1), self._comma))
            pieces += [TextPiece(pick(each.codes, node, -1), texts(each.values)) for each in self._host]
        pieces.append(TextPiece(np.zeros(size, dtype=np.int32), self._end))
        return join(pieces, size)


def _members(args: str) -> str:
    """The members of the args of an event, within one of their own where they would hide the category or the host's."""
    if any(f'"{key}"' in args for key in _MADE):
        keys = msgspec.json.decode(args, type=dict[str, msgspec.Raw]).keys()
        if keys & _MADE:
            return f'"args":{args}'
    return args[1:-1]


@contextmanager
def rank_folder(out: Path) -> Iterator[None]:
    """Around the writing of one rank's tables: the folder exists, and does not count as merged before its link.json.

    Raises:
        TraceFileError: the folder cannot be written to.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        (out / layout.LINK_FILE).unlink(missing_ok=True)
        for part in out.glob(f"*{layout.PART_SUFFIX}"):
            if part.stat().st_mtime < time.time() - _ABANDONED_S:
                part.unlink()
        yield
    except OSError as error:
        raise TraceFileError(
            f"{out} cannot be written: {error.strerror or error}. Give a writable folder with -o."
        ) from error


def write_nodes(path: Path, windows: Sequence[tuple[Columns, Communication]]) -> None:
    """Write the nodes of all windows, numbered on through them."""

    def blocks(
        with_columns: list[str] | None, predicate: pl.Expr | None, n_rows: int | None, batch_size: int | None
    ) -> Iterator[pl.DataFrame]:
        first = 0
        for window, (columns, communication) in enumerate(windows):
            yield from _Nodes(columns, communication, window, first).blocks()
            first += len(columns)

    rows = _rows_per_block(max((len(columns) for columns, _ in windows), default=0))
    write_table(path, register_io_source(blocks, schema=NODES.schema), rows)


def _rows_per_block(size: int) -> int:
    """Few, so that little text is in memory at once; more of a large table, so that the file's index stays small."""
    return min(max(size // _BLOCKS, _FEWEST_ROWS), _MOST_ROWS)


def write_table(path: Path, table: pl.LazyFrame, rows_per_group: int = _MOST_ROWS) -> None:
    """Write one table; its final name says that it is whole."""
    with _replacing(path) as file, faults_of_disk(file):
        table.sink_parquet(
            file, compression="zstd", compression_level=1, statistics=False, row_group_size=rows_per_group
        )


def write_link(path: Path, link: dict[str, Any]) -> None:
    """Write link.json."""
    with _replacing(path) as file:
        file.write(msgspec.json.format(msgspec.json.encode(link), indent=1))


@contextmanager
def _replacing(path: Path) -> Iterator[IO[bytes]]:
    # Of its own name: a worker that was taken for dead may still write the same rank.
    part = layout.part_path(path.with_name(f"{path.name}.{secrets.token_hex(4)}"))
    try:
        with part.open("wb") as file:
            yield file
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
