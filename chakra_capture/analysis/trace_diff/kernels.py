"""Kernels, copies and memsets of two sides, matched by the call that launched them: renamed ones are told as such."""

import numpy as np
import polars as pl

from chakra_capture.analysis.activities import device_activities
from chakra_capture.analysis.trace_diff.measure import COLUMNS, Scale, measured
from chakra_capture.analysis.trace_diff.siblings import Sibling, pair_siblings
from chakra_capture.analysis.trace_diff.side import Side
from chakra_capture.analysis.trace_diff.structure import ROOT, Structure
from chakra_capture.trace.columns import Int64
from chakra_capture.trace.schema import KINDS, Column

STATUSES = ("matched", "new", "gone", "renamed")
# Kernels run beside each other: their times are no parts of a step.
_COLUMNS = tuple(column for column in COLUMNS if column.name != "share")

SCHEMA = (
    Column("status", pl.Enum(STATUSES), "matched; new, gone: of one side alone; renamed: launched by the same call"),
    Column("name", pl.String, "name of the activity"),
    Column("kind", pl.Enum(KINDS), "kernel, memcpy or memset"),
    Column("first_name", pl.String, "name of A, where it is another; null: the same"),
    *_COLUMNS,
)

_PAIR = {"node": pl.Int64, "kind": pl.String, "first": pl.String, "second": pl.String}


def kernel_differences(sides: tuple[Side, Side], structure: Structure, scale: Scale) -> pl.DataFrame | None:
    """Compare the device activities that the steps launched; None where a side has measured none."""
    if any(side.trace.num_activities == 0 or side.trace.device_tail_lost for side in sides):
        return None
    rows = pl.concat([_launched(side, structure.of_rows[at], at) for at, side in enumerate(sides)])
    names = rows.group_by("side", "node", "kind", "name").agg(pl.col("place").min())
    pairs = pl.DataFrame(_pairs(names), schema=_PAIR, orient="row")
    keys = ["node", "kind", "name"]
    for other, mine, at in (("first", "second", 1), ("second", "first", 0)):
        known = pairs.select(
            "node", "kind", pl.col(mine).alias("name"), pl.col(other).alias(f"{other}_name"), side=pl.lit(at, pl.Int64)
        )
        rows = rows.join(known, on=[*keys, "side"], how="left", validate="m:1")
    rows = rows.with_columns(first_name=pl.coalesce("first_name", "name"), name=pl.coalesce("second_name", "name"))
    found = measured(rows.with_columns(count=pl.lit(1, pl.Int64)), ["kind", "name", "first_name"], scale)
    is_renamed = pl.col("first_name") != pl.col("name")
    status = (
        pl.when(pl.col("first_seen") == 0).then(pl.lit("new"))
        .when(pl.col("second_seen") == 0).then(pl.lit("gone"))
        .when(is_renamed).then(pl.lit("renamed"))
        .otherwise(pl.lit("matched"))
    )  # fmt: skip
    found = found.with_columns(status=status, first_name=pl.when(is_renamed).then("first_name"))
    return found.select(pl.col(column.name).cast(column.dtype) for column in SCHEMA)


def _launched(side: Side, node: Int64, at: int) -> pl.DataFrame:
    """Activities of the steps, with the node of the call that launched each."""
    rows = device_activities(side.trace, "name", "parent_id", "step").with_columns(pl.col("kind").cast(pl.String))
    rows = rows.join(side.places, on=["window", "step"], how="inner", nulls_equal=True, validate="m:1")
    calls = side.rows.select(parent_id="node_id").with_columns(node=pl.Series(node))
    rows = rows.join(calls, on="parent_id", how="left", validate="m:1").sort("window", "ts_ns", "node_id")
    return rows.select(
        pl.lit(at, pl.Int64).alias("side"), "at", pl.col("node").fill_null(ROOT), "kind", "name", ns="self_dur_ns",
        place=pl.Series(np.arange(rows.height)),
    )  # fmt: skip


def _pairs(names: pl.DataFrame) -> list[tuple[int, str, str, str]]:
    """Names of one call that only one side has, in pairs."""
    keys = ["node", "kind", "name"]
    both = names.group_by(keys).agg(pl.col("side").n_unique() == 2)
    table = names.join(both.rename({"side": "is_same"}), on=keys, validate="m:1").sort(*keys)
    alone = table.filter(~pl.col("is_same")).group_by("node").agg(pl.col("side").n_unique())
    some = table.filter(pl.col("node").is_in(alone.filter(pl.col("side") == 2)["node"].implode()))
    found = []
    for (node,), own in some.partition_by("node", as_dict=True).items():
        left: tuple[list[Sibling], list[Sibling]] = [], []
        # Where it stands among what this call launches, not when.
        own = own.with_columns(place=pl.col("place").rank("ordinal").over("side").cast(pl.Float64))
        same = own.filter("is_same").sort("kind", "name", "side")
        rows = own.filter(~pl.col("is_same"))
        for number, (side, kind, name, place) in enumerate(rows.select("side", "kind", "name", "place").iter_rows()):
            left[side].append(Sibling(number, kind, name, None, 0, place))
        places = same["place"].to_list()
        texts = rows["name"].to_list()
        for a, b in pair_siblings(*left, list(zip(places[::2], places[1::2], strict=True))):
            found.append((node, rows["kind"][a], texts[a], texts[b]))
    return found
