"""``chakra-capture analyze critical-path``: what the time of a step consists of, from its end back to its begin."""

from pathlib import Path
from typing import TYPE_CHECKING

from chakra_capture.cli.answers import Answer, show_answer
from chakra_capture.cli.output import EXIT_OK, console, count_of, duration, make_table, percent, shortened, status
from chakra_capture.cli.subject import DEFAULTS, Options, open_subject

if TYPE_CHECKING:
    import polars as pl
    from rich.console import Console

_ROWS = 15


def critical_path(path: Path, /, *, options: Options = DEFAULTS) -> int:
    """What the time of each step consists of: the chain of work that its end waited for.

    From the end of a step back over whatever had to be done last: a call waits
    for a kernel, the kernel for its launch or for the one before it, a thread for
    another, a collective for the rank that came last, on which the path goes on.
    Only what is on the path makes a step longer. Its parts sum to the step's time,
    to the nanosecond.

    Lags (launch, stream, sync) are what passes between the two. Unexplained is
    what is more than such a lag usually is, or begins though nothing in the trace
    says what it waited for; where it is much, do not trust the path.

    For example:
        chakra-capture analyze critical-path ./traces
        chakra-capture analyze critical-path ./traces --rank 0 --step 5 --json

    Of one rank alone, how long it waited for others is part of its communication.

    Parameters
    ----------
    path
        Folder of a run, its merged folder, or one rank=<R> folder in it.
    """
    import polars as pl

    from chakra_capture.analysis import critical_path as analysis
    from chakra_capture.cli.replayed import nothing_timed

    subject = open_subject(path, options)
    with status(f"walking the paths of {count_of(len(subject.traces), 'rank')}"):
        table = analysis.critical_path(subject.run, list(subject.traces))
    if table.is_empty():
        raise nothing_timed(path)
    notes = (*subject.notes, *_notes(table))
    if subject.steps is not None:
        table = table.filter(pl.col("step").is_in(subject.steps))
    if options.json:
        show_answer(Answer("critical-path", analysis.SCHEMA, table, notes), limit=options.limit, as_json=True)
        return EXIT_OK
    out = console()
    for (window, number), rows in table.group_by("window", "rank", maintain_order=True):
        _print_rank(out, f"Window {window}, rank {number}", rows, options.limit or _ROWS)
    for note in notes:
        out.print(f"note: {note}")
    return EXIT_OK


def _print_rank(out: "Console", title: str, rows: "pl.DataFrame", limit: int) -> None:
    import polars as pl

    steps = rows.filter(pl.col("step").is_not_null())["step"].unique(maintain_order=True).to_list()
    whole = rows.filter(pl.col("step").is_null())
    whole = rows if whole.is_empty() else whole  # some steps were asked for
    elapsed = _sum(whole)
    # One column for each step, while they fit on a screen.
    shown = steps if 1 < len(steps) <= 3 else []
    kinds = make_table(f"{title}: {duration(elapsed)} on the critical path", "", "time", "share", *map(_step, shown))
    kinds.columns[0].justify = "left"
    for category, total in _totals(whole, "category"):
        of_steps = [
            duration(_sum(rows.filter((pl.col("step") == step) & (pl.col("category") == category)))) for step in shown
        ]
        kinds.add_row(category, duration(total), percent(total, elapsed), *of_steps)
    out.print(kinds)
    names = make_table("Longest on it", "", "", "time", "share")
    names.columns[0].justify = names.columns[1].justify = "left"
    by_name = whole.group_by("category", "name", "on_rank").agg(pl.col("total_ns").sum())
    for category, name, on_rank, total in (
        by_name.sort("total_ns", "category", "name", "on_rank", descending=[True, False, False, False])
        .head(limit)
        .iter_rows()
    ):
        elsewhere = f" (rank {on_rank})" if on_rank is not None and on_rank != whole["rank"][0] else ""
        said = name or "(between operators)"
        names.add_row(
            category, shortened(said, 44 - len(elsewhere)) + elsewhere, duration(total), percent(total, elapsed)
        )
    out.print(names)


def _totals(rows: "pl.DataFrame", by: str) -> list[tuple[str, int]]:
    import polars as pl

    summed = rows.group_by(by).agg(pl.col("total_ns").sum())
    return [(str(key), total) for key, total in summed.sort("total_ns", descending=True).iter_rows()]


def _sum(rows: "pl.DataFrame") -> int:
    return int(rows["total_ns"].sum())


def _step(number: int) -> str:
    return f"step {number}"


def _notes(table: "pl.DataFrame") -> list[str]:
    import polars as pl

    whole = table.filter(pl.col("step").is_null())
    notes = []
    for (window, rank), rows in whole.group_by("window", "rank", maintain_order=True):
        elapsed = _sum(rows)
        unexplained = _sum(rows.filter(pl.col("category") == "unexplained"))
        notes.append(f"window {window}, rank {rank}: {percent(unexplained, elapsed)} of the path is unexplained.")
    return notes
