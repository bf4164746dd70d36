"""Ranks on the workers of a Dask cluster that sees the same folders: one rank at a time on each, within its memory."""

import secrets
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from queue import Empty, Queue
from typing import TYPE_CHECKING, Any

from chakra_capture.errors import ClusterError, MissingDependencyError
from chakra_capture.merge.many.executors import failure
from chakra_capture.merge.many.job import Began, Job
from chakra_capture.merge.many.origin import merged_from, own_version
from chakra_capture.merge.many.remote import merge_packed, packed
from chakra_capture.merge.report import RankReport
from chakra_capture.trace.discovery import Run

if TYPE_CHECKING:
    from distributed import Client, Future

# How long a scheduler, the first worker, and a new worker after the last one has died are waited for.
_ANSWER_S = 10
_WORKERS_S = 60
_LOOK_S = 1.0
_RESULT_S = 30
_GONE = "the scheduler or all workers are gone"


class Cluster:
    """The workers of a Dask client.

    Not the client's own executor: that would give a worker with several threads several ranks at once, whatever
    these need.
    """

    def __init__(self, client: "Client", *, patience_s: float = _WORKERS_S) -> None:
        self._client = client
        self._patience_s = patience_s

    def merge(self, jobs: list[Job], began: Began) -> Iterator[RankReport]:
        """Merge; a rank whose worker dies is tried once more on another one."""
        waiting, running = deque(jobs), _Running(self._client)
        seen_s = time.monotonic()
        try:
            while waiting or running.jobs:
                limits = self._limits()
                if limits:
                    seen_s = time.monotonic()
                elif self._client.status == "closed" or time.monotonic() - seen_s > self._patience_s:
                    break
                for job in running.orphans(limits):
                    if job.rank in running.tried:
                        yield RankReport(job.rank, error=_died(job))
                    else:
                        running.tried.add(job.rank)
                        waiting.append(job)
                while (given := _next(waiting, limits or {}, running.busy)) is not None:
                    job, address = given
                    waiting.remove(job)
                    running.give(job, address)
                    began(job, None)
                for job, future in running.ended():
                    yield _with_note(_report(job, future), _too_large(job, limits))
            for job in [*waiting, *running.jobs.values()]:
                yield RankReport(job.rank, error=failure(ConnectionError(_GONE)))
        finally:
            running.cancel()

    def _limits(self) -> dict[str, int] | None:
        """Memory of each worker there is now; 0 of one without a limit. None where the scheduler does not answer."""
        try:
            workers = self._client.scheduler_info(n_workers=-1).get("workers")
        except OSError:
            return None
        if workers is None or self._client.status != "running":
            return None
        return {address: int(worker["memory_limit"] or 0) for address, worker in workers.items()}


class _Running:
    """The ranks that workers have in hand.

    A task is bound to its worker. If that dies, the scheduler keeps the task, for a worker of that name that never
    comes, and so it is taken back here. (Bound loosely, it is forgotten all the same when all workers die at once.)
    """

    def __init__(self, client: "Client") -> None:
        self._client = client
        self._prefix = f"chakra-capture-{secrets.token_hex(4)}"
        self._addresses: dict[Future[RankReport], str] = {}
        self._ended: Queue[Future[RankReport]] = Queue()
        self.jobs: dict[Future[RankReport], Job] = {}
        self.tried: set[int] = set()

    @property
    def busy(self) -> set[str]:
        return set(self._addresses.values())

    def give(self, job: Job, address: str) -> None:
        key = f"{self._prefix}-rank-{job.rank}-{int(job.rank in self.tried)}"
        future = self._client.submit(merge_packed, packed(job), key=key, workers=[address], pure=False)
        self.jobs[future], self._addresses[future] = job, address
        future.add_done_callback(self._ended.put)

    def orphans(self, limits: dict[str, int] | None) -> Iterator[Job]:
        """Take back the jobs of workers that are no more."""
        for future, address in list(self._addresses.items()):
            if limits is not None and address not in limits and future.status == "pending":
                self._client.cancel([future], force=True)
                yield self._take(future)

    def ended(self) -> "Iterator[tuple[Job, Future[RankReport]]]":
        """What has ended by now, after a moment's wait."""
        with suppress(Empty):
            future = self._ended.get(timeout=_LOOK_S)
            while True:
                if future in self.jobs:
                    yield self._take(future), future
                future = self._ended.get_nowait()

    def cancel(self) -> None:
        if self._client.status == "running":
            self._client.cancel(list(self.jobs), force=True)

    def _take(self, future: "Future[RankReport]") -> Job:
        del self._addresses[future]
        return self.jobs.pop(future)


@contextmanager
def connected(address: str, run: Run, out: Path) -> Iterator[Cluster]:
    """The cluster whose scheduler listens at ``address``, if its workers can merge this run.

    Raises:
        MissingDependencyError: ``distributed`` is not installed.
        ClusterError: nothing answers there, or the workers have another version or other folders.
    """
    try:
        from distributed import Client
    except ImportError:
        raise MissingDependencyError(
            'Merging on a cluster needs Dask. Install it with: pip install "chakra-capture[cluster]"'
        ) from None
    try:
        _knock(address)
        client = Client(address, timeout=_ANSWER_S, set_as_default=False)
    except (OSError, ValueError) as error:
        raise ClusterError(
            f"no Dask scheduler answers at {address} ({' '.join(str(error).split())}). "
            "Give the address that it printed when it was started, as in --cluster tcp://HOST:8786."
        ) from None
    try:
        _check_workers(client, address, run, out)
        yield Cluster(client)
    finally:
        client.close()


