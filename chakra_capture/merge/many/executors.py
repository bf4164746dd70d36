"""Ranks on any ``concurrent.futures.Executor``: paths go there, small reports come back, tables are files."""

from collections.abc import Iterator
from concurrent.futures import BrokenExecutor, Executor, Future, as_completed

from chakra_capture.merge.many.job import Began, Job
from chakra_capture.merge.many.remote import merge_packed, packed
from chakra_capture.merge.report import RankReport


def merge_on(executor: Executor, jobs: list[Job], began: Began, unfinished: list[Job]) -> Iterator[RankReport]:
    """Merge on an executor.

    Args:
        unfinished: takes the jobs that are left when the executor breaks: of a process pool, when a worker dies.
    """
    futures: dict[Future[RankReport], Job] = {}
    try:
        for job in jobs:
            try:
                futures[executor.submit(merge_packed, packed(job))] = job
            except BrokenExecutor:
                unfinished.append(job)
                continue
            began(job, None)
        for future in as_completed(futures):
            job = futures[future]
            error = None if future.cancelled() else future.exception()
            if isinstance(error, BrokenExecutor):
                unfinished.append(job)
            elif error is None and not future.cancelled():
                yield future.result()
            else:
                yield RankReport(job.rank, error=failure(error))
    finally:
        for future in futures:
            future.cancel()


def failure(error: BaseException | None) -> str:
    """What is said of a rank whose task ended without a report."""
    what = "it was cancelled" if error is None else f"{type(error).__name__}: {' '.join(str(error).split())}"
    return (
        f"the executor did not merge it ({what.rstrip('.')}). "
        "Merge again: ranks that are merged already are left as they are."
    )
