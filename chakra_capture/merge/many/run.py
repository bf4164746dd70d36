"""Merging the ranks of a run: those that are not merged yet, wherever there is room; one bad rank stops no other."""

import os
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from chakra_capture import layout
from chakra_capture.merge.across.outcome import Alignment, RunFacts
from chakra_capture.merge.many.capacity import available_bytes, needed_bytes
from chakra_capture.merge.many.cluster import Cluster
from chakra_capture.merge.many.executors import merge_on
from chakra_capture.merge.many.job import Began, Job, disown
from chakra_capture.merge.many.origin import merged_from, origin
from chakra_capture.merge.many.processes import Processes, merge_here
from chakra_capture.merge.many.roster import Roster, check_ranks
from chakra_capture.merge.report import MergeOptions, RankReport
from chakra_capture.trace import scanners
from chakra_capture.trace.discovery import RankFiles, Run, merged_ranks
from chakra_capture.trace.scanners import ScannerKind


@dataclass(frozen=True, slots=True)
class Watch:
    """Who is told how a merge goes on.

    Attributes:
        planned: the ranks that will be merged, before the first one is.
        began: a rank is put to work.
        ended: its report.
        aligned: the ranks were held against each other; None where that is left to another call.
    """

    planned: Callable[[list[Job]], None] = lambda _: None
    began: Began = lambda *_: None
    ended: Callable[[RankReport], None] = lambda _: None
    aligned: Callable[[Alignment | None], None] = lambda _: None


def merge_run(
    run: Run,
    out: Path,
    options: MergeOptions,
    *,
    ranks: Collection[int] | None = None,
    again: bool = False,
    roster: Roster | None = None,
    workers: int | None = None,
    executor: Executor | Cluster | None = None,
    watch: Watch = Watch(),
) -> list[RankReport]:
    """Merge ranks of ``run`` into ``out/rank=<R>``; those merged before, from the same files, stay as they are.

    Args:
        ranks: merge these; None for all.
        again: merge also what is merged already.
        roster: how the ranks of the run go together; found out if it is not given.
        workers: processes at once; default one per core. Fewer, if memory is short.
        executor: where to merge instead of in processes of our own. It and its workers need the same folder.

    Returns:
        one report per rank in rank order; a rank that failed has ``error`` set.
    """
    roster = roster or check_ranks(run)
    chosen = [files for files in run.ranks if ranks is None or files.rank in ranks]
    reports, jobs = [], []
    for files in chosen:
        planned = _plan(files, out, options, roster, again=again)
        if isinstance(planned, Job):
            jobs.append(planned)
        else:
            reports.append(planned)
            watch.ended(planned)
    jobs.sort(key=lambda job: job.need_bytes, reverse=True)  # the longest last would leave the other workers idle
    watch.planned(jobs)
    with Processes(workers or os.cpu_count() or 1, available_bytes()) as processes:
        for report in _merge(jobs, processes, executor, watch.began):
            watch.ended(report)
            reports.append(report)
        reports.sort(key=lambda report: report.rank)
        watch.aligned(finish_run(run, out, reports, roster, processes))
    return reports


def finish_run(
    run: Run, out: Path, reports: list[RankReport], roster: Roster, processes: Processes
) -> Alignment | None:
    """Make what is made from the tables of all ranks, once these are written.

    Of tasks that merge one rank each, only one that finds all others merged does it: the others would make it in vain.
    Nor does a call do it while another one is at work on a rank that it has just merged.

    Returns:
        None where it is left to another call, or no rank is merged.
    """
    merged = merged_ranks(out)
    ranks = {files.rank for files in run.ranks}
    if not {report.rank for report in reports if report.error is None} <= merged.keys():
        return None
    if not merged or (len(reports) == 1 < len(ranks) and not ranks <= merged.keys()):
        return None
    return processes.run(partial(_align, out, merged, RunFacts(world_size=roster.world_size, hosts=roster.machines)))


def _align(out: Path, merged: dict[int, Path], facts: RunFacts) -> Alignment:
    # Where ranks are merged by other processes, this one needs no polars.
    from chakra_capture.merge.across.alignment import align_run

    return align_run(out, merged, facts)


def _plan(files: RankFiles, out: Path, options: MergeOptions, roster: Roster, *, again: bool) -> Job | RankReport:
    """What is to be done for a rank, or why nothing is."""
    folder = out / layout.rank_folder_name(files.rank)
    fault = roster.faults.get(files.rank)
    if fault and not options.force:
        disown(folder)
        return RankReport(files.rank, error=_refusal(files, fault))
    made_from = origin(files, force=options.force, strict=options.strict, fault=fault)
    before = None if again else merged_from(folder, made_from)
    if before is not None:
        return RankReport(files.rank, before, unchanged=True)
    is_native = options.scanner is not ScannerKind.MSGSPEC and scanners.is_built()
    traces = [path for window in files.windows for path in window.files]
    need = needed_bytes(traces, is_native=is_native, budget=options.memory_budget)
    return Job(files, folder, options, made_from, need)


def _refusal(files: RankFiles, fault: str) -> str:
    traces = files.windows[0].files if files.windows else ()
    names = " and ".join(str(path) for path in traces)
    verb = "are" if len(traces) > 1 else "is"
    return (
        f"{names} {verb} not of this rank and run: {fault}. "
        "Give each rank its own files of one run, or merge them all the same with --force."
    )


def _merge(
    jobs: list[Job], processes: Processes, executor: Executor | Cluster | None, began: Began
) -> Iterator[RankReport]:
    if isinstance(executor, Cluster):
        yield from executor.merge([_anywhere(job) for job in jobs], began)
    elif executor is not None:
        unfinished: list[Job] = []
        yield from merge_on(executor, [_anywhere(job) for job in jobs], began, unfinished)
        yield from processes.merge(unfinished, began)
    else:
        yield from _merge_locally(jobs, processes, began)


def _merge_locally(jobs: list[Job], processes: Processes, began: Began) -> Iterator[RankReport]:
    free = processes.free_bytes
    notes = {job.rank: _too_large(job, free) for job in jobs if free is not None and job.need_bytes > free}
    # One after the other they need no process of their own, unless one may end it for want of memory.
    is_here = len(jobs) <= 1 or (processes.count <= 1 and not notes)
    merged = merge_here(jobs, began) if is_here else processes.merge(jobs, began)
    for report in merged:
        note = notes.get(report.rank)
        yield replace(report, notes=(*report.notes, note)) if note else report


def _too_large(job: Job, free: int) -> str:
    return (
        f"merging it may need {job.need_bytes / 1e9:.1f} GB of the {free / 1e9:.1f} GB that are free, so no other rank "
        "was merged meanwhile; --memory-budget makes it need less"
    )


_FILES = ("host", "device", "issued")


def _anywhere(job: Job) -> Job:
    """The same for a process with another working directory."""
    windows = [
        replace(w, **{side: path.absolute() for side in _FILES if (path := getattr(w, side)) is not None})
        for w in job.files.windows
    ]
    phases = job.files.phases and job.files.phases.absolute()
    return replace(job, files=replace(job.files, windows=windows, phases=phases), folder=job.folder.absolute())
