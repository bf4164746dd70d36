"""The analyses of steps, their phases, their input and of slow ranks as commands."""

from pathlib import Path

from chakra_capture.cli.answers import Answer, show_answer
from chakra_capture.cli.output import EXIT_OK, duration, percent
from chakra_capture.cli.subject import DEFAULTS, Options, open_subject
from chakra_capture.errors import TraceFileError

_STEPS = (
    ("window", "window"), ("step", "step"), ("rank", "rank"), ("dur_ns", "time"), ("input_wait_ns", "input"),
    ("forward_ns", "forward"), ("backward_ns", "backward"), ("optimizer_ns", "optimizer"), ("residual_ns", "rest"),
    ("device_idle_ns", "dev. idle"),
)  # fmt: skip
_PHASES = (
    ("rank", "rank"), ("phase", "phase"), ("wall_ns", "wall"), ("compute_ns", "compute"),
    ("exposed_communication_ns", "exp. comm"), ("exposed_memory_ns", "exp. copies"), ("device_idle_ns", "idle"),
)  # fmt: skip
_STRAGGLERS = (
    ("rank", "rank"), ("num_steps", "steps"), ("num_latest", "latest in"), ("delay_ns", "late by"),
    ("waiting_ns", "waits"), ("share", "share"), ("is_straggler", "straggler"),
)  # fmt: skip
_NO_STEPS = "no step is marked in the traces (ProfilerStep), so there are none to tell apart"


def steps(path: Path, /, *, options: Options = DEFAULTS) -> int:
    """The recorded steps one by one: time, phases, device.

    A row per step and rank. These steps ran under the profiler, which makes
    small CPU ops take several times as long; the phases of all other steps are
    in summary. A window that marks no step is one row, from its first event to
    its last. A phase that is not measured is "-", never 0.

    For example:
        chakra-capture analyze steps ./traces
        chakra-capture analyze steps ./traces --rank 0-3 --step 5 --json

    Parameters
    ----------
    path
        Folder of a run, its merged folder, or one rank=<R> folder in it.
    """
    from chakra_capture.analysis.step_tables import SCHEMA, step_table

    subject = open_subject(path, options)
    table = step_table(subject.traces, steps=subject.steps)
    return _show(Answer("steps", SCHEMA, table, subject.notes, _STEPS), options)


def phases(path: Path, /, *, options: Options = DEFAULTS) -> int:
    """Phases of recorded steps: on the loop's thread, all CPU, the device.

    Means over the steps of each rank. Wall is time of the loop's thread; the
    phases and the rest (phase "-") sum to the step. The device's four times
    sum to it, too: an activity counts to the phase that launched it, idle time
    to the phase that the loop is in meanwhile.

    For example:
        chakra-capture analyze phases ./traces
        chakra-capture analyze phases ./traces --step 5 --json

    Parameters
    ----------
    path
        Folder of a run, its merged folder, or one rank=<R> folder in it.
    """
    from chakra_capture.analysis.phase_means import SCHEMA, phase_means

    subject = open_subject(path, options)
    table = phase_means(subject.traces, steps=subject.steps)
    notes = (*subject.notes, *([] if table.height else [_NO_STEPS]))
    return _show(Answer("phases", SCHEMA, table, notes, _PHASES), options)


def input_(path: Path, /, *, options: Options = DEFAULTS) -> int:
    """Waiting for data in each recorded step, and the device idle meanwhile.

    A row per step and rank. Input wait is time in which the loop's thread
    waits for its next batch. What the device idles of that is what faster
    loading can give back; the rest is hidden under queued work. A trace that
    marks no input_wait anywhere is not measured ("-"), not 0.

    For example:
        chakra-capture analyze input ./traces
        chakra-capture analyze input ./traces --rank 0 --json

    Parameters
    ----------
    path
        Folder of a run, its merged folder, or one rank=<R> folder in it.
    """
    from chakra_capture.analysis.input_waits import SCHEMA, input_waits

    subject = open_subject(path, options)
    table = input_waits(subject.traces, steps=subject.steps)
    notes = (*subject.notes, *([] if table.height else [_NO_STEPS]))
    return _show(Answer("input", SCHEMA, table, notes), options)


def stragglers(path: Path, /, *, options: Options = DEFAULTS) -> int:
    """Which ranks the others wait for.

    A row per rank: by how much it is later than half of the others in a step
    (median), less the time in which it waits itself, and in how many steps it
    is the latest. A rank is named only if it is late in nearly every step, by
    much, others wait, the clocks allow it and chance does not explain it; the
    notes say why none is, and in which phase one that is named is slow.

    For example:
        chakra-capture analyze stragglers ./traces
        chakra-capture analyze stragglers ./traces --json

    Parameters
    ----------
    path
        Folder of a run, or its merged folder.
    """
    import polars as pl

    from chakra_capture.analysis.loop import loop_windows
    from chakra_capture.analysis.own_times import own_times
    from chakra_capture.analysis.stragglers import SCHEMA, find_stragglers

    subject = open_subject(path, options)
    matched = subject.run.collectives
    if matched is None:
        raise TraceFileError(f"the ranks of {path} are not matched with each other. Merge them again, all at once.")
    used = matched if subject.steps is None else matched.filter(pl.col("step").is_in(subject.steps))
    used = used.filter(pl.col("rank").is_in([trace.rank for trace in subject.traces]))
    found = find_stragglers(used, {rank: clock.spread_ns or 0 for rank, clock in subject.run.clocks.items()})
    if found.ranks:
        own = {trace.rank: own_times(trace, loop_windows(trace)) for trace in subject.traces}
        found = found.located(own, {trace.rank: trace for trace in subject.traces})
    notes = [*subject.notes, *([f"no rank is named: {found.reason}"] if found.reason else [])]
    for rank, late in found.late_in.items():
        own, others = duration(late.own_ns), duration(late.others_ns)
        notes.append(f"rank {rank} is slow in {late.phase or 'no phase'}: {own} of its own, the others {others}")
        notes.append(str(late.what))
    for rank in found.ranks:
        share = found.table.filter(pl.col("rank") == rank)["share"][0]
        notes.append(f"the others wait for rank {rank}, which is late by {percent(share, 1)} of a step")
    return _show(Answer("stragglers", SCHEMA, found.table, tuple(notes), _STRAGGLERS), options)


def _show(answer: Answer, options: Options) -> int:
    show_answer(answer, limit=options.limit, as_json=options.json)
    return EXIT_OK
