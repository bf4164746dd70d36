"""A part of the dependency graph of one rank as two small tables, from which files are written."""

from dataclasses import dataclass
from pathlib import Path

import polars as pl

from chakra_capture import layout
from chakra_capture.errors import ChakraCaptureError
from chakra_capture.merge.rows import ACTIVITY_KINDS
from chakra_capture.merge.slices.kept import rows_of_steps
from chakra_capture.merge.slices.tables import read_link, readable, scan
from chakra_capture.trace.schema import Column

NODE_COLUMNS = (
    Column("node_id", pl.Int64, "as in the merged tables"),
    Column("name", pl.String, "name as recorded"),
    Column("kind", pl.String, "kind of the row"),
    Column("pid", pl.Int64, "process"),
    Column("tid", pl.Int64, "thread"),
    Column("device", pl.Int64, "device of a device row"),
    Column("stream", pl.Int64, "stream of a device row"),
    Column("step", pl.Int64, "step"),
    Column("ts_ns", pl.Int64, "start", "ns"),
    Column("dur_ns", pl.Int64, "duration", "ns"),
)
EDGE_COLUMNS = (
    Column("src", pl.Int64, "node that comes first"),
    Column("dst", pl.Int64, "node that waits"),
    Column("kind", pl.String, "why it waits"),
    Column("src_at", pl.String, "side of src that counts"),
    Column("dst_at", pl.String, "side of dst that waits"),
    Column("lag_ns", pl.Int64, "from the one to the other, the offset of the device clock removed", "ns"),
)


class GraphTooLargeError(ChakraCaptureError, ValueError):
    """More rows than a drawing takes were asked for."""


@dataclass(frozen=True, slots=True)
class Graph:
    """Nodes and edges, of ``NODE_COLUMNS`` and ``EDGE_COLUMNS``."""

    nodes: pl.DataFrame
    edges: pl.DataFrame


def graph_of_rank(
    folder: Path, *, steps: tuple[int, ...] | None = None, nodes: list[range] | None = None, max_nodes: int
) -> Graph:
    """The rows of a rank that are asked for, and the edges between them.

    Args:
        folder: of the merged rank.
        steps: only what a slice of these steps would hold; None: all.
        nodes: only rows whose ``node_id`` is in one of these; None: all.
        max_nodes: more are refused.

    Raises:
        GraphTooLargeError: there are more.
        TraceFileError: the tables cannot be read.
    """
    rows = scan(folder, layout.NODES_FILE)
    with readable(folder):
        if steps is not None:
            chosen = scan(folder, layout.STEPS_FILE).filter(pl.col("step").is_in(steps)).collect()
            kept = rows_of_steps(rows, chosen) if chosen.height else None
            rows = rows.filter(pl.lit(value=False) if kept is None else kept.stays("node_id"))
        if nodes is not None:
            rows = rows.filter(pl.any_horizontal(pl.col("node_id").is_between(r.start, r.stop - 1) for r in nodes))
        count = rows.select(pl.len()).collect(engine="streaming").item()
        if count > max_nodes:
            raise GraphTooLargeError(f"{folder} has {count} rows of what was asked for, more than {max_nodes}")
        columns = [pl.col(column.name).cast(column.dtype) for column in NODE_COLUMNS]
        found = rows.select(columns).collect(engine="streaming").sort("node_id")
        edges = _edges(scan(folder, layout.EDGES_FILE), _times(folder, rows, found["node_id"]))
    return Graph(found, edges)


def _times(folder: Path, rows: pl.LazyFrame, ids: pl.Series) -> pl.DataFrame:
    """Start and end of each row, on the clock of the host."""
    offsets = {entry["window"]: entry["clock_offset_ns"] for entry in read_link(folder)["windows"]}
    is_activity = pl.col("kind").is_in(ACTIVITY_KINDS)
    offset = pl.when(is_activity).then(pl.col("window").replace_strict(offsets, default=0, return_dtype=pl.Int64))
    start = pl.col("ts_ns") + offset.otherwise(0)
    times = rows.select("node_id", start=start, end=start + pl.col("dur_ns")).collect(engine="streaming")
    return times.filter(pl.col("node_id").is_in(ids.implode()))


def _edges(edges: pl.LazyFrame, times: pl.DataFrame) -> pl.DataFrame:
    known = times.lazy()
    both = edges.join(known, left_on="src", right_on="node_id", maintain_order="left").join(
        known, left_on="dst", right_on="node_id", suffix="_dst", maintain_order="left"
    )
    begun = pl.when(pl.col("src_at") == "start").then("start").otherwise("end")
    waited = pl.when(pl.col("dst_at") == "start").then("start_dst").otherwise("end_dst")
    columns = [pl.col(column.name).cast(column.dtype) for column in EDGE_COLUMNS]
    return both.with_columns(lag_ns=waited - begun).select(columns).collect(engine="streaming")
