"""Host ops, annotations and runtime calls by name: where CPU time goes, and which launch the time of the device."""

from collections.abc import Sequence

import numpy as np
import polars as pl

from chakra_capture.analysis.activities import KINDS as ON_DEVICE
from chakra_capture.analysis.ancestry import levels, positions, without_equal_around
from chakra_capture.analysis.shares import share_of
from chakra_capture.annotations import STEP_PREFIX
from chakra_capture.trace.columns import Int64
from chakra_capture.trace.merged import MergedTrace
from chakra_capture.trace.schema import Column

OUTSIDE = "(outside any op)"
PYTHON = "(Python functions)"

_NAME = Column("name", pl.String, "name of the host op, annotation or runtime call; in brackets what is none of them")
_COUNT = Column("count", pl.Int64, "how often it ran")
_SELF = Column("self_ns", pl.Int64, "summed self time: duration less that of the rows inside", "ns")
_TOTAL = Column("total_ns", pl.Int64, "summed duration; one within another of its row counts once", "ns")
_SHARE = Column("share", pl.Float64, "self_ns as a part of the self time of all rows of this table")

SCHEMA = (
    Column("rank", pl.Int64, "global rank; null: all ranks together"),
    Column("phase", pl.String, "phase of the step that it starts in; null: not known, or all together"),
    _NAME,
    Column("input_shapes", pl.String, "shapes of its inputs, JSON; null: not recorded, or all together"),
    _COUNT,
    _SELF,
    _SHARE,
    _TOTAL,
    Column("device_self_ns", pl.Int64, "summed durations of the device activities whose launch it is right around, no "
           "other op or annotation between; null = no device activities", "ns"),
    Column("device_total_ns", pl.Int64, "the same of all launched while it is open, also by what is inside; one within "
           "another of its row counts once; null = no device activities", "ns"),
    Column("num_launched", pl.Int64, "device activities launched while it is open; null = no device activities"),
)  # fmt: skip
SUMMARY = (_NAME, _COUNT, _SELF, _TOTAL, _SHARE)
# Columns that may tell rows of one name apart.
KEYS = ("rank", "phase", "input_shapes")

_CPU = ("host_op", "annotation", "runtime", "python_function")
_NEEDED = ("window", "node_id", "kind", "name", "parent_id", "launch_id", "dur_ns", "self_dur_ns", "step")
_SUMS = ("count", "self_ns", "total_ns", "device_self_ns", "device_total_ns", "num_launched")


def operator_statistics(
    traces: Sequence[MergedTrace], *, by: Sequence[str] = (), steps: Sequence[int] | None = None
) -> pl.DataFrame:
    """Rank by summed self time, longest first, over the whole recorded steps and all threads.

    The self time of ProfilerStep, the time of its thread in which no op runs, is a row of its own, and
    so are recorded Python functions together. A trace without whole steps is summed over all it holds.

    Args:
        traces: ranks, taken together.
        by: of ``KEYS``, what makes rows of their own.
        steps: only what starts in these steps.
    """
    keys = [*by, "name"]
    found = [_of_rank(trace, by, steps) for trace in traces]
    if not found:
        return pl.DataFrame(schema={column.name: column.dtype for column in SCHEMA})
    # A rank without a device has no say in the times of the device; a sum of nulls would be 0.
    sums = [pl.when(pl.col(name).count() > 0).then(pl.col(name).sum()).alias(name) for name in _SUMS]
    return (
        pl.concat(found)
        .group_by(keys)
        .agg(sums)
        .with_columns(share=share_of("self_ns"))
        .with_columns(pl.lit(None).alias(key) for key in KEYS if key not in by)
        .sort("self_ns", *keys, descending=[True, *[False] * len(keys)])
        .select(pl.col(column.name).cast(column.dtype) for column in SCHEMA)
    )


def operator_summary(trace: MergedTrace) -> pl.DataFrame:
    """The same of one rank in fewer columns, for an overview."""
    return operator_statistics([trace]).select(column.name for column in SUMMARY)


