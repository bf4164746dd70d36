"""Ranks side by side in processes: one that fails, or whose process dies, costs only itself."""

import os
from pathlib import Path

import pytest
from builder import TraceBuilder

from chakra_capture.layout import RunPaths
from chakra_capture.merge.many.job import disown
from chakra_capture.merge.many.processes import Processes
from chakra_capture.merge.many.roster import Roster
from chakra_capture.merge.many.run import Watch, finish_run, merge_run
from chakra_capture.merge.report import MergeOptions, RankReport
from chakra_capture.trace.discovery import RankFiles, Run, find_run


class Deadly(RankFiles):
    """Files whose mere arrival kills the process that should merge them."""

    def __reduce__(self) -> tuple[object, ...]:
        return os._exit, (9,)


def recorded(folder: Path, *ranks: int) -> Run:
    for rank in ranks:
        TraceBuilder(rank=rank).op("a", 1, 1).write(folder, rank)
    return find_run(folder)


@pytest.mark.parametrize("workers", [1, 2])
def test_reports_come_in_rank_order_and_each_as_its_rank_ends(workers: int, tmp_path: Path) -> None:
    run = recorded(tmp_path, 3, 0, 1)
    seen: list[RankReport] = []
    reports = merge_run(run, run.merged_dir, MergeOptions(), workers=workers, watch=Watch(ended=seen.append))
    assert [(r.rank, r.error) for r in reports] == [(0, None), (1, None), (3, None)]
    assert sorted(seen, key=lambda r: r.rank) == reports
    assert list(find_run(tmp_path).merged_ranks) == [0, 1, 3]


def test_rank_whose_process_dies_is_reported_and_the_others_merge(tmp_path: Path) -> None:
    run = recorded(tmp_path, 0, 1, 2)
    ranks = tuple(Deadly(1, files.windows) if files.rank == 1 else files for files in run.ranks)
    dying = Run(RunPaths(tmp_path, "0"), ranks, run.merged_dir)
    before = dict(os.environ)
    reports = merge_run(dying, run.merged_dir, MergeOptions(), workers=2)
    assert [r.rank for r in reports if r.error] == [1]
    assert "the merging process died twice" in (reports[1].error or "")
    assert list(find_run(tmp_path).merged_ranks) == [0, 2]
    assert dict(os.environ) == before


def test_all_workers_end_when_the_caller_stops_early(tmp_path: Path) -> None:
    def stop(_: RankReport) -> None:
        raise KeyboardInterrupt

    run = recorded(tmp_path, 0, 1, 2)
    with pytest.raises(KeyboardInterrupt):
        merge_run(run, run.merged_dir, MergeOptions(), workers=2, watch=Watch(ended=stop))
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    assert not [c for c in children if b"spawn_main" in Path(f"/proc/{c}/cmdline").read_bytes()]


@pytest.mark.parametrize("workers", [1, 2])
def test_failed_rank_does_not_keep_the_tables_of_an_earlier_merge(workers: int, tmp_path: Path) -> None:
    run = recorded(tmp_path, 0, 1)
    merge_run(run, run.merged_dir, MergeOptions(), workers=workers)
    (tmp_path / "0_chakra" / "rank-1.json").write_text("[]")
    reports = merge_run(run, run.merged_dir, MergeOptions(), workers=workers)
    assert [bool(r.error) for r in reports] == [False, True]
    assert list(find_run(tmp_path).merged_ranks) == [0]


def test_ranks_are_not_aligned_while_another_call_has_one_in_hand_that_this_one_merged(tmp_path: Path) -> None:
    run = recorded(tmp_path, 0, 1, 2)
    reports = merge_run(run, run.merged_dir, MergeOptions(), workers=1)
    written = (run.merged_dir / "alignment.json").read_bytes()
    disown(run.merged_dir / "rank=1")  # as merging it again begins
    assert finish_run(run, run.merged_dir, reports, Roster(), Processes(1, None)) is None
    assert (run.merged_dir / "alignment.json").read_bytes() == written
