"""Copies and memsets: by direction and kind of host memory, with their bandwidth and what of them is not hidden.

Bandwidth is bytes by time over all of a direction (small copies count little in it), and the median of the single
copies beside it; null where the trace does not say how many bytes a copy moves.
"""

from collections.abc import Sequence

import polars as pl

from chakra_capture.analysis.activities import device_activities
from chakra_capture.analysis.shares import quantile_of
from chakra_capture.merge import intervals
from chakra_capture.trace.columns import Int64
from chakra_capture.trace.merged import MergedTrace
from chakra_capture.trace.schema import Column

SCHEMA = (
    Column("rank", pl.Int64, "global rank"),
    Column("direction", pl.String, "HtoD, DtoH, DtoD, ... as the name of the copy has it; memset; null: not said"),
    Column("memory", pl.String, "from and to what kind of memory, as the name has it, e.g. Pageable -> Device"),
    Column("count", pl.Int64, "copies"),
    Column("bytes", pl.Int64, "bytes moved; null where any copy does not say", "bytes"),
    Column("total_ns", pl.Int64, "summed durations, each up to the next start on its stream", "ns"),
    Column("bandwidth", pl.Float64, "bytes by total_ns; null = not measured", "bytes/s"),
    Column("bandwidth_p50", pl.Float64, "median of the single copies; null = not measured", "bytes/s"),
    Column("p50_ns", pl.Int64, "median duration", "ns"),
    Column("p90_ns", pl.Int64, "duration that 9 of 10 do not exceed", "ns"),
    Column("exposed_ns", pl.Int64, "time of them in which nothing computes or communicates; that of two directions at "
           "once counts to both", "ns"),
)  # fmt: skip
_KEYS = ("direction", "memory")
_NAME = r"^Mem(?:cpy|set) ?(\w+)? ?(?:\((.*)\))?"


def copy_statistics(traces: Sequence[MergedTrace], *, steps: Sequence[int] | None = None) -> pl.DataFrame:
    """Sum up copies and memsets, those that take most time first.

    Args:
        traces: ranks.
        steps: only what these steps launched.
    """
    tables = [pl.DataFrame(schema={column.name: column.dtype for column in SCHEMA})]
    for trace in traces:
        activities = device_activities(trace, "step")
        rows = copies_of(trace, activities)
        if steps is not None:
            rows = rows.filter(pl.col("step").is_in(list(steps)))
        known = pl.col("bytes").is_not_null()
        per_second = pl.when(pl.col("self_dur_ns") > 0).then(pl.col("bytes") / pl.col("self_dur_ns") * 1e9)
        rows = rows.with_columns(per_second=per_second)
        table = rows.group_by(_KEYS).agg(
            pl.len().alias("count"),
            pl.when(known.all()).then(pl.col("bytes").sum()).alias("bytes"),
            total_ns=pl.col("self_dur_ns").sum(),
            bandwidth_p50=pl.col("per_second").median(),
            p50_ns=quantile_of("self_dur_ns", 1, 2),
            p90_ns=quantile_of("self_dur_ns", 9, 10),
        )
        mean = pl.when(pl.col("total_ns") > 0).then(pl.col("bytes") / pl.col("total_ns") * 1e9)
        table = table.with_columns(bandwidth=mean, rank=pl.lit(trace.rank))
        table = table.join(_exposed(activities, rows), on=_KEYS, how="left", nulls_equal=True, validate="1:1")
        tables.append(table.select(pl.col(column.name).cast(column.dtype) for column in SCHEMA))
    order = ["total_ns", "rank", "direction", "memory"]
    return pl.concat(tables).sort(order, descending=[True, False, False, False])


def copies_of(trace: MergedTrace, activities: pl.DataFrame) -> pl.DataFrame:
    """Copies and memsets of a rank, with their direction, kind of host memory and bytes."""
    copies = activities.filter(pl.col("part") == "memory")
    # The arguments are most of the table: those of all other rows are let go at once.
    texts = trace.some_of_nodes("node_id", "kind", "name", "args").filter(pl.col("kind").is_in(["memcpy", "memset"]))
    copies = copies.join(texts.drop("kind"), on="node_id", how="left", validate="1:1", maintain_order="left")
    said = pl.col("name").str.extract_groups(_NAME)
    is_memset = pl.col("kind") == "memset"
    return copies.with_columns(
        direction=pl.when(is_memset).then(pl.lit("memset")).otherwise(said.struct.field("1").replace({"": None})),
        memory=said.struct.field("2").replace({"": None}),
        bytes=pl.col("args").str.extract(r'"bytes":\s*"?(\d+)').cast(pl.Int64, strict=False),
    )


def _exposed(activities: pl.DataFrame, copies: pl.DataFrame) -> pl.DataFrame:
    """By direction, the time with such a copy and without any kernel."""
    place = ["window", "device"]
    kernels = activities.filter(pl.col("part") != "memory").partition_by(place, as_dict=True)
    rows = []
    for (direction, memory, *at), mine in copies.partition_by(*_KEYS, *place, as_dict=True).items():
        others = kernels.get(tuple(at), activities.clear())
        hidden = _spans(others)
        alone = intervals.total(*intervals.joined(hidden, _spans(mine))) - intervals.total(*hidden)
        rows.append((direction, memory, alone))
    schema = {"direction": pl.String, "memory": pl.String, "exposed_ns": pl.Int64}
    return pl.DataFrame(rows, schema=schema, orient="row").group_by(_KEYS).agg(pl.col("exposed_ns").sum())


def _spans(rows: pl.DataFrame) -> tuple[Int64, Int64]:
    return rows["ts_ns"].to_numpy(), rows["end_ns"].to_numpy()
