"""The section of ``compare`` on recorded steps: which calls make the difference, and what is new, gone or renamed."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from chakra_capture.cli.cells import print_cells
from chakra_capture.cli.merged import merge_stale
from chakra_capture.cli.output import count_of, duration, number_ranges, percent, plain, shortened, status
from chakra_capture.errors import ChakraCaptureError

if TYPE_CHECKING:
    import polars as pl
    from rich.console import Console

    from chakra_capture.analysis.trace_diff.diff import RankDifference, RunDifference
    from chakra_capture.trace.discovery import Run

_WIDTH = 80
_MOST_CAUSES, _MOST_OTHERS = 8, 5
_OTHERS = ("new", "gone", "renamed", "reshaped", "moved")
_WORDS = {"slower": "slower", "faster": "faster", "within_noise": "noise", "not_judged": "-"}


def has_traces(run: "Run") -> bool:
    """Whether a run recorded steps, merged or not."""
    return bool(run.ranks or run.merged_ranks)


def compare_recorded_steps(first: Path, second: Path) -> "RunDifference | None":
    """Compare the recorded steps of two runs, merging what is not merged; None where a side has none."""
    from chakra_capture.analysis.trace_diff.diff import compare_recorded, not_compared
    from chakra_capture.trace.discovery import find_run
    from chakra_capture.trace.merged import MergedRun, MergedTrace

    if not (first.is_dir() and second.is_dir()):
        return None
    runs = find_run(first), find_run(second)
    if not all(has_traces(run) for run in runs):
        return None
    failures: list[str] = []
    try:
        for run in runs:
            merge_stale(run, failures.append)
        with status("comparing the recorded steps"):
            ranks = [{rank: MergedTrace(rank, path) for rank, path in run.merged_ranks.items()} for run in runs]
            tables = MergedRun(runs[0].merged_dir), MergedRun(runs[1].merged_dir)
            found = compare_recorded(ranks[0], ranks[1], tables)
    except ChakraCaptureError as error:
        # What the phases of all steps say holds without the traces.
        return not_compared(str(error), failures)
    return replace(found, notes=(*dict.fromkeys(failures), *found.notes))


def print_recorded_steps(out: "Console", found: "RunDifference") -> None:
    """Print the section."""
    out.print()
    if found.worst is None:
        out.print(plain(f"Recorded steps are not compared: {found.reason}"), soft_wrap=True)
        for note in found.notes:
            out.print(plain(f"note: {note}"), soft_wrap=True)
        return
    out.print("Recorded steps (under the profiler, which slows small ops: read as shares)", style="bold")
    _print_ranks(out, found)
    _print_phases(out, found.worst)
    _print_causes(out, found.worst)
    _print_others(out, found.worst)
    _print_table(out, found.worst, "kernels", "Kernels and copies")
    _print_table(out, found.worst, "collectives", "Collectives")
    for note in found.notes:
        for line in wrap(f"note: {note}", _WIDTH, subsequent_indent="      "):
            out.print(plain(line))


def _print_ranks(out: "Console", found: "RunDifference") -> None:
    """The step of the rank that differs most, and of the one in the middle."""
    rows, names = [], []
    for name, each in (("worst", found.worst), ("median", found.median)):
        if each is not None:
            rows.append(next(row for row in found.ranks.iter_rows(named=True) if row["rank"] == each.rank))
            names.append(f"step, rank {each.rank}" + (f" ({name})" if found.ranks.height > 1 else ""))
    cells = [names, *_times(rows), [_band(row) for row in rows], [_WORDS[row["change"]] for row in rows]]
    heads = ["mean", "A", "B", "difference", "", "+- noise", ""]
    percents = [percent_change(row["first_ns"], row["second_ns"]) for row in rows]
    print_cells(out, heads, [*cells[:4], percents, *cells[4:]], [False, *[True] * 5, False], others="--json shows them")
    if found.ranks.height > 1:
        out.print(f"{count_of(found.ranks.height, 'rank')} compared; below is rank {_worst(found).rank}")
    a, b = (_steps(each) for each in _worst(found).steps)
    out.print(f"steps      {a}" if a == b else f"steps      A {a}; B {b}")


def _worst(found: "RunDifference") -> "RankDifference":
    assert found.worst is not None
    return found.worst


def _steps(steps: tuple[int | None, ...]) -> str:
    numbers = [step for step in steps if step is not None]
    return number_ranges(numbers) if numbers else f"{count_of(len(steps), 'whole window')}"


def _print_phases(out: "Console", each: "RankDifference") -> None:
    table = each.tables["phases"]
    rows = list(table.filter(table["part"] == "loop").iter_rows(named=True))
    _print_rows(out, "phase", rows, [row["phase"] or "(no known phase)" for row in rows])
    rows = _of_device(table, each.scale.exact_difference)
    if rows:
        _print_rows(out, "device", rows, [row["part"].replace("_", " ") for row in rows])


def _of_device(table: "pl.DataFrame", whole: int) -> list[dict[str, Any]]:
    """The device's parts over all phases; whether they differ by more than chance is known by phase alone."""
    import polars as pl

    names = ("difference_ns", "first_ns", "second_ns", "exact_difference")
    share = pl.col("exact_difference") / whole if whole else pl.lit(None)
    parts = table.filter(pl.col("part") != "loop").group_by("part").agg(pl.col(name).sum() for name in names)
    return list(parts.with_columns(share=share, change=pl.lit(None, pl.String)).sort("part").iter_rows(named=True))


