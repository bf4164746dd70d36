"""Processes and threads of the file: what they are called, in which order they stand, and by which numbers they go."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import polars as pl

from chakra_capture.annotations import STEP_PREFIX
from chakra_capture.export.perfetto.given import HOST
from chakra_capture.export.perfetto.rows import CODE, NO_DEVICE, ROWS_AT_ONCE, Shown
from chakra_capture.export.perfetto.texts import text
from chakra_capture.trace.columns import MISSING, Bool, Int64

RUN_PID = 0
_PARTS = 10
_ENGINE = "autograd::engine::evaluate_function"
# A stream of its own for what waits for a whole device, as Kineto writes it.
_NO_STREAMS = (MISSING, -1, (1 << 32) - 1)


@dataclass(slots=True)
class Numbers:
    """Numbers of processes and threads: equal ones of two hosts never mix.

    Attributes:
        parts: how many processes a rank has room for.
    """

    parts: int = _PARTS
    next_tid: int = 1

    @classmethod
    def of(cls, ranks: list[int], most_devices: int) -> "Numbers":
        """Room for that many devices; threads are numbered beyond all processes, on through the whole file."""
        parts = _PARTS
        while parts <= most_devices:
            parts *= 10
        last = (max(ranks, default=0) + 2) * parts
        return cls(parts, 10 ** len(str(last)) + 1)

    def pid(self, rank: int, part: int) -> int:
        """Process of the host of a rank (part 0), or of one of its devices."""
        return (rank + 1) * self.parts + part

    def tids(self, count: int) -> int:
        """The first of some new threads."""
        first = self.next_tid
        self.next_tid += count
        return first


@dataclass(slots=True)
class Process:
    """A process of the file; tracks come in the order in which they are added."""

    pid: int
    name: str
    labels: str
    numbers: Numbers
    texts: list[str] = field(default_factory=list)
    _order: int = 0

    def __post_init__(self) -> None:
        for kind, value in (
            ("process_name", f'"name":{text(self.name)}'),
            ("process_labels", f'"labels":{text(self.labels)}'),
            ("process_sort_index", f'"sort_index":{self.pid}'),
        ):
            self.texts.append(f'{{"ph":"M","name":"{kind}","pid":{self.pid},"tid":0,"ts":0,"args":{{{value}}}}}')

    def add(self, name: str, num_lanes: int, **origin: int) -> int:
        """Add a track with its lanes, one below the other; gives the first one's thread."""
        first = self.numbers.tids(num_lanes)
        more = "".join(f',"{key}":{value}' for key, value in origin.items())
        for lane in range(num_lanes):
            called = name if lane == 0 else f"{name} ({lane + 1})"
            head = f'{{"ph":"M","pid":{self.pid},"tid":{first + lane},"ts":0,"name":'
            self.texts.append(f'{head}"thread_name","args":{{"name":{text(called)}{more}}}}}')
            self.texts.append(f'{head}"thread_sort_index","args":{{"sort_index":{self._order}}}}}')
            self._order += 1
        return first


@dataclass(frozen=True, slots=True)
class Named:
    """What names tell of the rows of a rank.

    Attributes:
        is_engine: of each row: autograd runs a function of the backward pass in it.
        roles: of each track shown, what it is called; those to stand first have the lowest number.
    """

    is_engine: Bool
    roles: list[tuple[int, str]]


@dataclass(frozen=True, slots=True)
class RankTracks:
    """Where the rows of a rank are shown, and its processes.

    Attributes:
        pid, tid: of each row shown.
        processes: by part, as in ``given``.
        names: of the tracks of rows.
    """

    pid: Int64
    tid: Int64
    names: list[str]
    processes: dict[str | int, Process]

    def texts(self) -> Iterator[str]:
        for process in self.processes.values():
            yield from process.texts


def run_process(numbers: Numbers) -> Process:
    """The process of what concerns all ranks."""
    return Process(RUN_PID, "Run", "all ranks", numbers)


def rank_processes(rank: int, shown: Shown, numbers: Numbers, label: str) -> dict[str | int, Process]:
    """The host of a rank and its devices; their tracks are to be added."""
    rows = shown.rows
    is_host = ~rows.on_device
    pids = sorted({*np.unique(rows.place[is_host & (rows.place != MISSING)]).tolist()})
    labels = ", ".join([*(f"pid {pid}" for pid in pids[:4]), *(["..."] if len(pids) > 4 else []), label])
    found: dict[str | int, Process] = {HOST: Process(numbers.pid(rank, 0), f"rank {rank}: host", labels, numbers)}
    for part, device in enumerate(devices_of(shown)):
        called = "GPU" if device == NO_DEVICE else f"GPU {device}"
        found[device] = Process(
            numbers.pid(rank, part + 1), f"rank {rank}: {called}", f"device {device}, {label}", numbers
        )
    return found


