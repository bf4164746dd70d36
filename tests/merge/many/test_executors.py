"""Ranks on executors of other people: results are files, a worker that dies costs its rank only."""

import os
import pickle
from collections.abc import Callable
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
from builder import TraceBuilder

from chakra_capture.merge.many.remote import merge_packed
from chakra_capture.merge.many.run import Watch, merge_run
from chakra_capture.merge.report import MergeOptions
from chakra_capture.trace.discovery import RankFiles, Run, find_run


class Deadly(RankFiles):
    """Files whose mere arrival kills the process that should merge them."""

    def __reduce__(self) -> tuple[object, ...]:
        return os._exit, (9,)


def recorded(folder: Path, *ranks: int) -> Run:
    for rank in ranks:
        TraceBuilder(rank=rank, pid=100 + rank).op("a", 1, 1).write(folder, rank)
    return find_run(folder)


def processes() -> Executor:
    return ProcessPoolExecutor(2, mp_context=get_context("spawn"))


def threads() -> Executor:
    return ThreadPoolExecutor(2)


@pytest.mark.parametrize("make", [processes, threads])
def test_tables_are_byte_for_byte_those_of_a_local_merge(make: Callable[[], Executor], tmp_path: Path) -> None:
    run = recorded(tmp_path, 0, 1, 2)
    (tmp_path / "0_kineto" / "rank-1.json").write_text("garbage")
    local = merge_run(run, tmp_path / "local", MergeOptions(), workers=1)
    began: list[int] = []
    watch = Watch(began=lambda job, _: began.append(job.rank))
    with make() as executor:
        reports = merge_run(run, tmp_path / "there", MergeOptions(), executor=executor, watch=watch)
    assert reports == local
    assert [bool(report.error) for report in reports] == [False, True, False]
    assert sorted(began) == [0, 1, 2]
    written = {path.relative_to(tmp_path / "local"): path for path in (tmp_path / "local").rglob("*.*")}
    assert len(written) >= 8
    for name, path in written.items():
        assert (tmp_path / "there" / name).read_bytes() == path.read_bytes()


def test_relative_paths_reach_a_process_that_stands_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded(tmp_path, 0)
    monkeypatch.chdir(tmp_path)
    run = find_run(Path())
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=os.chdir, initargs=("/",)) as executor:
        (report,) = merge_run(run, run.merged_dir, MergeOptions(), executor=executor)
    assert report.error is None
    assert list(find_run(tmp_path).merged_ranks) == [0]


def test_pool_that_breaks_over_one_rank_costs_only_that_rank(tmp_path: Path) -> None:
    run = recorded(tmp_path, 0, 1, 2)
    ranks = tuple(Deadly(1, files.windows) if files.rank == 1 else files for files in run.ranks)
    with processes() as executor:
        reports = merge_run(Run(run.paths, ranks, run.merged_dir), run.merged_dir, MergeOptions(), executor=executor)
    assert [r.rank for r in reports if r.error] == [1]
    assert "the merging process died twice" in (reports[1].error or "")
    assert list(find_run(tmp_path).merged_ranks) == [0, 2]


class Strange(Executor):
    """One whose tasks end in ways that have nothing to do with traces."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **_: Any) -> Future[Any]:
        future: Future[Any] = Future()
        rank = pickle.loads(args[0]).rank
        if rank == 0:
            future.cancel()
            future.set_running_or_notify_cancel()
        elif rank == 1:
            future.set_exception(OSError("no route\nto host"))
        else:
            future.set_result(fn(*args))
        return future


def test_task_that_is_lost_is_a_failed_rank_with_one_sentence(tmp_path: Path) -> None:
    run = recorded(tmp_path, 0, 1, 2)
    reports = merge_run(run, run.merged_dir, MergeOptions(), executor=Strange())
    assert [r.error for r in reports] == [
        "the executor did not merge it (it was cancelled). "
        "Merge again: ranks that are merged already are left as they are.",
        "the executor did not merge it (OSError: no route to host). "
        "Merge again: ranks that are merged already are left as they are.",
        None,
    ]


def test_what_is_queued_is_cancelled_when_the_caller_stops(tmp_path: Path) -> None:
    run = recorded(tmp_path, *range(6))

    def stop(_: object) -> None:
        raise KeyboardInterrupt

    with ThreadPoolExecutor(1) as executor, pytest.raises(KeyboardInterrupt):
        merge_run(run, run.merged_dir, MergeOptions(), executor=executor, watch=Watch(ended=stop))
    merged = list(find_run(tmp_path).merged_ranks)
    assert 1 <= len(merged) < 6


def test_a_job_travels_small(tmp_path: Path) -> None:
    seen: list[bytes] = []

    class Seeing(Strange):
        def submit(self, fn: Callable[..., Any], /, *args: Any, **_: Any) -> Future[Any]:
            assert fn is merge_packed
            seen.append(args[0])
            return super().submit(fn, *args)

    run = recorded(tmp_path, 2)
    merge_run(run, run.merged_dir, MergeOptions(), executor=Seeing())
    assert len(seen[0]) < 4000


def test_polars_is_not_there_before_its_threads_are_limited(tmp_path: Path) -> None:
    recorded(tmp_path, 0)
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as executor:
        assert (
            executor.submit(
                eval, "(__import__('chakra_capture.merge.many.remote'), 'polars' in __import__('sys').modules)[1]"
            ).result()
            is False
        )
        run = find_run(tmp_path)
        merge_run(run, run.merged_dir, MergeOptions(), executor=executor)
        assert executor.submit(eval, "__import__('polars').thread_pool_size()").result() == 1
