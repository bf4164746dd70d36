"""The communication of a run across its ranks: ``collectives.parquet`` and ``alignment.json``."""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl
from polars.io.plugins import register_io_source

from chakra_capture import layout
from chakra_capture.errors import TraceFileError
from chakra_capture.merge.across.clocks import AGREEMENT, compare_clocks, to_reference
from chakra_capture.merge.across.matching import Matches, group_table, match_operations
from chakra_capture.merge.across.outcome import Alignment, Clock, RunFacts
from chakra_capture.merge.across.roles import Role, roles
from chakra_capture.merge.across.run_operations import Group, Operations, read_operations
from chakra_capture.merge.output import write_link, write_table
from chakra_capture.trace.columns import MISSING, Bool, Int64
from chakra_capture.trace.schema import COLLECTIVES

# Rows that are put together, and written as one row group, at a time.
_MOST_ROWS = 1 << 16
# Fewer operations may have equal times by chance.
_FEWEST_COPIED = 3


def align_run(merged_dir: Path, ranks: Mapping[int, Path], facts: RunFacts) -> Alignment:
    """Match the communication of all ranks and write what follows into ``merged_dir``.

    Args:
        ranks: folder of each merged rank; one whose table cannot be read is named, the others are used.

    Raises:
        TraceFileError: the folder cannot be written to.
    """
    operations = read_operations(ranks, facts.world_size)
    copies = _copies(operations)
    matches = match_operations(operations)
    operations = replace(operations, rows=operations.rows.clear())  # those of the matches are in another order
    role = roles(matches)
    clocks = compare_clocks(matches, role, facts.hosts, copies)
    collectives = _Collectives(operations, matches, role, clocks)
    alignment = _alignment(operations, matches, clocks, facts, set(ranks))
    try:
        write_table(merged_dir / layout.COLLECTIVES_FILE, collectives.table(), _MOST_ROWS)
        write_link(merged_dir / layout.ALIGNMENT_FILE, alignment.as_json())
    except OSError as error:
        raise TraceFileError(
            f"{merged_dir} cannot be written: {error.strerror or error}. Give a writable folder with -o."
        ) from error
    return alignment


def _copies(operations: Operations) -> dict[int, str]:
    """Ranks whose operations have the very times of another rank."""
    times = operations.rows.select("arrival", "end")
    seen: dict[bytes, list[int]] = {}
    first = 0
    for rank, number in operations.num_rows.items():
        mine = times.slice(first, number).drop_nulls()
        first += number
        if mine.height >= _FEWEST_COPIED:
            digest = hashlib.sha256(mine.to_numpy().tobytes()).digest()
            seen.setdefault(digest, []).append(rank)
    return {
        rank: f"its times are those of rank {next(r for r in same if r != rank)}, to the ns: one of them is a copy"
        for same in seen.values()
        if len(same) > 1
        for rank in same
    }


class _Collectives:
    """The table of collectives, put together block by block."""

    def __init__(
        self, operations: Operations, matches: Matches, role: npt.NDArray[np.int8], clocks: Mapping[int, Clock]
    ) -> None:
        self._matches = matches
        names = pl.Series("process_group", [group.name for group in operations.groups], dtype=pl.String)
        self._groups = names.to_frame()
        self._times = _times(matches, role, clocks)
        arrival = self._times["arrival_ns"].fill_null(matches.rows["arrival"]).fill_null(_NEVER).to_numpy()
        when = np.minimum.reduceat(arrival, matches.starts) if len(arrival) else arrival
        self._order = np.argsort(when, kind="stable")

    def table(self) -> pl.LazyFrame:
        def blocks(
            with_columns: list[str] | None, predicate: pl.Expr | None, n_rows: int | None, batch_size: int | None
        ) -> Iterator[pl.DataFrame]:
            sizes = np.cumsum(self._matches.num_found[self._order])
            first = 0
            while first < len(sizes):
                before = sizes[first - 1] if first else 0
                last = max(int(np.searchsorted(sizes, before + _MOST_ROWS, side="right")), first + 1)
                yield self._block(first, last)
                first = last

        return register_io_source(blocks, schema=COLLECTIVES.schema)

    def _block(self, first: int, last: int) -> pl.DataFrame:
        matches, ops = self._matches, self._order[first:last]
        sizes = matches.num_found[ops]
        op = np.repeat(ops, sizes)
        at = np.repeat(matches.starts[ops] - (np.cumsum(sizes) - sizes), sizes) + np.arange(len(op))
        rows = matches.rows[at].hstack(self._times[at])
        num_ranks = matches.num_ranks[op]
        rows = rows.hstack(self._groups[rows["group"]]).with_columns(
            pl.Series("collective_id", np.repeat(np.arange(first, last), sizes)),
            pl.Series("num_found", np.repeat(sizes, sizes)),
            pl.Series("num_ranks", num_ranks),
            mismatch=matches.mismatch[op],
        )
        return rows.with_columns(num_ranks=pl.when(pl.col("num_ranks") != MISSING).then("num_ranks")).select(
            pl.col(column.name).cast(column.dtype) for column in COLLECTIVES.columns
        )


_NEVER = int(np.iinfo(np.int64).max)


