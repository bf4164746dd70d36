"""Which op makes a rank late: self times of ops in a phase, held against those of the other ranks.

On the CPU ops count that run on the loop's thread and on autograd's; what communicates and calls that wait for the
device are left out. On the device an op has the kernels and copies that are launched in it. Python is what remains of
annotations; it is not guessed at.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt
import polars as pl

from chakra_capture.analysis.activities import KINDS as ON_DEVICE
from chakra_capture.analysis.ancestry import positions
from chakra_capture.analysis.host_threads import BLOCKING, ENGINE_PREFIX
from chakra_capture.analysis.loop import LoopWindow, is_step
from chakra_capture.annotations import BACKWARD, INPUT_WAIT, PHASE_NAMES

COMMUNICATES = r"^_?(c10d|gloo|nccl|rccl|mpi|ucc|record_param_comms|c10d_functional)(::?|$|_functional::)"
_LOADER = r"^enumerate\(DataLoader\)#.*__next__$"
# An op is named if it takes so much of what the phase takes longer.
_HALF = 0.5
# A path is that of the most time among so many rows of the op, the longest.
_MOST_ROWS = 2000
_KEYS = {"step": pl.Int64, "phase": pl.String, "name": pl.String, "kind": pl.String, "ns": pl.Int64}

Float = npt.NDArray[np.float64]


class Cause(StrEnum):
    """What makes a rank slow in a phase."""

    OP = "an op"
    DEVICE = "an op on the device"
    PYTHON = "in Python"
    LOADER = "in the loader"
    SPREAD = "in no one phase"
    UNKNOWN = "not known"


@dataclass(frozen=True, slots=True)
class LateOp:
    """What explains half of the time by which a rank is slower in a phase.

    Attributes:
        op: None: no one op does.
        op_ns: median over steps of its self time; ``op_others_ns`` the same of the median of the other ranks.
        call_path: ops and annotations around it, the outermost first; of Python the annotation that it is in.
    """

    cause: Cause
    op: str | None = None
    op_ns: float | None = None
    op_others_ns: float | None = None
    call_path: tuple[str, ...] = ()


def own_ops(loop: LoopWindow) -> pl.DataFrame:
    """Self time by step, phase and name; ``kind``: op, python (of annotations) or device."""
    rows = _host_rows(loop)
    named = pl.concat(
        [
            rows.filter(pl.col("op").is_not_null()).select(
                "step", "phase", "self_dur_ns", name="op", kind=pl.lit("op")
            ),
            rows.filter("is_python").select("step", "phase", "self_dur_ns", "name", kind=pl.lit("python")),
            _device_rows(loop).drop("at_id"),
        ]
    )
    table = named.group_by("step", "phase", "name", "kind").agg(ns=pl.col("self_dur_ns").sum())
    return table.select(pl.col(name).cast(dtype) for name, dtype in _KEYS.items())


def no_ops() -> pl.DataFrame:
    """A table of ``own_ops`` without a row."""
    return pl.DataFrame(schema=_KEYS)


def late_op(
    mine: pl.DataFrame, others: Sequence[pl.DataFrame], steps: Sequence[int], phase: str | None, *, on_device: bool,
    excess: float,
) -> LateOp:  # fmt: skip
    """Find the op that takes half of ``excess``, by which a rank is slower in a phase.

    Args:
        mine: ``own_ops`` of the rank.
        others: of the other ranks.
        steps: that all have.
    """
    wanted = pl.col("phase").is_null() if phase is None else pl.col("phase") == phase
    tables = [table.filter(wanted & pl.col("step").is_in(list(steps))) for table in (mine, *others)]
    found = _largest(tables, steps, "device" if on_device else "op", excess)
    if found is not None:
        name, op_ns, others_ns = found
        return LateOp(Cause.DEVICE if on_device else Cause.OP, name, op_ns, others_ns)
    if on_device:
        return LateOp(Cause.UNKNOWN)
    if phase == INPUT_WAIT:
        return LateOp(Cause.LOADER)
    python = _largest(tables, steps, "python", excess)
    around = () if python is None or python[0] in PHASE_NAMES or python[0] == "" else (python[0],)
    return LateOp(Cause.PYTHON, call_path=around)


def call_path(windows: Sequence[LoopWindow], phase: str | None, op: str, *, on_device: bool) -> tuple[str, ...]:
    """The ops and annotations around an op of a phase, the outermost first, where it takes the most time."""
    times: dict[tuple[str, ...], int] = {}
    for loop in windows:
        rows = _device_rows(loop) if on_device else _host_rows(loop).rename({"name": "own", "op": "name"})
        wanted = pl.col("phase").is_null() if phase is None else pl.col("phase") == phase
        mine = rows.filter(wanted & (pl.col("name") == op)).top_k(_MOST_ROWS, by="self_dur_ns")
        nodes = loop.nodes.sort("node_id")
        ids = nodes["node_id"].to_numpy()
        parent = positions(ids, nodes["parent_id"].fill_null(-1).to_numpy())
        at = positions(ids, mine["at_id"].fill_null(-1).to_numpy())
        names = nodes["name"].str.strip_prefix(ENGINE_PREFIX)
        shown = nodes["kind"].is_in(["host_op", "annotation"]) & ~nodes.select(is_step()).to_series()
        shown &= ~nodes["name"].is_in(list(PHASE_NAMES))
        for row, ns in zip(at.tolist(), mine["self_dur_ns"].to_list(), strict=True):
            path: list[str] = []
            around = int(parent[row]) if row >= 0 else -1
            while around >= 0:
                if shown[around] and [names[around]] != path[:1]:
                    path.insert(0, names[around])
                around = int(parent[around])
            key = tuple(path[:-1] if path[-1:] == [op] else path)
            times[key] = times.get(key, 0) + ns
    return max(times, key=lambda path: (times[path], path), default=())


def _host_rows(loop: LoopWindow) -> pl.DataFrame:
    """CPU rows of the loop's and of autograd's threads; ``op``: what each counts to, null for none."""
    nodes, name, kind = loop.nodes, pl.col("name"), pl.col("kind")
    main = nodes.filter(pl.col("node_id").is_in(loop.steps["node_id"].drop_nulls().implode())).select("pid", "tid")
    engine = nodes.filter(name.str.starts_with(ENGINE_PREFIX) & pl.col("pid").is_in(main["pid"].implode()))
    threads = pl.concat([main.unique(), engine.select("pid", "tid").unique()]).unique()
    rows = (
        nodes.filter(kind.is_in(["host_op", "annotation", "runtime", "python_function"]))
        .filter(pl.col("self_dur_ns").is_not_null() & pl.col("step").is_not_null())
        .join(threads, on=["pid", "tid"], how="semi")
        .join(main.unique().with_columns(is_main=True), on=["pid", "tid"], how="left", validate="m:1")
    )
    is_comm = pl.col("collective").is_not_null() | name.str.contains(COMMUNICATES)
    # While autograd works the loop's thread waits for it in a Python function.
    waits = pl.col("is_main").fill_null(value=False) & (pl.col("phase") == BACKWARD).fill_null(value=False)
    is_loader = (kind == "annotation") & name.str.contains(_LOADER)
    is_op = ((kind == "host_op") & ~is_comm) | is_loader | ((kind == "python_function") & ~waits)
    rows = rows.with_columns(
        op=pl.when(is_op).then(name.str.strip_prefix(ENGINE_PREFIX)),
        is_python=(kind == "annotation") & ~is_loader & ~waits & pl.col("collective").is_null(),
        name=pl.when(is_step()).then(pl.lit("")).otherwise(name),
        at_id=pl.col("node_id"),
    )
    # A call counts to the op around it; one that waits for the device is none of the rank's own work.
    around = rows.select(parent_id="node_id", around="op")
    is_call = (kind == "runtime") & ~name.str.contains(BLOCKING)
    return rows.join(around, on="parent_id", how="left", validate="m:1").with_columns(
        op=pl.when(is_call).then(pl.coalesce("around", "name")).otherwise("op"),
        at_id=pl.when(is_call & pl.col("around").is_not_null()).then("parent_id").otherwise("at_id"),
    )


def _device_rows(loop: LoopWindow) -> pl.DataFrame:
    """Kernels and copies that do not communicate, by the op that launched them."""
    names = loop.nodes.select(parent_id="node_id", around=pl.col("name").str.strip_prefix(ENGINE_PREFIX))
    return (
        loop.nodes.filter(pl.col("kind").is_in(ON_DEVICE) & pl.col("collective").is_null())
        .filter(pl.col("self_dur_ns").is_not_null() & pl.col("step").is_not_null())
        .join(names, on="parent_id", how="left", validate="m:1")
        .select("step", "phase", "self_dur_ns", name=pl.coalesce("around", "name"), kind=pl.lit("device"),
                at_id=pl.coalesce("parent_id", "node_id"))
    )  # fmt: skip


def _largest(
    tables: Sequence[pl.DataFrame], steps: Sequence[int], kind: str, excess: float
) -> tuple[str, float, float] | None:
    """Name, own and the others' time of what takes the most of ``excess``, if that is half of it."""
    used = [table.filter(kind=kind) for table in tables]
    names = sorted(used[0]["name"].unique().to_list())
    if not names:
        return None
    mine, *others = (_matrix(table, names, steps) for table in used)
    theirs = np.median(others, axis=0)
    medians = np.median(mine - theirs, axis=1)
    at = int(np.argmax(medians))
    if medians[at] < _HALF * excess:
        return None
    return names[at], float(np.median(mine[at])), float(np.median(theirs[at]))


def _matrix(table: pl.DataFrame, names: Sequence[str], steps: Sequence[int]) -> Float:
    rows: Mapping[str, int] = {name: at for at, name in enumerate(names)}
    columns = {step: at for at, step in enumerate(steps)}
    found = np.zeros((len(names), len(steps)))
    for step, name, ns in table.filter(pl.col("name").is_in(list(names))).select("step", "name", "ns").iter_rows():
        found[rows[name], columns[step]] += ns
    return found