def _knock(address: str) -> None:
    """Fail at once where nobody listens: a client would try again and again, and leave a thread behind.

    Raises:
        OSError: nobody listens there, or the host is not known.
    """
    host, port = address.removeprefix("tcp://").rsplit(":", 1)
    socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWER_S).close()


def _check_workers(client: "Client", address: str, run: Run, out: Path) -> None:
    """Hold every worker's version and folders against ours.

    Raises:
        ClusterError: there is no worker, or one differs.
    """
    try:
        client.wait_for_workers(1, timeout=_ANSWER_S)
    except TimeoutError:
        raise ClusterError(f"the cluster at {address} has no workers. Start some: dask worker {address}") from None
    trace = next(path for files in run.ranks for window in files.windows for path in window.files).absolute()
    probe = out.absolute() / f".cluster-{secrets.token_hex(4)}"
    try:
        out.mkdir(parents=True, exist_ok=True)
        probe.touch()
        seen: dict[str, Any] = client.run(_look(str(trace), str(probe)), on_error="return")
    except OSError as error:
        raise ClusterError(
            f"{out} cannot be written: {error.strerror or error}. Give a folder that the workers share with -o."
        ) from None
    finally:
        probe.unlink(missing_ok=True)
    for worker, found in sorted(seen.items()):
        _check_worker(worker, found, trace, out.absolute())


def _look(trace: str, probe: str) -> Callable[[], tuple[bool, str | None, bool, bool]]:
    """What a worker finds out of itself. A function within one travels as its code: the worker needs no package."""

    def look() -> tuple[bool, str | None, bool, bool]:
        import importlib.metadata
        import importlib.util
        import os

        has_package = importlib.util.find_spec("chakra_capture") is not None
        try:
            found = importlib.metadata.version("chakra-capture")
        except importlib.metadata.PackageNotFoundError:
            return has_package, None, os.path.exists(trace), os.path.exists(probe)
        return has_package, found, os.path.exists(trace), os.path.exists(probe)

    return look


def _check_worker(worker: str, found: Any, trace: Path, out: Path) -> None:
    if isinstance(found, BaseException):
        raise ClusterError(f"worker {worker} does not answer ({found}). Restart it, or the cluster.")
    has_package, version, sees_trace, sees_out = found
    if not has_package or version != own_version():
        has = f"chakra_capture {version or 'of unknown version'}" if has_package else "no chakra_capture"
        raise ClusterError(
            f"worker {worker} has {has}, this process {own_version() or 'one of unknown version'}. "
            "Install the same version in the environment of every worker."
        )
    if not (sees_trace and sees_out):
        raise ClusterError(
            f"worker {worker} does not see {out if sees_trace else trace}. "
            "Put traces and output in folders that all workers share under the same path."
        )


def _next(waiting: deque[Job], limits: dict[str, int], busy: set[str]) -> tuple[Job, str] | None:
    """The first job for which a worker with enough memory is free: the smallest such worker, or else the largest."""
    free = {address: limit for address, limit in limits.items() if address not in busy}
    for job in waiting if free else ():
        fits = [address for address, limit in limits.items() if not limit or limit >= job.need_bytes]
        if not fits:
            largest = max(limits.values())
            fits = [address for address, limit in limits.items() if limit == largest]
        ready = [address for address in fits if address in free]
        if ready:
            return job, min(ready, key=lambda address: (limits[address] or 1 << 62, address))
    return None


def _too_large(job: Job, limits: dict[str, int] | None) -> str | None:
    largest = max(limits.values(), default=0) if limits and all(limits.values()) else 0
    if not largest or job.need_bytes <= largest:
        return None
    return f"merging it may need {job.need_bytes / 1e9:.1f} GB; the largest worker has {largest / 1e9:.1f} GB"


def _report(job: Job, future: "Future[RankReport]") -> RankReport:
    from distributed import KilledWorker

    error: BaseException | None = ConnectionError(_GONE)
    if future.status == "finished":
        with suppress(OSError, CancelledError):
            report: RankReport = future.result(timeout=_RESULT_S)
            return report
        # Its worker, or the scheduler, is gone meanwhile; the tables are not.
        merged = merged_from(job.folder, job.made_from)
        if merged is not None:
            return RankReport(job.rank, merged)
    elif future.status == "error":
        error = future.exception()
    return RankReport(job.rank, error=_died(job) if isinstance(error, KilledWorker) else failure(error))


def _died(job: Job) -> str:
    return (
        f"two workers that merged it died, most likely out of memory: it may need {job.need_bytes / 1e9:.1f} GB. "
        "Give the workers more memory, or use --memory-budget."
    )


def _with_note(report: RankReport, note: str | None) -> RankReport:
    return replace(report, notes=(*report.notes, note)) if note else report
