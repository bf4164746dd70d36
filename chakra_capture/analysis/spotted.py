"""Work that is easily overlooked: forward done again in backward, conversions between types, launches by graphs.

*Recompute* (activation checkpointing): within a function of backward, ops that take a sequence number, as forward ops
do, and that no function is the backward of; within ``CheckpointFunctionBackward`` also those that its own backward pass
is of. The graph of a gradient that is differentiated again (``create_graph``) has such functions, so it is none.
*Conversion*: ``aten::copy_`` from one type to another, with the ``aten::_to_copy`` around it. *Graph*: activities whose
launch is that of a CUDA or HIP graph.
"""

from collections.abc import Sequence

import numpy as np
import polars as pl

from chakra_capture.analysis.ancestry import positions
from chakra_capture.analysis.backward import NEEDED, forward_ops, innermost, is_function, parents
from chakra_capture.trace.columns import Bool, Int64
from chakra_capture.trace.merged import MergedTrace
from chakra_capture.trace.schema import Column

RECOMPUTE, CONVERSION, GRAPH = "recompute", "dtype conversion", "graph"
SCHEMA = (
    Column("rank", pl.Int64, "global rank"),
    Column("what", pl.String, "recompute: forward ops run again in backward; dtype conversion: copies to another type; "
           "graph: activities that a CUDA or HIP graph launches"),
    Column("name", pl.String, "op, types (from -> to) or launch call; null: all of this kind together"),
    Column("count", pl.Int64, "how often it ran: ops, copies, launch calls; null = not measured"),
    Column("cpu_ns", pl.Int64, "time on the CPU, with all that is inside; null = not measured", "ns"),
    Column("cpu_share", pl.Float64, "the same as a part of the recorded steps (without any: of the window); ops of "
           "several threads all count"),
    Column("backward_share", pl.Float64, "of recompute: cpu_ns as a part of the CPU time of the functions of backward"),
    Column("num_launched", pl.Int64, "device activities launched by it; null = no device activities"),
    Column("device_ns", pl.Int64, "their summed durations; null = no device activities", "ns"),
    Column("device_share", pl.Float64, "the same as a part of the summed durations of all device activities; null = no "
           "device activities"),
)  # fmt: skip

_CPU = ("host_op", "annotation", "runtime", "python_function")
_ON_DEVICE = ("kernel", "memcpy", "memset")
_NEEDED = tuple(
    dict.fromkeys((*NEEDED, "node_id", "parent_id", "launch_id", "dur_ns", "self_dur_ns", "step", "input_types"))
)
_COPY, _TO_COPY, _CHECKPOINT = "aten::copy_", "aten::_to_copy", "CheckpointFunctionBackward"
# Both files' spelling: "c10::BFloat16" and "Tensor(c10::BFloat16)".
_TYPES = r'^\s*\[\s*"(?:Tensor\()?(?:c10::)?([^")]+)\)?"\s*,\s*"(?:Tensor\()?(?:c10::)?([^")]+)\)?"'
_DTYPES = {column.name: column.dtype for column in SCHEMA}


def spotted(traces: Sequence[MergedTrace], *, steps: Sequence[int] | None = None) -> pl.DataFrame:
    """Per rank and kind a row for all of it, then one per name, of most time first.

    Args:
        traces: ranks.
        steps: only what starts in (of the device: is launched in) these steps.
    """
    tables = [pl.DataFrame(schema=_DTYPES), *(_of_rank(trace, steps) for trace in traces)]
    return pl.concat([table.select(pl.col(name).cast(kind) for name, kind in _DTYPES.items()) for table in tables])


def _of_rank(trace: MergedTrace, steps: Sequence[int] | None) -> pl.DataFrame:
    nodes = trace.some_of_nodes(*_NEEDED).sort("node_id")
    rows = _Rows(nodes, steps)
    kinds = {RECOMPUTE: _recompute(rows), CONVERSION: _conversions(rows), GRAPH: _graphs(rows, trace)}
    found = [_table(rows, what, labels) for what, labels in kinds.items()]
    table = pl.concat(found).with_columns(rank=pl.lit(trace.rank))
    chosen = trace.steps if steps is None else trace.steps.filter(pl.col("step").is_in(list(steps)))
    whole, work = int(chosen["dur_ns"].sum()), rows.work_ns if trace.num_activities else None
    backward = rows.total_within(rows.functions)
    is_recompute = pl.col("what") == RECOMPUTE
    table = table.with_columns(
        (pl.col(name) if trace.num_activities else pl.lit(None)).alias(name) for name in ("num_launched", "device_ns")
    )
    # A host trace alone has no times.
    table = table.with_columns(cpu_ns=pl.col("cpu_ns") if nodes["self_dur_ns"].count() else None)
    return table.with_columns(
        cpu_share=pl.col("cpu_ns") / (whole or None),
        device_share=pl.col("device_ns") / (work or None),
        backward_share=pl.when(is_recompute).then(pl.col("cpu_ns") / (backward or None)),
    )


class _Rows:
    """Rows of one rank in order of ``node_id``, and what is around them."""

    def __init__(self, nodes: pl.DataFrame, steps: Sequence[int] | None) -> None:
        self.nodes = nodes
        self.parent = parents(nodes)
        self.functions = is_function(nodes)
        self.counted = np.ones(nodes.height, dtype=bool)
        if steps is not None:
            self.counted = nodes["step"].is_in(list(steps)).fill_null(value=False).to_numpy()
        kind = nodes["kind"]
        self.own = nodes["self_dur_ns"].fill_null(0).to_numpy()
        self.cpu = np.flatnonzero(kind.is_in(_CPU).to_numpy() & self.counted)
        self.work = np.flatnonzero(kind.is_in(_ON_DEVICE).to_numpy() & self.counted)
        self.call = positions(nodes["node_id"].to_numpy(), nodes["launch_id"].fill_null(-1).to_numpy()[self.work])
        self.work_ns = int(self.own[self.work].sum())

    def total_within(self, marked: Bool) -> int:
        """CPU time within marked rows, each instant of a thread once."""
        return int(self.own[self.cpu][innermost(self.parent, marked)[self.cpu] >= 0].sum())


