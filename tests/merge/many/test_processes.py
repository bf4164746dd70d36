"""Ranks side by side: never more at once than memory allows, the largest first, and always at least one."""

import os
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from builder import TraceBuilder

from chakra_capture.errors import TraceFileError
from chakra_capture.merge.across.alignment import align_run
from chakra_capture.merge.across.outcome import RunFacts
from chakra_capture.merge.many import run as run_module
from chakra_capture.merge.many.job import Job
from chakra_capture.merge.many.origin import origin
from chakra_capture.merge.many.processes import Processes
from chakra_capture.merge.many.run import Watch, merge_run
from chakra_capture.merge.report import MergeOptions
from chakra_capture.trace.discovery import Run, find_run


def recorded(folder: Path, *ranks: int) -> Run:
    for rank in ranks:
        built = TraceBuilder(rank=rank, pid=100 + rank)
        for number in range(1 + 100 * rank):
            built.op("a", 10 * number, 1)
        built.write(folder, rank)
    return find_run(folder)


def jobs(folder: Path, *needs: int) -> list[Job]:
    run = recorded(folder, *range(len(needs)))
    made = []
    for files, need in zip(run.ranks, needs, strict=True):
        made_from = origin(files, force=False, strict=False)
        made.append(Job(files, run.merged_dir / f"rank={files.rank}", MergeOptions(), made_from, need))
    return made


def most_at_once(made: list[Job], count: int, free: int | None) -> tuple[int, int, list[int]]:
    """The most ranks and the most memory in work at a time, and the order in which ranks began."""
    in_work: dict[int, int] = {}
    order, most, most_bytes = [], 0, 0

    def began(job: Job, pid: int | None) -> None:
        nonlocal most, most_bytes
        assert pid is not None
        in_work[job.rank] = job.need_bytes
        order.append(job.rank)
        most, most_bytes = max(most, len(in_work)), max(most_bytes, sum(in_work.values()))

    with Processes(count, free) as processes:
        for report in processes.merge(made, began):
            assert report.error is None
            del in_work[report.rank]
    return most, most_bytes, order


def test_ranks_in_work_fit_in_memory_together_and_smaller_ones_go_before_one_that_does_not_fit(tmp_path: Path) -> None:
    most, most_bytes, order = most_at_once(jobs(tmp_path, 60, 50, 40, 30), 2, 100)
    assert (most, most_bytes) == (2, 100)
    assert order[:2] == [0, 2]
    assert sorted(order) == [0, 1, 2, 3]


def test_rank_larger_than_memory_is_merged_alone(tmp_path: Path) -> None:
    assert most_at_once(jobs(tmp_path, 500, 60), 2, 100)[:2] == (1, 500)


def test_rank_larger_than_memory_is_said_and_the_largest_begins_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = recorded(tmp_path, 0, 1, 2)
    largest = sum(path.stat().st_size for path in run.ranks[2].windows[0].files)
    # More than the two small ranks need together, less than the large one.
    monkeypatch.setattr(run_module, "available_bytes", lambda: 90_000_000 + largest // 2)
    order: list[int] = []
    watch = Watch(began=lambda job, _: order.append(job.rank))
    reports = merge_run(run, run.merged_dir, MergeOptions(), workers=2, watch=watch)
    assert order == [2, 1, 0]
    assert [bool(report.notes) for report in reports] == [False, False, True]
    assert "so no other rank was merged meanwhile; --memory-budget makes it need less" in reports[2].notes[0]


def test_without_a_known_limit_only_cores_count(tmp_path: Path) -> None:
    made = [replace(job, need_bytes=1 << 60) for job in jobs(tmp_path, 1, 1, 1)]
    assert most_at_once(made, 2, None)[0] == 2


def test_one_worker_is_this_process_unless_a_rank_may_end_it_for_want_of_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = recorded(tmp_path, 0, 1)
    for free, is_here in ((1 << 40, True), (1000, False)):
        monkeypatch.setattr(run_module, "available_bytes", lambda free=free: free)
        pids: set[int | None] = set()
        watch = Watch(began=lambda _, pid, pids=pids: pids.add(pid))
        merge_run(run, run.merged_dir, MergeOptions(), workers=1, again=True, watch=watch)
        assert (pids == {os.getpid()}) == is_here


def own_pid(dies_unless: int) -> int:
    if os.getpid() != dies_unless:
        os._exit(9)
    return os.getpid()


def test_what_follows_the_ranks_is_done_by_a_worker_that_is_there_or_here_if_there_is_none_or_it_dies(
    tmp_path: Path,
) -> None:
    pids: list[int | None] = []
    with Processes(1, None) as processes:
        assert processes.run(os.getpid) == os.getpid()
        (report,) = processes.merge(jobs(tmp_path, 1), lambda _, pid: pids.append(pid))
        assert [processes.run(os.getpid)] == pids
        with pytest.raises(TraceFileError, match="cannot be written: No such file or directory"):
            processes.run(partial(align_run, tmp_path / "none", {0: tmp_path}, RunFacts()))
        assert processes.run(partial(own_pid, os.getpid())) == os.getpid()
    assert report.error is None
