"""One window of a rank's merged rows as plain lists: the replay walks them row by row."""

from collections import defaultdict
from dataclasses import dataclass

import polars as pl

from chakra_capture.annotations import parse_step
from chakra_capture.trace.merged import MergedTrace

CPU_KINDS = frozenset({"host_op", "annotation", "python_function", "runtime"})
ACTIVITY_KINDS = frozenset({"kernel", "memcpy", "memset"})
# gloo's own threads show each operation from when it is queued until it is done.
GLOO = "gloo:"
Track = tuple[int | None, int | None]
_COLUMNS = (
    *("window", "node_id", "kind", "name", "parent_id", "launch_id", "ts_ns", "dur_ns"),
    *("pid", "tid", "device", "stream", "collective", "phase"),
)


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows by number in the window; times in ns.

    Attributes:
        first: ``node_id`` of row 0.
        parent, launch: numbers of rows, -1 for none.
        start, end: None where the trace has no time.
        track: (pid, tid) of a CPU row, (device, stream) of a device row.
        waits: row -> activities whose end it waits for (``sync``), or whose end its start waits for (``event_wait``).
    """

    first: int
    kind: list[str]
    name: list[str]
    parent: list[int]
    launch: list[int]
    start: list[int | None]
    end: list[int | None]
    track: list[Track]
    is_collective: list[bool]
    sync: dict[int, list[int]]
    event_wait: dict[int, list[int]]
    phase: list[str | None]

    def __len__(self) -> int:
        return len(self.kind)

    @property
    def has_times(self) -> bool:
        """Whether anything that a replay goes by has a time: work of an active thread, or of a device."""
        worked = {"host_op", *ACTIVITY_KINDS}
        return any(kind in worked and self.is_timed(row) for row, kind in enumerate(self.kind))

    def is_timed(self, row: int) -> bool:
        """Whether start and end are known."""
        return self.start[row] is not None and self.end[row] is not None

    def step(self, row: int) -> int | None:
        """Number of the step that a ProfilerStep annotation brackets."""
        return parse_step(self.name[row]) if self.kind[row] == "annotation" else None


def rows_of(trace: MergedTrace, window: int) -> Rows:
    """Read one window of a merged rank."""
    nodes = trace.some_of_nodes(*_COLUMNS).filter(pl.col("window") == window)
    first = int(nodes["node_id"].min() or 0)  # type: ignore[arg-type]
    kind = nodes["kind"].cast(pl.String).to_list()
    start, duration = nodes["ts_ns"].to_list(), nodes["dur_ns"].to_list()
    end = [None if s is None or d is None else s + d for s, d in zip(start, duration, strict=True)]
    pid, tid, device, stream = (nodes[name].to_list() for name in ("pid", "tid", "device", "stream"))
    track = [
        (device[row], stream[row]) if kind[row] in ACTIVITY_KINDS else (pid[row], tid[row]) for row in range(len(kind))
    ]
    waits: dict[str, dict[int, list[int]]] = {"sync": defaultdict(list), "event_wait": defaultdict(list)}
    edges = trace.edges.filter((pl.col("window") == window) & pl.col("kind").is_in(list(waits)))
    for src, dst, why in edges.select("src", "dst", pl.col("kind").cast(pl.String)).iter_rows():
        waits[why][dst - first].append(src - first)
    parent, launch = (
        [-1 if other is None else other - first for other in nodes[key].to_list()] for key in ("parent_id", "launch_id")
    )
    return Rows(
        first,
        kind,
        [name or "" for name in nodes["name"].to_list()],
        parent,
        launch,
        start,
        end,
        track,
        [name is not None for name in nodes["collective"].to_list()],
        waits["sync"],
        waits["event_wait"],
        nodes["phase"].to_list(),
    )
