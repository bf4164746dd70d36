"""What ``analyze`` prints: one table with its columns explained, for people or as JSON."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from chakra_capture.cli.cells import print_cells
from chakra_capture.cli.output import console, count_of, duration, percent, plain, print_json, size

if TYPE_CHECKING:
    import polars as pl
    from rich.console import Console

    from chakra_capture.trace.schema import Column

SCHEMA_VERSION = 1
_ROWS = 20
_NOT_MEASURED = "-"
_MOSTLY_ONE = ("window", "device")


@dataclass(frozen=True, slots=True)
class Answer:
    """One analysis of a run.

    Attributes:
        name: of the analysis.
        columns: of the table, in order.
        notes: sentences that belong beside the numbers.
        screen: columns for people and what they are called there; () for all by their own names.
    """

    name: str
    columns: "tuple[Column, ...]"
    table: "pl.DataFrame"
    notes: tuple[str, ...] = ()
    screen: tuple[tuple[str, str], ...] = ()


def show_answer(answer: Answer, *, limit: int | None, as_json: bool) -> None:
    """Print an answer; ``limit`` rows of it, by default all as JSON and some for people."""
    most = limit if limit is not None or as_json else _ROWS
    rows = answer.table if most is None else answer.table.head(most)
    left_out = answer.table.height - rows.height
    if as_json:
        print_json(_content(answer, rows, left_out))
        return
    out = console()
    if rows.height:
        _print_rows(out, answer, rows)
    else:
        out.print("nothing to show")
    if left_out:
        out.print(f"... and {count_of(left_out, 'row')} more (--limit shows more, --json all)")
    for note in answer.notes:
        out.print(plain(f"note: {note}"))


def _print_rows(out: "Console", answer: Answer, rows: "pl.DataFrame") -> None:
    of_name = {column.name: column for column in answer.columns}
    screen = answer.screen or tuple((name, _heading(column)) for name, column in of_name.items())
    # Most runs have one window and one device: a column of them says nothing.
    shown = [each for each in screen if each[0] not in _MOSTLY_ONE or rows[each[0]].n_unique() > 1]
    cells = [[plain(_cell(value, of_name[name])) for value in rows[name]] for name, _ in shown]
    is_number = [rows[name].dtype.is_numeric() for name, _ in shown]
    print_cells(out, [heading for _, heading in shown], cells, is_number, others="--json shows them")
    if len(screen) < len(of_name):
        left = ", ".join(name for name in of_name if name not in dict(screen))
        out.print(f"--json has more columns: {left}")


def _content(answer: Answer, rows: "pl.DataFrame", left_out: int) -> dict[str, Any]:
    from chakra_capture.trace.values import as_json

    notes = [*answer.notes, *([f"{count_of(left_out, 'row')} more than --limit"] if left_out else [])]
    return {
        "schema_version": SCHEMA_VERSION,
        "name": answer.name,
        "columns": [{"name": c.name, "unit": c.unit, "meaning": c.meaning} for c in answer.columns],
        "rows": [{name: as_json(value) for name, value in row.items()} for row in rows.iter_rows(named=True)],
        "notes": notes,
    }


def _heading(column: "Column") -> str:
    return column.name.removesuffix(f"_{column.unit}") if column.unit in ("ns", "bytes") else column.name


def _cell(value: Any, column: "Column") -> str:
    if value is None:
        return _NOT_MEASURED
    if column.unit == "ns":
        return duration(value)
    if column.unit == "bytes":
        return size(value)
    if column.unit == "bytes/s":
        return f"{size(int(value))}/s"
    if column.unit == "%":
        return f"{value:.1f}"
    if isinstance(value, float):
        return percent(value, 1)
    return str(value).removeprefix("void ")
