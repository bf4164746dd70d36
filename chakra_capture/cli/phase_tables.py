"""The phases of steps, as ``summary`` prints them: one rank in full, then how far the ranks are apart."""

from statistics import median
from typing import TYPE_CHECKING, Any

from chakra_capture.cli.output import count_of, duration, make_table, percent, plain, shortened, size

if TYPE_CHECKING:
    import polars as pl
    from rich.console import Console
    from rich.table import Table

    from chakra_capture.analysis.phases import PhaseSummary

_BAR = 12
_NAME = 14
_MOST_PARTS, _PART = 8, 40
_HEADS = {"step": "step", "between": "between steps"}


def print_phases(out: "Console", phases: "dict[int, PhaseSummary]") -> None:
    """Print the phases of the first rank, then those of all ranks beside each other."""
    for rank, summary in list(phases.items())[:1]:
        _print_rank(out, rank, summary)
    if len(phases) > 1:
        _print_ranks(out, phases)


def _print_rank(out: "Console", rank: int, summary: "PhaseSummary") -> None:
    title = f"Phases of {count_of(summary.num_steps, 'step')} of rank {rank}"
    table = make_table(title, "", "mean", "median", "90 %", "share", "steps", "")
    for row in _rows(table, summary.table.iter_rows(named=True)):
        if row["mean_ns"] is None:
            table.add_row(_name(row), "not measured" if row["share"] is None else "")
            continue
        times = [duration(row[key]) for key in ("mean_ns", "median_ns", "p90_ns")]
        share, steps = row["share"] or 0.0, f"{row['num_steps']}/{summary.num_steps}"
        table.add_row(_name(row), *times, percent(share, 1), steps, "█" * round(share * _BAR))
    out.print(table)
    if summary.step_mean_ns is not None:
        mean, middle = duration(summary.step_mean_ns), duration(summary.step_median_ns)
        out.print(f"a step takes {mean} (median {middle}) without what comes between its batches")
        out.print(f"{percent(summary.coverage, 1)} of {duration(summary.wall_ns)} of training is in named phases")
    for line in _rates(summary):
        out.print(line)
    for why, number in summary.left_out.items():
        out.print(f"not in these times: {count_of(number, 'step')} {why}")
    for name, why in summary.not_measured.items():
        out.print(plain(f"{name} is not measured: {why}"))
    for note in summary.notes:
        out.print(plain(f"note: rank {rank}: {note}"))
    out.print()


def _rates(summary: "PhaseSummary") -> list[str]:
    """Steps per second, how the steps that are left out compare, and memory."""
    lines = []
    if summary.steps_per_s is not None:
        rates = [(summary.steps_per_s, "steps"), (summary.batches_per_s, "batches"), (summary.samples_per_s, "samples")]
        lines.append(", ".join(f"{rate:.2f} {what}" for rate, what in rates if rate is not None) + " per second")
    if summary.samples_per_s is None and summary.batch_size is not None:
        lines.append("batches hold {} to {} samples".format(*summary.batch_size))
    if summary.first_ns is not None:
        lines.append(f"the first step took {duration(summary.first_ns)}")
    if summary.profiled_median_ns is not None and summary.step_median_ns:
        more = summary.profiled_median_ns / summary.step_median_ns
        lines.append(f"under the profiler a step takes {duration(summary.profiled_median_ns)} ({more:.2f} x, medians)")
    if summary.rss_bytes is not None:
        lines.append(f"memory of the process up to {size(summary.rss_bytes)}")
    return lines


def _print_ranks(out: "Console", phases: "dict[int, PhaseSummary]") -> None:
    found: dict[tuple[str, str], dict[int, float]] = {}
    for rank, summary in phases.items():
        for row in summary.table.iter_rows(named=True):
            if row["mean_ns"] is not None:
                found.setdefault((row["place"], row["phase"]), {})[rank] = row["mean_ns"]
    table = make_table(f"Mean of each phase over {len(phases)} ranks", "", "median", "least", "rank", "most", "rank")
    rows = [{"place": place, "phase": name, "means": means} for (place, name), means in found.items()]
    for row in _rows(table, rows):
        means = row["means"]
        least, most = min(means, key=lambda rank: means[rank]), max(means, key=lambda rank: means[rank])
        cells = [duration(median(means.values())), duration(means[least]), str(least), duration(means[most])]
        table.add_row(_name(row), *cells, str(most))
    out.print(table)
    out.print()


def print_phase_times(out: "Console", times: "pl.DataFrame", rest: "pl.DataFrame") -> None:
    """Print what the recorded steps did in each phase, on the CPU and on the device."""
    if times.height < 2:  # the rest alone is the step
        return
    on_device = times["compute_ns"].count() > 0
    heads = ("launches", "busy", "exp. comm", "idle") if on_device else ()
    table = make_table("Profiled steps by phase", "", "time", "CPU self", *heads)
    table.columns[0].justify = "left"
    for row in times.iter_rows(named=True):
        cells = [duration(row["wall_ns"]), duration(row["cpu_self_ns"])]
        if on_device:
            cells += ["-" if row["num_launches"] is None else f"{row['num_launches']:.0f}"]
            cells += [duration(value) for value in _device_times(row)]
        table.add_row(row["phase"] or "rest", *cells)
    out.print(table)
    shown = [(shortened(row["part"], _PART), row["wall_ns"]) for row in rest.iter_rows(named=True)]
    if more := shown[_MOST_PARTS:]:
        shown[_MOST_PARTS:] = [(f"{len(more)} more", sum(ns for _, ns in more))]
    if shown:
        out.print(plain(f"rest: {', '.join(f'{name} {duration(ns)}' for name, ns in shown)}"))
    out.print("mean of a step; CPU self: on all threads")
    if on_device:
        out.print("device: busy + idle = time; exp. comm: of busy, what no compute hides")
    out.print()


def _device_times(row: dict[str, Any]) -> tuple[float | None, ...]:
    """Busy, exposed communication and idle time."""
    parts = [row[f"{name}_ns"] for name in ("compute", "exposed_communication", "exposed_memory")]
    busy = None if None in parts else sum(parts)
    return busy, row["exposed_communication_ns"], row["device_idle_ns"]


def _rows(table: "Table", rows: Any) -> Any:
    """The rows, with a line in the table before those of each place."""
    table.columns[0].justify = "left"
    if len(table.columns) > 6:
        table.columns[6].justify = "left"
    place = ""
    for row in sorted(rows, key=lambda row: row["place"], reverse=True):
        if row["place"] != place:
            place = row["place"]
            table.add_row(_HEADS[place])
        yield row


def _name(row: dict[str, Any]) -> str:
    return f"  {shortened(row['phase'], _NAME)}"
