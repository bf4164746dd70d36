"""Ranks side by side in processes of this machine, as many as its cores and its memory allow."""

import gc
import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import connection

from chakra_capture.merge.many.job import Began, Job, merge_job
from chakra_capture.merge.memory import prepare_process
from chakra_capture.merge.rank import RankReport

_THREADS = "POLARS_MAX_THREADS"
_DIED = (
    "the merging process died twice, most likely out of memory. "
    "Merge this rank alone with --rank, or on a machine with more memory."
)


def merge_here(jobs: list[Job], began: Began) -> Iterator[RankReport]:
    """Merge one rank after the other in this process."""
    for job in jobs:
        began(job, os.getpid())
        yield merge_job(job)


def merge_in_processes(jobs: list[Job], began: Began, count: int, free_bytes: int | None) -> Iterator[RankReport]:
    """Merge in worker processes; one that dies costs only the rank it had in hand, which is tried once more.

    Not a ProcessPoolExecutor: it hangs (CPython 3.11) when a worker dies while another one starts.

    Args:
        jobs: in the order in which they are to begin.
        count: processes at most.
        free_bytes: what the ranks in work may need together; one is merged whatever it needs. None: no limit.
    """
    waiting = deque(jobs)
    tried: set[int] = set()
    workers: list[_Worker] = []
    with _one_thread_each():
        try:
            while waiting or any(worker.job for worker in workers):
                _give_work(workers, waiting, began, count, free_bytes)
                ready = connection.wait([worker.pipe for worker in workers if worker.job])
                for worker in [w for w in workers if w.pipe in ready]:
                    job, report = worker.take()
                    if report is None:
                        workers.remove(worker)
                        if job.rank not in tried:
                            tried.add(job.rank)
                            waiting.append(job)
                            continue
                    yield report or RankReport(job.rank, error=_DIED)
        finally:
            for worker in workers:
                worker.end()


def _give_work(workers: list["_Worker"], waiting: deque[Job], began: Began, count: int, free_bytes: int | None) -> None:
    """Give idle workers the first jobs that fit in memory; start workers while there are jobs for them."""
    while waiting:
        idle = next((worker for worker in workers if worker.job is None), None)
        if idle is None and len(workers) == count:
            return
        in_hand = [worker.job.need_bytes for worker in workers if worker.job]
        left = None if free_bytes is None or not in_hand else free_bytes - sum(in_hand)
        job = next((job for job in waiting if left is None or job.need_bytes <= left), None)
        if job is None:
            return
        waiting.remove(job)
        if idle is None:
            idle = _Worker()
            workers.append(idle)
        idle.give(job)
        began(job, idle.pid)


class _Worker:
    """A process that merges one rank at a time; its pipe is at its end when it has died."""

    def __init__(self) -> None:
        # Not fork: polars' threads do not survive it.
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.job: Job | None = None
        self._process = context.Process(target=_serve, args=(theirs,), daemon=True)
        # A process that is killed while it starts breaks this pipe too; take() finds out.
        with theirs, suppress(OSError):
            self._process.start()

    @property
    def pid(self) -> int | None:
        return self._process.pid

    def give(self, job: Job) -> None:
        self.job = job
        with suppress(OSError):
            self.pipe.send(job)

    def take(self) -> tuple[Job, RankReport | None]:
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


def _serve(pipe: "connection.Connection[RankReport, Job]") -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends its workers
    prepare_process(merges=True)
    gc.freeze()  # what was imported stays: no need to look at it after each rank
    with suppress(EOFError), pipe:
        while True:
            pipe.send(merge_job(pipe.recv()))
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
