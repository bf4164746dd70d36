"""``chakra-capture export et``: a merged run as Chakra traces for simulators."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from chakra_capture.cli.output import (
    EXIT_BAD_INPUT,
    EXIT_OK,
    count_of,
    not_negative,
    number_ranges,
    print_error,
    print_json,
    print_line,
    size,
)
from chakra_capture.errors import TraceFileError

if TYPE_CHECKING:
    from chakra_capture.export.making.rank import RankExport
    from chakra_capture.export.making.run import Export


def export_et(
    path: Path,
    /,
    *,
    output: Annotated[Path | None, Parameter(alias="-o")] = None,
    profile: Literal["astra", "full"] = "astra",
    window: Annotated[int | None, Parameter(validator=not_negative)] = None,
    job: str | None = None,
    overwrite: Annotated[bool, Parameter(negative=())] = False,
    anonymize: Annotated[bool, Parameter(negative=())] = False,
    workers: Annotated[int | None, Parameter(validator=not_negative)] = None,
    json: Annotated[bool, Parameter(negative=())] = False,
) -> int:
    """Write a merged run as Chakra traces (.et), which simulators such as ASTRA-sim run.

    Every rank becomes chakra.<rank>.et; comm_group.json lists the process groups.
    Nodes are stretches of CPU threads (also those in which no operator runs),
    device activities and communication, each with start and duration. They wait
    for what they waited for in the run: the thread, the launch, the stream, events
    and synchronisation, the other thread, the group. What only waits takes no time
    of its own: a simulator with a faster device waits less.

    Profile astra holds what ASTRA-sim runs. Stretches of one operator are joined
    where nothing else waits; reduce and gather become all-reduce and all-gather,
    scatter a broadcast, a barrier an all-reduce of 1 byte; collectives of a single
    rank become computation; communication of all groups is put in one order, since
    ASTRA-sim has one of a rank at a time. What was changed is counted and shown.
    Profile full holds every row, exact nanoseconds, shapes and types; rows that run
    nothing are METADATA_NODEs. Check what was written with: chakra-capture validate.

    Examples:
        chakra-capture export et ./traces
        chakra-capture export et ./traces -o /tmp/et --profile full
        chakra-capture export et ./traces --window 1 --overwrite --json

    Parameters
    ----------
    path
        Folder of a run, or of merged ranks.
    output
        Folder to write to; default: et, beside the merged ranks.
    profile
        What ASTRA-sim runs, or all that is known.
    window
        Recorded window to write; default: the first.
    job
        Job of a trace_dir that holds several runs; default: the newest.
    overwrite
        Replace an export that is there.
    anonymize
        Write hashes for names and types, and shapes rounded up to powers of two. Times,
        structure and communication stay; equal names stay equal, on all ranks.
    workers
        Ranks at once; default: one per core.
    json
        Print JSON.
    """
    from chakra_capture.export.anonymize import Anonymizer
    from chakra_capture.export.making.content import Texts, hidden
    from chakra_capture.export.making.run import Asked
    from chakra_capture.export.making.run import export_et as write
    from chakra_capture.export.validation.node_checks import Profile
    from chakra_capture.trace.discovery import find_run

    run = find_run(path, job)
    if not run.merged_ranks:
        raise TraceFileError(f"{path} has no merged ranks. Merge it first, with: chakra-capture merge.")
    with _progress() as seen:
        asked = Asked(
            profile=Profile(profile),
            window=window,
            workers=workers,
            overwrite=overwrite,
            texts=hidden(Anonymizer()) if anonymize else Texts(),
            seen=seen,
        )
        done = write(run, output, asked)
    if json:
        print_json(_as_json(done, profile))
    else:
        _print(done)
    failed = [one for one in done.ranks if one.error]
    for one in failed:
        print_error(f"rank {one.rank} was not exported: {one.error}")
    return EXIT_BAD_INPUT if failed else EXIT_OK


@contextmanager
def _progress() -> "Iterator[Callable[[RankExport, int], None]]":
    """A bar on a terminal; nothing elsewhere."""
    if not sys.stderr.isatty():
        yield lambda rank, number: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("exporting", total=None)
        yield lambda rank, number: bar.update(task, advance=1, total=number, description=f"rank {rank.rank}")


def _as_json(done: "Export", profile: str) -> dict[str, Any]:
    return {
        "schema_version": 1,
        "folder": str(done.folder),
        "profile": profile,
        "window": done.window,
        "windows": done.windows,
        "groups": {str(number): ranks for number, ranks in done.groups.items()},
        "counts": dict(done.counts),
        "ranks": [
            {
                "rank": one.rank,
                "path": None if one.path is None else str(one.path),
                "num_nodes": one.num_nodes,
                "num_bytes": one.num_bytes,
                "num_dependencies": one.num_edges,
                "error": one.error,
            }
            for one in done.ranks
        ],
    }


def _print(done: "Export") -> None:
    written = [one for one in done.ranks if one.path]
    if not written:
        return
    nodes, num_bytes = sum(one.num_nodes for one in written), sum(one.num_bytes for one in written)
    ranks = f"rank{'s' * (len(written) > 1)} {number_ranges([one.rank for one in written])}"
    print_line(
        f"{done.folder}: {ranks}, {count_of(nodes, 'node')}, {size(num_bytes)}, {count_of(len(done.groups), 'group')}"
    )
    if len(done.windows) > 1:
        print_line(f"  window {done.window} of {number_ranges(done.windows)}; choose with --window")
    for text, number in sorted(done.counts.items()):
        print_line(f"  {number:,} {text}")
