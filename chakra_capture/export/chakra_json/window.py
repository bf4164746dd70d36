"""One window as linked JSON: what is known of it, its text in blocks, and what a reader of it should know."""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime

import msgspec
import numpy as np
import polars as pl

from chakra_capture.export.chakra_json.kernels import COMPUTE, KernelName, kernel_name
from chakra_capture.export.chakra_json.nodes import Facts, node_texts, origin, process_text
from chakra_capture.export.chakra_json.order import Order, order_nodes
from chakra_capture.export.chakra_json.tables import ACTIVITIES, CODE, WindowTables
from chakra_capture.export.chakra_json.waits import find_waits, own_times
from chakra_capture.trace.columns import MISSING
from chakra_capture.trace.schema import KINDS

# The newest layout of nodes that the converter (mlc-chakra 1.0.0) has a parser for; older ones differ in nothing it
# reads.
SCHEMA = "1.1.1-chakra.0.0.4"
_NAMED_BY_NCCL = "ncclKernel|ncclDevKernel"


@dataclass(frozen=True, slots=True)
class Contents:
    """What one file holds, and what it does not.

    Attributes:
        left_out: rows that are no nodes of this format, by kind.
        renamed: (collective, what the converter takes it for, is that exact) -> kernels written under another name.
        num_unsized: communication kernels of which no size is known; their comm_size will be 0.
        num_on_cpu: communication operations without a kernel (gloo), which the converter takes for computation.
    """

    num_host: int
    num_device: int
    num_inter_thread: int
    num_sync: int
    num_roots_added: int = 0
    num_outside_ops: int = 0
    num_without_launch: int = 0
    num_early: int = 0
    num_waits_unplaced: int = 0
    num_waits_dropped: int = 0
    num_unsized: int = 0
    num_on_cpu: int = 0
    left_out: dict[str, int] = field(default_factory=dict)
    renamed: Counter[tuple[str, str, bool]] = field(default_factory=Counter)

    @property
    def notes(self) -> list[str]:
        """Sentences on what is not as a reader would expect."""
        found = []
        for (collective, taken_for, is_exact), number in sorted(self.renamed.items()):
            as_what = "computation" if taken_for == COMPUTE else taken_for
            why = "knows another name of it" if is_exact else "has no type for it"
            found.append(f"kernels of {collective} named so that the converter, which {why}, reads {as_what}: {number}")
        counts = (
            (self.num_unsized, "communication kernels that state no size, so that the converter writes 0"),
            (self.num_on_cpu, "communication operations without a device activity, computation to the converter"),
            (self.num_without_launch, "device activities without a launch in the trace, put on a thread of their own"),
            (self.num_outside_ops, "device activities launched outside any op, put on the thread of their launch"),
            (self.num_early, "device activities numbered at the start of their op, as the converter's recursion "
             "cannot come back over all its ops before the launch"),
            (self.num_waits_unplaced, "waits for the device without an op after them, left out"),
            (self.num_waits_dropped, "hand-overs between threads without ops in that order, left out"),
        )  # fmt: skip
        return found + [f"{text}: {number}" for number, text in counts if number]