def _times(matches: Matches, role: npt.NDArray[np.int8], clocks: Mapping[int, Clock]) -> pl.DataFrame:
    """Times of every row on the reference clock, and what a rank waited.

    A rank waits from its arrival to that of the last rank it needs: the root (not root in broadcast, scatter, reduce,
    gather), else the last of all. Who need not wait until then (a sender, the root of a broadcast) waits no longer than
    it is in the operation.
    """
    rows, starts = matches.rows, matches.starts
    names = ("arrival_ns", "end_ns", "wait_ns", "transfer_ns", "skew_ns", "last_rank")
    if not len(starts):
        return pl.DataFrame(schema=dict.fromkeys(names, pl.Int64))
    ranks = np.array(sorted(clocks))
    at = np.searchsorted(ranks, rows["rank"].to_numpy())
    mapped = tuple(clocks[rank] for rank in ranks.tolist())
    arrival, end = (to_reference(rows[name].fill_null(MISSING).to_numpy(), mapped, at) for name in ("arrival", "end"))
    reference = np.array([clock.reference if clock.comparable else _NEVER for clock in mapped])[at]
    op = matches.op
    first, last = np.minimum.reduceat(arrival, starts), np.maximum.reduceat(arrival, starts)
    comparable = np.minimum.reduceat(reference, starts) == np.maximum.reduceat(reference, starts)
    known = matches.full & ~matches.doubtful & comparable & (first != MISSING)
    known &= matches.is_certain | _ends_agree(matches, known, role, arrival, end)
    is_root = (role == Role.SOURCE) | (role == Role.SINK)
    of_root = np.maximum.reduceat(np.where(is_root, arrival, MISSING), starts)
    needed = np.where((role == Role.TAKER) | (role == Role.GIVER), of_root[op], last[op])
    needed[role == Role.UNKNOWN] = MISSING
    wait = np.maximum(np.minimum(needed, end), arrival) - arrival
    is_last = arrival == last[op]
    last_rank = np.minimum.reduceat(np.where(is_last, rows["rank"].to_numpy(), _NEVER), starts)
    measured = known[op] & (needed != MISSING)
    columns = {
        "arrival_ns": arrival,
        "end_ns": end,
        "wait_ns": np.where(measured, wait, MISSING),
        "transfer_ns": np.where(measured, end - arrival - wait, MISSING),
        "skew_ns": np.where(known, last - first, MISSING)[op],
        "last_rank": np.where(known, last_rank, MISSING)[op],
    }
    return pl.DataFrame(columns).select(pl.when(pl.all() != MISSING).then(pl.all()))


def _ends_agree(matches: Matches, known: Bool, role: npt.NDArray[np.int8], arrival: Int64, end: Int64) -> Bool:
    """Per operation, whether all of its lane end so much at one time that the ranks must have been in one group."""
    starts = matches.starts
    spread = np.maximum.reduceat(end, starts) - np.minimum.reduceat(end, starts)
    shortest = np.minimum.reduceat(end - arrival, starts)
    ops = pl.DataFrame({"lane": matches.rows["lane"][starts], "spread": spread, "shortest": shortest}).with_columns(
        counts=pl.Series(known & (role[starts] == Role.ALL))
    )
    counted = pl.col("counts")
    agree = pl.col("spread").filter(counted).max() <= AGREEMENT * pl.col("shortest").filter(counted).min()
    return ops.select(agree.fill_null(value=False).over("lane")).to_series().to_numpy()


def _alignment(
    operations: Operations, matches: Matches, clocks: Mapping[int, Clock], facts: RunFacts, given: set[int]
) -> Alignment:
    groups = [
        _group_entry(row, operations.groups[row["group"]], given) for row in group_table(matches).iter_rows(named=True)
    ]
    job = set(range(facts.world_size)) if facts.world_size else set()
    members = {rank for group in operations.groups for rank in group.members or ()}
    notes = [f"rank {rank} recorded no communication" for rank, number in operations.num_rows.items() if not number]
    is_partly_named = any(group["process_group"] is not None for group in groups)
    unnamed = [group for group in groups if group["process_group"] is None]
    if unnamed and is_partly_named:
        number = sum(group["num_operations"] for group in unnamed)
        notes.append(f"process groups of {number} operations are not told, and of others are: matched with none")
    elif unnamed:
        notes.append(
            "operations whose process group no trace names were matched as those of one group, among the ranks that "
            "have them"
        )
    if any(group["ranks"] is None for group in groups if not (is_partly_named and group["process_group"] is None)):
        notes.append(
            "of a process group whose members no trace states, waits are among the ranks recorded here, and stated "
            "only where their ends agree"
        )
    return Alignment(
        ranks=tuple(operations.num_rows),
        missing_ranks=tuple(sorted((job | members) - given)),
        extra_ranks=tuple(sorted(given - job)) if job else (),
        unreadable=operations.unreadable,
        clocks=clocks,
        groups=tuple(groups),
        num_operations=len(matches.starts),
        num_matched=int(np.count_nonzero(matches.full & ~matches.doubtful)),
        notes=tuple(notes),
    )


def _group_entry(row: dict[str, Any], group: Group, given: set[int]) -> dict[str, Any]:
    name = "process group of unknown name" if group.name is None else f"process group {group.name}"
    mesh = f" ({row['mesh_dim']})" if row["mesh_dim"] else ""
    return {
        "process_group": group.name,
        "mesh_dim": row["mesh_dim"],
        "ranks": None if group.members is None else list(group.members),
        "missing_ranks": [rank for rank in group.members or () if rank not in given],
        "matched_by": "seq" if row["by_seq"] else "order",
        "num_operations": row["num_operations"],
        "num_matched": row["num_matched"],
        "num_incomplete": row["num_incomplete"],
        "num_mismatches": row["num_mismatches"],
        "first_mismatch": f"{name}{mesh}: {row['first_mismatch']}" if row["num_mismatches"] else None,
    }
