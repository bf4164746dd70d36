"""``chakra-capture what-if``: how long steps would take if something in them took another time."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from chakra_capture.cli.output import (
    EXIT_INCONCLUSIVE,
    EXIT_OK,
    UsageError,
    console,
    count_of,
    duration,
    make_table,
    not_negative,
    percent,
    print_json,
    shortened,
    status,
)

if TYPE_CHECKING:
    import polars as pl
    from rich.console import Console

    from chakra_capture.analysis.what_if.changes import Changes
    from chakra_capture.analysis.what_if.predict import WindowModel

Preset = Literal[
    "no_input_wait", "no_exposed_comm", "infinite_network", "perfect_balance", "fused_kernels", "device_2x", "cpu_2x"
]
_MOST_STEPS_SHOWN = 12
_MOST_PRIZES_SHOWN = 12
_Many = Annotated[list[str] | None, Parameter(negative=())]


def what_if(
    path: Path,
    /,
    *,
    scale: _Many = None,
    remove: _Many = None,
    overlap_comm: Annotated[bool, Parameter(negative=())] = False,
    preset: Preset | None = None,
    rank: Annotated[int | None, Parameter(validator=not_negative)] = None,
    job: str | None = None,
    json: Annotated[bool, Parameter(negative=())] = False,
) -> int:
    """Predict how long steps would take if something in them took another time.

    Without a change: what would help most, each preset and the longest of the
    critical path tried alone. With changes: all of them together, for each step.

    The run is replayed, all ranks together, with other durations. What waits for
    the device, for a full launch queue or for another rank is derived anew, so
    twice as fast kernels help only where something waited for them. Without a
    change the replay is the measurement exactly. The error shown is what it is off
    by when lags are medians instead of what was measured: a prediction is hardly
    better than that, and it says nothing of caches, clocks or memory.

    --scale WHAT[~NAME][@RANK]=FACTOR, as often as you like. NAME is a regular
    expression, upper or lower case. WHAT is one of

        kernel   kernels that compute
        comm     collectives, not the waits for other ranks in them
        memory   copies and memsets
        device   all of these
        op       an operator and all it calls and launches (needs a NAME)
        self     CPU time of operators alone (needs a NAME)
        cpu      CPU time, with what is called

    --remove takes the same without a factor, and input_wait, waiting (of ranks for
    each other) and rank0, rank1 ... (the others no longer wait for that rank).

    Where the trace cannot tell, the answer is a range, or "at most": of one rank's
    collectives nobody knows how much is a wait for others; of a loader's worker
    that never kept the loop waiting, how much faster it could be.

    Exit status 3: too much of the run is unexplained, so nothing can be predicted.

    Examples:
        chakra-capture what-if ./traces
        chakra-capture what-if ./traces --scale 'kernel~gemm=0.5' --scale comm=0.5
        chakra-capture what-if ./traces --remove input_wait --overlap-comm --json
        chakra-capture what-if ./traces --preset device_2x

    Parameters
    ----------
    path
        Folder of a run, or of merged ranks.
    scale
        WHAT[~NAME][@RANK]=FACTOR: have it take FACTOR times as long.
    remove
        Have it take no time.
    overlap_comm
        Nothing that computes waits for a collective.
    preset
        A change by its name.
    rank
        One rank alone.
    job
        Job of a trace_dir that holds several runs; default: the newest.
    json
        Print JSON.
    """
    from chakra_capture.analysis.what_if.changes import ChangeError, parse_changes
    from chakra_capture.analysis.what_if.predict import models
    from chakra_capture.analysis.what_if.prizes import PRESETS
    from chakra_capture.cli.replayed import merged_ranks, nothing_timed

    changes = None
    try:
        if scale or remove or overlap_comm:
            changes = parse_changes(scale or (), remove or (), overlap_comm=overlap_comm)
    except ChangeError as error:
        raise UsageError(str(error)) from error
    if preset is not None:
        if changes is not None:
            raise UsageError("--preset is a change of its own; leave out --scale, --remove and --overlap-comm.")
        changes = PRESETS[preset][0]
    run, chosen = merged_ranks(path, job, rank)
    with status(f"replaying {count_of(len(chosen), 'rank')}"):
        windows = list(models(run, chosen))
        if not windows:
            raise nothing_timed(path)
        return _answer(windows, changes, as_json=json)


def _answer(windows: "list[WindowModel]", changes: "Changes | None", *, as_json: bool) -> int:
    from chakra_capture.analysis.what_if import predict, prizes
    from chakra_capture.cli.replayed import table_content

    told = {one.window: one.not_replayable for one in windows}
    bad = [(window, one) for window, found in told.items() for one in found]
    usable = [] if bad else windows
    notes = [
        f"rank {one.rank} of window {window} is not replayable: {100 * one.unexplained_share:.1f} % of it are waits "
        "that nothing in the trace explains (5 % at most), so nothing is predicted. Were kernels left out of the trace?"
        for window, one in bad
    ]
    columns = prizes.SCHEMA if changes is None else predict.SCHEMA
    table = prizes.prizes(usable) if changes is None else predict.what_if(usable, changes)
    if usable:
        notes += _notes_on_prizes(table) if changes is None else _notes_on_ranges(table, windows)
    if as_json:
        print_json({**table_content("what-if", columns, table, notes), "is_replayable": not bad})
    else:
        out = console()
        if usable:
            (_print_prizes if changes is None else _print_predictions)(out, table)
        for note in notes:
            out.print(f"note: {note}")
    return EXIT_INCONCLUSIVE if bad else EXIT_OK


def _notes_on_prizes(table: "pl.DataFrame") -> list[str]:
    notes = ["each is tried alone; what two of them save together is not their sum."]
    if table["at_most"].any():
        notes.append("at most: how much of it the run would really gain, this trace cannot tell; perhaps nothing.")
    return notes


def _notes_on_ranges(table: "pl.DataFrame", windows: "list[WindowModel]") -> list[str]:
    if (table["fastest_ns"] == table["slowest_ns"]).all():
        return []
    inputs = any(len(one.inputs.perhaps) for window in windows for one in window.model.replay.ranks.values())
    reasons = ["how much of a collective is a wait for ranks that are not in this trace"]
    if inputs:
        reasons.append("whether the loader's workers, which never kept the loop waiting, would keep up")
    return [f"a range, for the trace cannot tell {' or '.join(reasons)}."]


def _print_prizes(out: "Console", table: "pl.DataFrame") -> None:
    if table.is_empty():
        out.print("Nothing that was tried would make the steps shorter.")
        return
    first = table.row(0, named=True)
    shown = make_table(
        f"What would help most: a step takes {duration(first['measured_ns'])}", "", "after", "saved", "share"
    )
    shown.columns[0].justify = "left"
    for row in table.head(_MOST_PRIZES_SHOWN).iter_rows(named=True):
        shown.add_row(
            shortened(row["name"], 42),
            duration(row["fastest_ns"]),
            f"{'at most ' if row['at_most'] else ''}{duration(row['saved_ns'])}",
            percent(row["share"], 1),
        )
    out.print(shown)
    out.print(f"replay error: {percent(first['replay_error'], 1)} (off by that when nothing is changed)")


def _print_predictions(out: "Console", table: "pl.DataFrame") -> None:
    shown = make_table("Predicted", "rank", "what", "measured", "predicted", "change", "error")
    for _, rows in table.group_by("window", "rank", maintain_order=True):
        for row in rows.head(_MOST_STEPS_SHOWN + 1).iter_rows(named=True):
            is_range = row["slowest_ns"] != row["fastest_ns"]
            until = f" to {duration(row['slowest_ns'])}" if is_range else ""
            least = 100 * (row["slowest_ns"] / row["measured_ns"] - 1) if row["measured_ns"] else 0.0
            shown.add_row(
                str(row["rank"]),
                "window" if row["step"] is None else f"step {row['step']}",
                duration(row["measured_ns"]),
                f"{duration(row['fastest_ns'])}{until}",
                f"{100 * row['change']:+.1f} %" + (f" to {least:+.1f} %" if is_range else ""),
                f"{100 * row['replay_error']:+.2f} %",
            )
        if rows.height > _MOST_STEPS_SHOWN + 1:
            shown.add_row(str(rows["rank"][0]), f"{rows.height - _MOST_STEPS_SHOWN - 1} more steps", *[""] * 4)
    out.print(shown)
    out.print("error: what a replay is off by when nothing is changed")
