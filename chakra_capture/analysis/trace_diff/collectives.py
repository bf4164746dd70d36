"""Communication of two sides, by operation, members and size: what it takes, waiting for others and transfer."""

import polars as pl

from chakra_capture.analysis.trace_diff.measure import COLUMNS, Scale, measured
from chakra_capture.analysis.trace_diff.siblings import Sibling, pair_siblings
from chakra_capture.analysis.trace_diff.side import Side
from chakra_capture.trace.merged import MergedRun
from chakra_capture.trace.schema import Column

STATUSES = ("matched", "new", "gone", "resized")
PARTS = ("time", "wait", "transfer")
# Operations run beside each other and beside compute: their times are no parts of a step.
_COLUMNS = tuple(column for column in COLUMNS if column.name != "share")

SCHEMA = (
    Column("status", pl.Enum(STATUSES), "matched; new, gone: of one side alone; resized"),
    Column("part", pl.Enum(PARTS), "time: from arrival to end; wait, transfer: its parts, where all ranks are known"),
    Column("collective", pl.String, "operation"),
    Column("mesh_dim", pl.String, "dimension of the device mesh that its group serves"),
    Column("num_ranks", pl.Int64, "ranks that take part; groups of one size and dimension are taken together"),
    Column("comm_bytes", pl.Int64, "bytes, as in the table nodes", "bytes"),
    Column("first_bytes", pl.Int64, "bytes of A, where they are others; null: the same", "bytes"),
    *_COLUMNS,
)  # fmt: skip
_KEYS = ["collective", "mesh_dim", "num_ranks"]
_PAIR = {
    "collective": pl.String, "mesh_dim": pl.String, "num_ranks": pl.Int64, "first": pl.Int64, "second": pl.Int64,
}  # fmt: skip


def collective_differences(sides: tuple[Side, Side], runs: tuple[MergedRun, MergedRun], scale: Scale) -> pl.DataFrame:
    """Compare the operations of the steps; a table of ``SCHEMA``, empty where nothing was communicated."""
    rows = pl.concat([_operations(*each, at) for at, each in enumerate(zip(sides, runs, strict=True))])
    sizes = rows.group_by("side", *_KEYS, "comm_bytes").agg(pl.col("place").min()).sort("place")
    pairs = pl.DataFrame(_pairs(sizes), schema=_PAIR, orient="row")
    for other, mine, at in (("first", "second", 1), ("second", "first", 0)):
        known = pairs.select(*_KEYS, pl.col(other).alias(f"{other}_bytes"), comm_bytes=mine, side=pl.lit(at, pl.Int64))
        known = known.with_columns(pl.lit(value=True).alias(f"has_{other}"))
        rows = rows.join(known, on=[*_KEYS, "comm_bytes", "side"], how="left", nulls_equal=True, validate="m:1")
    rows = rows.with_columns(
        first_bytes=pl.when(pl.col("has_first")).then("first_bytes").otherwise("comm_bytes"),
        comm_bytes=pl.when(pl.col("has_second")).then("second_bytes").otherwise("comm_bytes"),
    )
    cells = rows.unpivot(
        index=["side", "at", *_KEYS, "comm_bytes", "first_bytes"], on=[*PARTS], variable_name="part", value_name="ns"
    ).filter(pl.col("ns").is_not_null())
    is_known = (pl.col("part") == "time") | (pl.col("side").n_unique().over("part") == len(sides))
    cells = cells.filter(is_known).with_columns(count=pl.lit(1, pl.Int64))
    found = measured(cells, ["part", *_KEYS, "comm_bytes", "first_bytes"], scale)
    is_other = pl.col("first_bytes").ne_missing(pl.col("comm_bytes"))
    status = (
        pl.when(pl.col("first_seen") == 0).then(pl.lit("new"))
        .when(pl.col("second_seen") == 0).then(pl.lit("gone"))
        .when(is_other).then(pl.lit("resized"))
        .otherwise(pl.lit("matched"))
    )  # fmt: skip
    found = found.with_columns(status=status, first_bytes=pl.when(is_other).then("first_bytes"))
    return found.select(pl.col(column.name).cast(column.dtype) for column in SCHEMA).sort("part", maintain_order=True)


def _operations(side: Side, run: MergedRun, at: int) -> pl.DataFrame:
    rows = side.trace.communication.join(side.places, on=["window", "step"], nulls_equal=True, validate="m:1")
    times = pl.Schema(dict.fromkeys(("rank", "node_id", "num_ranks", "wait_ns", "transfer_ns"), pl.Int64()))
    table = run.collectives
    known = pl.DataFrame(schema=times) if table is None else table.select(*times).cast(times)
    mine = known.filter(pl.col("rank") == side.trace.rank).unique("node_id", keep="first")
    rows = rows.join(mine, on="node_id", how="left", validate="m:1", maintain_order="left").with_row_index("place")
    members = pl.coalesce("num_ranks", pl.col("group_ranks").list.len().cast(pl.Int64))
    return rows.select(
        pl.lit(at, pl.Int64).alias("side"), "at", pl.col("place").cast(pl.Int64), "collective", "mesh_dim",
        members.alias("num_ranks"), "comm_bytes", time="dur_ns", wait="wait_ns", transfer="transfer_ns",
    )  # fmt: skip


def _pairs(sizes: pl.DataFrame) -> list[tuple[object, ...]]:
    """Sizes of one operation that only one side has, in pairs, in the order in which they were first used."""
    found: list[tuple[object, ...]] = []
    for key, own in sizes.partition_by(_KEYS, as_dict=True, maintain_order=True).items():
        of_side = [own.filter(side=at)["comm_bytes"].to_list() for at in (0, 1)]
        left = [
            [
                Sibling(at, "", "", None, 0, float(at))
                for at, size in enumerate(of_side[side])
                if size not in of_side[1 - side]
            ]
            for side in (0, 1)
        ]
        found += [(*key, of_side[0][a], of_side[1][b]) for a, b in pair_siblings(left[0], left[1], [])]
    return found