def _print_rows(out: "Console", head: str, rows: list[dict[str, Any]], names: list[str]) -> None:
    out.print()
    changes = [_WORDS.get(row["change"], "") for row in rows]
    cells = [[plain(name) for name in names], *_times(rows), [_share(row) for row in rows], changes]
    print_cells(
        out, [head, "A", "B", "difference", "share", ""], cells, [False, *[True] * 4, False], others="--json shows them"
    )


def _print_causes(out: "Console", each: "RankDifference") -> None:
    """The calls that differ most, and all others together: the sum is the difference."""
    table = each.tables["ops"]
    rows = list(table.filter(table["exact_difference"] != 0).head(_MOST_CAUSES).iter_rows(named=True))
    out.print()
    if not rows:
        out.print("No call differs")
        return
    out.print("What the difference consists of")
    total = each.scale.exact_difference
    rest = total - sum(row["exact_difference"] for row in rows)
    others = each.scale.difference_ns - sum(row["difference_ns"] for row in rows)
    names = [*(_short(row) for row in rows), "all others together"]
    times = [*(_signed(row["difference_ns"]) for row in rows), _signed(others)]
    shares = [*(_share(row) for row in rows), percent_of(rest, total)]
    calls = [*(_calls(row, each.scale.num_steps) for row in rows), ""]
    phases = [*(row["phase"] or "-" for row in rows), ""]
    changes = [*(_WORDS[row["change"]] for row in rows), ""]
    cells = [times, shares, changes, calls, phases, [plain(name) for name in names]]
    print_cells(
        out,
        ["difference", "share", "", "calls", "phase", "call"],
        cells,
        [True, True, False, True, False, False],
        others="--json shows them",
    )
    if not each.scale.is_judged:
        seen = " and ".join(str(number) for number in each.scale.num_steps)
        out.print(f"seen in {seen} steps: too few to tell a change from chance")
    elif not table["change"].is_in(["slower", "faster"]).any():
        out.print("no call differs by more than noise")


def _short(row: dict[str, Any]) -> str:
    """A call in few words; what it was is told below."""
    if row["status"] != "matched":
        return f"{row['status']}: {row['name']}"
    name = f"{row['name']} {row['input_shapes']}" if row["input_shapes"] else row["name"]
    return f"{name}, mostly {row['mostly']}" if row["mostly"] else name


def _full(row: dict[str, Any]) -> str:
    """What a call is, and what it was."""
    if row["status"] == "renamed":
        return f"{row['name']} (was {row['first_name']})"
    if row["status"] == "reshaped":
        return f"{row['name']} {row['input_shapes']} (was {row['first_shapes']})"
    if row["status"] == "moved":
        return f"{row['name']} from {row['first_phase'] or 'no phase'} to {row['phase'] or 'no phase'}"
    return str(row["name"])


