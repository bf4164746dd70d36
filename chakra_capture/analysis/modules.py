"""Modules of the model as a tree: the time of their calls, and of the device work that forward and backward launch.

They are recorded with the Python stack (``nn.Module: Linear_0``: the class and a number). A module has the time of the
rows within its calls; its self time is that of rows in no module inside it. Backward runs outside of any module: a
function of backward counts to the module that its forward op ran in.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl

from chakra_capture.analysis.ancestry import positions
from chakra_capture.analysis.backward import NEEDED, forward_ops, innermost, is_function, parents
from chakra_capture.trace.columns import Bool, Int64
from chakra_capture.trace.merged import MergedTrace
from chakra_capture.trace.schema import Column

PREFIX = "nn.Module: "
SCHEMA = (
    Column("rank", pl.Int64, "global rank; null: all ranks together"),
    Column("path", pl.String, "the modules from the outermost on, separated by /"),
    Column("module", pl.String, "class of the module, and its number among those of the class"),
    Column("depth", pl.Int64, "modules around it"),
    Column("count", pl.Int64, "calls"),
    Column("total_ns", pl.Int64, "time of its calls on the CPU", "ns"),
    Column("self_ns", pl.Int64, "the same less that of modules inside", "ns"),
    Column("device_total_ns", pl.Int64, "summed durations of the device activities launched within its calls; null = "
           "no device activities", "ns"),
    Column("device_self_ns", pl.Int64, "the same less those launched in modules inside; null like device_total_ns",
           "ns"),
    Column("num_launched", pl.Int64, "device activities launched within its calls; null like device_total_ns"),
    Column("backward_ns", pl.Int64, "CPU time of the functions of backward whose forward op ran within its calls; null "
           "= no function can be told to be of any module", "ns"),
    Column("backward_device_ns", pl.Int64, "summed durations of the device activities that these functions launched; "
           "null like backward_ns and device_total_ns", "ns"),
)  # fmt: skip

_CPU = ("host_op", "annotation", "runtime", "python_function")
_ON_DEVICE = ("kernel", "memcpy", "memset")
_NEEDED = tuple(dict.fromkeys((*NEEDED, "node_id", "parent_id", "launch_id", "self_dur_ns", "step")))
_SELF = ("count", "self_ns", "device_self_ns", "num_self", "backward_self_ns", "backward_device_self_ns")
_SUMS = {
    "total_ns": "self_ns", "device_total_ns": "device_self_ns", "num_launched": "num_self",
    "backward_ns": "backward_self_ns", "backward_device_ns": "backward_device_self_ns",
}  # fmt: skip


def module_tree(
    traces: Sequence[MergedTrace], *, by: Sequence[str] = (), steps: Sequence[int] | None = None,
    depth: int | None = None,
) -> pl.DataFrame:  # fmt: skip
    """The tree in its order: after each module those inside it, of several the one that takes most time first.

    Args:
        traces: ranks, taken together.
        by: ``rank`` or nothing, what makes trees of their own.
        steps: only what starts in these steps.
        depth: levels of the tree; the times are those of the whole tree.

    Returns:
        a table of ``SCHEMA``; empty where no module is recorded.
    """
    keys = [*by, "path"]
    schema = {column.name: column.dtype for column in SCHEMA}
    found = [table for trace in traces if (table := _of_rank(trace, steps)) is not None]
    if not found:
        return pl.DataFrame(schema=schema)
    # A rank without a device has no say in the times of the device; a sum of nulls would be 0.
    sums = [pl.when(pl.col(name).count() > 0).then(pl.col(name).sum()).alias(name) for name in _SELF]
    own = pl.concat(found).group_by(keys).agg(sums)
    trees = own.partition_by(*by, maintain_order=True) if by else [own]
    tables = [_in_order(_with_totals(tree)) for tree in trees]
    table = pl.concat(tables).with_columns(pl.lit(None).alias(key) for key in ("rank",) if key not in by)
    table = table.select(pl.col(name).cast(dtype) for name, dtype in schema.items())
    if by:
        table = table.sort("rank", maintain_order=True)
    return table if depth is None else table.filter(pl.col("depth") < depth)


def has_modules(trace: MergedTrace) -> bool:
    """Whether any module is recorded."""
    nodes = trace.some_of_nodes("kind", "name").filter(pl.col("kind") == "python_function")
    return bool(nodes["name"].str.starts_with(PREFIX).any())


def module_names(trace: MergedTrace) -> pl.DataFrame:
    """``node_id`` and ``module`` of each row that is in one: the innermost, in backward that of the forward op."""
    nodes = trace.some_of_nodes(*_NEEDED).sort("node_id")
    around = _Around.of(nodes)
    table = nodes.select("node_id", module=_picked(nodes["name"], around.module_or_forward()))
    return table.drop_nulls("module").with_columns(pl.col("module").str.strip_prefix(PREFIX))


@dataclass(frozen=True, slots=True)
class _Around:
    """Of each row the innermost module around it, and the one that the function of backward around it is of."""

    is_module: Bool
    parent: Int64
    module: Int64
    of_function: Int64

    @classmethod
    def of(cls, nodes: pl.DataFrame) -> "_Around":
        called = nodes["name"].str.starts_with(PREFIX).fill_null(value=False)
        is_module = (called & (nodes["kind"] == "python_function")).to_numpy()
        parent, functions = parents(nodes), is_function(nodes)
        module = innermost(parent, is_module)
        op, function = forward_ops(nodes, functions), innermost(parent, functions)
        forward = np.append(np.where(op >= 0, module[op], -1), -1)
        return cls(is_module, parent, module, forward[function])

    def module_or_forward(self) -> Int64:
        return np.where(self.module >= 0, self.module, self.of_function)


def _of_rank(trace: MergedTrace, steps: Sequence[int] | None) -> pl.DataFrame | None:
    """By path what is right in the modules there, no other between; None where no module is recorded."""
    nodes = trace.some_of_nodes(*_NEEDED).sort("node_id")
    around = _Around.of(nodes)
    if not around.is_module.any():
        return None
    paths, path_of = _paths(nodes["name"], around)
    counted = np.ones(nodes.height, dtype=bool)
    if steps is not None:
        counted = nodes["step"].is_in(list(steps)).fill_null(value=False).to_numpy()
    kind, own = nodes["kind"], nodes["self_dur_ns"].fill_null(0).to_numpy()
    is_cpu = kind.is_in(_CPU).to_numpy() & counted
    work = np.flatnonzero(kind.is_in(_ON_DEVICE).to_numpy() & counted)
    call = positions(nodes["node_id"].to_numpy(), nodes["launch_id"].fill_null(-1).to_numpy()[work])
    backward = np.where(around.module >= 0, -1, around.of_function)

    def summed(rows: Int64, where: Int64, values: Int64 | None = None) -> Int64:
        """Sum values, or count, by the path of the module at each row."""
        kept = where >= 0
        sums = np.zeros(len(paths), dtype=np.int64)
        np.add.at(sums, path_of[where[kept]], 1 if values is None else values[rows[kept]])
        return sums

    cpu = np.flatnonzero(is_cpu)
    calls = np.flatnonzero(around.is_module & counted)
    columns: dict[str, Int64 | None] = dict.fromkeys(_SELF)
    columns["count"] = summed(calls, calls)
    columns["self_ns"] = summed(cpu, around.module[cpu], own)
    has_backward = bool((around.of_function >= 0).any())
    if has_backward:
        columns["backward_self_ns"] = summed(cpu, backward[cpu], own)
    if trace.num_activities:
        inside, behind = (np.append(where, -1)[call] for where in (around.module, backward))
        columns["device_self_ns"], columns["num_self"] = summed(work, inside, own), summed(work, inside)
        if has_backward:
            columns["backward_device_self_ns"] = summed(work, behind, own)
    table = pl.DataFrame({"path": paths, **columns}, schema_overrides=dict.fromkeys(_SELF, pl.Int64))
    return table.with_columns(rank=pl.lit(trace.rank, dtype=pl.Int64))


def _paths(names: pl.Series, around: _Around) -> tuple[list[str], Int64]:
    """Every path, those around before those inside, and the number of the path of each row that is a module."""
    rows = np.flatnonzero(around.is_module)
    outer = np.append(around.module, -1)[around.parent[rows]]
    name = names.gather(rows).str.strip_prefix(PREFIX)
    labels, code = name.unique().sort(), name.rank("dense").cast(pl.Int64).to_numpy() - 1
    paths: list[str] = []
    path_of = np.full(len(around.module), -1, dtype=np.int64)
    left = outer < 0
    pending = np.ones(len(rows), dtype=bool)
    while left.any():
        above = np.where(outer[left] >= 0, path_of[outer[left]], -1)
        pairs, number = np.unique(above * len(labels) + code[left], return_inverse=True)
        path_of[rows[left]] = len(paths) + number
        over, own = np.divmod(pairs, len(labels))
        paths += [labels[int(c)] if o < 0 else f"{paths[o]}/{labels[int(c)]}" for o, c in zip(over, own, strict=True)]
        pending &= ~left
        left = pending & (path_of[outer] >= 0)
    return paths, path_of


def _with_totals(own: pl.DataFrame) -> pl.DataFrame:
    """Add to each path the times of all paths inside it."""
    own = own.with_columns(depth=pl.col("path").str.count_matches("/", literal=True).cast(pl.Int64))
    rows = own.sort("depth", descending=True)
    place = {path: at for at, path in enumerate(rows["path"])}
    outer = np.array([place[head] if (head := path.rpartition("/")[0]) else -1 for path in rows["path"]])
    totals = {}
    for name, part in _SUMS.items():
        values = rows[part].fill_null(0).to_numpy().copy()
        for level in rows["depth"].unique().sort(descending=True).to_list():
            at = np.flatnonzero((rows["depth"] == level).to_numpy() & (outer >= 0))
            np.add.at(values, outer[at], values[at])
        totals[name] = pl.Series(values).set(rows[part].is_null(), None)
    return rows.with_columns(**totals, module=pl.col("path").str.split("/").list.last())


def _in_order(tree: pl.DataFrame) -> pl.DataFrame:
    """Each module before those inside it, the one that takes most time first."""
    inside: dict[str, list[int]] = {}
    rows = tree.sort("total_ns", "path", descending=[True, False])
    for at, path in enumerate(rows["path"]):
        inside.setdefault(path.rpartition("/")[0], []).append(at)
    order, waiting = [], inside.get("", [])[::-1]
    paths = rows["path"].to_list()
    while waiting:
        order.append(at := waiting.pop())
        waiting += inside.get(paths[at], [])[::-1]
    return rows[order]


def _picked(values: pl.Series, at: Int64) -> pl.Series:
    return values.gather(pl.Series(at).set(pl.Series(at < 0), None))
