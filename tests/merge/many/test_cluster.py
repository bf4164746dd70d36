"""Ranks on a real Dask cluster: a scheduler and two workers under nannies, each a process of its own."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dask
import pytest
from builder import TraceBuilder
from commands import process, refused, run
from distributed import Client
from isal import igzip

from chakra_capture.merge.many.cluster import Cluster
from chakra_capture.merge.many.run import Watch, merge_run
from chakra_capture.merge.report import MergeOptions
from chakra_capture.trace.discovery import RankFiles, Run, find_run

MEMORY = 300_000_000
# A worker past its memory is ended by its nanny at once.
SETTINGS = {
    "DASK_DISTRIBUTED__WORKER__MEMORY__MONITOR_INTERVAL": "20ms",
    "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep),
}


class Deadly(RankFiles):
    """Files whose mere arrival kills the process that should merge them."""

    def __reduce__(self) -> tuple[object, ...]:
        return os._exit, (9,)


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("cluster")
    file = folder / "scheduler.json"
    environment = {**os.environ, **SETTINGS}
    python = [sys.executable, "-m"]
    scheduler = [*python, "distributed.cli.dask_scheduler", "--host", "127.0.0.1", "--port", "0", "--no-dashboard"]
    workers = [*python, "distributed.cli.dask_worker", "--nworkers", "2", "--nthreads", "2", "--no-dashboard"]
    workers += ["--memory-limit", str(MEMORY), "--local-directory", folder, "--scheduler-file", file]
    with (folder / "log").open("w") as log:
        options: dict[str, Any] = {"stdout": log, "stderr": log, "env": environment, "cwd": folder}
        with subprocess.Popen([*scheduler, "--scheduler-file", file], **options) as first:
            while not (file.exists() and file.read_text()):
                assert first.poll() is None
                time.sleep(0.05)
            with subprocess.Popen(workers, **options) as second:
                found = json.loads(file.read_text())["address"]
                with Client(found, set_as_default=False) as client:
                    client.wait_for_workers(2, timeout=60)
                yield found
                second.send_signal(signal.SIGTERM)
            first.send_signal(signal.SIGTERM)


@pytest.fixture
def client(address: str) -> Iterator[Client]:
    with dask.config.set({"distributed.comm.timeouts.connect": "3s"}), Client(address, set_as_default=False) as found:
        found.wait_for_workers(2, timeout=60)
        yield found


def recorded(folder: Path, *ranks: int) -> Run:
    for rank in ranks:
        TraceBuilder(rank=rank, pid=100 + rank).op("a", 1, 1).write(folder, rank)
    return find_run(folder)


def assert_same_files(folder: Path, other: Path) -> None:
    written = sorted(path.relative_to(folder) for path in folder.rglob("*.*"))
    assert written == sorted(path.relative_to(other) for path in other.rglob("*.*"))
    assert written
    for name in written:
        assert (folder / name).read_bytes() == (other / name).read_bytes()


def test_merge_on_a_cluster_says_and_writes_what_a_local_one_does(address: str, tmp_path: Path) -> None:
    recorded(tmp_path, 0, 1, 2, 3)
    (tmp_path / "0_kineto" / "rank-1.json").write_text("garbage")
    there = run("merge", tmp_path, "-o", tmp_path / "o", "--cluster", address)
    (tmp_path / "o").rename(tmp_path / "there")
    here = run("merge", tmp_path, "-o", tmp_path / "o", "--workers", 1)
    assert there == here
    refused(there, "rank 1 was not merged", "rank-1.json is no device trace")
    assert_same_files(tmp_path / "there", tmp_path / "o")
    assert not list((tmp_path / "there").glob(".*"))
    again = run("merge", tmp_path, "-o", tmp_path / "there", "--cluster", address)
    assert "(3 merged before, unchanged)" in again.out


def test_client_as_an_executor_merges_the_same(client: Client, tmp_path: Path) -> None:
    run = recorded(tmp_path, 0, 1)
    merge_run(run, tmp_path / "here", MergeOptions(), workers=1)
    reports = merge_run(run, tmp_path / "there", MergeOptions(), executor=client.get_executor())
    assert [report.error for report in reports] == [None, None]
    assert_same_files(tmp_path / "here", tmp_path / "there")
    assert set(client.run(lambda: __import__("polars").thread_pool_size()).values()) == {1}


def test_worker_that_is_killed_costs_no_rank(client: Client, tmp_path: Path) -> None:
    run = recorded(tmp_path, *range(5))
    before = client.run(os.getpid)
    began: list[int] = []

    def kill(job: Any, _: int | None) -> None:
        began.append(job.rank)
        if len(began) == 2:  # each worker has a rank
            os.kill(next(iter(before.values())), signal.SIGKILL)

    reports = merge_run(run, run.merged_dir, MergeOptions(), executor=Cluster(client), watch=Watch(began=kill))
    assert [(report.rank, report.error) for report in reports] == [(rank, None) for rank in range(5)]
    assert list(find_run(tmp_path).merged_ranks) == list(range(5))
    assert set(client.run(os.getpid).values()) != set(before.values())


def test_rank_that_needs_more_memory_than_workers_have_is_named_after_its_retry_and_the_others_merge(
    client: Client, tmp_path: Path
) -> None:
    recorded(tmp_path, 0, 1, 2)
    text = json.dumps(TraceBuilder(rank=1, pid=101).op("a", 1, 1).op("huge", 2, 1).device_dict())
    before, after = text.split("huge")
    (tmp_path / "0_chakra" / "rank-1.json").unlink()
    (tmp_path / "0_kineto" / "rank-1.json").unlink()
    huge = before.encode() + b"x" * (MEMORY * 3 // 2) + after.encode()
    (tmp_path / "0_kineto" / "rank-1.json.gz").write_bytes(igzip.compress(huge, 0))
    run = find_run(tmp_path)
    reports = merge_run(run, run.merged_dir, MergeOptions(), executor=Cluster(client))
    assert [report.rank for report in reports if report.error] == [1]
    assert "two workers that merged it died, most likely out of memory: it may need" in (reports[1].error or "")
    assert list(find_run(tmp_path).merged_ranks) == [0, 2]


def test_what_is_queued_is_cancelled_when_the_caller_stops(client: Client, tmp_path: Path) -> None:
    run = recorded(tmp_path, *range(8))

    def stop(_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        merge_run(run, run.merged_dir, MergeOptions(), executor=Cluster(client), watch=Watch(ended=stop))
    for _ in range(100):
        if not any(client.processing().values()):
            break
        time.sleep(0.05)
    assert not any(client.processing().values())
    assert 1 <= len(find_run(tmp_path).merged_ranks) < 8


# Refusals: each one clear sentence.


def test_workers_of_another_version_are_refused(address: str, tmp_path: Path) -> None:
    recorded(tmp_path, 0)
    other = tmp_path / "site" / "chakra_capture-9.9.9.dist-info"
    other.mkdir(parents=True)
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: chakra-capture\nVersion: 9.9.9\n")
    before = f"import sys; sys.path.insert(0, {str(other.parent)!r})"
    done = process("merge", tmp_path, "--cluster", address, before=before)
    refused(done, "has chakra_capture 0.1.0, this process 9.9.9", "Install the same version")


def test_workers_that_do_not_see_the_folder_are_refused(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded(tmp_path / "run", 0)
    monkeypatch.chdir(tmp_path)
    # A path that is another folder for each process.
    refused(run("merge", "/proc/self/cwd/run", "--cluster", address), "does not see /proc/self/cwd/run/0_chakra")
    refused(
        run("merge", tmp_path / "run", "-o", "/proc/self/cwd/out", "--cluster", address),
        "does not see /proc/self/cwd/out. Put traces and output in folders that all workers share",
    )


def test_scheduler_that_does_not_answer_is_said(tmp_path: Path) -> None:
    recorded(tmp_path, 0)
    refused(run("merge", tmp_path, "--cluster", "tcp://127.0.0.1:99999"), "no Dask scheduler answers")
    refused(run("merge", tmp_path, "--cluster", "tcp://127.0.0.1:1"), "no Dask scheduler answers at tcp://127.0.0.1:1")


def test_missing_package_is_said_with_the_line_that_installs_it(tmp_path: Path) -> None:
    recorded(tmp_path, 0)
    before = "import sys; sys.modules['distributed'] = None"
    done = process("merge", tmp_path, "--cluster", "tcp://127.0.0.1:1", before=before)
    refused_line = done.err.strip().splitlines()
    assert done.code == 1
    assert refused_line == [
        'chakra-capture: Merging on a cluster needs Dask. Install it with: pip install "chakra-capture[cluster]"'
    ]


@pytest.mark.parametrize("address", ["nonsense", "127.0.0.1:8786", "tcp://host", "inproc://a:1", "scheduler.json"])
def test_other_than_an_address_is_wrong_usage(address: str, tmp_path: Path) -> None:
    done = run("merge", tmp_path, "--cluster", address)
    assert done.code == 2
    assert "is no address of a scheduler. Give it as tcp://HOST:PORT." in done.err
    assert run("merge", "--host", "h.json", "-o", tmp_path, "--cluster", "tcp://127.0.0.1:1").code == 2


def test_rank_that_kills_all_workers_there_are_is_named(client: Client, tmp_path: Path) -> None:
    run = recorded(tmp_path, 0, 1)
    ranks = tuple(Deadly(1, files.windows) if files.rank == 1 else files for files in run.ranks)
    reports = merge_run(Run(run.paths, ranks, run.merged_dir), run.merged_dir, MergeOptions(), executor=Cluster(client))
    assert [bool(report.error) for report in reports] == [False, True]
    assert "two workers that merged it died" in (reports[1].error or "")


def test_scheduler_that_dies_ends_the_merge_with_what_was_finished(client: Client, tmp_path: Path) -> None:
    """The last one here: it takes the cluster with it."""
    run = recorded(tmp_path, *range(6))
    pid = client.run_on_scheduler(os.getpid)
    ended: list[int] = []

    def kill(report: Any) -> None:
        if not ended:
            os.kill(pid, signal.SIGKILL)
        ended.append(report.rank)

    reports = merge_run(run, run.merged_dir, MergeOptions(), executor=Cluster(client), watch=Watch(ended=kill))
    assert sorted(ended) == list(range(6))
    failed = [report for report in reports if report.error]
    assert 1 <= len(failed) < 6
    assert all("ConnectionError: the scheduler or all workers are gone" in (report.error or "") for report in failed)
    assert {report.rank for report in reports if not report.error} <= set(find_run(tmp_path).merged_ranks)
