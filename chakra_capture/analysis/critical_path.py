"""The critical path of each step: what its time consists of, over threads, streams and ranks; it sums to the step.

From the end of a step back over whatever set each point's time in the replay (see ``replay.calibrated``), to the
step's begin. At a collective that ranks met in, the path goes on with the rank that came last.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import polars as pl

from chakra_capture.analysis.path_labels import CATEGORIES, LABEL, Labelled, Labels
from chakra_capture.analysis.replay.calibrated import Calibrated, calibrate
from chakra_capture.analysis.replay.path import Walker
from chakra_capture.analysis.replay.replay import replay
from chakra_capture.analysis.replay.run import windows_of
from chakra_capture.trace.merged import MergedRun, MergedTrace
from chakra_capture.trace.schema import Column

SCHEMA = (
    Column("window", pl.Int32, "recorded window"),
    Column("rank", pl.Int32, "rank whose step it is"),
    Column("step", pl.Int64, "number of the step, as its CPU thread brackets it; null: the whole window, device work "
           "included"),
    Column("category", pl.Enum([*CATEGORIES]), "what the path does; see CATEGORIES"),
    Column("name", pl.String, "operator, call or activity; of a lag what was waiting; null for none"),
    Column("phase", pl.String, "phase of the step that it is in; null: not known"),
    Column("on_rank", pl.Int32, "rank on which it is; null where nothing says that"),
    Column("count", pl.Int64, "parts of the path"),
    Column("total_ns", pl.Int64, "their time; over all rows of a step exactly its duration", "ns"),
    Column("share", pl.Float64, "total_ns as a part of the step"),
)  # fmt: skip


PARTS: dict[str, pl.DataType | type[pl.DataType]] = {
    **LABEL,
    "node_id": pl.Int64,
    "begin_ns": pl.Int64,
    "end_ns": pl.Int64,
}


def critical_path(run: MergedRun, traces: list[MergedTrace]) -> pl.DataFrame:
    """Sum up the critical paths of all steps, longest row of each step first.

    Raises:
        ReplayError: the dependencies of a window go round in a circle.
    """
    windows = windows_of(run, traces)
    return sum_paths(
        (window, Paths(calibrate(replay(ranks, meetings, clocks, inputs=True))))
        for (window, meetings, clocks), ranks in windows
        if ranks
    )


def sum_paths(windows: "Iterable[tuple[int, Paths]]") -> pl.DataFrame:
    """The same of windows that are replayed already."""
    schema = pl.Schema({column.name: column.dtype for column in SCHEMA})
    tables = [pl.DataFrame(schema=schema)]
    for window, paths in windows:
        summed = (_summed(window, path) for path in paths.all())
        tables += [one.select(pl.col(name).cast(dtype) for name, dtype in schema.items()) for one in summed]
    order = ["window", "rank", "step", "total_ns", "category", "name", "phase", "on_rank"]
    return pl.concat(tables).sort(order, descending=[name == "total_ns" for name in order], nulls_last=True)


@dataclass(frozen=True, slots=True)
class Path:
    """The critical path of a step of a rank; ``step`` None: of all steps."""

    rank: int
    step: int | None
    _found: Labelled
    _labels: Labels

    @property
    def parts(self) -> pl.DataFrame:
        """Of ``PARTS``, the first first; they follow each other without a gap.

        ``node_id`` is of the row on ``on_rank`` that a part is named by: what ran, or waited.
        """
        found = self._found
        order = np.argsort(found.begin, kind="stable")
        return self._labels.table.select(pl.all().gather(found.label[order])).with_columns(
            node_id=pl.lit(self._labels.node_ids(found.edge[order])),
            begin_ns=pl.lit(pl.Series(found.begin[order])),
            end_ns=pl.lit(pl.Series(found.end[order])),
        )

    @property
    def sums(self) -> pl.DataFrame:
        """``count`` and ``total_ns`` of the parts of each label, those that come first first."""
        found, num_labels = self._found, self._labels.table.height
        count = np.bincount(found.label, minlength=num_labels)
        # Sums of whole numbers are exact in floating point up to 2**53 ns, a hundred days.
        total = np.bincount(found.label, weights=found.end - found.begin, minlength=num_labels).astype(np.int64)
        first = np.full(num_labels, np.iinfo(np.int64).max)
        np.minimum.at(first, found.label, found.begin)
        seen = np.flatnonzero(count)
        seen = seen[np.argsort(first[seen])]
        return self._labels.table.select(pl.all().gather(seen)).with_columns(
            count=pl.lit(pl.Series(count[seen])), total_ns=pl.lit(pl.Series(total[seen]))
        )


class Paths:
    """Critical paths of a replay whose lags are as recorded."""

    def __init__(self, model: Calibrated) -> None:
        self._model = model
        self._walker, self._labels = Walker(model, model.times, model.lag), Labels(model)

    def all(self) -> Iterator[Path]:
        """Of every rank: of each step, and of its window.

        Raises:
            ReplayError: the dependencies go round in a circle.
        """
        for rank, one in self._model.replay.ranks.items():
            for step, begin, end in one.steps:
                yield self._path(rank, step, begin, end)
            yield self.whole(rank)

    def whole(self, rank: int) -> Path:
        """Of the window of a rank."""
        points = self._model.replay.ranks[rank].points
        first, last = (points[choose(self._model.times[points])] for choose in (np.argmin, np.argmax))
        return self._path(rank, None, int(first), int(last))

    def between(self, rank: int, begin: int, end: int) -> pl.DataFrame:
        """What the time between two points of a rank consists of; rows of ``PARTS``."""
        return self._path(rank, None, begin, end).parts

    def _path(self, rank: int, step: int | None, begin: int, end: int) -> Path:
        found = self._walker.walk(end, int(self._model.times[begin]))
        return Path(rank, step, self._labels.of(rank, found), self._labels)


def _summed(window: int, path: Path) -> pl.DataFrame:
    """Rows of ``SCHEMA``, in no order."""
    return path.sums.with_columns(
        window=pl.lit(window), rank=pl.lit(path.rank), step=pl.lit(path.step, dtype=pl.Int64),
        share=pl.col("total_ns") / pl.col("total_ns").sum(),
    )  # fmt: skip