def _calls(row: dict[str, Any], num_steps: tuple[int, int]) -> str:
    """Calls per step, of A and B where they differ."""
    first, second = (
        f"{row[name] / num:.3g}" for name, num in zip(("first_count", "second_count"), num_steps, strict=True)
    )
    return first if first == second else f"{first} > {second}"


def _print_others(out: "Console", each: "RankDifference") -> None:
    """Calls that are new, gone or in other words in every step: which is no matter of chance."""
    lines = list(_others(each))
    if lines:
        out.print()
        out.print("New, gone, or in other words or on other shapes, in every step")
    for line in lines[:_MOST_OTHERS]:
        out.print(plain(line), no_wrap=True, overflow="ellipsis")
    if len(lines) > _MOST_OTHERS:
        out.print(f"  ... and {len(lines) - _MOST_OTHERS} more; --json has all")


def _others(each: "RankDifference") -> Iterator[str]:
    for row in each.tables["ops"].filter(each.tables["ops"]["status"].is_in(_OTHERS)).iter_rows(named=True):
        in_all = [
            row[name] in (0, num) for name, num in zip(("first_seen", "second_seen"), each.scale.num_steps, strict=True)
        ]
        if all(in_all):
            where = f" in {row['parents'][-1]}" if row["parents"] else ""
            yield f"  {row['status']:<8}  {_signed(row['difference_ns']):>9}  {_full(row)}{where}"


def _print_table(out: "Console", each: "RankDifference", name: str, title: str) -> None:
    """The largest differences of a table whose rows are no parts of a step."""
    import polars as pl

    if name not in each.tables:
        return
    table = each.tables[name]
    if "part" in table.columns:
        table = table.filter(pl.col("part") == "time")
    changed = pl.col("change").is_in(["slower", "faster"]) if each.scale.is_judged else pl.col("exact_difference") != 0
    rows = list(table.filter(changed | (pl.col("status") != "matched")).head(_MOST_OTHERS).iter_rows(named=True))
    if not rows:
        return
    out.print()
    cells = [
        [plain(_activity(row)) for row in rows], *_times(rows), [_calls(row, each.scale.num_steps) for row in rows],
        [row["status"] if row["status"] != "matched" else _WORDS[row["change"]] for row in rows],
    ]  # fmt: skip
    heads = [title, "A", "B", "difference", "calls", ""]
    print_cells(out, heads, cells, [False, *[True] * 4, False], others="--json shows them")


def _activity(row: dict[str, Any]) -> str:
    if "collective" in row:
        was = f" (was {row['first_bytes']} B)" if row["first_bytes"] is not None else ""
        ranks = "" if row["num_ranks"] is None else f" of {row['num_ranks']} ranks"
        return f"{row['collective']}{ranks}, {row['comm_bytes']} B{was}"
    name = shortened(row["name"].removeprefix("void "), 40)
    return f"{name} (was {row['first_name']})" if row["first_name"] else name


def _times(rows: list[dict[str, Any]]) -> list[list[str]]:
    return [
        [duration(row["first_ns"]) for row in rows],
        [duration(row["second_ns"]) for row in rows],
        [_signed(row["difference_ns"]) for row in rows],
    ]


def _signed(ns: float) -> str:
    return f"{'-' if ns < 0 else '+'}{duration(abs(ns))}"


def _band(row: dict[str, Any]) -> str:
    return duration(row["band_ns"])


def _share(row: dict[str, Any]) -> str:
    return "-" if row["share"] is None else f"{round(100 * row['share'])} %"


def percent_of(part: int, whole: int) -> str:
    """A share that may be negative, or above all of it."""
    return f"{round(100 * part / whole)} %" if whole else "-"


def percent_change(first: float, second: float) -> str:
    """Relative change, with its sign."""
    return f"{100 * (second / first - 1):+.1f} %" if first else percent(None, None)
