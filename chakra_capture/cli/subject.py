"""What an analysis looks at: the options that all of them have, and the ranks and steps that they choose."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from chakra_capture import layout
from chakra_capture.cli.merged import merge_stale
from chakra_capture.cli.output import not_negative, number_ranges
from chakra_capture.cli.selection import chosen_ranks, chosen_steps

if TYPE_CHECKING:
    from chakra_capture.trace.merged import MergedRun, MergedTrace


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """Options of every analysis.

    Attributes:
        rank: Ranks to look at, such as 0 or 0,2-3; default: all.
        step: Steps to look at, such as 5 or 5-8; default: all that was recorded.
        limit: Rows at most; default: 20 on the screen, all with --json.
        json: Print JSON: schema_version, name, columns (name, unit, meaning), rows and notes.
        job: Job of a trace_dir that holds several runs; default: the newest.
    """

    rank: Annotated[list[str] | None, Parameter(name=["--rank", "--ranks"], negative=(), consume_multiple=True)] = None
    step: Annotated[list[str] | None, Parameter(name=["--step", "--steps"], negative=(), consume_multiple=True)] = None
    limit: Annotated[int | None, Parameter(validator=not_negative)] = None
    json: Annotated[bool, Parameter(negative=())] = False
    job: str | None = None


DEFAULTS = Options()


@dataclass(frozen=True, slots=True)
class Subject:
    """Ranks of a merged run, and the steps of them that are asked for; None: all that was recorded."""

    traces: "tuple[MergedTrace, ...]"
    run: "MergedRun"
    steps: tuple[int, ...] | None
    notes: tuple[str, ...]


def open_subject(path: Path, options: Options) -> Subject:
    """Find a run, merge what is not merged, and choose.

    Raises:
        TraceFileError: there is no such run, rank or step.
        UsageError: ``--rank`` or ``--step`` is no number or range.
    """
    from chakra_capture.trace.discovery import find_run
    from chakra_capture.trace.merged import MergedRun, MergedTrace
    from chakra_capture.trace.sql import open_tables

    if not layout.MERGED_RANK_NAME.fullmatch(path.resolve().name):
        merge_stale(find_run(path, options.job))
    tables = open_tables(path, options.job)
    ranks = chosen_ranks(tables, path, options.rank)
    steps = None if options.step is None else tuple(chosen_steps(tables, path, ranks, options.step))
    folder = tables.folder
    notes = [f"rank {number_ranges([*tables.unmerged])} is not merged and not in here"] if tables.unmerged else []
    traces = tuple(MergedTrace(rank, folder / layout.rank_folder_name(rank)) for rank in ranks)
    return Subject(traces, MergedRun(folder), steps, tuple(notes))
