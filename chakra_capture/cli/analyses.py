"""The analyses as commands: what each is asked, and how its table is told."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TypeVar

from cyclopts import Parameter

from chakra_capture.cli.answers import Answer, show_answer
from chakra_capture.cli.output import EXIT_OK, number_ranges, percent
from chakra_capture.cli.subject import DEFAULTS, Options, Subject, open_subject

if TYPE_CHECKING:
    import polars as pl

_KEYS = (("rank", "rank"), ("window", "window"), ("device", "device"))
_DEVICE = (
    *_KEYS, ("step", "step"), ("span_ns", "span"), ("compute_ns", "compute"),
    ("exposed_communication_ns", "exp. comm"), ("exposed_memory_ns", "exp. copies"), ("idle_ns", "idle"),
    ("overlap", "overlap"),
)  # fmt: skip
_HTA = (
    *_KEYS, ("kernel_time_ns", "kernel time"), ("idle_time_ns", "idle"), ("compute_time_ns", "compute"),
    ("non_compute_time_ns", "non-compute"), ("comp_comm_overlap_pctg", "overlap %"),
)  # fmt: skip

_KERNELS = (
    ("name", "name"), ("count", "count"), ("total_ns", "total"), ("share", "share"), ("mean_ns", "mean"),
    ("p50_ns", "p50"), ("p90_ns", "p90"),
)  # fmt: skip
_OPERATORS = (
    ("name", "name"), ("count", "count"), ("self_ns", "self"), ("share", "share"), ("total_ns", "total"),
    ("device_self_ns", "dev. self"), ("device_total_ns", "dev. total"),
)  # fmt: skip
_Key = TypeVar("_Key")
_By = Annotated[tuple[_Key, ...], Parameter(negative=(), consume_multiple=True)]


def device(path: Path, /, *, definitions: Literal["own", "hta"] = "own", options: Options = DEFAULTS) -> int:
    """What the device does: computing, communicating, copying, idle.

    One row for all that was recorded of a device, then one per step; with
    --step those steps alone. compute + exposed communication + exposed memory
    + idle = span, to the nanosecond: where several kinds run at once the first
    of them counts. Exposed communication is what no compute hides. The row of
    a step covers it from start to end, whatever launched an activity; idle is
    time without any activity on any stream.

    --definitions hta shows what Holistic Trace Analysis counts on the same
    trace: it leaves out the last step, and has one number for all that is busy
    and does not compute.

    Examples:
        chakra-capture analyze device ./traces
        chakra-capture analyze device ./traces --rank 0 --step 5-8 --json

    Parameters
    ----------
    path
        Folder of a run, its merged folder, or one rank=<R> folder in it.
    definitions
        own, or hta.
    """
    import polars as pl

    from chakra_capture.analysis import device as own
    from chakra_capture.analysis import hta_breakdown as hta

    subject = open_subject(path, options)
    notes = _notes_on_devices(subject)
    if definitions == "hta":
        table = pl.concat([hta.hta_breakdown(trace) for trace in subject.traces])
        return _show(Answer("device", hta.SCHEMA, table, notes, _HTA), options)
    table = pl.concat([own.device_breakdown(trace) for trace in subject.traces])
    return _show(Answer("device", own.SCHEMA, _of_steps(table, subject), notes, _DEVICE), options)


def kernels(path: Path, /, *, by: _By[Literal["rank", "phase"]] = (), options: Options = DEFAULTS) -> int:
    """Kernels, copies and memsets by name: count, total, spread.

    All ranks together; --by makes rows of their own. Every statistic is of the
    single launches: p90 is the duration that 9 of 10 do not exceed. An
    activity counts up to the next start on its stream; how many reach past it
    as recorded, and the sum as recorded, are columns. With --step only what
    these steps launched.

    Examples:
        chakra-capture analyze kernels ./traces
        chakra-capture analyze kernels ./traces --by phase --limit 40
        chakra-capture analyze kernels ./traces --rank 0 --step 5 --json

    Parameters
    ----------
    path
        Folder of a run, its merged folder, or one rank=<R> folder in it.
    by
        rank, phase or both: what makes rows of their own.
    """
    from chakra_capture.analysis.kernels import SCHEMA, kernel_statistics

    subject = open_subject(path, options)
    table = kernel_statistics(subject.traces, by=by, steps=subject.steps)
    notes = list(_notes_on_devices(subject))
    of_graphs, total = (int(rows["total_ns"].sum()) for rows in (table.filter(table["num_in_graphs"] > 0), table))
    if of_graphs:
        share = percent(of_graphs, total)
        notes.append(f"{share} of the device time is launched by graphs: which op it belongs to is not recorded")
    if clipped := table["num_clipped"].sum():
        notes.append(f"{clipped} activities reach past the next start on their stream; total counts them up to it")
    return _show(Answer("kernels", SCHEMA, table, tuple(notes), _screen(by, _KERNELS)), options)


def operators(path: Path, /, *, by: _By[Literal["rank", "phase", "shapes"]] = (), options: Options = DEFAULTS) -> int:
    """Ops, annotations and runtime calls: CPU time and launched device time.

    All ranks and threads together, over the whole recorded steps; --by makes
    rows of their own. Self time is the duration without what is inside;
    "(outside any op)" is the time of the step's own thread between ops. Device
    time counts to the op whose launch ran it: "dev. self" to the innermost op
    around the launch call, "dev. total" to every op open meanwhile. Within
    recursion a time counts once. Under the profiler small ops take several
    times as long: read CPU times as shares.

    Examples:
        chakra-capture analyze operators ./traces
        chakra-capture analyze operators ./traces --by shapes --limit 40
        chakra-capture analyze operators ./traces --by rank phase --json

    Parameters
    ----------
    path
        Folder of a run, its merged folder, or one rank=<R> folder in it.
    by
        rank, phase, shapes (of the inputs): what makes rows of their own.
    """
    from chakra_capture.analysis.operators import SCHEMA, operator_statistics

    subject = open_subject(path, options)
    keys = ["input_shapes" if key == "shapes" else key for key in by]
    table = operator_statistics(subject.traces, by=keys, steps=subject.steps)
    return _show(Answer("operators", SCHEMA, table, _notes_on_devices(subject), _screen(keys, _OPERATORS)), options)


def _screen(by: Sequence[str], columns: tuple[tuple[str, str], ...]) -> tuple[tuple[str, str], ...]:
    return (*((key, key) for key in by), *columns)


def _show(answer: Answer, options: Options) -> int:
    show_answer(answer, limit=options.limit, as_json=options.json)
    return EXIT_OK


def _of_steps(table: "pl.DataFrame", subject: Subject) -> "pl.DataFrame":
    import polars as pl

    return table if subject.steps is None else table.filter(pl.col("step").is_in(subject.steps))


def _notes_on_devices(subject: Subject) -> tuple[str, ...]:
    """Which ranks say nothing about their device, or not all."""
    notes = list(subject.notes)
    silent = [trace.rank for trace in subject.traces if not trace.num_activities]
    if silent:
        notes.append(f"rank {number_ranges(silent)} has no device activities: device times are not measured there")
    lost = [trace.rank for trace in subject.traces if trace.device_tail_lost]
    if lost:
        notes.append(f"the end of the device trace of rank {number_ranges(lost)} is lost: its times are not measured")
    return tuple(notes)
