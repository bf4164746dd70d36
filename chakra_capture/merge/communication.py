"""Communication of one window: the collective, group and size of every row, and a table of its operations."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import msgspec
import numpy as np
import polars as pl

from chakra_capture.merge.collectives import host_collective, kernel_collective, stated_collective
from chakra_capture.merge.comm_facts import CommFacts
from chakra_capture.merge.groups import KnownGroups
from chakra_capture.merge.operations import CommRows, Operation
from chakra_capture.merge.rows import climb
from chakra_capture.merge.tables import Columns
from chakra_capture.trace.columns import MISSING, Coded, Int64, Positions, pick
from chakra_capture.trace.process_groups import mesh_dimension
from chakra_capture.trace.schema import COMMUNICATION


@dataclass(frozen=True, slots=True)
class Communication:
    """What a window communicates.

    Attributes:
        collective: of every row.
        rows: the rows whose group or size is known, ascending; ``groups`` and ``num_bytes`` are theirs.
        table: as COMMUNICATION, with row numbers of the window for node ids.
    """

    collective: Coded
    rows: Int64
    groups: Coded
    num_bytes: Int64
    table: pl.DataFrame

    def operations(self, window: int, first: int) -> pl.DataFrame:
        """The table, with its window and node ids counted from ``first``."""
        ids = pl.col("node_id", "host_node_id") + first
        return self.table.with_columns(pl.lit(window, dtype=pl.Int32).alias("window"), ids)

    def of_rows(self, part: slice) -> tuple[Positions, Int64]:
        """Group codes and bytes of a stretch of rows, -1 and ``MISSING`` for none."""
        size = part.stop - part.start
        codes, num_bytes = np.full(size, -1, dtype=np.int32), np.full(size, MISSING)
        first, last = np.searchsorted(self.rows, [part.start, part.stop])
        at = self.rows[first:last] - part.start
        codes[at], num_bytes[at] = self.groups.codes[first:last], self.num_bytes[first:last]
        return codes, num_bytes


def find_communication(columns: Columns, known: KnownGroups) -> Communication:
    """Find the operations of a window.

    Args:
        columns: its linked rows.
        known: what is known of process groups.
    """
    collective = collectives(columns)
    rows = CommRows(columns, collective)
    operations = rows.operations()
    for operation in operations:
        operation.facts = rows.facts(operation, known.names_of_ids)
    known.complete(columns, operations, rows.caller_group)
    ordered = [one for one in operations if one.collective]
    return Communication(collective, *_per_row(ordered, len(columns)), _table(columns, ordered, rows))


def collectives(columns: Columns) -> Coded:
    """Collective of each communication row, null elsewhere."""
    found: dict[str, int] = {}
    codes = np.full(len(columns), -1, dtype=np.int32)

    def number(per_value: Iterable[str | None]) -> Positions:
        """Code of the collective that each text of a dictionary stands for, -1 for none; null comes last."""
        known = [-1 if name is None else found.setdefault(name, len(found)) for name in per_value]
        return np.array([*known, -1], dtype=np.int32)

    def fill(rows: Int64, stated: Positions) -> None:
        codes[rows] = np.where(stated >= 0, stated, codes[rows])

    kernels = np.flatnonzero(columns.is_kind("kernel"))
    ops = np.flatnonzero(columns.is_kind("host_op", "annotation"))
    names, of_name = columns.name.values, columns.name.codes
    fill(kernels, number(kernel_collective(name, None) for name in names)[of_name[kernels]])
    fill(ops, number(host_collective(name) for name in names)[of_name[ops]])
    unstated = np.ones(len(kernels), dtype=bool)
    if columns.device is not None:
        args = columns.device.residue
        stated = [_stated(text) for text in args.values]
        of_args = pick(args.codes, columns.device_row, -1)
        of_kernel = number(value and kernel_collective("", value) for value in stated)[of_args[kernels]]
        fill(kernels, of_kernel)
        fill(ops, number(value and stated_collective(value) for value in stated)[of_args[ops]])
        unstated = of_kernel < 0
    # All of point-to-point and all-to-all run in one SendRecv kernel, any collective in a generic one.
    open_codes = [found[name] for name in ("send_recv", "other") if name in found]
    if open_codes:
        _name_by_caller(columns, codes, kernels[unstated & np.isin(codes[kernels], open_codes)])
    return Coded(codes, list(found))


def _name_by_caller(columns: Columns, codes: "np.typing.NDArray[np.int32]", kernels: Int64) -> None:
    """Give kernels that do not say their collective that of the innermost op around their launch that does."""
    at = climb(columns.parent[kernels], columns.parent, codes >= 0)
    codes[kernels[at >= 0]] = codes[at[at >= 0]]


class _CommArgs(msgspec.Struct):
    collective: str | None = msgspec.field(name="Collective name", default=None)


def _stated(args: str | None) -> str | None:
    if not args or "Collective name" not in args:
        return None
    try:
        return msgspec.json.decode(args, type=_CommArgs).collective or None
    except msgspec.DecodeError:
        return None


def payload(facts: CommFacts) -> int | None:
    """Bytes of an operation, as the column ``comm_bytes`` defines them."""
    return facts.in_bytes or (facts.in_bytes if facts.out_bytes is None else facts.out_bytes)


def _per_row(operations: list[Operation], size: int) -> tuple[Int64, Coded, Int64]:
    """Group and bytes of every row of an operation; a kernel that several share has the sum of theirs."""
    groups: dict[int, str | None] = {}
    num_bytes: dict[int, int | None] = {}
    shared: dict[int, list[Operation]] = defaultdict(list)
    for operation in operations:
        for row in operation.rows:
            groups[row], num_bytes[row] = operation.facts.process_group, payload(operation.facts)
        if operation.shares_kernel:
            for row in operation.kernels:
                shared[row].append(operation)
    for row, several in shared.items():
        names = {one.facts.process_group for one in several}
        sizes = [payload(one.facts) for one in several]
        groups[row] = names.pop() if len(names) == 1 else None
        num_bytes[row] = None if None in sizes else sum(size or 0 for size in sizes)
    rows = np.array(
        sorted(row for row in groups if groups[row] is not None or num_bytes[row] is not None), dtype=np.int64
    )
    names_in_order: dict[str, int] = {}
    codes = [
        -1 if (n := groups[row]) is None else names_in_order.setdefault(n, len(names_in_order)) for row in rows.tolist()
    ]
    sizes_in_order = [MISSING if (b := num_bytes[row]) is None else b for row in rows.tolist()]
    return rows, Coded(np.array(codes, dtype=np.int32), list(names_in_order)), np.array(sizes_in_order, dtype=np.int64)


def _table(columns: Columns, operations: list[Operation], rows: CommRows) -> pl.DataFrame:
    records = []
    for one in operations:
        facts = one.facts
        row, ts, dur = rows.ran(one)
        asked = one.root if one.root >= 0 else row
        step = int(columns.step[asked])
        issued = int(columns.ts_ns[one.root]) if one.root >= 0 else MISSING
        records.append({
            "window": 0,
            "node_id": row,
            "host_node_id": one.root if one.root >= 0 else None,
            "process_group": facts.process_group,
            "mesh_dim": mesh_dimension(facts.description),
            "group_ranks": None if facts.ranks is None else list(facts.ranks),
            "collective": one.collective,
            "dtype": facts.dtype,
            "comm_bytes": payload(facts),
            "seq": facts.seq,
            "algorithm": rows.algorithm(one),
            "in_bytes": facts.in_bytes,
            "out_bytes": facts.out_bytes,
            "root": facts.root,
            "peer": facts.peer,
            "tag": facts.tag,
            "step": None if step == MISSING else step,
            "issued_ns": None if issued == MISSING else issued,
            "ts_ns": ts,
            "dur_ns": dur,
        })  # fmt: skip
    return pl.DataFrame(records, schema=COMMUNICATION.schema)
