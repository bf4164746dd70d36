"""A slice of a merged run: what was asked for, of every rank, and of the tables that the ranks have in common."""

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import polars as pl

from chakra_capture import layout
from chakra_capture.errors import TraceFileError
from chakra_capture.merge.folder import new_folder
from chakra_capture.merge.output import write_link, write_table
from chakra_capture.merge.slices.kept import Kept, rows_beneath, rows_of_steps
from chakra_capture.merge.slices.tables import (
    Counts,
    copy_link,
    operations_kept,
    read_link,
    readable,
    scan,
    write_rank,
)
from chakra_capture.trace.discovery import Run
from chakra_capture.trace.schema import COLLECTIVES

_TABLES = (layout.NODES_FILE, layout.EDGES_FILE, layout.STEPS_FILE, layout.COMMUNICATION_FILE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """What is to stay.

    Attributes:
        ranks: in order.
        steps: numbers of steps; None: all there is.
        node: ``node_id`` of a row of the one rank, of which what is beneath it stays; None: all.
    """

    ranks: tuple[int, ...]
    steps: tuple[int, ...] | None = None
    node: int | None = None

    @property
    def is_whole(self) -> bool:
        """Whether ranks stay as they are."""
        return self.steps is None and self.node is None

    def __str__(self) -> str:
        ranks = f"rank {_listed(self.ranks)}"
        if self.node is not None:
            return f"node {self.node} of {ranks}"
        return ranks if self.steps is None else f"step {_listed(self.steps)} of {ranks}"


@dataclass(frozen=True, slots=True)
class Slice:
    """What a slice holds.

    Attributes:
        ranks: counts by rank.
        without: ranks that have none of the steps, and so are not in it.
        num_operations, num_incomplete: communication operations, and those of them that miss a rank that took part.
    """

    ranks: Mapping[int, Counts]
    without: tuple[int, ...]
    num_operations: int | None
    num_incomplete: int | None


def slice_run(source: Path, selection: Selection, out: Path, watch: Callable[[str], None] = lambda _: None) -> Slice:
    """Write what is selected of a merged run as a merged run of its own.

    Args:
        source: folder of the merged ranks; it is only read.
        selection: what stays; the ranks are merged.
        out: folder to make.
        watch: is told what is being done.

    Raises:
        TraceFileError: ``out`` cannot be made, a table cannot be read, or the node is not there.
    """
    _check_out(source, out)
    run = {"run_id": _run_id(source), "folder": str(source.resolve())}
    said = {
        "steps": None if selection.steps is None else list(selection.steps),
        "ranks": list(selection.ranks),
        "node_id": selection.node,
    }
    rows: dict[int, Kept | None] = {}
    counts: dict[int, Counts] = {}
    with new_folder(out) as folder:
        for rank in selection.ranks:
            watch(f"slicing rank {rank}, {len(rows) + 1} of {len(selection.ranks)}")
            of, to = (each / layout.rank_folder_name(rank) for each in (source, folder))
            about = {"source": run | _origin(of), **said}
            if selection.is_whole:
                rows[rank] = None
                counts[rank] = _copy_rank(of, to, about)
                continue
            kept = _kept(of, selection)
            if kept is not None:
                rows[rank] = kept
                counts[rank] = write_rank(of, to, kept, about, f"a slice: {selection}")
        watch("slicing collectives")
        operations = _write_collectives(source, folder, rows)
        _write_alignment(source, folder, tuple(rows), operations)
    without = tuple(rank for rank in selection.ranks if rank not in rows)
    return Slice(counts, without, *(operations or (None, None)))


def _check_out(source: Path, out: Path) -> None:
    if out.resolve().is_relative_to(source.resolve()):
        raise TraceFileError(f"{out} lies in the run that is sliced. Name a folder elsewhere with -o.")
    match = layout.RUN_FOLDER_NAME.fullmatch(out.resolve().name)
    if match is not None:
        paths = layout.RunPaths(out.resolve().parent, match["job"])
        if any(each.exists() for each in (paths.host_dir, paths.device_dir, paths.phases_dir, paths.run_dir)):
            raise TraceFileError(
                f"{out} is where a merge of run {match['job']} would write. Name another folder with -o."
            )


def _run_id(source: Path) -> str | None:
    """Id of the run whose merged ranks lie in ``source``, where its other folders say it."""
    match = layout.RUN_FOLDER_NAME.fullmatch(source.resolve().name)
    if match is None or match["part"] != layout.MERGED_FOLDER:
        return None
    run = Run(layout.RunPaths(source.resolve().parent, match["job"]), (), source)
    return run.owner or next((head.run_id for head in run.manifests.values() if head.run_id), None)


def _origin(rank: Path) -> dict[str, Any]:
    """What a rank was made from; of a slice, what that was cut from."""
    link = read_link(rank)
    return {"made_from": link.get("made_from"), "slice": link.get("slice")}


def _kept(folder: Path, selection: Selection) -> Kept | None:
    """The rows of a rank that stay; None: it has none of the steps."""
    nodes = scan(folder, layout.NODES_FILE)
    with readable(folder):
        if selection.steps is not None:
            wanted = pl.col("step").is_in(selection.steps)
            steps = scan(folder, layout.STEPS_FILE).filter(wanted).collect()
            return rows_of_steps(nodes, steps) if steps.height else None
        assert selection.node is not None
        kept = rows_beneath(nodes, selection.node)
        if kept is None:
            number = nodes.select(pl.len()).collect().item()
            there = f"its {number} rows are numbered from 0" if number else "it has no rows"
            raise TraceFileError(
                f"{folder} has no node {selection.node}; {there}. Find one with chakra-capture query, by name."
            )
        return kept


def _copy_rank(source: Path, out: Path, said: dict[str, Any]) -> Counts:
    out.mkdir()
    for name in _TABLES:
        if (source / name).is_file():
            shutil.copyfile(source / name, out / name)
    return copy_link(source, out, said)


def _write_collectives(source: Path, out: Path, rows: Mapping[int, Kept | None]) -> tuple[int, int] | None:
    """Write the operations of what stays; returns how many, and how many lack a rank.

    None: the run has no such table.
    """
    path = source / layout.COLLECTIVES_FILE
    if not path.is_file():
        return None
    with readable(source):
        table = scan(source, layout.COLLECTIVES_FILE)
        parts = []
        for rank, kept in rows.items():
            mine = table.filter(pl.col("rank") == rank)
            parts.append(mine if kept is None else operations_kept(mine, kept))
        # The ranks that are here; those that took part stand in num_ranks.
        found = (
            pl.concat([pl.LazyFrame(schema=COLLECTIVES.schema), *parts])
            .sort("collective_id", "rank", maintain_order=True)
            .with_columns(num_found=pl.len().over("collective_id").cast(pl.Int64))
            .collect(engine="streaming")
        )
    write_table(out / layout.COLLECTIVES_FILE, found.lazy())
    operations = found.unique("collective_id", keep="first")
    return operations.height, operations.filter(pl.col("num_found") < pl.col("num_ranks")).height


def _write_alignment(source: Path, out: Path, ranks: Sequence[int], operations: tuple[int, int] | None) -> None:
    """Write what is known of clocks, of the ranks that stay; the groups are said as of the whole run."""
    path = source / layout.ALIGNMENT_FILE
    if not path.is_file():
        return
    try:
        alignment = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
        clocks = {rank: clock for rank, clock in alignment["clocks"].items() if int(rank) in ranks}
        of_source = alignment["ranks"]
    except (OSError, msgspec.DecodeError, KeyError, ValueError, AttributeError) as error:
        raise TraceFileError(f"{path} cannot be read ({error}). Merge the run again.") from error
    number, incomplete = operations or (None, None)
    said = {"ranks_of_source": of_source, "num_operations": number, "num_operations_that_lack_a_rank": incomplete}
    write_link(out / layout.ALIGNMENT_FILE, {**alignment, "ranks": list(ranks), "clocks": clocks, "slice": said})


def _listed(numbers: Sequence[int]) -> str:
    few = [str(number) for number in numbers[:_MOST_LISTED]]
    return ", ".join(few) + (", ..." if len(numbers) > _MOST_LISTED else "")


_MOST_LISTED = 8
