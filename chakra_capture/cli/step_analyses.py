"""The analyses of steps, their phases, their input and of slow ranks as commands."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from chakra_capture.cli.answers import Answer, show_answer
from chakra_capture.cli.output import EXIT_OK, count_of, duration, percent
from chakra_capture.cli.subject import DEFAULTS, Options, open_subject
from chakra_capture.errors import TraceFileError

if TYPE_CHECKING:
    import polars as pl

    from chakra_capture.analysis.slow_transfers import SlowTransfers

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
    ("share", "share"), ("is_straggler", "straggler"), ("phase", "phase"), ("op", "op"),
)  # fmt: skip
_DEAREST = 3
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
    """Waiting for data in each recorded step, and what it costs.

    A row per step and rank. Input wait is time in which the loop's thread
    waits for its next batch. What the device idles of that is what faster
    loading can give back on this rank; the rest is hidden under queued work.
    Peers wait is what the other ranks together wait for this one in the
    collectives that follow, as far as it waited longer for its input than
    each of them. What is not recorded is not measured ("-"), not 0.

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
    table = input_waits(subject.traces, subject.run, steps=subject.steps)
    notes = (*subject.notes, *_stalls(table), *([] if table.height else [_NO_STEPS]))
    return _show(Answer("input", SCHEMA, table, notes), options)


def stragglers(path: Path, /, *, options: Options = DEFAULTS) -> int:
    """Which ranks the others wait for.

    A row per rank: by how much it is later than half of the others in a step
    (median), less the time in which it waits itself, and in how many steps it
    is the latest. A rank is named only if it is late in nearly every step, by
    much, others wait, its own work takes longer in nearly every step, the
    clocks allow it and chance does not explain it; the notes say why none is.

    Of a rank that is named, phase is where its own work takes longest beyond
    that of the others, communication and waiting taken off. Op is what takes
    half of that or more in self time, on the CPU (the loop's thread, in backward
    autograd's, in input_wait the loader) or on the device (what it launches);
    without one it is "in Python" or "in the loader". A slow network makes no
    rank late: transfers that take much of a step are a note of their own, which
    names a rank only where messages between two ranks (send, recv) tell.

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
    table = found.explained()
    for rank in found.ranks:
        notes += _of_straggler(table.row(by_predicate=pl.col("rank") == rank, named=True))
    notes += _of_transfers(found.transfers)
    return _show(Answer("stragglers", SCHEMA, table, tuple(notes), _STRAGGLERS), options)


def _stalls(table: "pl.DataFrame") -> list[str]:
    """What the input of each rank costs the others, the dearest first."""
    import polars as pl

    sums = table.group_by("rank").agg(pl.col("input_wait_ns", "peers_wait_ns").sum(), pl.len())
    dear = sums.filter(pl.col("peers_wait_ns") > 0).sort("peers_wait_ns", "rank", descending=[True, False])
    return [
        f"rank {rank} waits {duration(wait)} for its input in {count_of(steps, 'step')}; "
        f"the other ranks together wait {duration(peers)} for it"
        for rank, wait, peers, steps in dear.head(_DEAREST).iter_rows()
    ]


def _of_straggler(row: dict[str, Any]) -> list[str]:
    """What there is to say of a rank that is named."""
    rank, cause = row["rank"], row["cause"]
    notes = [f"the others wait for rank {rank}, which is late by {percent(row['share'], 1)} of a step"]
    if cause is None:
        return notes
    own, others = duration(row["own_ns"]), duration(row["others_ns"])
    what = cause
    if row["op"] is not None:
        around = f" in {row['call_path']}" if row["call_path"] else ""
        device = " on the device" if cause.endswith("device") else ""
        what = (
            f"{row['op']}{around} takes {duration(row['op_ns'])}{device}, on the others {duration(row['op_others_ns'])}"
        )
    elif row["call_path"]:
        what += f", in {row['call_path']}"
    where = row["phase"] or "all phases"
    where = where if where.startswith("between") else f"in {where}"
    notes.append(f"rank {rank} is slow {where}: {own} of its own, the others {others}; {what}")
    return notes


def _of_transfers(transfers: "SlowTransfers") -> list[str]:
    notes = [
        f"transfers of group {group.process_group} ({count_of(len(group.ranks), 'rank')}) take "
        f"{duration(group.transfer_ns)} per step ({percent(group.share, 1)}) after the last rank has come: "
        "nobody is late there, and they do not tell whose link is slow"
        for group in transfers.groups
    ]
    links = transfers.links
    if links is not None:
        took, others = duration(links.message_ns), duration(links.others_ns)
        notes.append(f"the links of rank {links.rank} are slow: a message takes {took}, between other ranks {others}")
    return notes


def _show(answer: Answer, options: Options) -> int:
    show_answer(answer, limit=options.limit, as_json=options.json)
    return EXIT_OK
