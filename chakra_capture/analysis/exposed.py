"""Communication that no compute hides: of which kernel, which op waits for it, and whether it was the network at all.

An exposed stretch ends where the next activity begins that is not communication. What of the stretch lies before the
launch of that activity is the host's: nothing was queued to hide the transfer under, and a faster network changes
little. What lies after is waited for, by the op that launched it. Together they are ``exposed_communication_ns`` of
``device``, exactly.
"""

from collections.abc import Sequence

import numpy as np
import polars as pl

from chakra_capture.analysis.activities import device_activities
from chakra_capture.analysis.ancestry import outermost, positions
from chakra_capture.analysis.host_threads import picked
from chakra_capture.analysis.idle_gaps import Stretches, cut_at
from chakra_capture.merge import intervals
from chakra_capture.trace.columns import Int64
from chakra_capture.trace.merged import MergedTrace
from chakra_capture.trace.schema import Column

WAITED, LATE = "waited for", "host late"
NOT_RECORDED, NOTHING_LATER = "launch not recorded", "end of window"

SCHEMA = (
    Column("rank", pl.Int64, "global rank"),
    Column("cause", pl.String, "waited for: the next activity was launched and could not begin; host late: it was not "
           "launched yet; launch not recorded; end of window: nothing but communication comes later"),
    Column("collective", pl.String, "operation that is exposed; of several at once the one that began first"),
    Column("phase", pl.String, "phase that launched it; null: not known"),
    Column("waiting_op", pl.String, "op (the outermost) that launches the next activity; null: none is recorded"),
    Column("waiting_phase", pl.String, "phase that launches it; null: not known"),
    Column("count", pl.Int64, "stretches"),
    Column("total_ns", pl.Int64, "their summed time", "ns"),
    Column("share", pl.Float64, "of the exposed communication of this rank"),
)  # fmt: skip
_KEYS = ("rank", "cause", "collective", "phase", "waiting_op", "waiting_phase")
_ENGINE_PREFIX = "autograd::engine::evaluate_function: "


def waiting_ops(traces: Sequence[MergedTrace], *, steps: Sequence[int] | None = None) -> pl.DataFrame:
    """Sum up exposed communication by what waits for it, most first.

    Args:
        traces: ranks.
        steps: only communication that these steps launched.
    """
    dtypes = {column.name: column.dtype for column in SCHEMA}
    tables = [pl.DataFrame(schema=dtypes)]
    for trace in traces:
        parts = [pl.DataFrame()] if trace.device_tail_lost else [_of_device(*each) for each in _devices(trace)]
        rows = pl.concat(parts, how="diagonal") if parts else pl.DataFrame()
        if rows.is_empty():
            continue
        if steps is not None:
            rows = rows.filter(pl.col("step").is_in(list(steps)))
        sums = rows.with_columns(rank=pl.lit(trace.rank)).group_by(_KEYS).agg(
            pl.len().alias("count"), pl.col("ns").sum().alias("total_ns")
        )  # fmt: skip
        sums = sums.with_columns(share=pl.col("total_ns") / pl.col("total_ns").sum())
        tables.append(sums.select(pl.col(name).cast(dtype) for name, dtype in dtypes.items()))
    return pl.concat(tables).sort("total_ns", *_KEYS, descending=[True, *[False] * len(_KEYS)])


def exposed_of_kernels(trace: MergedTrace) -> pl.DataFrame:
    """Of each communication kernel its time and that in which nothing computes: ``rank``, ``node_id``, both ns."""
    found = [pl.DataFrame(schema=dict.fromkeys(("rank", "node_id", "kernel_ns", "exposed_ns"), pl.Int64))]
    activities = device_activities(trace)
    for mine in activities.partition_by("window", "device", maintain_order=True):
        comp, comm = (mine.filter(pl.col("part") == part) for part in ("compute", "communication"))
        low, high = _span(comm)
        hidden = intervals.covered(*intervals.union(*_span(comp)), low, high)
        columns = {"node_id": comm["node_id"], "kernel_ns": high - low, "exposed_ns": high - low - hidden}
        found.append(pl.DataFrame({"rank": pl.repeat(trace.rank, comm.height, dtype=pl.Int64, eager=True), **columns}))
    return pl.concat(found)


