"""``chakra-capture analyze findings``: what is wrong with a run, most important first."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from chakra_capture import layout
from chakra_capture.cli.answers import Answer, show_answer
from chakra_capture.cli.findings import print_run_findings
from chakra_capture.cli.output import EXIT_OK, console
from chakra_capture.cli.subject import DEFAULTS, Options, Subject, open_subject

if TYPE_CHECKING:
    from chakra_capture.analysis.step_series import StepSeries
    from chakra_capture.analysis.stragglers import Stragglers


def findings(
    path: Path,
    /,
    *,
    every: Annotated[bool, Parameter(name="--all", negative=())] = False,
    options: Options = DEFAULTS,
) -> int:
    """What is wrong, what that costs, what to do next; silent when healthy.

    From the recorded steps and, where they were recorded, the phases of all
    steps; where both say the same it is one finding. The prize is what a step
    would be shorter by: by a replay without it where one can tell, else the
    time that was measured of it, at most. A prize under 3 % of a step is not
    worth a word; those of several findings may be of the same time, so they do
    not add up. Of time of the host a part is the profiler's: it is taken off
    where steps outside the profiler were timed, else said to be unknown.

    Where more than 10 % of the device's idle time has no recorded reason, or
    more than 10 % of what ran there no launch, nothing is said of why it
    idles. The same list ends summary.

    For example:
        chakra-capture analyze findings ./traces
        chakra-capture analyze findings ./traces --all
        chakra-capture analyze findings ./traces --rank 0 --step 5-8 --json

    Parameters
    ----------
    path
        Folder of a run, its merged folder, or one rank=<R> folder in it.
    every
        Show also what would save less than 3 % of a step.
    """
    from chakra_capture.analysis.diagnosis import diagnose_series
    from chakra_capture.analysis.run_findings import SCHEMA, run_findings

    subject = open_subject(path, options)
    series = _series(path, options.job, subject)
    stragglers = _stragglers(subject)
    diagnosis = diagnose_series(series, stragglers) if series else None
    found = run_findings(
        subject.traces, subject.run, series=series, diagnosis=diagnosis, stragglers=stragglers, steps=subject.steps
    )
    if options.json:
        table = found.table(with_minor=every)
        show_answer(Answer("findings", SCHEMA, table, subject.notes), limit=options.limit, as_json=True)
    else:
        print_run_findings(console(), diagnosis, found, with_minor=every)
    return EXIT_OK


def _series(path: Path, job: str | None, subject: Subject) -> "list[StepSeries]":
    """The steps of the ranks asked for that recorded phases."""
    from chakra_capture.analysis.diagnosis import series_of
    from chakra_capture.trace.discovery import find_run
    from chakra_capture.trace.phase_records import read_phases

    if layout.MERGED_RANK_NAME.fullmatch(path.resolve().name):
        return []
    files = find_run(path, job).phase_files
    ranks = {trace.rank for trace in subject.traces}
    return [series_of(rank, read_phases(file), len(files)) for rank, file in files.items() if rank in ranks]


def _stragglers(subject: Subject) -> "Stragglers | None":
    """Which of the ranks asked for the others wait for; None where they are not matched."""
    import polars as pl

    from chakra_capture.analysis.loop import loop_windows
    from chakra_capture.analysis.own_times import own_times
    from chakra_capture.analysis.stragglers import find_stragglers

    ranks = [trace.rank for trace in subject.traces]
    if subject.run.collectives is None or len(ranks) < 2:
        return None
    matched = subject.run.collectives.filter(pl.col("rank").is_in(ranks))
    found = find_stragglers(matched, {rank: clock.spread_ns or 0 for rank, clock in subject.run.clocks.items()})
    if not found.ranks:
        return found
    own = {trace.rank: own_times(trace, loop_windows(trace)) for trace in subject.traces}
    return found.located(own, {trace.rank: trace for trace in subject.traces})
