"""Reading merged tables back: one rank as lazy-loaded frames, for analyses and reports."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import polars as pl

from chakra_capture import layout
from chakra_capture.errors import TraceFileError


@dataclass(frozen=True)
class MergedTrace:
    """The merged tables of one rank; each is read when first asked for."""

    rank: int
    folder: Path

    @cached_property
    def nodes(self) -> pl.DataFrame:
        return self._read(layout.NODES_FILE)

    def some_of_nodes(self, *columns: str) -> pl.DataFrame:
        """Some columns of nodes, read anew: those of text can take more memory than all others."""
        return _read_table(self.folder / layout.NODES_FILE, columns)

    def rows_of(self, kinds: Sequence[str], *columns: str) -> pl.DataFrame:
        """Some columns of the rows of some kinds, read anew: texts of the other rows are never in memory at once."""
        return _read_table(self.folder / layout.NODES_FILE, columns, pl.col("kind").is_in(list(kinds)))

    @cached_property
    def edges(self) -> pl.DataFrame:
        return self._read(layout.EDGES_FILE)

    def edges_of(self, *kinds: str) -> pl.DataFrame:
        """Edges of some kinds, read anew: most edges are the order of threads, of which few ask."""
        path = self.folder / layout.EDGES_FILE
        try:
            with path.open("rb") as file:
                return pl.scan_parquet(file).filter(pl.col("kind").is_in(kinds)).collect()
        except (OSError, pl.exceptions.PolarsError) as error:
            raise _unreadable(path, error) from error

    @cached_property
    def steps(self) -> pl.DataFrame:
        return self._read(layout.STEPS_FILE)

    @cached_property
    def communication(self) -> pl.DataFrame:
        return self._read(layout.COMMUNICATION_FILE)

    @cached_property
    def link(self) -> dict[str, Any]:
        """link.json as written by merge."""
        path = self.folder / layout.LINK_FILE
        try:
            loaded = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
        except (OSError, msgspec.DecodeError) as error:
            raise _unreadable(path, error) from error
        return loaded

    @property
    def device_tail_lost(self) -> bool:
        """The end of a device trace is lost, so how long the device was busy or idle is not known."""
        devices = [window["device"] for window in self.link["windows"]]
        return any(device is not None and device["tail_lost"] for device in devices)

    @property
    def num_activities(self) -> int:
        """Device activities that were read; 0 where no device trace was."""
        return sum(window["device"]["num_activities"] for window in self.link["windows"] if window["device"])

    @property
    def clock_offsets(self) -> dict[int, int]:
        """By window, what the times of the device lag behind those of the host, ns."""
        return {window["window"]: window["clock_offset_ns"] for window in self.link["windows"]}

    @property
    def device_activities(self) -> pl.DataFrame:
        """Rows of kernels, copies and memsets that have a time."""
        is_activity = pl.col("kind").is_in(["kernel", "memcpy", "memset"])
        return self.nodes.filter(is_activity & pl.col("ts_ns").is_not_null() & pl.col("dur_ns").is_not_null())

    def _read(self, name: str) -> pl.DataFrame:
        return _read_table(self.folder / name)


@dataclass(frozen=True)
class MergedRun:
    """The tables that a run has across its ranks; None where they have not been made."""

    folder: Path

    @cached_property
    def collectives(self) -> pl.DataFrame | None:
        path = self.folder / layout.COLLECTIVES_FILE
        return _read_table(path) if path.is_file() else None

    @cached_property
    def clocks(self) -> dict[int, "RankClock"]:
        """How well the clock of each rank is known."""
        path = self.folder / layout.ALIGNMENT_FILE
        try:
            return msgspec.json.decode(path.read_bytes(), type=_Alignment).clocks if path.is_file() else {}
        except (OSError, msgspec.DecodeError) as error:
            raise TraceFileError(f"{path} cannot be read ({error}). Merge the run again.") from error


class RankClock(msgspec.Struct):
    """What of a clock in alignment.json the analyses need; see ``merge.clocks.Clock``."""

    offset_ns: int | None = None
    spread_ns: int | None = None
    reason: str | None = None


class _Alignment(msgspec.Struct):
    clocks: dict[int, RankClock] = {}


def _read_table(path: Path, columns: Sequence[str] | None = None, which: pl.Expr | None = None) -> pl.DataFrame:
    try:
        with path.open("rb") as file:  # polars takes no path that is not valid UTF-8
            if which is not None:
                return pl.scan_parquet(file).filter(which).select(*(columns or ())).collect()
            return pl.read_parquet(file, columns=None if columns is None else list(columns))
    except (OSError, pl.exceptions.PolarsError) as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: Exception) -> TraceFileError:
    return TraceFileError(f"{path} cannot be read ({error}). Merge this rank again.")
