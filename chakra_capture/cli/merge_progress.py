"""What a merge says while it runs, on a terminal: a line for the run, and one for each rank in work."""

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from chakra_capture.cli.output import plain

if TYPE_CHECKING:
    from rich.console import RenderableType

    from chakra_capture.merge.many.job import Job
    from chakra_capture.merge.many.run import Watch
    from chakra_capture.merge.report import RankReport


@dataclass(slots=True)
class _InWork:
    """A rank that is merged at this moment; ``has_read`` once one of its files was seen open."""

    files: dict[str, int]
    pid: int | None
    begin_s: float
    has_read: bool = False

    @property
    def size(self) -> int:
        return sum(self.files.values())

    def stage(self) -> str:
        if self.pid is None:
            return "merging"
        position = read_position(self.pid, self.files)
        if position is not None:
            self.has_read = True
            return f"{position / 1e6:.1f} of {self.size / 1e6:.1f} MB read"
        return "linking, writing" if self.has_read else "starting"


@dataclass(slots=True)
class MergeProgress:
    """How far a merge is."""

    clock: Callable[[], float] = time.monotonic
    num_ranks: int = 0
    num_merged: int = 0
    num_failed: int = 0
    num_bytes: int = 0
    done_bytes: int = 0
    begin_s: float = 0.0
    _sizes: dict[int, int] = field(default_factory=dict)
    _in_work: dict[int, _InWork] = field(default_factory=dict)

    def planned(self, jobs: "list[Job]") -> None:
        """Take the ranks that will be merged."""
        self.begin_s, self.num_ranks = self.clock(), len(jobs)
        self._sizes = {job.rank: job.files.size_bytes for job in jobs}
        self.num_bytes = sum(self._sizes.values())

    def began(self, job: "Job", pid: int | None) -> None:
        """Take a rank that is put to work."""
        files = {str(p.absolute()): p.stat().st_size for w in job.files.windows for p in w.files if p.exists()}
        self._in_work[job.rank] = _InWork(files, pid, self.clock())

    def ended(self, report: "RankReport") -> None:
        """Take the end of a rank."""
        self._in_work.pop(report.rank, None)
        if report.rank in self._sizes:
            self.num_failed += report.error is not None
            self.num_merged += report.error is None
            self.done_bytes += self._sizes[report.rank]

    def lines(self) -> list[str]:
        """What the screen shows now."""
        now = self.clock()
        seconds = now - self.begin_s
        failed = f", {self.num_failed} failed" if self.num_failed else ""
        head = f"{self.num_merged + self.num_failed} of {self.num_ranks} ranks{failed}"
        if self.done_bytes and seconds > 0:
            rate = self.done_bytes / seconds
            left = _time((self.num_bytes - self.done_bytes) / rate)
            head += f", {rate / 1e6:.1f} MB/s, {left} left"
        shown = list(self._in_work.items())  # another thread puts ranks to work meanwhile
        return [
            f"{head}, {_time(seconds)}",
            *(f"  rank {rank}: {rank_in.stage()}, {_time(now - rank_in.begin_s)}" for rank, rank_in in sorted(shown)),
        ]


def read_position(pid: int, files: dict[str, int]) -> int | None:
    """Bytes that a process has read of files it reads one after the other; None while none of them is open.

    Args:
        files: absolute paths and sizes, in the order of reading.
    """
    with suppress(OSError):
        for handle in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError, ValueError, IndexError):
                path = os.readlink(handle)
                if path in files:
                    before = list(files).index(path)
                    position = int(Path(f"/proc/{pid}/fdinfo/{handle.name}").read_text().split()[1])
                    return sum(list(files.values())[:before]) + position
    return None


@contextmanager
def watched() -> "Iterator[Watch]":
    """Show a merge on stderr while it runs; nothing where that is no terminal."""
    from chakra_capture.merge.many.run import Watch

    if not sys.stderr.isatty():
        yield Watch()
        return
    from rich.console import Console, Group
    from rich.live import Live
    from rich.text import Text

    progress = MergeProgress()

    def screen() -> "RenderableType":
        return Group(*(Text(plain(line), no_wrap=True) for line in progress.lines()))

    with Live(get_renderable=screen, console=Console(stderr=True), transient=True, refresh_per_second=4):
        yield Watch(progress.planned, progress.began, progress.ended)


def _time(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
