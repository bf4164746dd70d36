"""What a terminal shows while ranks merge: a line for the run, one for each rank in work; otherwise nothing."""

import os
import pty
import subprocess
import sys
from pathlib import Path

from builder import TraceBuilder

from chakra_capture.cli.merge_progress import MergeProgress, read_position
from chakra_capture.merge.many.job import Job
from chakra_capture.merge.many.origin import origin
from chakra_capture.merge.report import MergeOptions, RankReport
from chakra_capture.trace.discovery import find_run


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def jobs(folder: Path, *sizes: int) -> list[Job]:
    for rank, size in enumerate(sizes):
        path = folder / "0_kineto" / f"rank-{rank}.json"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b" " * size)
    run = find_run(folder)
    made_from = [origin(files, force=False, strict=False) for files in run.ranks]
    return [Job(f, folder, MergeOptions(), m, 1) for f, m in zip(run.ranks, made_from, strict=True)]


def test_lines_say_how_many_ranks_are_done_how_fast_and_what_is_in_work(tmp_path: Path) -> None:
    made, clock = jobs(tmp_path, 2_000_000, 2_000_000, 4_000_000, 2_000_000), Clock()
    progress = MergeProgress(clock)
    progress.planned(made)
    assert progress.lines() == ["0 of 4 ranks, 0 s"]
    progress.began(made[2], os.getpid())
    progress.began(made[0], None)
    clock.now += 4
    assert progress.lines() == ["0 of 4 ranks, 4 s", "  rank 0: merging, 4 s", "  rank 2: starting, 4 s"]
    progress.ended(RankReport(0))
    progress.began(made[1], None)
    with (tmp_path / "0_kineto" / "rank-2.json").open("rb") as file:
        file.read(1_000_000)
        os.lseek(file.fileno(), 1_000_000, os.SEEK_SET)
        clock.now += 1
        assert progress.lines() == [
            "1 of 4 ranks, 0.4 MB/s, 20 s left, 5 s",
            "  rank 1: merging, 1 s",
            "  rank 2: 1.0 of 4.0 MB read, 5 s",
        ]
    progress.ended(RankReport(1, error="bad"))
    clock.now += 60
    assert progress.lines() == [
        "2 of 4 ranks, 1 failed, 0.1 MB/s, 1 min 38 s left, 1 min 5 s",
        "  rank 2: linking, writing, 1 min 5 s",
    ]


def test_ranks_merged_before_are_not_in_the_count(tmp_path: Path) -> None:
    made = jobs(tmp_path, 10, 10)
    progress = MergeProgress(Clock())
    progress.ended(RankReport(5, unchanged=True))
    progress.planned(made)
    assert progress.lines() == ["0 of 2 ranks, 0 s"]


def test_position_counts_the_files_before_and_is_unknown_of_a_process_that_is_gone(tmp_path: Path) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    for path in (first, second):
        path.write_bytes(b"12345")
    files = {str(first): 5, str(second): 5}
    assert read_position(os.getpid(), files) is None
    with second.open("rb", buffering=0) as file:
        file.read(2)
        assert read_position(os.getpid(), files) == 7
    assert read_position(2**22 + 1, files) is None


def test_terminal_sees_progress_and_ends_clean_and_a_file_sees_none(tmp_path: Path) -> None:
    for rank in range(2):
        TraceBuilder(rank=rank, pid=100 + rank).op("a", 1, 1).write(tmp_path, rank)
    command = [sys.executable, "-m", "chakra_capture", "merge", str(tmp_path), "--workers", "1"]
    main, child = pty.openpty()
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=child, env={**os.environ, "TERM": "xterm"}, timeout=60
    )
    os.close(child)
    shown = os.read(main, 1 << 16).decode()
    os.close(main)
    assert done.returncode == 0
    assert "of 2 ranks" in shown
    assert b"of 2 ranks," not in done.stdout
    silent = subprocess.run([*command, "--again"], capture_output=True, timeout=60, check=True)
    assert silent.stderr == b""
