"""What verbs that replay a run have in common: the merged ranks they look at, and how they tell a table."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from chakra_capture.cli.output import number_ranges
from chakra_capture.errors import TraceFileError

if TYPE_CHECKING:
    import polars as pl

    from chakra_capture.trace.merged import MergedRun, MergedTrace
    from chakra_capture.trace.schema import Column

SCHEMA_VERSION = 1


def merged_ranks(path: Path, job: str | None, rank: int | None) -> "tuple[MergedRun, list[MergedTrace]]":
    """Open the merged ranks of a run, or one of them.

    Raises:
        TraceFileError: there are none, or not this one.
    """
    from chakra_capture.trace.discovery import find_run
    from chakra_capture.trace.merged import MergedRun, MergedTrace

    run = find_run(path, job)
    merged = run.merged_ranks
    if not merged:
        raise TraceFileError(f"{path} has no merged ranks. Merge it first, with: chakra-capture merge.")
    if rank is not None and rank not in merged:
        raise TraceFileError(f"{path} has no merged rank {rank}; it has {number_ranges([*merged])}. Name one of them.")
    chosen = [MergedTrace(number, folder) for number, folder in merged.items() if rank in (None, number)]
    return MergedRun(run.merged_dir), chosen


def nothing_timed(path: Path) -> TraceFileError:
    """The error of a run without any time."""
    return TraceFileError(
        f"{path} holds nothing that has a time, so there is nothing to replay: a host trace alone has none. "
        "Merge it with its device traces."
    )


def table_content(name: str, columns: "tuple[Column, ...]", table: "pl.DataFrame", notes: list[str]) -> dict[str, Any]:
    """A table as JSON, with its columns explained."""
    return {
        "schema_version": SCHEMA_VERSION,
        "name": name,
        "columns": [{"name": c.name, "unit": c.unit, "meaning": c.meaning} for c in columns],
        "rows": table.to_dicts(),
        "notes": notes,
    }
