"""Ranks are merged before they are shown, if that has not been done yet."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from chakra_capture import layout
from chakra_capture.cli.output import print_error

if TYPE_CHECKING:
    from chakra_capture.trace.discovery import Run


def merge_stale(run: "Run", say: Callable[[str], None] = print_error) -> None:
    """Merge the ranks whose tables are missing or of other traces; what cannot be merged is said."""
    from chakra_capture.merge.many.origin import is_of
    from chakra_capture.merge.many.run import merge_run
    from chakra_capture.merge.report import MergeOptions

    merged = run.merged_ranks
    stale = [files.rank for files in run.ranks if files.rank not in merged or not is_of(merged[files.rank], files)]
    is_matched = not run.ranks or (run.merged_dir / layout.COLLECTIVES_FILE).is_file()
    for report in merge_run(run, run.merged_dir, MergeOptions(), ranks=stale) if stale or not is_matched else ():
        if report.error:
            say(f"rank {report.rank} was not merged: {report.error}")
