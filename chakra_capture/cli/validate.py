"""``chakra-capture validate``: are files right for simulators, or: does a replay give back what a run has measured?"""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

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
    number_ranges,
    print_json,
    status,
)

if TYPE_CHECKING:
    from rich.console import Console

    from chakra_capture.analysis.replay.run import WindowReplay
    from chakra_capture.analysis.replay.score import RankScore, StepScore

_MOST_STEPS_SHOWN = 12


def validate(
    path: Path,
    /,
    *,
    replay: Annotated[bool, Parameter(negative=())] = False,
    rules: Annotated[bool, Parameter(negative=())] = False,
    profile: Literal["astra", "full"] = "astra",
    comm_group: Path | None = None,
    npus: str | None = None,
    job: str | None = None,
    rank: Annotated[int | None, Parameter(validator=not_negative)] = None,
    json: Annotated[bool, Parameter(negative=())] = False,
) -> int:
    """Check Chakra .et files before a simulator runs them, or replay a merged run.

    Without --replay, PATH is a file X.et, the PREFIX of PREFIX.<rank>.et, a
    folder of such files, or of a run. Whoever wrote them, all ranks are checked:

        V1 files whole, plain, writable, one for each rank   V2 ids unique
        V3 dependencies lead to nodes   V4 none twice or on itself   V5 no circles
        V6 a node to begin with   V7 node types   V8 attributes and their kinds
        V9 collective types   V10 communication off the CPU   V11 its sizes
        V12 durations   V13 is the device waited for, does the longest path take the
        time that was measured   V14 process groups   V15 order, type and size of
        collectives on all members   V16 collectives of a group in a chain
        V17 groups in one order   V18 sends and receives paired
        V19 the same steps on all ranks   V20 as many ranks as NPUs

    Of one file, V15 and V17 to V20 are not checked. Exit status 0: no error,
    warnings allowed; 1: an error, which keeps a simulator from running the trace
    or has it simulate something else. A damaged file is one that names the byte.

    A replay (--replay) knows how long each stretch of a CPU thread and each device
    activity took, and what waits for what. When kernels start, how long calls wait
    for the device and collectives for other ranks is derived: launch latency, the
    gap on a stream and the like are one median of the trace each, never the
    recorded value. So it comes out right only if the dependencies are. CPU time,
    also that of a hand-over between threads, is what it was. All ranks of a run are
    replayed together.

    Unexplained wait is what device activities start later than everything they are
    known to wait for. Where it is more than 5 % of a window, nothing can be
    predicted from the trace (some kernels may be missing in it): exit status 3.

    Step errors alone prove little: a training that waits for its CPU has the right
    step time in a replay whose kernels are wrong. See the error of their starts.

    Examples:
        chakra-capture validate ./traces
        chakra-capture validate et/chakra --npus 2x4 --json
        chakra-capture validate ./traces --replay
        chakra-capture validate ./traces --replay --rules --rank 0 --json

    Parameters
    ----------
    path
        File, PREFIX or folder of .et files; folder of a run, or of merged ranks.
    replay
        Replay the run instead of checking files.
    rules
        Replay it once more without each rule, to see what the rule is good for.
    profile
        What the files may hold: what ASTRA-sim runs, or all that Chakra has.
    comm_group
        File of process groups; default: comm_group.json beside the .et files.
    npus
        NPUs of the network to simulate: their number, or dimensions such as 2x4.
    job
        Job of a trace_dir that holds several runs; default: the newest.
    rank
        Replay one rank alone.
    json
        Print JSON.
    """
    if not replay:
        if rules or rank is not None:
            raise UsageError("--rules and --rank belong to --replay; give it too.")
        from chakra_capture.cli.validate_et import validate_files

        return validate_files(path, job=job, profile=profile, comm_group=comm_group, npus=npus, json=json)
    if comm_group is not None or npus is not None:
        raise UsageError("--comm-group and --npus are for .et files, which --replay does not read.")
    return _replay(path, rules=rules, job=job, rank=rank, json=json)


