"""The merged tables of one rank as this export reads them: narrow columns whole, wide ones by ranges of rows."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import polars as pl

from chakra_capture import layout
from chakra_capture.trace.columns import MISSING, Bool, Int64
from chakra_capture.trace.merged import MergedTrace
from chakra_capture.trace.schema import KINDS

CODE = {name: number for number, name in enumerate(KINDS)}
ACTIVITIES = ("kernel", "memcpy", "memset")
Hide = Callable[[pl.DataFrame], pl.DataFrame]
# Ranges of rows that are nearer to each other are read as one: they may stand in one group of rows of the file.
_NEAR = 1 << 13


@dataclass(frozen=True, slots=True)
class RankTables:
    """Tables of one rank, none of them read yet.

    Attributes:
        hide: makes other rows of nodes of those that are read, as many and in the same order; None: as they are.
    """

    rank: int
    nodes: pl.LazyFrame
    edges: pl.LazyFrame
    communication: pl.LazyFrame
    hide: Hide | None = None

    @classmethod
    def of(cls, trace: MergedTrace, hide: Hide | None = None) -> "RankTables":
        """Tables as they are on the disk."""
        names = (layout.NODES_FILE, layout.EDGES_FILE, layout.COMMUNICATION_FILE)
        nodes, edges, communication = (pl.scan_parquet(trace.folder / name, glob=False) for name in names)
        return cls(trace.rank, nodes, edges, communication, hide)

    def windows(self) -> "Iterator[WindowTables]":
        """The recorded windows."""
        found = (
            self.nodes.select("window")
            .with_row_index("row")
            .group_by("window")
            .agg(first=pl.col("row").min(), rows=pl.len())
            .sort("window")
            .collect()
        )
        for window, first, rows in found.iter_rows():
            yield WindowTables(self, window, first, rows)


@dataclass(frozen=True)
class WindowTables:
    """One window: rows ``first`` to ``first + num_rows`` of nodes; a row is a position among them, -1 for none."""

    tables: RankTables
    window: int
    first: int
    num_rows: int

    @cached_property
    def node_id(self) -> Int64:
        return self.integers("node_id")

    @cached_property
    def kind(self) -> "np.typing.NDArray[np.uint8]":
        column = self._all.select(pl.col("kind").to_physical().cast(pl.UInt8)).collect().to_series()
        return column.to_numpy()

    @cached_property
    def track(self) -> "Tracks":
        pid, tid = self.integers("pid"), self.integers("tid")
        begins = np.flatnonzero(np.append(True, (pid[1:] != pid[:-1]) | (tid[1:] != tid[:-1]))) if len(pid) else pid
        numbers: dict[tuple[int, int], int] = {}
        pairs = zip(pid[begins].tolist(), tid[begins].tolist(), strict=True)
        codes = np.array([numbers.setdefault(pair, len(numbers)) for pair in pairs], dtype=np.int32)
        return Tracks(np.repeat(codes, np.diff(np.append(begins, len(pid)))), tuple(numbers))

    def is_kind(self, *kinds: str) -> Bool:
        """Say of each row whether it is of one of these kinds."""
        return np.isin(self.kind, [CODE[kind] for kind in kinds])

    def integers(self, name: str) -> Int64:
        """One column of all rows, ``MISSING`` for null."""
        return self._all.select(pl.col(name).fill_null(MISSING)).collect().to_series().to_numpy()

    def rows_of(self, name: str) -> "np.typing.NDArray[np.int32]":
        """A column of node_ids as rows."""
        return self.rows(self.integers(name)).astype(np.int32)

    def rows(self, node_ids: Int64) -> Int64:
        """Rows of nodes; -1 for those of which there is none."""
        ids = self.node_id
        if not len(ids):
            return np.full(len(node_ids), -1)
        if ids[-1] - ids[0] == len(ids) - 1:  # numbered on, as merge does
            rows = np.where(node_ids == MISSING, -1, node_ids - ids[0])
            return np.where((rows >= 0) & (rows < len(ids)), rows, -1)
        at = np.minimum(np.searchsorted(ids, node_ids), len(ids) - 1)
        return np.where(ids[at] == node_ids, at, -1)

    def edges(self, kind: str) -> tuple[Int64, Int64]:
        """Source and destination rows of the edges of one kind."""
        chosen = (pl.col("window") == self.window) & (pl.col("kind") == kind)
        found = self.tables.edges.filter(chosen).select("src", "dst").collect()
        src, dst = (self.rows(found[side].to_numpy()) for side in ("src", "dst"))
        both = (src >= 0) & (dst >= 0)
        return src[both], dst[both]

    def read(self, rows: Int64, columns: Sequence[str]) -> pl.DataFrame:
        """Columns of these rows, in their order; what lies between them is read only where it is near."""
        ordered = np.unique(rows)
        parts, places = [], np.zeros(len(ordered), dtype=np.int64)
        count = 0
        breaks = np.flatnonzero(np.diff(ordered) > _NEAR) + 1
        for run in np.split(np.arange(len(ordered)), breaks):
            if not len(run):
                continue
            begin, end = int(ordered[run[0]]), int(ordered[run[-1]]) + 1
            part = self.tables.nodes.slice(self.first + begin, end - begin).select(columns).collect()
            chosen = part[ordered[run] - begin]
            parts.append(self.tables.hide(chosen) if self.tables.hide else chosen)
            places[run] = count + np.arange(len(run))
            count += len(run)
        if not parts:
            return self.tables.nodes.select(columns).head(0).collect()
        return pl.concat(parts)[places[np.searchsorted(ordered, rows)]]

    @property
    def _all(self) -> pl.LazyFrame:
        return self.tables.nodes.slice(self.first, self.num_rows)


@dataclass(frozen=True, slots=True)
class Tracks:
    """Number of the (pid, tid) of each row, and what they are; ``MISSING`` for null."""

    code: "np.typing.NDArray[np.int32]"
    pairs: tuple[tuple[int, int], ...]