def _table(rows: _Rows, what: str, labels: pl.Series | None) -> pl.DataFrame:
    """What is within the rows that have a label, together and by label; of one within another the inner counts."""
    schema = {name: _DTYPES[name] for name in ("what", "name", "count", "cpu_ns", "num_launched", "device_ns")}
    if labels is None:
        return pl.DataFrame([{"what": what}], schema=schema)
    marked = labels.is_not_null().to_numpy()
    if not marked.any():
        nothing = dict.fromkeys(("count", "cpu_ns", "num_launched", "device_ns"), 0)
        return pl.DataFrame([{"what": what, **nothing}], schema=schema)
    inside = innermost(rows.parent, marked)
    launched = np.append(inside, -1)[rows.call]
    parts = (
        ("count", np.flatnonzero(marked & rows.counted), None),
        ("cpu_ns", inside[rows.cpu], rows.own[rows.cpu]),
        ("num_launched", launched, None),
        ("device_ns", launched, rows.own[rows.work]),
    )
    tables = []
    for name, at, values in parts:
        some = at >= 0
        value = pl.Series(np.ones(int(some.sum()), dtype=np.int64) if values is None else values[some])
        tables.append(pl.DataFrame({"name": labels.gather(at[some]), "part": [name] * len(value), "value": value}))
    sums = [pl.col("value").filter(pl.col("part") == name).sum().alias(name) for name, _, _ in parts]
    by_name = pl.concat(tables).group_by("name").agg(sums)
    by_name = by_name.sort("device_ns", "cpu_ns", "name", descending=[True, True, False])
    whole = by_name.select(pl.lit(None).alias("name"), *(pl.col(name).sum() for name, _, _ in parts))
    frames = (frame.with_columns(pl.lit(what).alias("what")) for frame in (whole, by_name))
    return pl.concat([frame.select(pl.col(name).cast(dtype) for name, dtype in schema.items()) for frame in frames])


def _recompute(rows: _Rows) -> pl.Series | None:
    """The op where forward is done again; None where backward ran and no number tells."""
    nodes = rows.nodes
    numbered = nodes["sequence_number"].is_not_null().to_numpy()
    if rows.functions.any() and not numbered.any():
        return None
    function, parent = innermost(rows.parent, rows.functions), rows.parent
    # The function's own op (``MmBackward0``) has the number of the function.
    is_own = np.append(rows.functions, False)[parent]
    op = (nodes["kind"] == "host_op").to_numpy() & numbered & (function >= 0) & ~rows.functions & ~is_own
    outer = op & (np.append(innermost(parent, op), -1)[parent] < 0)
    if not outer.any():
        return _labels(nodes["name"], outer)
    partners = forward_ops(nodes, rows.functions)
    partners = partners[np.append(op, False)[partners]]
    has_partner = np.zeros(nodes.height + 1, dtype=bool)
    # Of an op that is made of others these have the partners; one that needs no gradient has the number of the next.
    has_partner[innermost(parent, outer)[partners]] = True
    numbers = nodes.select("window", "pid", "sequence_number").with_columns(row=np.arange(nodes.height))
    taken = numbers.filter(_at(partners, nodes.height)).drop("row")
    same = numbers.filter(pl.Series(outer)).join(taken, on=taken.columns, how="semi")
    has_partner[same["row"].to_numpy()] = True
    in_checkpoint = nodes["name"].str.ends_with(_CHECKPOINT).fill_null(value=False).to_numpy()[function]
    return _labels(nodes["name"], outer & (~has_partner[:-1] | in_checkpoint))


def _conversions(rows: _Rows) -> pl.Series | None:
    """``from -> to`` of each conversion; None where copies ran and no types are recorded."""
    nodes = rows.nodes
    is_copy = nodes["name"] == _COPY
    said = nodes.select(pl.col("input_types").filter(is_copy).str.extract_groups(_TYPES)).to_series().struct.unnest()
    if is_copy.any() and said["1"].is_null().all():
        return None
    copies, types = np.flatnonzero(is_copy.to_numpy()), said.select(to="1", of="2")
    differs = (types["to"] != types["of"]).fill_null(value=False).to_numpy()
    around = rows.parent[copies]
    has_around = (nodes["name"].gather(np.maximum(around, 0)) == _TO_COPY).fill_null(value=False).to_numpy()
    place = np.where(has_around & (around >= 0), around, copies)[differs]
    texts = types.filter(pl.Series(differs)).select(pl.format("{} -> {}", "of", "to")).to_series()
    return pl.Series([None], dtype=pl.String).new_from_index(0, nodes.height).scatter(place, texts)


def _graphs(rows: _Rows, trace: MergedTrace) -> pl.Series | None:
    """Launch calls of graphs; None without device activities."""
    nodes = rows.nodes
    if not trace.num_activities:
        return None
    called = (nodes["kind"] == "runtime") & nodes["name"].str.ends_with("GraphLaunch")
    return _labels(nodes["name"], called.fill_null(value=False).to_numpy())


def _at(rows: Int64, height: int) -> pl.Series:
    """A mask of some rows."""
    mask = np.zeros(height, dtype=bool)
    mask[rows] = True
    return pl.Series(mask)


def _labels(names: pl.Series, marked: Bool) -> pl.Series:
    """The names of marked rows; null of all others."""
    return names.set(pl.Series(~marked), None)
