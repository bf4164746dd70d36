"""Memory that allocators hand out, from the ``[memory]`` records of profile_memory: peaks, sums, and by which op.

Each record is one allocation or release with the totals after it, so what was in use before it is known too: a peak is
the largest of both. Memory of the host counts from the start of the recording, that of a device is all that the process
has. An allocation belongs to the outermost host op around it: the innermost is nearly always ``aten::empty``.
"""

from collections.abc import Sequence

import polars as pl

from chakra_capture.analysis.ancestry import outermost, positions
from chakra_capture.analysis.backward import ENGINE_PREFIX, parents
from chakra_capture.trace.merged import MergedTrace
from chakra_capture.trace.schema import Column

OUTSIDE = "(outside any op)"
_RANK = Column("rank", pl.Int64, "global rank")
_WINDOW = Column("window", pl.Int32, "recorded window")
_ALLOCATOR = Column("allocator", pl.String, "whose memory: cpu, cuda:0, hip:0, ...")
_NO_RESERVE = "null where the allocator keeps none (cpu) or does not say"

SCHEMA = (
    _RANK,
    _WINDOW,
    _ALLOCATOR,
    Column("step", pl.Int64, "step that it happens in; null: in none, or all together"),
    Column("phase", pl.String, "phase of the step; null: not known, or all together"),
    Column("op", pl.String, "host op (the outermost) that allocates or releases; null: all together"),
    Column("num_allocations", pl.Int64, "allocations"),
    Column("allocated_bytes", pl.Int64, "their sum", "bytes"),
    Column("num_frees", pl.Int64, "releases"),
    Column("freed_bytes", pl.Int64, "their sum", "bytes"),
    Column("growth_bytes", pl.Int64, "allocated_bytes less freed_bytes", "bytes"),
    Column("peak_bytes", pl.Int64, "most that was in use at once, right before or after one of them; cpu: of what was "
           "allocated since the recording began; null = not recorded", "bytes"),
    Column("peak_reserved_bytes", pl.Int64, f"most that the allocator held; {_NO_RESERVE}", "bytes"),
    Column("peak_op", pl.String, "op that allocated or released at the peak"),
    Column("top_op", pl.String, "op that allocated most"),
    Column("top_op_bytes", pl.Int64, "what it allocated", "bytes"),
)  # fmt: skip
TIMELINE = (
    _RANK,
    _WINDOW,
    _ALLOCATOR,
    Column("ts_ns", pl.Int64, "time of the allocation or release, Unix epoch", "ns"),
    Column("since_ns", pl.Int64, "the same since the first of the window", "ns"),
    Column("bytes", pl.Int64, "what was allocated; negative: released", "bytes"),
    Column("in_use_bytes", pl.Int64, "in use from then on; cpu: of what was allocated since the recording began",
           "bytes"),
    Column("reserved_bytes", pl.Int64, f"what the allocator holds; {_NO_RESERVE}", "bytes"),
    Column("op", pl.String, "host op (the outermost) around it"),
    Column("step", pl.Int64, "step that it happens in"),
    Column("phase", pl.String, "phase of the step; null: not known"),
)  # fmt: skip
# Columns that may tell rows of one allocator apart.
KEYS = ("step", "phase", "op")

_ALWAYS = ("rank", "window", "allocator")
# Kineto writes the number of c10's DeviceType.
_TYPES = {0: "cpu", 1: "cuda", 6: "hip", 9: "xla", 12: "xpu", 13: "mps", 19: "mtia", 20: "privateuseone"}
_ARGUMENTS = {
    "bytes": "Bytes", "in_use_bytes": "Total Allocated", "reserved_bytes": "Total Reserved", "type": "Device Type",
    "id": "Device Id",
}  # fmt: skip


