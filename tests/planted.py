"""Runs of several ranks whose truth is known: tables of communication from a simulated time line, clocks planted."""

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import polars as pl

from chakra_capture import layout
from chakra_capture.merge.across.alignment import align_run
from chakra_capture.merge.across.outcome import Alignment, RunFacts
from chakra_capture.trace.schema import COMMUNICATION

START = 1_700_000_000_000_000_000
US, MS = 1_000, 1_000_000


def operation(ts: int, dur: int, **columns: Any) -> dict[str, Any]:
    """One row of communication.parquet: an all_reduce of 4 kB unless said otherwise."""
    usual = {
        "window": 0,
        "process_group": "0",
        "collective": "all_reduce",
        "dtype": "float32",
        "comm_bytes": 4096,
        "in_bytes": 4096,
        "out_bytes": 4096,
        "ts_ns": START + ts,
        "dur_ns": dur,
    }
    return usual | columns


def write_ranks(folder: Path, ranks: Mapping[int, Iterable[Mapping[str, Any]]]) -> dict[int, Path]:
    """Write communication.parquet of every rank; rows in order of issue."""
    folders = {}
    for rank, rows in ranks.items():
        folders[rank] = folder / layout.rank_folder_name(rank)
        folders[rank].mkdir(parents=True, exist_ok=True)
        numbered = [{"node_id": at, "host_node_id": None, **row} for at, row in enumerate(rows)]
        table = pl.DataFrame(numbered, schema=COMMUNICATION.schema, orient="row")
        table.write_parquet(folders[rank] / layout.COMMUNICATION_FILE)
    return folders


def align(
    folder: Path, ranks: Mapping[int, Iterable[Mapping[str, Any]]], **facts: Any
) -> tuple[Alignment, pl.DataFrame]:
    """Write the ranks, align them, read the collectives back."""
    alignment = align_run(folder, write_ranks(folder, ranks), RunFacts(**facts))
    return alignment, pl.read_parquet(folder / layout.COLLECTIVES_FILE)


@dataclass(frozen=True, kw_only=True)
class Job:
    """A simulated training: steps of some work and some collectives, each of which all ranks leave together.

    Attributes:
        work_ns: of (rank, step, number of the collective), what a rank does before it arrives.
        transfer_ns: of each collective of a step.
        jitter_ns: ranks leave a collective up to this much apart.
    """

    ranks: int = 4
    steps: int = 20
    transfer_ns: Sequence[int] = (40 * US, 90 * US, 400 * US)
    work_ns: Callable[[int, int, int], int] = lambda rank, step, number: 1 * MS
    jitter_ns: int = 5 * US
    offsets_ns: Mapping[int, int] = field(default_factory=dict)
    drifts_ppm: Mapping[int, float] = field(default_factory=dict)
    seed: int = 0
    columns: Mapping[str, Any] = field(default_factory=dict)

    def true_rows(self) -> dict[int, list[tuple[int, int, int, int]]]:
        """Step, number within the step, arrival and end of every collective, on one clock."""
        chance = random.Random(self.seed)
        now = [chance.randrange(200 * US) for _ in range(self.ranks)]
        rows: dict[int, list[tuple[int, int, int, int]]] = {rank: [] for rank in range(self.ranks)}
        for step in range(self.steps):
            for number, transfer in enumerate(self.transfer_ns):
                arrivals = [
                    now[r] + self.work_ns(r, step, number) + chance.randrange(50 * US) for r in range(self.ranks)
                ]
                for rank, arrival in enumerate(arrivals):
                    now[rank] = max(arrivals) + transfer + chance.randrange(self.jitter_ns + 1)
                    rows[rank].append((step, number, arrival, now[rank]))
        return rows

    def shown(self, rank: int, time: int) -> int:
        """What the clock of the rank shows."""
        drift = self.drifts_ppm.get(rank, 0.0) * 1e-6
        return time + self.offsets_ns.get(rank, 0) + round(time * drift)

    def rows(self) -> dict[int, list[dict[str, Any]]]:
        """Rows of communication.parquet."""
        found = {}
        for rank, rows in self.true_rows().items():
            found[rank] = []
            for step, number, arrival, end in rows:
                ts = self.shown(rank, arrival)
                row = operation(ts, self.shown(rank, end) - ts, step=step, comm_bytes=4096 << number)
                found[rank].append(row | {"group_ranks": list(range(self.ranks))} | self.columns)
        return found
