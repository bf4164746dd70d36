"""Merging every rank of a run: parallel processes, one bad rank never stops the others."""

import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from pathlib import Path

from chakra_capture import layout
from chakra_capture.errors import ChakraCaptureError
from chakra_capture.merge.rank import MergeOptions, RankReport, merge_rank
from chakra_capture.trace.discovery import RankFiles, Run

_THREADS = "POLARS_MAX_THREADS"


def merge_run(
    run: Run,
    out: Path,
    options: MergeOptions,
    *,
    workers: int | None = None,
    on_rank: Callable[[RankReport], None] = lambda _: None,
) -> list[RankReport]:
    """Merge all ranks of ``run`` into ``out/rank=<R>``.

    Args:
        workers: processes at once; default one per core, at most one per rank.
        on_rank: called with each report as its rank ends.

    Returns:
        one report per rank in rank order; a rank that failed has ``error`` set.
    """
    count = min(workers or os.cpu_count() or 1, len(run.ranks))
    jobs = [(files, out / layout.rank_folder_name(files.rank)) for files in run.ranks]
    if count <= 1:
        reports = [_merge_one(files, folder, options) for files, folder in jobs]
        for report in reports:
            on_rank(report)
        return reports
    reports = []
    for report in _in_processes(jobs, options, count):
        on_rank(report)
        reports.append(report)
    return sorted(reports, key=lambda report: report.rank)


def _merge_one(files: RankFiles, folder: Path, options: MergeOptions) -> RankReport:
    try:
        return merge_rank(files.rank, files.windows, folder, options)
    except ChakraCaptureError as error:
        return RankReport(files.rank, error=str(error))


def _in_processes(jobs: list[tuple[RankFiles, Path]], options: MergeOptions, count: int) -> Iterator[RankReport]:
    lost: list[tuple[RankFiles, Path]] = []
    with _one_thread_each(), _pool(count) as pool:
        futures = {pool.submit(_merge_one, files, folder, options): (files, folder) for files, folder in jobs}
        for future in as_completed(futures):
            report = _result(future)
            if report is None:
                lost.append(futures[future])
            else:
                yield report
    # A worker that dies takes the whole pool with it; each rank left over gets a process of its own.
    for files, folder in lost:
        with _one_thread_each(), _pool(1) as pool:
            report = _result(pool.submit(_merge_one, files, folder, options))
        yield report or RankReport(
            files.rank,
            error=f"rank {files.rank}: the merging process died, most likely out of memory. "
            "Merge it alone with --ranks, or on a machine with more memory.",
        )


def _result(future: "Future[RankReport]") -> RankReport | None:
    try:
        return future.result()
    except BrokenProcessPool:
        return None


def _pool(count: int) -> ProcessPoolExecutor:
    # Not fork: polars' threads do not survive it.
    return ProcessPoolExecutor(count, mp_context=multiprocessing.get_context("spawn"))


@contextmanager
def _one_thread_each() -> Iterator[None]:
    """Polars reads its thread count when first imported, so the children must find it in their environment."""
    before = os.environ.get(_THREADS)
    os.environ[_THREADS] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_THREADS]
        else:
            os.environ[_THREADS] = before
