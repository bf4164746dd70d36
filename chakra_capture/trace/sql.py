"""SQL over the merged tables of all ranks of a run, read lazily: nothing else can be read, nothing is written."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import polars as pl

from chakra_capture import layout
from chakra_capture.errors import TraceFileError
from chakra_capture.trace.discovery import find_run, merged_ranks
from chakra_capture.trace.schema import COLLECTIVES, COMMUNICATION, EDGES, NODES, STEPS

RANK = "rank"
_FILE = "file of the table"
_RANK_OF_FILE = r"rank=(\d+)[/\\][^/\\]*$"
_OF_A_RANK = {
    NODES.name: layout.NODES_FILE,
    EDGES.name: layout.EDGES_FILE,
    STEPS.name: layout.STEPS_FILE,
    COMMUNICATION.name: layout.COMMUNICATION_FILE,
}
_OF_THE_RUN = {COLLECTIVES.name: layout.COLLECTIVES_FILE}
# All table functions of polars 2.1. They are refused wherever the words stand, also in a text or a comment: only
# polars itself knows for sure where one ends, and asking it opens the file.
_FILE_FUNCTIONS = re.compile("read_(?:csv|parquet|ipc|json|ndjson)", re.IGNORECASE)
# A source in the plan that is no frame in memory; guards against functions that a later polars may add.
_SOURCE = re.compile(r"\bSCAN \[")
_COMMENTS = re.compile(r"\s+|--[^\n]*(?:\n|$)|/\*.*?\*/|\(", re.DOTALL)
_QUESTIONS = ("select", "with", "from")
# An expression of 3000 terms, or a union of 300 parts, overflows the stack of polars 2.1 and kills the process.
_MAX_CHARACTERS = 4000


class QueryError(TraceFileError):
    """The SQL is wrong, or asks for what is not there."""


@dataclass(frozen=True, slots=True)
class RunTables:
    """The tables of a run as lazy frames.

    Attributes:
        ranks, unmerged: ranks in the tables, and ranks that the run recorded and nobody has merged.
        absent: tables that this run does not have, with the ranks that lack them.
    """

    folder: Path
    ranks: tuple[int, ...]
    unmerged: tuple[int, ...]
    frames: dict[str, pl.LazyFrame]
    absent: dict[str, tuple[int, ...]]


def open_tables(path: Path, job: str | None = None, ranks: list[int] | None = None) -> RunTables:
    """Find the merged tables of a run: of a trace_dir, a folder of merged ranks, or one rank of it.

    Raises:
        TraceFileError: there is no merged rank, or a rank in ``ranks`` is not merged.
    """
    folder, found, unmerged = _merged(path, job)
    if ranks is not None:
        missing = sorted(set(ranks) - set(found))
        if missing:
            raise TraceFileError(f"rank {missing[0]} of {path} is not merged. Merge it with chakra-capture merge.")
        found, unmerged = {rank: found[rank] for rank in sorted(set(ranks))}, ()
    _check_name(folder)
    frames, absent = {}, {}
    for table, name in _OF_A_RANK.items():
        files = {rank: of / name for rank, of in found.items() if (of / name).is_file()}
        lacking = tuple(sorted(set(found) - set(files)))
        if lacking:
            absent[table] = lacking
        if files:
            frames[table] = _scan(list(files.values()))
    for table, name in _OF_THE_RUN.items():
        if (folder / name).is_file():
            frames[table] = _of_ranks(pl.scan_parquet(folder / name, glob=False), ranks)
        else:
            absent[table] = ()
    return RunTables(folder, tuple(found), unmerged, frames, absent)


def select(tables: RunTables, sql: str) -> pl.LazyFrame:
    """Return the answer of one SELECT as a lazy frame.

    Raises:
        QueryError: the SQL is wrong, changes something, or reads anything but the tables.
    """
    _check_question(sql)
    with translated(tables, sql):
        used = {name: frame for name, frame in tables.frames.items() if name in sql.lower()}
        # The same question to empty frames in memory: what it reads besides them shows in its plan.
        empty = {name: pl.DataFrame(schema=frame.collect_schema()) for name, frame in used.items()}
        rehearsed = pl.SQLContext(frames=empty, eager=False).execute(sql)
        if _SOURCE.search(rehearsed.explain(optimized=False)):
            raise _reads_files()
        rehearsed.collect_schema()
        return pl.SQLContext(frames=used, eager=False).execute(sql)


@contextmanager
def translated(tables: RunTables, sql: str) -> Iterator[None]:
    """Turn what polars raises within into one sentence on the query."""
    try:
        yield
    except pl.exceptions.PolarsError as error:
        raise _explained(tables, error, sql) from error
    except pl.exceptions.PanicException as error:
        raise QueryError(f"polars cannot run this query ({_first_line(error)}). Write it another way.") from error


def _merged(path: Path, job: str | None) -> tuple[Path, dict[int, Path], tuple[int, ...]]:
    one = layout.MERGED_RANK_NAME.fullmatch(path.resolve().name)
    if one and path.is_dir():
        rank, folder = int(one["rank"]), path.resolve().parent
        if rank not in merged_ranks(folder):
            raise TraceFileError(f"{path} holds no finished merge. Merge this rank again.")
        return folder, {rank: path.resolve()}, ()
    run = find_run(path, job)
    found = run.merged_ranks
    if not found:
        raise TraceFileError(f"{path} holds no merged rank. Merge it first: chakra-capture merge {path}")
    return run.merged_dir, found, tuple(sorted({files.rank for files in run.ranks} - set(found)))


def _check_name(folder: Path) -> None:
    try:
        str(folder).encode()
    except UnicodeEncodeError as error:
        raise TraceFileError(f"the name of {folder} is not UTF-8, and polars opens no such path. Rename it.") from error


def _scan(files: list[Path]) -> pl.LazyFrame:
    """One table of many ranks, with the column rank."""
    # One scan of all: as many scans as ranks run at once, on 512 threads. Not polars' hive partitions: they take every
    # name=value in the path, such as Hydra's sweep folders have, for a column, even in place of the one in the file.
    scan = pl.scan_parquet(files, glob=False, hive_partitioning=False, include_file_paths=_FILE)
    rank = pl.col(_FILE).str.extract(_RANK_OF_FILE).cast(pl.Int64).alias(RANK)
    return scan.select(rank, pl.exclude(_FILE))


def _of_ranks(frame: pl.LazyFrame, ranks: list[int] | None) -> pl.LazyFrame:
    return frame if ranks is None else frame.filter(pl.col(RANK).is_in(ranks))


def _check_question(sql: str) -> None:
    if len(sql) > _MAX_CHARACTERS:
        raise QueryError(f"the query has {len(sql)} characters; at most {_MAX_CHARACTERS} are read. Make it shorter.")
    if _FILE_FUNCTIONS.search(sql):
        raise _reads_files()
    if _first_word(sql) not in _QUESTIONS:
        raise QueryError("a query only asks: begin it with SELECT or WITH. Nothing is changed or written by SQL; "
                         "give -o FILE for a file.")  # fmt: skip


def _first_word(sql: str) -> str:
    at = 0
    while match := _COMMENTS.match(sql, at):
        at = match.end()
    word = re.match(r"\w*", sql[at:])
    return word[0].lower() if word else ""


def _reads_files() -> QueryError:
    return QueryError(
        "a query reads the tables of the run and nothing else, so read_csv, read_parquet, read_ipc, read_json and "
        "read_ndjson may not stand in it. Ask for the tables by name."
    )


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def _explained(tables: RunTables, error: pl.exceptions.PolarsError, sql: str) -> TraceFileError:
    said = _first_line(error)
    for table, lacking in tables.absent.items():
        if table not in tables.frames and f"'{table}'" in said:
            return QueryError(f"{tables.folder} has no table {table}{_why_absent(table, lacking)}")
    differing = _differing_rank(tables)
    if differing is not None:
        return TraceFileError(
            f"the tables of rank {differing} in {tables.folder} cannot be read together with those of the other ranks "
            f"({said}). Merge this rank again."
        )
    said = said.partition("; valid columns:")[0].rstrip(".")
    return QueryError(f"the query cannot be run: {said}. {_what_there_is(tables, sql)}")


def _why_absent(table: str, lacking: tuple[int, ...]) -> str:
    if table in _OF_THE_RUN:
        return ": it is written when the ranks of a run are merged together. Merge them again, all at once."
    return ", which an earlier version did not write. Merge the ranks again."


def _differing_rank(tables: RunTables) -> int | None:
    """A rank whose tables have other columns than those of the first, or are damaged."""
    for name in _OF_A_RANK.values():
        first = None
        for rank in tables.ranks:
            file = tables.folder / layout.rank_folder_name(rank) / name
            if not file.is_file():
                continue
            try:
                schema = pl.read_parquet_schema(file)
            except (pl.exceptions.PolarsError, OSError):
                return rank
            first = first or schema
            if schema != first:
                return rank
    return None


def _what_there_is(tables: RunTables, sql: str) -> str:
    named = {name: frame for name, frame in tables.frames.items() if name in sql.lower()}
    parts = [f"{name} has {', '.join(frame.collect_schema().names())}" for name, frame in named.items()]
    return f"The tables are {', '.join(tables.frames)}{''.join('; ' + part for part in parts)}."
