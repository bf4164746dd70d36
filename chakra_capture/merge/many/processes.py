"""Ranks side by side in processes of this machine, as many as its cores and its memory allow."""

import gc
import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import connection
from typing import Any, Protocol, Self, TypeVar

from chakra_capture.errors import ChakraCaptureError
from chakra_capture.merge.many.job import Began, Job, merge_job
from chakra_capture.merge.memory import prepare_process
from chakra_capture.merge.report import RankReport

_Result = TypeVar("_Result")


class RankJob(Protocol):
    """What is to be done for one rank."""

    @property
    def rank(self) -> int: ...

    @property
    def need_bytes(self) -> int:
        """About how much memory it takes."""
        ...


_Job = TypeVar("_Job", bound=RankJob)
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


@dataclass(slots=True)
class Processes:
    """Worker processes of this machine; each starts when there is work for it, and all end with the block.

    Not a ProcessPoolExecutor: it hangs (CPython 3.11) when a worker dies while another one starts.

    Attributes:
        count: processes at most.
        free_bytes: what the ranks in work may need together; one is merged whatever it needs. None: no limit.
    """

    count: int
    free_bytes: int | None
    _workers: "list[_Worker]" = field(default_factory=list, init=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers:
            worker.end()

    def merge(self, jobs: list[Job], began: Began) -> Iterator[RankReport]:
        """Merge; a process that dies costs only the rank it had in hand, which is tried once more.

        Args:
            jobs: in the order in which they are to begin.
        """
        return self.each(jobs, merge_job, began, lambda rank: RankReport(rank, error=_DIED))

    def each(
        self,
        jobs: "Sequence[_Job]",
        task: "Callable[[_Job], _Result]",
        began: "Callable[[_Job, int | None], None]",
        died: Callable[[int], _Result],
    ) -> Iterator[_Result]:
        """Do a task for each job, in the order in which they end.

        Args:
            task: can be pickled, and gives something else than None.
            died: what is given of a rank whose process has died twice.
        """
        waiting = deque(jobs)
        in_hand: dict[_Worker, _Job] = {}
        tried: set[int] = set()
        while waiting or in_hand:
            self._give_work(waiting, in_hand, task, began)
            ready = connection.wait([worker.pipe for worker in in_hand])
            for worker in [worker for worker in in_hand if worker.pipe in ready]:
                job, result = in_hand.pop(worker), worker.take()
                if result is None:
                    self._workers.remove(worker)
                    if job.rank not in tried:
                        tried.add(job.rank)
                        waiting.append(job)
                        continue
                    result = died(job.rank)
                yield result

    def _give_work(
        self,
        waiting: "deque[_Job]",
        in_hand: "dict[_Worker, _Job]",
        task: "Callable[[_Job], object]",
        began: "Callable[[_Job, int | None], None]",
    ) -> None:
        """Give idle workers the first jobs that fit in memory; start workers while there are jobs for them."""
        while waiting and len(in_hand) < self.count:
            used = sum(job.need_bytes for job in in_hand.values())
            left = None if self.free_bytes is None or not in_hand else self.free_bytes - used
            job = next((job for job in waiting if left is None or job.need_bytes <= left), None)
            if job is None:
                return
            waiting.remove(job)
            worker = next((worker for worker in self._workers if worker not in in_hand), None)
            if worker is None:
                worker = _Worker()
                self._workers.append(worker)
            in_hand[worker] = job
            worker.give(partial(task, job))
            began(job, worker.pid)

    def run(self, task: Callable[[], _Result]) -> _Result:
        """Run a task in a worker that is there and has imported all it needs; here if there is none, or it dies.

        The other workers end, and give back their memory.
        """
        while len(self._workers) > 1:
            self._workers.pop().end()
        if not self._workers:
            return task()
        self._workers[0].give(task)
        answer = self._workers[0].take()
        if isinstance(answer, ChakraCaptureError):
            raise answer
        result: _Result | None = answer
        return task() if result is None else result


class _Worker:
    """A process that does one thing at a time; its pipe is at its end when it has died."""

    def __init__(self) -> None:
        # Not fork: polars' threads do not survive it.
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self._is_busy = False
        self._process = context.Process(target=_serve, args=(theirs,), daemon=True)
        # A process that is killed while it starts breaks this pipe too; take() finds out.
        with theirs, _one_thread(), suppress(OSError):
            self._process.start()

    @property
    def pid(self) -> int | None:
        return self._process.pid

    def give(self, task: Callable[[], object]) -> None:
        self._is_busy = True
        with suppress(OSError):
            self.pipe.send(task)

    def take(self) -> Any:
        """What the task gave, or raised of our errors; None if the process died over it."""
        try:
            result = self.pipe.recv()
        except (EOFError, OSError):
            result = None
        self._is_busy = False
        if result is None:
            self.end()
        return result

    def end(self) -> None:
        """Let an idle process go; stop one that still works."""
        self.pipe.close()
        if self._process.pid is None:
            return
        if self._is_busy:
            self._process.terminate()
        self._process.join()


def _serve(pipe: "connection.Connection[object, Callable[[], object]]") -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends its workers
    prepare_process(merges=True)
    import chakra_capture.merge.rank  # noqa: F401  # with what it needs

    gc.freeze()  # what was imported stays: no need to look at it after each rank
    with suppress(EOFError), pipe:
        while True:
            task = pipe.recv()
            try:
                result = task()
            except ChakraCaptureError as error:
                result = error
            pipe.send(result)
            gc.collect()


@contextmanager
def _one_thread() -> Iterator[None]:
    """Polars reads its thread count when first imported, so a child must find it in its environment."""
    before = os.environ.get(_THREADS)
    os.environ[_THREADS] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_THREADS]
        else:
            os.environ[_THREADS] = before
