"""The analyses as commands: what each is asked, and how its table is told."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TypeVar

from cyclopts import Parameter

from chakra_capture.cli.answers import Answer, show_answer
from chakra_capture.cli.output import EXIT_OK, duration, number_ranges, percent
from chakra_capture.cli.subject import DEFAULTS, Options, Subject, open_subject
from chakra_capture.errors import TraceFileError

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
_IDLE = (("count", "gaps"), ("total_ns", "total"), ("share", "share"), ("longest_ns", "longest"))
_LAUNCHES = (
    ("rank", "rank"), ("device", "device"), ("stream", "stream"), ("call", "call"), ("num_launches", "calls"),
    ("call_p50_ns", "p50"), ("delay_p50_ns", "delay"), ("activity_p50_ns", "work"), ("num_short", "short"),
    ("queue_max", "queue"),
)  # fmt: skip
_MEMORY = (
    ("rank", "rank"), ("direction", "direction"), ("memory", "memory"), ("count", "count"), ("bytes", "bytes"),
    ("total_ns", "total"), ("bandwidth", "bandwidth"), ("exposed_ns", "exposed"),
)  # fmt: skip
_COMMUNICATION = (
    ("process_group", "group"), ("mesh_dim", "dim"), ("collective", "operation"), ("count", "count"),
    ("max_bytes", "up to"), ("total_ns", "total"), ("wait_ns", "wait"), ("bus_bytes_per_s", "bus"),
    ("exposed_ns", "exposed"),
)  # fmt: skip
_WAITING = (
    ("rank", "rank"), ("cause", "cause"), ("waiting_op", "waiting op"), ("collective", "for"), ("phase", "phase"),
    ("count", "count"), ("total_ns", "total"), ("share", "share"),
)  # fmt: skip
Flag = Annotated[bool, Parameter(negative=())]
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

    For example:
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

    For example:
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

    For example:
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


def idle(
    path: Path,
    /,
    *,
    by: _By[Literal["step", "name", "detail", "phase", "drained_by"]] = ("name",),
    options: Options = DEFAULTS,
) -> int:
    """Why the device is idle: every gap by cause.

    Idle is no activity on any stream. The inner gaps sum to the idle time of
    analyze device, exactly; lead and tail are what lies between them and the
    steps' first start and last end. Where the next launch came too late, the
    gap is the host's until then: waiting for input, in an op, in a call that
    waits for the device, allocating, between ops (in Python, or in autograd's
    engine), then inside the launch call, then the latency of the launch.
    Where work was queued a short gap is the hand-over between two activities.
    What nothing recorded explains is a row of its own; with more than 10 % of
    it (activities missing in the file, a window opened late) no conclusion
    should be drawn.

    A collective that waits for its peers keeps the device busy: see analyze
    communication. The profiler slows the host: of time that the host takes
    only a part would be there without it.

    For example:
        chakra-capture analyze idle ./traces
        chakra-capture analyze idle ./traces --by detail --limit 40
        chakra-capture analyze idle ./traces --by phase name --step 5 --json

    Parameters
    ----------
    path
        Folder of a run, its merged folder, or one rank=<R> folder in it.
    by
        What makes rows of their own: step, name (op or annotation), detail (the innermost, or the ops on both sides),
        phase, drained_by (the call that waited for the device, so that nothing was queued). Default: name.
    """
    from chakra_capture.analysis.idle import SCHEMA, idle_causes

    subject = open_subject(path, options)
    table = idle_causes(subject.traces, by=by, steps=subject.steps)
    notes = (*_notes_on_devices(subject), *_notes_on_idle(table, subject))
    return _show(Answer("idle", SCHEMA, table, notes, _screen(("rank", "position", "cause", *by), _IDLE)), options)


def _notes_on_idle(table: "pl.DataFrame", subject: Subject) -> list[str]:
    from chakra_capture.analysis.idle import MOST_UNEXPLAINED, hand_over_ns, unexplained_share

    notes = []
    for trace in subject.traces:
        share = unexplained_share(table.filter(table["rank"] == trace.rank))
        if share is not None and share > MOST_UNEXPLAINED:
            part = percent(share, 1)
            notes.append(f"{part} of the idle time of rank {trace.rank} has no recorded reason: draw no conclusion")
    limits = sorted({hand_over_ns(trace) for trace in subject.traces}) if table.height else []
    if limits:
        shown = " or ".join(duration(limit) for limit in limits)
        notes.append(f"a gap of up to {shown} before work that was queued is a hand-over")
    return notes


def launches(path: Path, /, *, options: Options = DEFAULTS) -> int:
    """Launch calls: what they cost, how long until the work starts, queues.

    One row per stream and call. The delay is from the start of the call to the
    start of what it launched; where a queue is long it is waiting in line, not
    a slow launch. The queue is what was launched on the stream and has not
    started when a call begins, its own included: work whose launch is not
    recorded is not in it, so it is never below 0. "short" counts activities
    that are shorter than their launch call: the host cannot keep ahead of many
    of them.

    For example:
        chakra-capture analyze launches ./traces
        chakra-capture analyze launches ./traces --rank 0 --step 5 --json

    Parameters
    ----------
    path
        Folder of a run, its merged folder, or one rank=<R> folder in it.
    """
    from chakra_capture.analysis.launches import SCHEMA, launch_statistics

    subject = open_subject(path, options)
    table = launch_statistics(subject.traces, steps=subject.steps)
    notes = list(_notes_on_devices(subject))
    missing = int(table.filter(table["call"].is_null())["num_activities"].sum())
    if missing:
        notes.append(f"the launches of {missing} activities are not recorded")
    if backward := table["num_backward"].sum():
        notes.append(f"{backward} activities start before their launch call, by a fault of the clocks")
    return _show(Answer("launches", SCHEMA, table, tuple(notes), _LAUNCHES), options)


def memory(path: Path, /, *, options: Options = DEFAULTS) -> int:
    """Copies and memsets: bytes, bandwidth, and what of them is not hidden.

    One row per direction and kind of host memory. Bandwidth is all bytes by
    all time; the median of the single copies is beside it in --json. Exposed
    is the time with such a copy and no kernel. Pageable host memory is copied
    in stages while the call waits: pinned memory is what non_blocking needs.

    For example:
        chakra-capture analyze memory ./traces
        chakra-capture analyze memory ./traces --rank 0 --json

    Parameters
    ----------
    path
        Folder of a run, its merged folder, or one rank=<R> folder in it.
    """
    from chakra_capture.analysis.copies import SCHEMA, copy_statistics

    subject = open_subject(path, options)
    table = copy_statistics(subject.traces, steps=subject.steps)
    return _show(Answer("memory", SCHEMA, table, _notes_on_devices(subject), _MEMORY), options)


def communication(path: Path, /, *, waiting: Flag = False, options: Options = DEFAULTS) -> int:
    """Communication by group, kind and size: waiting, bandwidth, overlap.

    One row per process group, operation and class of sizes (two powers of 2).
    "wait" is the time until the last rank it needs had arrived, only what is
    after it is transfer, and bandwidth is of that: algorithm bandwidth is the
    payload of the full result per rank by the transfer, bus bandwidth that
    times 2(n-1)/n for all_reduce, (n-1)/n for all_gather, reduce_scatter and
    all_to_all. Where ranks are missing or their clocks cannot be compared
    wait and bandwidth are not measured. Exposed is what no compute hides.

    --waiting asks who waits: exposed communication by the op whose activity
    comes next. What passes before that activity is launched is "host late":
    nothing was queued to hide the transfer, and a faster network helps little.

    Examples:
        chakra-capture analyze communication ./traces
        chakra-capture analyze communication ./traces --waiting --step 5-8
        chakra-capture analyze communication ./traces --rank 0 --json

    Parameters
    ----------
    path
        Folder of a run, its merged folder, or one rank=<R> folder in it.
    waiting
        Show exposed communication by what waits for it.
    """
    import polars as pl

    from chakra_capture.analysis import communication as classes
    from chakra_capture.analysis import exposed

    subject = open_subject(path, options)
    if waiting:
        table = exposed.waiting_ops(subject.traces, steps=subject.steps)
        notes = _notes_on_devices(subject)
        return _show(Answer("communication", exposed.SCHEMA, table, notes, _WAITING), options)
    matched = subject.run.collectives
    if matched is None:
        raise TraceFileError(
            f"the operations of {subject.run.folder} are not matched across its ranks. Merge them again, all at once."
        )
    mine = matched.filter(pl.col("rank").is_in([trace.rank for trace in subject.traces]))
    if subject.steps is not None:
        mine = mine.filter(pl.col("step").is_in(subject.steps))
    kernels = pl.concat([exposed.exposed_of_kernels(trace) for trace in subject.traces])
    table = classes.communication_statistics(mine, kernels)
    return _show(Answer("communication", classes.SCHEMA, table, subject.notes, _COMMUNICATION), options)


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