def allocation_statistics(
    traces: Sequence[MergedTrace], *, by: Sequence[str] = (), steps: Sequence[int] | None = None
) -> pl.DataFrame:
    """Sum up allocations by allocator, in order of rank, window, allocator and time; no row where none is recorded.

    Args:
        traces: ranks.
        by: of ``KEYS``, what makes rows of their own.
        steps: only what happens in these steps.
    """
    keys = [*_ALWAYS, *by]
    rows = allocation_timeline(traces, steps=steps)
    if rows.is_empty():
        return pl.DataFrame(schema={column.name: column.dtype for column in SCHEMA})
    is_new = pl.col("bytes") > 0
    rows = rows.with_columns(
        allocated=pl.when(is_new).then("bytes").otherwise(0),
        freed=pl.when(~is_new).then(-pl.col("bytes")).otherwise(0),
        high=pl.max_horizontal("in_use_bytes", pl.col("in_use_bytes") - pl.col("bytes")),
    )
    most = (
        rows.group_by(list(dict.fromkeys([*keys, "op"])))
        .agg(top_op_bytes=pl.col("allocated").sum(), top_op=pl.col("op").first())
        .sort("top_op_bytes", "top_op", descending=[True, False])
        .group_by(keys)
        .agg(pl.col("top_op", "top_op_bytes").first())
        .filter(pl.col("top_op_bytes") > 0)
    )
    table = rows.group_by(keys).agg(
        first=pl.col("ts_ns").min(),
        num_allocations=is_new.sum(),
        allocated_bytes=pl.col("allocated").sum(),
        num_frees=(~is_new).sum(),
        freed_bytes=pl.col("freed").sum(),
        growth_bytes=pl.col("bytes").sum(),
        peak_bytes=pl.col("high").max(),
        peak_reserved_bytes=pl.col("reserved_bytes").max(),
        peak_op=pl.col("op").get(pl.col("high").fill_null(-1).arg_max()),
    )
    table = table.join(most, on=keys, how="left", nulls_equal=True, validate="1:1")
    order = ["allocated_bytes", "op"] if "op" in by else ["first"]
    return (
        table.sort(*_ALWAYS, *order, descending=[*[False] * len(_ALWAYS), "op" in by, *[False] * (len(order) - 1)])
        .with_columns(pl.lit(None).alias(key) for key in KEYS if key not in by)
        .select(pl.col(column.name).cast(column.dtype) for column in SCHEMA)
    )


def allocation_timeline(traces: Sequence[MergedTrace], *, steps: Sequence[int] | None = None) -> pl.DataFrame:
    """Every allocation and release with the totals after it, in order of rank, window, allocator and time.

    Args:
        traces: ranks.
        steps: only what happens in these steps.
    """
    dtypes = {column.name: column.dtype for column in TIMELINE}
    tables = [pl.DataFrame(schema=dtypes), *(_of_rank(trace) for trace in traces)]
    rows = pl.concat([table.select(pl.col(name).cast(dtype) for name, dtype in dtypes.items()) for table in tables])
    return rows if steps is None else rows.filter(pl.col("step").is_in(list(steps)))


def _of_rank(trace: MergedTrace) -> pl.DataFrame:
    rows = trace.rows_of(["memory"], "node_id", "window", "ts_ns", "step", "phase", "args")
    if rows.is_empty():
        return pl.DataFrame(schema={column.name: column.dtype for column in TIMELINE})
    rows = rows.with_columns(_number(key).alias(name) for name, key in _ARGUMENTS.items()).drop("args")
    is_known = pl.col("ts_ns").is_not_null() & pl.col("bytes").is_not_null()
    named = pl.col("type").replace_strict(_TYPES, default=pl.format("device type {}", "type"), return_dtype=pl.String)
    is_cpu = pl.col("type") == 0
    rows = rows.filter(is_known).with_columns(
        rank=pl.lit(trace.rank),
        allocator=pl.when(is_cpu | pl.col("id").is_null()).then(named).otherwise(pl.format("{}:{}", named, "id")),
        reserved_bytes=pl.when(~is_cpu).then("reserved_bytes"),
        since_ns=pl.col("ts_ns") - pl.col("ts_ns").min().over("window"),
    )
    return rows.with_columns(op=_ops(trace, rows["node_id"])).sort("window", "allocator", "ts_ns", "node_id")


def _number(key: str) -> pl.Expr:
    """What follows a key in the arguments, if it is a number; a regular expression takes twice as long."""
    after = pl.col("args").str.splitn(f'"{key}":', 2).struct.field("field_1")
    return after.str.splitn(",", 2).struct.field("field_0").str.strip_chars(" }").cast(pl.Int64, strict=False)


def _ops(trace: MergedTrace, node_ids: pl.Series) -> pl.Series:
    """Name of the outermost host op around each row."""
    nodes = trace.some_of_nodes("node_id", "kind", "name", "parent_id").sort("node_id")
    is_op = (nodes["kind"] == "host_op").to_numpy()
    op = outermost(parents(nodes), positions(nodes["node_id"].to_numpy(), node_ids.to_numpy()), is_op)
    names = nodes["name"].gather(pl.Series(op).set(pl.Series(op < 0), None))
    return names.str.strip_prefix(ENGINE_PREFIX).fill_null(OUTSIDE)
