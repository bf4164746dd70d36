"""One rank to its .et file."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import IO

import numpy as np
import polars as pl

from chakra_capture import layout
from chakra_capture.errors import ChakraCaptureError, TraceFileError
from chakra_capture.export.making.content import Texts, astra_content, full_content
from chakra_capture.export.making.encode import encoded, metadata_record
from chakra_capture.export.making.items import Operations
from chakra_capture.export.making.window import make_window
from chakra_capture.export.validation.node_checks import Profile
from chakra_capture.merge.window import Rows, read_rows
from chakra_capture.trace.columns import MISSING, Int64
from chakra_capture.trace.merged import MergedTrace

_VERSION = "0.0.4"  # of Chakra's schema, which has not changed since


@dataclass(frozen=True, slots=True)
class RankJob:
    """Write one window of a merged rank.

    Attributes:
        operations: its communication, from ``plan_operations``.
        folder: where the file is written.
        need_bytes: about how much memory it takes.
    """

    rank: int
    merged: Path
    window: int
    folder: Path
    profile: Profile
    world_size: int
    operations: pl.DataFrame
    need_bytes: int = 0
    texts: Texts = field(default_factory=Texts)


@dataclass(frozen=True, slots=True)
class RankExport:
    """What was written of a rank, or why nothing was.

    Attributes:
        counts: what was changed or left out, and how often.
        num_edges: dependencies found, by kind.
    """

    rank: int
    path: Path | None = None
    num_nodes: int = 0
    num_bytes: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    num_edges: dict[str, int] = field(default_factory=dict)
    error: str | None = None


def export_rank(job: RankJob) -> RankExport:
    """Write the .et file of one rank; a rank that cannot be written is an answer, too."""
    try:
        return _export(job)
    except (ChakraCaptureError, OSError) as error:
        return RankExport(job.rank, error=str(error))


def _export(job: RankJob) -> RankExport:
    trace = MergedTrace(job.rank, job.merged)
    rows = read_rows(trace, job.window).on_cpu_clock(trace.clock_offsets.get(job.window, 0))
    made = make_window(rows, _operations(job.operations, rows), join=job.profile == Profile.ASTRA)
    if not len(made.nodes):
        raise TraceFileError(
            f"{job.merged} has nothing in window {job.window} that took time: no op, call or device activity with a "
            "start and an end. A host trace alone has no times. Merge it with its device trace."
        )
    if job.profile == Profile.ASTRA:
        content = astra_content(rows, made, job.operations, job.texts)
        made.counts["rows that run nothing of their own, left out"] += _num_silent(rows, made.nodes.row)
    else:
        content = full_content(trace, job.window, rows, made, job.operations, job.texts)
    path = job.folder / layout.et_file_name(job.rank)
    with _whole_or_not(path) as file:
        file.write(metadata_record(_VERSION, _described(job, trace)))
        for data in encoded(content):
            file.write(data)
        num_bytes = file.tell()
    return RankExport(job.rank, path, len(content), num_bytes, +made.counts, made.num_edges)


def _operations(table: pl.DataFrame, rows: Rows) -> Operations:
    ran, asked = (_row_numbers(table[name], rows.first) for name in ("node_id", "host_node_id"))
    return Operations(ran, asked, table["group"].to_numpy(), table["turn"].fill_null(-1).to_numpy())


def _row_numbers(ids: pl.Series, first: int) -> Int64:
    numbers = ids.cast(pl.Int64).fill_null(MISSING).to_numpy()
    return np.where(numbers == MISSING, -1, numbers - first)


def _num_silent(rows: Rows, written: Int64) -> int:
    has = np.zeros(len(rows), dtype=bool)
    has[written[written >= 0]] = True
    return int(np.count_nonzero(~has & ~rows.is_kind("host_op", "annotation", "python_function", "runtime")))


def _described(job: RankJob, trace: MergedTrace) -> dict[str, object]:
    steps = trace.steps.filter(pl.col("window") == job.window)["step"].drop_nulls().sort().to_list()
    described: dict[str, object] = {
        "writer": f"chakra-capture {version('chakra-capture')}",
        "profile": job.profile.value,
        "rank": job.rank,
        "world_size": job.world_size,
        "window": job.window,
    }
    return {**described, "steps": steps} if steps else described


@contextmanager
def _whole_or_not(path: Path) -> Iterator[IO[bytes]]:
    """A file that gets its name when all is written."""
    part = layout.part_path(path)
    part.unlink(missing_ok=True)
    try:
        with part.open("xb") as file:
            yield file
        part.replace(path)
    except BaseException:
        with suppress(OSError):
            part.unlink(missing_ok=True)
        raise