@dataclass(frozen=True, slots=True)
class LinkedWindow:
    """The text of one window, not made yet, and what will be in it."""

    contents: Contents
    num_nodes: int
    facts: Facts
    pid: int

    def texts(self, seen: Callable[[int], None] | None = None) -> Iterator[str]:
        """Give the file piece by piece.

        Args:
            seen: told how many nodes are done.
        """
        yield self._head()
        done, comma = 0, ""
        for block in node_texts(self.facts):
            yield comma + ",\n".join(block)
            comma, done = ",\n", done + len(block)
            if seen is not None:
                seen(done)
        # Last, as torch writes it: so no thread depends on it, and the converter takes it away without a trace.
        yield f"{comma}{process_text(_process_name(self.facts.tables))}\n]}}\n"

    def _head(self) -> str:
        tables, origin_ns = self.facts.tables, self.facts.origin_ns
        starts, lengths = tables.integers("ts_ns"), tables.integers("dur_ns")
        timed = starts != MISSING
        first_ns = int(starts[timed].min()) if timed.any() else 0
        ends = np.where(lengths != MISSING, starts + np.maximum(lengths, 0), starts)[timed]
        head = {
            "schema": SCHEMA,
            "pid": self.pid,
            "time": datetime.fromtimestamp(first_ns // 10**9, UTC).strftime("%Y-%m-%d %H:%M:%S")
            if first_ns > 0
            else "",
            "start_ts": max(0, first_ns // 10**6),
            "finish_ts": max(0, int(ends.max()) // 10**6 if len(ends) else 0),
            "baseTimeNanoseconds": origin_ns,
        }
        return str(msgspec.json.encode(head), "utf-8")[:-1] + ',"nodes":[\n'


def linked_window(tables: WindowTables) -> LinkedWindow:
    """Work out the nodes of a window."""
    order = order_nodes(tables)
    waits = find_waits(tables, order)
    found, sized = _communication_kernels(tables, order)
    dtypes, num_on_cpu = _communication(tables)
    rf_ids = tables.integers("record_function_id")
    facts = Facts(
        tables, order, waits, origin(tables.integers("ts_ns")), own_times(tables, order),
        {row: named for row, (named, _, _) in found.items()}, dtypes, rf_ids,
    )  # fmt: skip
    renamed = Counter(
        (collective, named.taken_for, named.is_exact)
        for named, name, collective in found.values()
        if named.name != name or not named.is_exact
    )
    contents = Contents(
        num_host=int(np.count_nonzero(~order.is_activity)) + 1,
        num_device=int(np.count_nonzero(order.is_activity)),
        num_inter_thread=len(waits.inter_thread),
        num_sync=sum(map(len, waits.sync.values())),
        num_roots_added=order.num_roots_added,
        num_outside_ops=order.num_outside_ops,
        num_without_launch=order.num_without_launch,
        num_early=order.num_early,
        num_waits_unplaced=waits.num_unplaced,
        num_waits_dropped=waits.num_dropped,
        num_unsized=sum(named.taken_for != COMPUTE and row not in sized for row, (named, _, _) in found.items()),
        num_on_cpu=num_on_cpu,
        left_out=_left_out(tables, order),
        renamed=renamed,
    )
    return LinkedWindow(contents, len(order.row), facts, _pid(tables))


def _communication_kernels(
    tables: WindowTables, order: Order
) -> tuple[dict[int, tuple[KernelName, str, str]], set[int]]:
    """By row: how a kernel is named, its own name and its collective; and the rows whose size is known."""
    named_so = pl.col("collective").is_not_null() | pl.col("name").str.contains(_NAMED_BY_NCCL)
    found = (
        tables.tables.nodes.filter(
            (pl.col("window") == tables.window) & pl.col("kind").is_in(list(ACTIVITIES)) & named_so
        )
        .select("node_id", "name", pl.col("collective").fill_null("other"), "comm_bytes")
        .collect()
    )
    rows = tables.rows(found["node_id"].to_numpy())
    parent = _row_above(order, rows)
    ops = {-1: ""}
    above = np.unique(np.concatenate([parent, _row_above(order, parent)]))
    above = above[(above >= 0) & (above < tables.num_rows)]
    ops.update(zip(above.tolist(), tables.read(above, ["name"])["name"].to_list(), strict=True))
    kernels = {}
    columns = zip(rows.tolist(), found["name"], found["collective"], parent.tolist(), strict=True)
    for row, name, collective, op in columns:
        text = ops.get(op) or ""
        if text == "record_param_comms":
            text = ops.get(int(_row_above(order, np.array([op]))[0])) or ""
        kernels[row] = (kernel_name(name or "", collective, text), name or "", collective)
    return kernels, set(rows[found["comm_bytes"].is_not_null().to_numpy()].tolist())


def _row_above(order: Order, rows: "np.typing.NDArray[np.int64]") -> "np.typing.NDArray[np.int64]":
    """Row of the parent of each row that is a node; -1 for none."""
    numbers = np.where(rows >= 0, order.number[np.maximum(rows, 0)], 0)
    parents = np.where(numbers >= 2, order.parent[np.maximum(numbers - 2, 0)], 1)
    return np.where(parents >= 2, order.row[np.maximum(parents - 2, 0)], -1)


def _communication(tables: WindowTables) -> tuple[dict[int, str], int]:
    """Element types by row, and how many operations no device activity ran."""
    chosen = pl.col("window") == tables.window
    found = tables.tables.communication.filter(chosen).select("node_id", "dtype").collect()
    rows = tables.rows(found["node_id"].fill_null(MISSING).to_numpy())
    dtypes = {row: dtype for row, dtype in zip(rows.tolist(), found["dtype"], strict=True) if dtype is not None}
    on_device = tables.is_kind(*ACTIVITIES)
    return dtypes, int(np.count_nonzero(~on_device[rows[rows >= 0]]))


def _left_out(tables: WindowTables, order: Order) -> dict[str, int]:
    left = order.number[: tables.num_rows] == 0
    counts = np.bincount(tables.kind[left], minlength=len(KINDS))
    return {kind: int(counts[CODE[kind]]) for kind in KINDS if counts[CODE[kind]] and kind != "process"}


def _pid(tables: WindowTables) -> int:
    """The process: as the host trace states it, else that of the first row on the CPU."""
    pid = tables.integers("pid")
    for kinds in (("process",), ("host_op", "annotation", "runtime")):
        known = pid[tables.is_kind(*kinds) & (pid != MISSING)]
        if len(known):
            return max(0, int(known[0]))
    return 0


def _process_name(tables: WindowTables) -> str | None:
    rows = np.flatnonzero(tables.is_kind("process"))
    name: str | None = tables.read(rows[:1], ["name"])["name"][0] if len(rows) else None
    return name
