"""Writing the tables of one rank of a slice, rows numbered anew, and what link.json says of it."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import polars as pl

from chakra_capture import layout
from chakra_capture.errors import TraceFileError
from chakra_capture.merge import intervals
from chakra_capture.merge.many.origin import table_sizes
from chakra_capture.merge.output import rank_folder, write_link, write_table
from chakra_capture.merge.rows import ACTIVITY_KINDS, DEVICE_KINDS
from chakra_capture.merge.slices.counts import counted_columns, recounted
from chakra_capture.merge.slices.kept import Kept
from chakra_capture.trace.schema import EDGES, NODES, STEPS

_ON_CPU = ("host_op", "annotation", "python_function", "runtime")


@dataclass(frozen=True, slots=True)
class Counts:
    """What stayed of a rank, and what went.

    Attributes:
        num_edges_cut: of the edges left out, those with one end that stays.
        num_parents_left_out, num_launches_left_out: rows that stay and whose ``parent_id`` or ``launch_id`` is null
            for that row was left out.
        num_carried: device activities of before that run in what stays.
    """

    num_rows: int
    num_rows_left_out: int
    num_edges: int
    num_edges_left_out: int
    num_edges_cut: int
    num_parents_left_out: int
    num_launches_left_out: int
    num_carried: int


def scan(folder: Path, name: str) -> pl.LazyFrame:
    """One table of a rank, read lazily.

    Raises:
        TraceFileError: there is none, or polars opens no path of that name.
    """
    path = folder / name
    try:
        str(path).encode()
    except UnicodeEncodeError as error:
        raise TraceFileError(f"the name of {path} is not UTF-8, and polars opens no such path. Rename it.") from error
    if not path.is_file():
        raise TraceFileError(f"{path} is not there. Merge this rank again.")
    return pl.scan_parquet(path, glob=False, hive_partitioning=False)


@contextmanager
def readable(folder: Path) -> Iterator[None]:
    """Turn what polars raises of damaged tables into one sentence."""
    try:
        yield
    except pl.exceptions.PolarsError as error:
        said = str(error).strip().partition("\n")[0]
        raise TraceFileError(f"the tables in {folder} cannot be read ({said}). Merge this rank again.") from error


def read_link(folder: Path) -> dict[str, Any]:
    """link.json of a rank.

    Raises:
        TraceFileError: it is no such file.
    """
    path = folder / layout.LINK_FILE
    try:
        link = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
        [(window["window"], window["notes"]) for window in link["windows"]]
    except (OSError, msgspec.DecodeError, KeyError, TypeError) as error:
        raise TraceFileError(f"{path} cannot be read ({error}). Merge this rank again.") from error
    return link


def write_rank(source: Path, out: Path, kept: Kept, said: dict[str, Any], note: str) -> Counts:
    """Write what stays of a rank into a folder of its own.

    Args:
        source: folder of the merged rank.
        out: where the tables go.
        kept: which rows stay.
        said: what link.json says of the slice beside the counts.
        note: the same in a few words, for the notes of each window.

    Raises:
        TraceFileError: the tables cannot be read, or not be written.
    """
    nodes, edges = scan(source, layout.NODES_FILE), scan(source, layout.EDGES_FILE)
    link = read_link(source)
    with readable(source):
        counts = _counts(nodes, edges, kept)
        with rank_folder(out):
            write_table(out / layout.EDGES_FILE, _edges(edges, kept))
            write_table(out / layout.NODES_FILE, _nodes(nodes, kept))
            steps = _steps(scan(source, layout.STEPS_FILE), scan(out, layout.NODES_FILE), kept)
            write_table(out / layout.STEPS_FILE, steps.lazy())
            if (source / layout.COMMUNICATION_FILE).is_file():
                operations = operations_kept(scan(source, layout.COMMUNICATION_FILE), kept)
                write_table(out / layout.COMMUNICATION_FILE, operations)
            if counts.num_carried:
                note += f"; device activities launched before that run in it: {counts.num_carried}"
            write_link(
                out / layout.LINK_FILE,
                {
                    **link,
                    "made_from": None,  # of no traces: a merge into this folder must not take it for its own
                    "slice": {**said, **asdict(counts), "source_node_ids": _runs(kept.ids)},
                    "tables": table_sizes(out),
                    "windows": _windows(link["windows"], out, steps, note),
                },
            )
    return counts


def copy_link(source: Path, out: Path, said: dict[str, Any]) -> Counts:
    """Write link.json of a rank that stays as it is, whose tables are in ``out`` already."""
    link = read_link(source)
    with readable(source):
        sizes = (
            scan(source, name).select(pl.len()).collect().item() for name in (layout.NODES_FILE, layout.EDGES_FILE)
        )
        counts = Counts(next(sizes), 0, next(sizes), 0, 0, 0, 0, 0)
    whole = [[0, counts.num_rows - 1]] if counts.num_rows else []
    link |= {"made_from": None, "slice": {**said, **asdict(counts), "source_node_ids": whole}}
    write_link(out / layout.LINK_FILE, {**link, "tables": table_sizes(out)})
    return counts


def operations_kept(operations: pl.LazyFrame, kept: Kept) -> pl.LazyFrame:
    """Operations whose row stays for what it is; the op that asked for one may have been left out."""
    return operations.filter(kept.is_own("node_id")).with_columns(
        node_id=kept.renumbered("node_id"), host_node_id=kept.renumbered("host_node_id")
    )


def _nodes(nodes: pl.LazyFrame, kept: Kept) -> pl.LazyFrame:
    ids = {name: kept.renumbered(name) for name in ("node_id", "parent_id", "launch_id")}
    return nodes.filter(kept.stays("node_id")).with_columns(**ids).select(*NODES.schema)


def _edges(edges: pl.LazyFrame, kept: Kept) -> pl.LazyFrame:
    both = kept.stays("src") & kept.stays("dst")
    return edges.filter(both).with_columns(src=kept.renumbered("src"), dst=kept.renumbered("dst")).select(*EDGES.schema)


def _counts(nodes: pl.LazyFrame, edges: pl.LazyFrame, kept: Kept) -> Counts:
    lost = (
        (pl.col(name).is_not_null() & kept.renumbered(name).is_null()).sum().alias(name)
        for name in ("parent_id", "launch_id")
    )
    parents, launches = nodes.filter(kept.stays("node_id")).select(*lost).collect(engine="streaming").row(0)
    ends = pl.sum_horizontal(*(kept.stays(name).cast(pl.Int8) for name in ("src", "dst"))).alias("ends")
    of_edges = edges.select(ends).select(pl.len().alias("all"), both=(pl.col("ends") == 2).sum(),
                                         one=(pl.col("ends") == 1).sum())  # fmt: skip
    num_edges, both, one = of_edges.collect(engine="streaming").row(0)
    num_rows = nodes.select(pl.len()).collect().item()
    return Counts(
        num_rows=len(kept.ids),
        num_rows_left_out=num_rows - len(kept.ids),
        num_edges=both,
        num_edges_left_out=num_edges - both,
        num_edges_cut=one,
        num_parents_left_out=parents,
        num_launches_left_out=launches,
        num_carried=len(kept.carried),
    )


def _steps(steps: pl.LazyFrame, nodes: pl.LazyFrame, kept: Kept) -> pl.DataFrame:
    """The steps whose annotation stays, as they were measured; of a slice within a step a row for all of it."""
    found = steps.filter(kept.stays("node_id")).with_columns(node_id=kept.renumbered("node_id")).collect()
    return found if found.height else _whole(nodes)


def _whole(nodes: pl.LazyFrame) -> pl.DataFrame:
    """One row from the first start to the last end; none where nothing has a time."""
    is_cpu, is_activity = pl.col("kind").is_in(_ON_CPU), pl.col("kind").is_in(ACTIVITY_KINDS)
    rows = (
        nodes.filter((is_cpu | pl.col("kind").is_in(DEVICE_KINDS)) & pl.col("dur_ns").is_not_null())
        .filter(pl.col("ts_ns").is_not_null())
        .select("window", "pid", "ts_ns", "dur_ns", "self_dur_ns", is_cpu=is_cpu, is_activity=is_activity)
        .collect(engine="streaming")
    )
    if rows.is_empty():
        return pl.DataFrame(schema=STEPS.schema)
    low, high = rows.select(pl.col("ts_ns").min(), end=(pl.col("ts_ns") + pl.col("dur_ns")).max()).row(0)
    active = rows.filter("is_activity")
    start = active["ts_ns"].to_numpy()
    busy = intervals.total(start, start + active["self_dur_ns"].to_numpy()) if active.height else None
    pids = rows.filter("is_cpu")["pid"].unique().to_list()
    row = {
        "window": rows["window"][0],
        "pid": pids[0] if len(pids) == 1 else None,
        "ts_ns": low,
        "dur_ns": high - low,
        "device_busy_ns": busy,
        "device_idle_ns": None if busy is None else high - low - busy,
        "num_device_activities": None if busy is None else active.height,
        "profiled": True,
    }
    return pl.DataFrame([{name: row.get(name) for name in STEPS.schema}], schema=STEPS.schema)


def _windows(entries: list[dict[str, Any]], out: Path, steps: pl.DataFrame, note: str) -> list[dict[str, Any]]:
    """The entries of the windows that something is left of."""
    rows = counted_columns(scan(out, layout.NODES_FILE))
    edges = scan(out, layout.EDGES_FILE).select("window", "kind").collect(engine="streaming")
    by_window = rows.partition_by("window", as_dict=True)
    found = []
    for entry in entries:
        window = entry["window"]
        if (window,) in by_window:
            numbers = steps.filter(pl.col("window") == window)["step"].drop_nulls().to_list()
            new = recounted(entry, by_window[(window,)], edges.filter(pl.col("window") == window), numbers)
            found.append({**new, "notes": [note, *(each for each in entry["notes"] if each != note)]})
    return found


def _runs(ids: np.ndarray[Any, np.dtype[np.int64]]) -> list[list[int]]:
    """First and last of each run of successive numbers."""
    if not len(ids):
        return []
    last = np.flatnonzero(np.append(np.diff(ids) != 1, True))
    first = np.append(0, last[:-1] + 1)
    return [[int(low), int(high)] for low, high in zip(ids[first], ids[last], strict=True)]
