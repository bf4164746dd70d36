"""One rank to merge, as it is handed to any process: paths go there, a small report comes back."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from chakra_capture import layout
from chakra_capture.errors import ChakraCaptureError
from chakra_capture.merge.many.origin import Origin
from chakra_capture.merge.report import MergeOptions, RankReport
from chakra_capture.trace.discovery import RankFiles


@dataclass(frozen=True, slots=True)
class Job:
    """Merge the files of one rank into ``folder``.

    Attributes:
        made_from: what the rank's files were when the job was made.
        need_bytes: about how much memory it takes.
    """

    files: RankFiles
    folder: Path
    options: MergeOptions
    made_from: Origin
    need_bytes: int

    @property
    def rank(self) -> int:
        return self.files.rank


# Told that a rank is put to work, and the process that does it where that is one of this machine.
Began = Callable[[Job, int | None], None]


def merge_job(job: Job) -> RankReport:
    """Merge one rank; a rank that cannot be merged is a report, too."""
    # Whoever hands out jobs, or passes one on, needs no polars.
    from chakra_capture.merge.rank import merge_rank

    try:
        return merge_rank(
            job.rank,
            job.files.windows,
            job.folder,
            job.options,
            phases=job.files.phases,
            made_from=job.made_from,
        )
    except ChakraCaptureError as error:
        disown(job.folder)
        return RankReport(job.rank, error=str(error))


def disown(folder: Path) -> None:
    """Tables of an earlier merge are not those of these files: they no longer count as merged."""
    with suppress(OSError):
        (folder / layout.LINK_FILE).unlink(missing_ok=True)
