"""``chakra-capture summary``: a run on one screen."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from chakra_capture.cli.communication_table import print_communication
from chakra_capture.cli.findings import findings_text, print_findings
from chakra_capture.cli.merged import merge_stale
from chakra_capture.cli.output import (
    EXIT_OK,
    console,
    count_of,
    duration,
    make_table,
    not_negative,
    number_ranges,
    percent,
    plain,
    print_error,
    print_json,
    shortened,
)
from chakra_capture.cli.phase_tables import print_phase_times, print_phases
from chakra_capture.errors import TraceFileError

if TYPE_CHECKING:
    import polars as pl
    from rich.console import Console
    from rich.table import Table

    from chakra_capture.analysis.overview import Overview, RankOverview
    from chakra_capture.trace.discovery import Run

_MAX_RANKS_SHOWN = 8
_NAME_WIDTH = 48


def summary(
    path: Path,
    /,
    *,
    job: str | None = None,
    rank: Annotated[int | None, Parameter(validator=not_negative)] = None,
    top: Annotated[int, Parameter(validator=not_negative)] = 8,
    phases_only: Annotated[bool, Parameter(negative=())] = False,
    json: Annotated[bool, Parameter(negative=())] = False,
) -> int:
    """Show what a run recorded and where its step time went.

    Ranks that are not merged yet, or whose traces are newer than their tables, are merged first.

    Step times are those of whole recorded steps, taken under the profiler, which makes small CPU ops several times
    slower. Operators are ranked by self time: their duration without the operators inside them, on all threads of the
    recorded steps; "(outside any op)" is the time of the step's own thread between operators. Device time is
    compute + exposed communication + exposed copies + idle = span, from the first to the last device activity.
    Phases are those of all steps, of the window or not: of a step input wait, forward and so on, and its residual in no
    phase; and what comes between two steps. Steps under the profiler and the first of a training are left out.
    Profiled steps by phase: an activity of the device counts to the phase that launched it, idle time to the phase
    that the loop is in meanwhile. The rest is split into loss, zero_grad, copies, handlers and callbacks by name,
    MONAI's decollate and postprocessing, other annotations and ops, and Python.
    Communication is that of all ranks together: of each operation the time until the last rank it needs had arrived
    (waiting), and after that (transfer); bus bandwidth as in NCCL's tests. The rank that the others wait for is named
    only if it is late in nearly every step, by much, and chance does not explain it.
    The last lines say what is wrong, most important first, what that costs and what to do next: from recorded steps
    (analyze findings, which has the limits, tells the same), and from those outside the profiler, of all ranks: there
    nothing that takes less than 10 % of a step (or of the wall time, between steps) is wrong.
    The same in TraceML's form, final_summary.json, is written beside the manifests of a run that recorded phases.
    What a run did not record is shown as "not measured", never as 0.

    Examples:
        chakra-capture summary ./traces
        chakra-capture summary ./traces --job 0.1 --rank 3 --json

    Parameters
    ----------
    path
        Folder of a run, or of merged ranks.
    job
        Job of a trace_dir that holds several runs; default: the newest.
    rank
        Show one rank only.
    top
        Rows in the lists of operators and kernels.
    phases_only
        Leave the traces alone, merged or not: show the phases of all steps.
    json
        Print JSON.
    """
    from chakra_capture.analysis.diagnosis import series_of
    from chakra_capture.analysis.overview import overview
    from chakra_capture.analysis.phases import phase_summary
    from chakra_capture.trace.discovery import find_run
    from chakra_capture.trace.merged import MergedTrace
    from chakra_capture.trace.phase_records import read_phases

    run = find_run(path, job)
    if phases_only and not run.phase_files:
        raise TraceFileError(f"{path} holds no phases of steps. Record with phases: true, or leave out --phases-only.")
    if not phases_only:
        merge_stale(run)
    merged = {} if phases_only else run.merged_ranks
    known = sorted({*merged, *run.phase_files})
    if rank is not None and rank not in known:
        raise TraceFileError(f"{path} has no merged rank {rank}; it has {number_ranges(known)}. Name one of them.")
    phases, series = {}, []
    for number, file in run.phase_files.items():
        records = read_phases(file)
        series.append(series_of(number, records, len(run.phase_files)))
        if rank in (None, number):
            phases[number] = phase_summary(records)
    if not merged and not run.ranks and not phases:
        raise TraceFileError(run.why_empty)
    if not merged and run.ranks and not phases_only:
        raise TraceFileError(
            f"no rank of {path} could be merged. See the messages above, or run: chakra-capture merge {path}"
        )
    shown = [number for number in merged if rank in (None, number)]
    result = overview(run, [MergedTrace(number, merged[number]) for number in shown], phases, series)
    if rank is None:
        _write_summary(run, result)
    if json:
        print_json(result.as_json())
    else:
        _print(run, result, top)
    return EXIT_OK


def _write_summary(run: "Run", result: "Overview") -> None:
    """Write final_summary.json beside the manifests; of a run without them there is no such place."""
    from chakra_capture.analysis.final_summary import RunFacts, final_summary
    from chakra_capture.cli.files import write_json

    if result.diagnosis is None or not run.paths.run_dir.is_dir():
        return
    facts = RunFacts(run.paths.job, run.manifests, result.world_size, run.why_failed)
    text = "\n".join(findings_text(result.diagnosis))
    path = run.paths.summary
    try:
        write_json(path, final_summary(facts, result.diagnosis, result.phases, text=text))
    except OSError as fault:
        print_error(f"{path} is not written: {fault.strerror or fault}. The summary below is complete.")


def _print(run: "Run", result: "Overview", top: int) -> None:
    out = console()
    out.print(plain(f"Run {run.paths.job} in {run.paths.trace_dir}"), soft_wrap=True)
    if result.ranks:
        _print_head(out, result)
        _print_steps(out, result)
    print_phases(out, result.phases)
    if result.ranks:
        print_phase_times(out, result.phase_times, result.rest_parts)
        _print_device(out, result)
        print_communication(out, result)
        _print_top(out, result, top)
    for note in result.notes:
        out.print(plain(f"note: {note}"))
    for rank in result.ranks[:_MAX_RANKS_SHOWN]:
        for note in rank.notes:
            out.print(plain(f"note: rank {rank.rank}: {note}"))
    print_findings(out, result.diagnosis, result.findings)


def _print_head(out: "Console", result: "Overview") -> None:
    of_world = "" if result.world_size is None else f" of {result.world_size}"
    numbers = number_ranges([rank.rank for rank in result.ranks])
    out.print(f"Ranks      {len(result.ranks)}{of_world} ({numbers})")
    steps = sorted({step for rank in result.ranks for step in rank.steps})
    out.print(f"Steps      {number_ranges(steps)}{_coverage(result)}")
    out.print(f"Host ops   {_host_ops(result)}")
    activities, launched = _sum(result, "activities"), _sum(result, "launched")
    if activities:
        shared = f"{launched} of {activities} ({percent(launched, activities)})"
        out.print(f"Device     {shared} activities linked to their launch")
    elif activities == 0:
        out.print("Device     no device events in the traces: device time is not measured")
    else:
        out.print("Device     no device trace: times are not measured")
    if salvaged := [rank.rank for rank in result.ranks if rank.salvaged]:
        out.print(f"Salvaged   rank {number_ranges(salvaged)}: cut or repaired input, see the notes below")
    out.print()


def _host_ops(result: "Overview") -> str:
    ops, linked = _sum(result, "host_ops"), _sum(result, "host_linked")
    alone = sum(rank.host_alone for rank in result.ranks)
    parts = []
    if ops is not None:
        parts.append(f"{linked} of {ops} ({percent(linked, ops)}) linked to the device trace")
    if alone:
        parts.append(f"{alone} without a device trace, so without times")
    return "; ".join(parts) or "no host trace"


def _coverage(result: "Overview") -> str:
    """How much of what was asked for is there, as the manifests say."""
    asked = sum(recording["num_steps_asked"] for recording in result.recordings.values())
    whole = sum(len(window["steps"]) for recording in result.recordings.values() for window in recording["windows"])
    ranks = count_of(len(result.recordings), "rank")
    return f" ({whole} of {asked} asked for recorded whole, over {ranks})" if asked else ""


def _sum(result: "Overview", field: str) -> int | None:
    values = [getattr(rank, field) for rank in result.ranks if getattr(rank, field) is not None]
    return sum(values) if values else None


def _print_steps(out: "Console", result: "Overview") -> None:
    table = make_table(
        "Step time (profiled)",
        "rank",
        "steps",
        "mean",
        "median",
        "min",
        "max",
    )
    for rank in result.ranks[:_MAX_RANKS_SHOWN]:
        time = rank.step_time
        if time:
            values = [duration(time[key]) for key in ("mean_ns", "median_ns", "min_ns", "max_ns")]
            table.add_row(str(rank.rank), str(time["num_steps"]), *values)
        else:
            table.add_row(str(rank.rank), "0", "not measured", "", "", "")
    out.print(table)
    for rank in result.ranks[:_MAX_RANKS_SHOWN]:
        for window in rank.unmarked_windows:
            spans = (
                f"window {window['window']} of rank {rank.rank} from first to last event: {duration(window['dur_ns'])}"
            )
            out.print(f"no step is marked; {spans}")
    partial = sum(rank.step_time["num_partial"] for rank in result.ranks if rank.step_time)
    if partial:
        out.print(f"cut short and not in these times: {count_of(partial, 'step')}")
    if any(rank.step_time for rank in result.ranks):
        out.print("under the profiler, where small CPU ops take several times as long")
    if len(result.ranks) > _MAX_RANKS_SHOWN:
        out.print(f"... and {len(result.ranks) - _MAX_RANKS_SHOWN} ranks more (--json has all)")
    out.print()


def _print_device(out: "Console", result: "Overview") -> None:
    measured = [rank for rank in result.ranks if rank.device]
    if not measured:
        return
    table = make_table("Device time", "rank", "span", "compute", "exp. comm", "exp. copies", "idle", "comm", "busy")
    for rank in measured[:_MAX_RANKS_SHOWN]:
        table.add_row(str(rank.rank), *_device_cells(rank))
    out.print(table)
    out.print("compute + exposed communication + exposed copies + idle = span")
    out.print()


def _device_cells(rank: "RankOverview") -> list[str]:
    device = rank.device or {}
    span = device["span_ns"]
    if span is None:
        return ["not measured", *[""] * 6]
    shares = ("compute_ns", "exposed_communication_ns", "exposed_memory_ns", "idle_ns", "communication_ns", "busy_ns")
    return [duration(span), *(percent(device[key], span) for key in shares)]


def _print_top(out: "Console", result: "Overview", top: int) -> None:
    if top and result.operators.height:
        out.print(_top_table("Top operators by self time", result.operators.head(top), "self_ns"))
        scope = "whole recorded steps" if any(rank.step_time for rank in result.ranks) else "all that was recorded"
        out.print(f"of {scope}, all threads; share of the self times of all operators")
        out.print()
    if top and result.kernels.height:
        out.print(_top_table("Top kernels by total time", result.kernels.head(top), "total_ns"))
        out.print()


def _top_table(title: str, rows: "pl.DataFrame", time: str) -> "Table":
    table = make_table(title, "name", "count", "time", "share")
    table.columns[0].justify = "left"
    for row in rows.iter_rows(named=True):
        cells = (str(row["count"]), duration(row[time]), percent(row["share"], 1))
        table.add_row(shortened(row["name"].removeprefix("void "), _NAME_WIDTH).ljust(_NAME_WIDTH), *cells)
    return table
