"""``chakra-capture query``: SQL over the merged tables of all ranks."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from chakra_capture.cli.cells import print_cells
from chakra_capture.cli.output import (
    EXIT_OK,
    UsageError,
    console,
    count_of,
    not_negative,
    number_ranges,
    print_error,
    print_json,
    print_line,
)

if TYPE_CHECKING:
    import polars as pl

    from chakra_capture.trace.sql import RunTables

_LIMIT = 50
_STDERR = 2


def query(
    path: Path,
    sql: str,
    /,
    *,
    job: str | None = None,
    ranks: Annotated[list[int] | None, Parameter(negative=(), consume_multiple=True)] = None,
    limit: Annotated[int | None, Parameter(validator=not_negative)] = None,
    output: Annotated[Path | None, Parameter(name=["--output", "-o"])] = None,
    csv: Annotated[bool, Parameter(negative=())] = False,
    json: Annotated[bool, Parameter(negative=())] = False,
) -> int:
    """Ask the merged tables of all ranks in SQL.

    The tables are nodes, edges, steps and communication, of all merged ranks,
    each with the column rank; and collectives, one row per operation and rank
    that took part. The README says what their columns mean; times are in ns.
    Only the columns that a query names are read, in pieces, so tables larger
    than memory can be asked too; --ranks reads fewer ranks. A query reads
    these tables and nothing else, and changes nothing.

    Examples: the kernels that take most time over all ranks; the collectives
    that ranks waited for longest and who came last; how long each rank waited.

        chakra-capture query ./traces "SELECT name, count(*) AS launches,
            sum(dur_ns) / 1e6 AS ms FROM nodes WHERE kind = 'kernel'
            GROUP BY name ORDER BY ms DESC LIMIT 10"

        chakra-capture query ./traces "SELECT collective_id, collective, step,
            last_rank, max(wait_ns) / 1e6 AS ms FROM collectives
            GROUP BY collective_id, collective, step, last_rank
            ORDER BY ms DESC LIMIT 10"

        chakra-capture query ./traces "SELECT rank, sum(wait_ns) / 1e6 AS ms
            FROM collectives GROUP BY rank ORDER BY ms DESC" --json

    Parameters
    ----------
    path
        Folder of a run, its merged folder, or one rank=<R> folder in it.
    sql
        One SELECT, as polars' SQL reads it.
    job
        Job of a trace_dir that holds several runs; default: the newest.
    ranks
        Read only these ranks.
    limit
        Rows at most; default: 50 on the screen, all of them with --json, --csv and -o.
    output
        Write the answer to this file (.parquet or .csv) and print nothing but where it is.
    csv
        Print CSV.
    json
        Print JSON: columns with their types, and rows. What JSON has no number for is the text NaN, Infinity or
        -Infinity.
    """
    if sum((csv, json, output is not None)) > 1:
        raise UsageError("--json, --csv and -o exclude each other. Give one of them.")
    if output is not None and output.suffix not in (".parquet", ".csv"):
        raise UsageError(f"-o {output} says no format. Name a file that ends in .parquet or .csv.")
    from chakra_capture.trace.sql import open_tables, select, translated

    tables = open_tables(path, job, ranks)
    _say_what_is_missing(tables)
    with translated(tables, sql), _at_work(f"Reading {count_of(len(tables.ranks), 'rank')}"):
        answer = select(tables, sql)
        if limit is not None or not (csv or json or output is not None):
            answer = answer.head((_LIMIT if limit is None else limit) + 1)
        if output is not None:
            rows = _write(answer if limit is None else answer.head(limit), output, tables)
            print_line(f"{output}: {rows}")
            return EXIT_OK
        frame = answer.collect(engine="streaming")
    shown = frame if limit is None and (csv or json) else frame.head(_LIMIT if limit is None else limit)
    if csv:
        _print_csv(shown)
    elif json:
        print_json(_as_json(tables, shown, more=shown.height < frame.height))
    else:
        _print_table(shown, more=shown.height < frame.height)
    return EXIT_OK


@contextmanager
def _at_work(what: str) -> Iterator[None]:
    """A sign on a terminal that something goes on; what polars writes to stderr when it panics is not for users."""
    from rich.console import Console

    try:
        kept = os.dup(_STDERR)
    except OSError:  # the process has no stderr
        yield
        return
    with open(kept, "w") as stderr, open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), _STDERR)
        try:
            with Console(file=stderr).status(what) if stderr.isatty() else nullcontext():
                yield
        finally:
            os.dup2(kept, _STDERR)


def _say_what_is_missing(tables: "RunTables") -> None:
    if tables.unmerged:
        print_error(
            f"rank {number_ranges(list(tables.unmerged))} is not merged and not in the answer. "
            "Merge it with chakra-capture merge."
        )
    for table, ranks in tables.absent.items():
        if table in tables.frames:
            print_error(f"table {table} lacks rank {number_ranges(list(ranks))}. Merge it again.")


def _write(answer: "pl.LazyFrame", output: Path, tables: "RunTables") -> str:
    """Stream the answer into a file that gets its name when it is whole; the tables themselves are left alone."""
    from chakra_capture.errors import TraceFileError
    from chakra_capture.layout import part_path
    from chakra_capture.trace.sinks import faults_of_disk
    from chakra_capture.trace.values import flat

    if output.resolve().is_relative_to(tables.folder.resolve()):
        raise TraceFileError(f"{output} lies among the merged tables. Write it to another folder.")
    part = part_path(output)
    try:
        part.unlink(missing_ok=True)
        with part.open("xb") as file, faults_of_disk(file):
            if output.suffix == ".csv":
                flat(answer).sink_csv(file, engine="streaming")
            else:
                answer.sink_parquet(file, engine="streaming")
        os.replace(part, output)
    except OSError as error:
        raise TraceFileError(f"{output} cannot be written: {error.strerror}. Name a file elsewhere.") from error
    finally:
        part.unlink(missing_ok=True)
    return f"{output.stat().st_size} bytes"


def _print_csv(frame: "pl.DataFrame") -> None:
    from chakra_capture.cli.output import plain
    from chakra_capture.trace.values import flat

    text = flat(frame.lazy()).collect().write_csv()
    if sys.stdout.isatty():  # names of a trace must not move the cursor
        text = "\n".join(plain(line) for line in text.split("\n"))
    sys.stdout.write(text)


def _as_json(tables: "RunTables", frame: "pl.DataFrame", *, more: bool) -> dict[str, object]:
    from chakra_capture.trace.values import as_json

    return {
        "schema_version": 1,
        "ranks": list(tables.ranks),
        "not_merged": list(tables.unmerged),
        "columns": [{"name": name, "type": str(dtype)} for name, dtype in frame.schema.items()],
        "rows": [{name: as_json(value) for name, value in row.items()} for row in frame.iter_rows(named=True)],
        "more": more,
    }


def _print_table(frame: "pl.DataFrame", *, more: bool) -> None:
    from chakra_capture.cli.output import plain
    from chakra_capture.trace.values import as_text

    out = console()
    cells = [[plain(as_text(value)) for value in column] for column in frame.iter_columns()]
    names = [plain(name) for name in frame.columns]
    is_number = [dtype.is_numeric() for dtype in frame.dtypes]
    print_cells(out, names, cells, is_number, others="--json, --csv or -o show them")
    print_line(f"the first {count_of(frame.height, 'row')}; --limit shows more" if more else
               count_of(frame.height, "row"))  # fmt: skip
