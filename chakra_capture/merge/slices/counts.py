"""What link.json of a slice counts: rows, links and orphans of what stayed; all else it says of the recording."""

from collections.abc import Collection
from typing import Any

import polars as pl

from chakra_capture.merge.link import ambiguous_correlations
from chakra_capture.merge.rows import ACTIVITY_KINDS
from chakra_capture.trace.columns import MISSING

_MOST_NAMES = 10
_FROM_DEVICE = '{"cat":'  # as every row of the device trace begins its args


def counted_columns(nodes: pl.LazyFrame) -> pl.DataFrame:
    """Of each row what ``recounted`` needs."""
    in_device = pl.col("args").str.starts_with(_FROM_DEVICE).fill_null(value=False)
    columns = ("node_id", "window", "kind", "parent_id", "launch_id", "correlation_id", "pid", "self_dur_ns", "step")
    in_host = pl.col("host_id").is_not_null()
    return nodes.select(
        *columns,
        "repaired",
        in_host=in_host,
        in_device=in_device,
        name=pl.when(in_host & ~in_device).then("name"),
    ).collect(engine="streaming")


def recounted(entry: dict[str, Any], rows: pl.DataFrame, edges: pl.DataFrame, steps: Collection[int]) -> dict[str, Any]:
    """The entry of a window in link.json with the counts of the rows that it has now.

    Args:
        entry: of the whole window.
        rows: of the window, as ``counted_columns`` gives them.
        edges: ``kind`` of each edge of the window.
        steps: those that stay.
    """
    host, device = entry["host"], entry["device"]
    if host is not None:
        host = host | _host(rows, has_device=device is not None) | {"steps": _those(host, steps)}
    if device is not None:
        device = device | _device(rows, has_host=host is not None) | {"steps": _those(device, steps)}
    kinds = rows["kind"].value_counts().sort("kind")
    return entry | {
        "host": host,
        "device": device,
        "rows": dict(kinds.cast({"kind": pl.String}).iter_rows()),
        "edges": {str(kind): n for kind, n in edges["kind"].value_counts().sort("kind").iter_rows()},
        "repairs": entry["repairs"] | {"rows_repaired": int(rows["repaired"].sum())},
    }


def _those(side: dict[str, Any], steps: Collection[int]) -> list[int]:
    return [step for step in side["steps"] if step in steps]


def _host(rows: pl.DataFrame, *, has_device: bool) -> dict[str, Any]:
    is_root = pl.col("kind").is_in(("process", "thread"))
    # A repaired root was added for one that the host trace lacks.
    nodes = rows.filter(pl.col("in_host") & ~(is_root & pl.col("repaired")))
    ops = nodes.filter(~is_root)
    alone = ops.filter(~pl.col("in_device"))
    names = alone.group_by(pl.col("name").fill_null("")).len().sort("len", "name", descending=[True, False])
    return {
        "num_nodes": nodes.height,
        "num_roots": nodes.height - ops.height,
        "num_linked": ops.height - alone.height,
        "num_host_only": alone.height,
        "host_only_names": dict(names.head(_MOST_NAMES).iter_rows()) if has_device else {},
    }


def _device(rows: pl.DataFrame, *, has_host: bool) -> dict[str, Any]:
    calls = rows.filter(pl.col("kind") == "runtime")
    of_calls = (calls[name].fill_null(MISSING).to_numpy() for name in ("correlation_id", "pid"))
    several = pl.Series(ambiguous_correlations(*of_calls))
    activities = rows.filter(pl.col("kind").is_in(ACTIVITY_KINDS))
    has_launch, has_parent = pl.col("launch_id").is_not_null(), pl.col("parent_id").is_not_null()
    has_id = pl.col("correlation_id").is_not_null()
    is_ambiguous = has_id & pl.col("correlation_id").is_in(several.implode())
    # Its step comes from a launch, and so does its parent: without one, the launch was left out.
    was_launched = pl.col("step").is_not_null() & ~has_launch
    lost = has_id & ~is_ambiguous & ~has_launch
    device_only = rows.filter(~pl.col("in_host"))["node_id"]
    is_unknown = pl.col("parent_id").is_in(device_only.implode()).fill_null(value=False)
    time = pl.col("self_dur_ns").sum()
    counts = activities.select(
        num_activities=pl.len(),
        num_launched=has_launch.sum(),
        num_with_parent=has_parent.sum(),
        device_time_ns=time,
        device_time_without_host_node_ns=pl.col("self_dur_ns").filter(is_unknown).sum(),
        no_correlation_id=(~has_id).sum(),
        launch_not_in_file=(lost & ~was_launched).sum(),
        launch_left_out=was_launched.sum(),
        launch_in_several_processes=is_ambiguous.sum(),
        launch_outside_any_op=(has_launch & ~has_parent).sum(),
    ).row(0, named=True)
    orphans = ("no_correlation_id", "launch_not_in_file", "launch_in_several_processes", "launch_outside_any_op")
    left_out = counts.pop("launch_left_out")
    found = {name: counts.pop(name) for name in orphans}
    if not has_host:
        counts["device_time_without_host_node_ns"] = None
    return {
        **counts,
        "num_ops": rows.filter(pl.col("kind").is_in(("host_op", "annotation")) & pl.col("in_device")).height,
        "orphans": {**found, **({"launch_left_out": left_out} if left_out else {})},
    }
