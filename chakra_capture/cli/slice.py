"""``chakra-capture slice``: a smaller run out of a merged one."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from chakra_capture.cli.output import (
    EXIT_OK,
    UsageError,
    count_of,
    not_negative,
    number_ranges,
    print_json,
    print_line,
    status,
)
from chakra_capture.cli.selection import chosen_ranks, chosen_steps
from chakra_capture.errors import TraceFileError

if TYPE_CHECKING:
    from chakra_capture.merge.slices.run import Selection, Slice


def slice_(
    path: Path,
    /,
    *,
    output: Annotated[Path, Parameter(name=["--output", "-o"])],
    steps: Annotated[list[str] | None, Parameter(negative=(), consume_multiple=True)] = None,
    ranks: Annotated[list[str] | None, Parameter(negative=(), consume_multiple=True)] = None,
    node: Annotated[int | None, Parameter(validator=not_negative)] = None,
    rank: Annotated[int | None, Parameter(validator=not_negative)] = None,
    job: str | None = None,
    json: Annotated[bool, Parameter(negative=())] = False,
) -> int:
    """Cut a smaller run out of a merged one: some steps, some ranks, or one op.

    The result is a folder of merged ranks like any other: summary, query,
    validate --replay, export and slice read it. The source is only read.

    Steps: a CPU row is of the step in which it starts, a device activity of that
    of its launch. What lies between two steps that follow each other stays with
    them. So do activities launched before that still run in a step that stays:
    device busy and idle time are as measured. Rows that begin before the first
    step, such as an annotation around the whole epoch, are left out, but for the
    annotation of a phase that reaches into it.
    A node: its row, all beneath it, and what the launches in it ran.

    Rows are numbered anew, from 0; link.json maps them to those of the source.
    Times, self times and steps stay as measured in the whole run. A parent or
    launch that was left out is null. An edge stays if both its ends do; none is
    made up for what is left out. collectives.parquet keeps waits as measured
    among all ranks; where num_found is below num_ranks, a rank is not here.

    Examples:
        chakra-capture slice ./traces --steps 5-6 -o small
        chakra-capture slice ./traces --steps 5 --ranks 0,2-3 -o small
        chakra-capture query ./traces "SELECT rank, node_id, dur_ns FROM nodes
            WHERE name = 'aten::addmm' ORDER BY dur_ns DESC LIMIT 3"
        chakra-capture slice ./traces --node 4711 --rank 0 -o addmm

    Parameters
    ----------
    path
        Folder of a run, its merged folder, or one rank=<R> folder in it.
    output
        Folder for the slice; it must not exist.
    steps
        Steps that stay, such as 5, 5-6 or 1,3-5.
    ranks
        Ranks that stay, such as 0 or 0,2-3; default: all.
    node
        node_id of the row that stays, with all beneath it.
    rank
        Rank of --node; not needed where there is one.
    job
        Job of a trace_dir that holds several runs; default: the newest.
    json
        Print JSON.
    """
    if node is None and rank is not None:
        raise UsageError("--rank is for --node; choose ranks with --ranks.")
    if node is not None and (steps is not None or ranks is not None):
        raise UsageError("--node goes with neither --steps nor --ranks. Slice twice for both.")
    if node is None and steps is None and ranks is None:
        raise UsageError("nothing says what is to stay. Give --steps, --ranks or --node.")
    from chakra_capture.merge.slices.run import Selection, slice_run
    from chakra_capture.trace.sql import open_tables

    tables = open_tables(path, job)
    if node is not None:
        selection = Selection(ranks=(_rank_of_node(path, tables.ranks, rank),), node=node)
    else:
        wanted = chosen_ranks(tables, path, ranks)
        numbers = None if steps is None else tuple(chosen_steps(tables, path, wanted, steps))
        selection = Selection(ranks=tuple(wanted), steps=numbers)
    with status("slicing") as watch:
        made = slice_run(tables.folder, selection, output, watch)
    if json:
        print_json(_as_json(output, selection, made))
    else:
        _print(output, made)
    return EXIT_OK


def _rank_of_node(path: Path, merged: tuple[int, ...], rank: int | None) -> int:
    if rank is None and len(merged) > 1:
        raise UsageError(f"{path} has several ranks, and node ids are of one. Give --rank, too.")
    if rank is not None and rank not in merged:
        raise TraceFileError(f"{path} has no merged rank {rank}; it has {number_ranges([*merged])}. Name one of them.")
    return merged[0] if rank is None else rank


def _as_json(output: Path, selection: "Selection", made: "Slice") -> dict[str, object]:
    return {
        "schema_version": 1,
        "output": str(output),
        "steps": selection.steps,
        "node_id": selection.node,
        "ranks": [{"rank": rank, **asdict(counts)} for rank, counts in made.ranks.items()],
        "ranks_without_these_steps": made.without,
        "num_operations": made.num_operations,
        "num_operations_that_lack_a_rank": made.num_incomplete,
    }


def _print(output: Path, made: "Slice") -> None:
    for rank, of in made.ranks.items():
        rows, edges = of.num_rows + of.num_rows_left_out, of.num_edges + of.num_edges_left_out
        print_line(f"rank {rank}: {of.num_rows} of {rows} rows, {of.num_edges} of {edges} edges")
        if of.num_parents_left_out or of.num_launches_left_out:
            print_line(f"  note: rows whose parent or launch was left out, now null: parent {of.num_parents_left_out}, "
                       f"launch {of.num_launches_left_out}")  # fmt: skip
        if of.num_carried:
            print_line(f"  note: device activities launched before that run in these steps: {of.num_carried}")
    if made.without:
        print_line(f"note: none of these steps is on rank {number_ranges([*made.without])}, which is left out")
    if made.num_incomplete:
        print_line(
            f"note: {made.num_incomplete} of {made.num_operations} communication operations lack a rank that took part"
        )
    print_line(f"{count_of(len(made.ranks), 'rank')} sliced into {output}")