def devices_of(shown: Shown) -> list[int]:
    """The devices that a rank has rows of."""
    return np.unique(shown.rows.place[shown.rows.on_device]).tolist()  # type: ignore[no-any-return]


def add_rows(shown: Shown, named: Named, processes: dict[str | int, Process]) -> RankTracks:
    """Add the tracks of rows to the processes, the most important first."""
    first = np.zeros(len(shown.tracks), dtype=np.int64)
    pids = np.zeros(len(shown.tracks), dtype=np.int64)
    order = sorted(range(len(shown.tracks)), key=lambda at: (named.roles[at][0], shown.tracks[at][1:]))
    for at in order:
        on_device, place, line = shown.tracks[at]
        process = processes[place if on_device else HOST]
        origin = {"device": place, "stream": line} if on_device else {"pid": place, "tid": line}
        known = {key: value for key, value in origin.items() if value != MISSING}
        first[at] = process.add(named.roles[at][1], shown.num_lanes[at], **known)
        pids[at] = process.pid
    names = [
        f"{processes[place if on_device else HOST].name}, {role}"
        for (on_device, place, _), (_, role) in zip(shown.tracks, named.roles, strict=True)
    ]
    return RankTracks(pids[shown.track], first[shown.track] + shown.lane, names, processes)


def name_tracks(shown: Shown) -> Named:
    """Look at the names of a rank, a block at a time."""
    rows, size = shown.rows, len(shown.tracks)
    engine = np.zeros(len(rows), dtype=bool)
    seen = {what: np.zeros(size, dtype=bool) for what in ("step", "engine", "gloo", "loader")}
    groups: dict[int, str] = {}
    track_of = np.full(len(rows), -1, dtype=np.int32)
    track_of[shown.row] = shown.track
    for begin in range(0, len(rows), ROWS_AT_ONCE):
        block = rows.table.slice(begin, ROWS_AT_ONCE)
        table = block.select(
            step=pl.col("name").str.starts_with(STEP_PREFIX),
            engine=pl.col("name").str.starts_with(_ENGINE),
            gloo=pl.col("name").str.starts_with("gloo:"),
            loader=pl.col("name").str.contains("DataLoader", literal=True),
            group=pl.when(pl.col("collective").is_not_null() & (pl.col("kind") == "kernel")).then(
                pl.concat_str(
                    pl.when(pl.col("name").str.contains("(?i)nccl")).then(pl.lit("NCCL")).otherwise(pl.lit("collectives")),
                    pl.coalesce(
                        pl.col("args").str.extract(r'"Process Group Description":"([^"\\]+)"'), "process_group"
                    ),
                    separator=" ", ignore_nulls=True,
                )
            ),
        ).collect()  # fmt: skip
        mine = track_of[begin : begin + ROWS_AT_ONCE]
        engine[begin : begin + ROWS_AT_ONCE] = table["engine"].fill_null(value=False).to_numpy()
        for what, flags in seen.items():
            at = mine[table[what].fill_null(value=False).to_numpy()]
            flags[at[at >= 0]] = True
        some = table["group"].is_not_null().to_numpy()
        for track, group in zip(mine[some].tolist(), table["group"].drop_nulls(), strict=True):
            groups.setdefault(track, group)
    return Named(engine, [_role(shown, at, seen, groups.get(at)) for at in range(size)])


def _role(shown: Shown, at: int, seen: dict[str, Bool], group: str | None) -> tuple[int, str]:
    on_device, place, line = shown.tracks[at]
    if on_device:
        return _stream_role(shown, at, group)
    if line == MISSING:
        return 9, "other" if place == MISSING else f"process {place}"
    main_pids = {shown.tracks[other][1] for other in np.flatnonzero(seen["step"]).tolist()}
    if seen["step"][at] and not seen["engine"][at]:
        return 0, f"main thread {line}"
    if seen["engine"][at]:
        return (0, f"main thread {line}") if seen["step"][at] else (1, f"autograd thread {line}")
    if seen["gloo"][at]:
        return 4, f"gloo thread {line}"
    if main_pids and place not in main_pids:
        return 3, f"loader {place}, thread {line}" if seen["loader"][at] else f"process {place}, thread {line}"
    return 2, f"thread {line}"


def _stream_role(shown: Shown, at: int, group: str | None) -> tuple[int, str]:
    line = shown.tracks[at][2]
    if line in _NO_STREAMS:
        return 9, "whole device"
    kinds = np.unique(shown.rows.kind[shown.row[shown.track == at]]).tolist()
    if group is not None:
        return 1, f"stream {line} {group}"
    if CODE["kernel"] in kinds:
        return 0, f"stream {line} compute"
    return (2, f"stream {line} copies") if {CODE["memcpy"], CODE["memset"]} & {*kinds} else (3, f"stream {line}")
