"""Merging every rank of a run: parallel processes, one bad rank never stops the others."""

import gc
import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import connection
from pathlib import Path

from chakra_capture import layout
from chakra_capture.errors import ChakraCaptureError
from chakra_capture.merge.memory import prepare_process
from chakra_capture.merge.rank import MergeOptions, RankReport, merge_rank
from chakra_capture.trace.discovery import RankFiles, Run

_THREADS = "POLARS_MAX_THREADS"
_DIED = (
    "the merging process died twice, most likely out of memory. "
    "Merge this rank alone with --ranks, or on a machine with more memory."
)


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
    jobs = [_Job(files, out / layout.rank_folder_name(files.rank), options) for files in run.ranks]
    reports = []
    for report in map(_merge_one, jobs) if count <= 1 else _in_processes(jobs, count):
        on_rank(report)
        reports.append(report)
    return sorted(reports, key=lambda report: report.rank)


@dataclass(frozen=True, slots=True)
class _Job:
    files: RankFiles
    folder: Path
    options: MergeOptions


def _merge_one(job: _Job) -> RankReport:
    try:
        return merge_rank(job.files.rank, job.files.windows, job.folder, job.options, phases=job.files.phases)
    except ChakraCaptureError as error:
        with suppress(OSError):  # tables of an earlier merge are not those of these files
            (job.folder / layout.LINK_FILE).unlink(missing_ok=True)
        return RankReport(job.files.rank, error=str(error))


def _in_processes(jobs: list[_Job], count: int) -> Iterator[RankReport]:
    """Merge in worker processes; one that dies costs only the rank it had in hand, which is tried once more.

    Not a ProcessPoolExecutor: it hangs (CPython 3.11) when a worker dies while another one starts.
    """
    waiting = deque(jobs)
    tried: set[int] = set()
    workers: list[_Worker] = []
    with _one_thread_each():
        try:
            while waiting or any(worker.job for worker in workers):
                _give_work(workers, waiting, count)
                ready = connection.wait([worker.pipe for worker in workers if worker.job])
                for worker in [w for w in workers if w.pipe in ready]:
                    job, report = worker.take()
                    if report is None:
                        workers.remove(worker)
                        if job.files.rank not in tried:
                            tried.add(job.files.rank)
                            waiting.append(job)
                            continue
                    yield report or RankReport(job.files.rank, error=_DIED)
        finally:
            for worker in workers:
                worker.end()


def _give_work(workers: list["_Worker"], waiting: deque[_Job], count: int) -> None:
    """Give each idle worker a job; start workers while there are jobs for them."""
    for worker in workers:
        if waiting and worker.job is None:
            worker.give(waiting.popleft())
    while waiting and len(workers) < count:
        workers.append(_Worker())
        workers[-1].give(waiting.popleft())


class _Worker:
    """A process that merges one rank at a time; its pipe is at its end when it has died."""

    def __init__(self) -> None:
        # Not fork: polars' threads do not survive it.
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.job: _Job | None = None
        self._process = context.Process(target=_serve, args=(theirs,), daemon=True)
        # A process that is killed while it starts breaks this pipe too; take() finds out.
        with theirs, suppress(OSError):
            self._process.start()

    def give(self, job: _Job) -> None:
        self.job = job
        with suppress(OSError):
            self.pipe.send(job)

    def take(self) -> tuple[_Job, RankReport | None]:
        """The job in hand and its report, None if the process died over it."""
        job, self.job = self.job, None
        assert job is not None
        try:
            report: RankReport = self.pipe.recv()
        except (EOFError, OSError):
            self.end()
            return job, None
        return job, report

    def end(self) -> None:
        """Let an idle process go; stop one that still works."""
        self.pipe.close()
        if self._process.pid is None:
            return
        if self.job is not None:
            self._process.terminate()
        self._process.join()


def _serve(pipe: "connection.Connection[RankReport, _Job]") -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends its workers
    prepare_process(merges=True)
    with suppress(EOFError), pipe:
        while True:
            pipe.send(_merge_one(pipe.recv()))
            gc.collect()


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