def _devices(trace: MergedTrace) -> list[tuple[pl.DataFrame, pl.DataFrame, int]]:
    """Activities of each window and device, rows of the host, offset of the clock."""
    activities = device_activities(trace, "phase", "step", "parent_id")
    if not (activities["part"] == "communication").any():
        return []
    nodes = trace.some_of_nodes("node_id", "kind", "name", "parent_id", "ts_ns").sort("node_id")
    parts = activities.partition_by("window", "device", as_dict=True, maintain_order=True).items()
    return [(mine, nodes, trace.clock_offsets.get(window, 0)) for (window, _), mine in parts]


def _of_device(activities: pl.DataFrame, nodes: pl.DataFrame, offset: int) -> pl.DataFrame:
    part = pl.col("part")
    comm = activities.filter((part == "communication") & (pl.col("end_ns") > pl.col("ts_ns")))
    others, comp = activities.filter(part != "communication"), activities.filter(part == "compute")
    stretches = _exposed(comm, comp)
    following = np.searchsorted(others["ts_ns"].to_numpy(), stretches.end)
    following = np.where(following < others.height, following, -1)
    ids = nodes["node_id"].to_numpy()
    call = positions(ids, picked(others["launch_id"], following).fill_null(-1).to_numpy())
    launched = picked(nodes["ts_ns"], call).fill_null(0).to_numpy() - offset
    late_until = np.clip(np.where(call >= 0, launched, stretches.start), stretches.start, stretches.end)
    waits = np.select([following < 0, call < 0], [1, 2], default=0)
    causes = pl.Series((WAITED, NOTHING_LATER, NOT_RECORDED, LATE))
    parts = [(np.full(len(waits), 3), stretches.start, late_until), (waits, late_until, stretches.end)]
    op = _launching_op(nodes, picked(others["parent_id"], following))
    about = {
        "collective": picked(comm["collective"], stretches.gap),
        "phase": picked(comm["phase"], stretches.gap),
        "step": picked(comm["step"], stretches.gap),
        "waiting_op": op,
        "waiting_phase": picked(others["phase"], following),
    }
    tables = [pl.DataFrame({"cause": picked(causes, cause), "ns": high - low, **about}) for cause, low, high in parts]
    return pl.concat(tables).filter(pl.col("ns") > 0)


def _exposed(comm: pl.DataFrame, comp: pl.DataFrame) -> Stretches:
    """Stretches in which communication runs and nothing computes; of several at once the first is the ``gap``."""
    start, end = _span(comm)
    begun = np.maximum(start, np.append(start[:1], np.maximum.accumulate(end)[:-1]))
    some = np.flatnonzero(end > begun)
    union = intervals.union(*_span(comp))
    bounds = np.sort(np.concatenate(union))
    pieces = cut_at(Stretches(some, begun[some], end[some], np.zeros(len(some), dtype=np.int64)), bounds)
    shown = ~intervals.holds(*union, pieces.start) & (pieces.end > pieces.start)
    return Stretches(*(getattr(pieces, name)[shown] for name in Stretches.__slots__))


def _launching_op(nodes: pl.DataFrame, parent_id: pl.Series) -> pl.Series:
    """Name of the outermost op around a launch, of the annotation where there is no op."""
    ids = nodes["node_id"].to_numpy()
    around = positions(ids, parent_id.fill_null(-1).to_numpy())
    parent = positions(ids, nodes["parent_id"].fill_null(-1).to_numpy())
    op = outermost(parent, around, (nodes["kind"] == "host_op").to_numpy())
    return picked(nodes["name"], np.where(op >= 0, op, around)).str.strip_prefix(_ENGINE_PREFIX)


def _span(rows: pl.DataFrame) -> tuple[Int64, Int64]:
    return rows["ts_ns"].to_numpy(), rows["end_ns"].to_numpy()