def _replay(path: Path, *, rules: bool, job: str | None, rank: int | None, json: bool) -> int:
    from chakra_capture.analysis.replay.run import replay_run
    from chakra_capture.cli.replayed import merged_ranks, nothing_timed

    run, chosen = merged_ranks(path, job, rank)
    with status(f"replaying {count_of(len(chosen), 'rank')}"):
        windows = list(replay_run(run, chosen, ablate=rules))
    if not any(window.ranks for window in windows):
        raise nothing_timed(path)
    is_replayable = all(one.is_replayable for window in windows for one in window.ranks)
    if json:
        print_json(
            {
                "schema_version": 1,
                "is_replayable": is_replayable,
                "windows": [
                    {
                        "window": window.window,
                        "num_meetings": window.num_meetings,
                        "without_times": window.without_times,
                        "ranks": [_as_json(one) for one in window.ranks],
                        "without": {rule: [_as_json(one) for one in found] for rule, found in window.without.items()},
                    }
                    for window in windows
                ],
            }
        )
    else:
        for window in windows:
            _print(console(), window)
    return EXIT_OK if is_replayable else EXIT_INCONCLUSIVE


def _as_json(one: "RankScore") -> dict[str, Any]:
    return {
        **asdict(one),
        "worst_error": one.worst_error,
        "unexplained_share": one.unexplained_share,
        "is_replayable": one.is_replayable,
    }


def _print(out: "Console", window: "WindowReplay") -> None:
    together = f", {window.num_meetings} collectives of several ranks together" if window.num_meetings else ""
    out.print(f"Window {window.window}: predicted by a replay of the dependencies{together}")
    steps = make_table("", "rank", "what", "measured", "predicted", "error")
    for one in window.ranks:
        _add_step(steps, one.rank, "window", one.window)
        for step in one.steps[:_MOST_STEPS_SHOWN]:
            _add_step(steps, one.rank, f"step {step.step}", step)
        if len(one.steps) > _MOST_STEPS_SHOWN:
            steps.add_row(
                "", f"{len(one.steps) - _MOST_STEPS_SHOWN} more steps", "", "", f"<= {_percent(one.worst_error)}"
            )
    out.print(steps)
    device = make_table("Device", "rank", "activities", "start error", "p95", "idle", "predicted", "unexplained")
    for one in window.ranks:
        if one.num_activities:
            device.add_row(
                str(one.rank),
                str(one.num_activities),
                duration(one.start_error_mean_ns),
                duration(one.start_error_p95_ns),
                duration(one.idle_measured_ns),
                duration(one.idle_predicted_ns),
                f"{duration(one.unexplained_ns)} ({_percent(one.unexplained_share)})",
            )
    if device.row_count:
        out.print(device)
    if window.without_times:
        out.print(f"Not replayed, for they have no times: rank {number_ranges(window.without_times)}.")
    for one in window.ranks:
        if not one.is_replayable:
            out.print(
                f"Rank {one.rank} is not replayable: {_percent(one.unexplained_share)} of its window are waits that "
                "nothing in the trace explains (5 % at most). Were kernels left out of it?"
            )
    if window.without:
        _print_rules(out, window)


def _add_step(table: Any, rank: int, name: str, step: "StepScore") -> None:
    table.add_row(
        str(rank), name, duration(step.measured_ns), duration(step.predicted_ns), f"{100 * step.error:+.2f} %"
    )


def _print_rules(out: "Console", window: "WindowReplay") -> None:
    table = make_table("Without a rule", "rule", "rank", "worst error of a step", "start error, mean")
    for rule, ranks in [("(with all)", window.ranks), *window.without.items()]:
        for one in ranks:
            mean = one.start_error_mean_ns
            start = "not measured" if mean is None else duration(mean)
            table.add_row(rule, str(one.rank), _percent(one.worst_error), start)
    out.print(table)


def _percent(share: float) -> str:
    return f"{100 * share:.2f} %"