def _of_rank(trace: MergedTrace, by: Sequence[str], steps: Sequence[int] | None) -> pl.DataFrame:
    keys = [*(key for key in by if key != "rank"), "name"]
    nodes = trace.some_of_nodes(*_NEEDED, *(key for key in keys if key not in _NEEDED)).sort("node_id")
    if "input_shapes" in keys:  # as recorded: one tool indents them
        nodes = nodes.with_columns(pl.col("input_shapes").str.replace_all(r"\s", ""))
    nodes = _with_labels(nodes).with_columns(is_counted=_is_counted(trace, steps))
    nodes = nodes.with_columns(group=pl.struct(keys).rank("dense").cast(pl.Int64))
    tables = _Rows(nodes)
    rows = nodes.filter("is_cpu").with_columns(pl.Series("is_outer", tables.is_outer))
    table = rows.filter("is_counted").group_by("group").agg(
        *(pl.col(key).first() for key in keys),
        pl.len().cast(pl.Int64).alias("count"),
        pl.col("self_dur_ns").sum().alias("self_ns"),
        pl.col("dur_ns").filter("is_outer").sum().alias("total_ns"),
    )  # fmt: skip
    measured = trace.num_activities > 0
    for name, column in tables.launched().items() if measured else ():
        table = table.join(column, on="group", how="left", validate="1:1").with_columns(pl.col(name).fill_null(0))
    missing = [pl.lit(None, dtype=pl.Int64).alias(name) for name in _SUMS if name not in table.columns]
    rank = pl.lit(trace.rank, dtype=pl.Int64).alias("rank")
    return table.with_columns(*missing, rank).select(*by, "name", *_SUMS)


def _with_labels(nodes: pl.DataFrame) -> pl.DataFrame:
    name = pl.col("name")
    label = (
        pl.when(pl.col("kind") == "python_function")
        .then(pl.lit(PYTHON))
        .when(name.str.starts_with(STEP_PREFIX))
        .then(pl.lit(OUTSIDE))
        .otherwise(name)
    )
    is_cpu = pl.col("kind").is_in(_CPU) & pl.col("self_dur_ns").is_not_null()
    is_work = pl.col("kind").is_in(ON_DEVICE) & pl.col("self_dur_ns").is_not_null()
    return nodes.with_columns(name=label, is_cpu=is_cpu, is_work=is_work)


def _is_counted(trace: MergedTrace, steps: Sequence[int] | None) -> pl.Expr:
    """Rows of the steps asked for, else of whole steps, else all."""
    is_whole = pl.col("step").is_not_null() & pl.col("dur_ns").is_not_null() & ~pl.col("partial").fill_null(False)
    chosen = is_whole if steps is None else pl.col("step").is_in(list(steps))
    whole = trace.steps.filter(chosen).select("window", "step").unique()
    if whole.is_empty() and steps is None:
        return pl.lit(value=True)
    return pl.struct("window", "step").is_in(whole.select(pl.struct("window", "step")).to_series().implode())


class _Rows:
    """CPU rows and, by the rows around their launches, the activities."""

    def __init__(self, nodes: pl.DataFrame) -> None:
        cpu, work = nodes.filter("is_cpu"), nodes.filter("is_work", "is_counted")
        ids = cpu["node_id"].to_numpy()
        self._parent = positions(ids, _ids(cpu["parent_id"]))
        self._group = cpu["group"].to_numpy()
        self._is_counted = cpu["is_counted"].to_numpy()
        self.is_outer = without_equal_around(self._parent, self._group)
        self._call = positions(ids, _ids(work["launch_id"]))
        around, step = positions(ids, _ids(work["parent_id"])), self._steps_around(cpu)
        # No op and no annotation is around the launch: it is right in the step.
        self._right_around = np.where(around >= 0, around, step)
        self._ns = work["self_dur_ns"].to_numpy()

    def launched(self) -> dict[str, pl.DataFrame]:
        """By group, what was launched right in it, and in it at all."""
        mine = self._right_around >= 0
        own = self._summed(self._group[self._right_around[mine]], np.flatnonzero(mine))
        pairs = [(self._group[around], place) for place, around in levels(self._parent, self._call)
                 if self._is_counted[around].any()]  # fmt: skip
        groups, places = (np.concatenate([pair[at] for pair in pairs] or [np.zeros(0, np.int64)]) for at in (0, 1))
        # An activity within recursion is in its group once.
        _, first = np.unique(groups * max(len(self._ns), 1) + places, return_index=True)
        total = self._summed(groups[first], places[first])
        return {
            "device_self_ns": own.select("group", device_self_ns="ns"),
            "device_total_ns": total.select("group", device_total_ns="ns"),
            "num_launched": total.select("group", num_launched="len"),
        }

    def _summed(self, groups: Int64, places: Int64) -> pl.DataFrame:
        rows = pl.DataFrame({"group": groups, "ns": self._ns[places]})
        return rows.group_by("group").agg(pl.col("ns").sum(), pl.len().cast(pl.Int64))

    def _steps_around(self, cpu: pl.DataFrame) -> Int64:
        found = np.full(len(self._call), -1, dtype=np.int64)
        is_step = (cpu["name"] == OUTSIDE).to_numpy()
        for place, around in levels(self._parent, self._call):
            found[place[is_step[around]]] = around[is_step[around]]
        return found


def _ids(column: pl.Series) -> Int64:
    return column.fill_null(-1).to_numpy()
