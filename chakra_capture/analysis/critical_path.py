"""The critical path of each step: what its time consists of, over threads, streams and ranks; it sums to the step.

From the end of a step back over whatever set each point's time in the replay (see ``replay.calibrated``), to the
step's begin. At a collective that ranks met in, the path goes on with the rank that came last.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import polars as pl

from chakra_capture.analysis.replay.calibrated import KINDS, NONE, Calibrated, calibrate
from chakra_capture.analysis.replay.path import Stretch, Walker
from chakra_capture.analysis.replay.replay import RankReplay, replay
from chakra_capture.analysis.replay.rows import ACTIVITY_KINDS
from chakra_capture.analysis.replay.run import windows_of
from chakra_capture.annotations import INPUT_WAIT
from chakra_capture.trace.merged import MergedRun, MergedTrace
from chakra_capture.trace.schema import Column

CATEGORIES = {
    "op": "an operator's or annotation's own time on the CPU",
    "python": "Python between operators: nothing in the trace runs",
    "runtime": "calls of the device's runtime",
    "input": "waiting for, or making, a batch",
    "kernel": "computation on a device",
    "communication": "a collective on the device, or of gloo; met by other ranks: once all have come",
    "memory": "copies and memsets",
    "hand_over": "until another thread goes on with the work",
    "launch_lag": "from the launch call to the start on the device",
    "stream_lag": "between two activities of a stream",
    "sync_lag": "until a call that waited for the device returns",
    "wait_lag": "until what waits for an event, a drained kernel or a free slot of the queue goes on",
    "not_recorded": "before anything was recorded of it: of another rank, or of what a device still had to do",
    "unexplained": "more than such a lag usually takes, or nothing in the trace says what it was that was waited for",
}
_LAGS = {
    "hand_over": "hand_over", "launch": "launch_lag", "stream_order": "stream_lag", "sync": "sync_lag",
    "queue": "wait_lag", "event_wait": "wait_lag", "contention": "wait_lag", "collective": "communication",
    "input": "input", "begin": "unexplained",
}  # fmt: skip
# Lags up to this much over what is usual are as lags vary; as in the replay's own unexplained waits.
_UNEXPLAINED_NS = 50_000

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


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a critical path; parts follow each other without a gap.

    Attributes:
        row: number of the row in its rank's window, -1 for none.
        begin, end: ns on the clock that all ranks share.
    """

    category: str
    on_rank: int | None
    row: int
    name: str | None
    phase: str | None
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Path:
    """The critical path of a step of a rank, first part first; ``step`` None: of all steps."""

    rank: int
    step: int | None
    parts: list[Part]


def critical_path(run: MergedRun, traces: list[MergedTrace]) -> pl.DataFrame:
    """Sum up the critical paths of all steps, longest row of each step first.

    Raises:
        ReplayError: the dependencies of a window go round in a circle.
    """
    rows = []
    for (window, meetings, clocks), ranks in windows_of(run, traces):
        if ranks:
            for path in Paths(calibrate(replay(ranks, meetings, clocks, inputs=True))).all():
                rows += _summed(window, path)
    schema = pl.Schema({column.name: column.dtype for column in SCHEMA})
    order = ["window", "rank", "step", "total_ns", "category", "name", "phase", "on_rank"]
    return pl.DataFrame(rows, schema=schema, orient="row").sort(
        order, descending=[name == "total_ns" for name in order], nulls_last=True
    )


class Paths:
    """Critical paths of a replay whose lags are as recorded."""

    def __init__(self, model: Calibrated) -> None:
        self._model = model
        self._walker, self._namer = Walker(model, model.times, model.lag), _Namer(model)

    def all(self) -> Iterator[Path]:
        """Of every rank: of each step, and of its window."""
        for rank, one in self._model.replay.ranks.items():
            for step, begin, end in step_points(one):
                yield Path(rank, step, self.between(rank, begin, end))
            yield self.whole(rank)

    def whole(self, rank: int) -> Path:
        """Of the window of a rank."""
        points = all_points(self._model.replay.ranks[rank])
        first, last = (choose(points, key=lambda at: self._model.times[at]) for choose in (min, max))
        return Path(rank, None, self.between(rank, first, last))

    def between(self, rank: int, begin: int, end: int) -> list[Part]:
        """What the time between two points of a rank consists of, first part first."""
        found = self._walker.walk(end, int(self._model.times[begin]))
        return [part for stretch in found for part in self._namer.parts(rank, stretch)][::-1]


def step_points(one: RankReplay) -> list[tuple[int, int, int]]:
    """Number, begin and end of the steps of a rank, as points; in time order."""
    rows, threads = one.rows, one.threads
    found = ((row, number) for row in threads.ends if (number := rows.step(row)) is not None)
    steps = [(number, threads.begin_point(rows, row), threads.end_point(rows, row)) for row, number in found]
    return sorted(steps, key=lambda step: (step[1], step[2]))


def all_points(one: RankReplay) -> list[int]:
    """All points of a rank that lie on its window."""
    points = [point for thread in one.threads.of_track.values() for point in thread.points]
    for where in (one.activities, one.gloo):
        points += [*where.starts.values(), *where.ends.values()]
    return points


class _Namer:
    """What the stretches of paths are."""

    def __init__(self, model: Calibrated) -> None:
        self._ranks = [(rank, model.replay.ranks[rank]) for rank in model.ranks]
        self._rank, self._row, self._kind = model.rank.tolist(), model.row.tolist(), model.kind.tolist()
        self._phases = [_Phases(one) for _, one in self._ranks]
        self._dst = model.dst.tolist()
        self._starts = [{*one.activities.starts.values()} for _, one in self._ranks]
        self._rank_of = {point: number for number, (_, one) in enumerate(self._ranks) for point in all_points(one)}

    def parts(self, rank: int, stretch: Stretch) -> Iterator[Part]:
        """What a stretch of a rank's path is, last part first."""
        if stretch.edge == NONE:
            yield self._rootless(rank, stretch)
            return
        number, row, kind = self._rank[stretch.edge], self._row[stretch.edge], KINDS[self._kind[stretch.edge]]
        on_rank, one = self._ranks[number]
        phase = one.rows.phase[row] if row != NONE else self._phases[number].at(self._dst[stretch.edge])
        category = _LAGS.get(kind) or _category(one, row, phase)
        name = one.rows.name[row] if row != NONE else None
        excess = stretch.excess_ns if stretch.excess_ns > _UNEXPLAINED_NS else 0
        cut = stretch.end - excess
        if excess:
            yield Part("unexplained", on_rank, row, name, phase, cut, stretch.end)
        if stretch.begin < cut:
            yield Part(category, on_rank, row, name, phase, stretch.begin, cut)

    def _rootless(self, rank: int, stretch: Stretch) -> Part:
        """What comes before a point that waits for nothing that is known."""
        number = self._rank_of.get(stretch.point)
        on_rank, one = (None, None) if number is None else self._ranks[number]
        is_activity = one is not None and stretch.point in self._starts[number or 0]
        category = "not_recorded" if is_activity or on_rank != rank else "unexplained"
        return Part(category, on_rank, NONE, None, None, stretch.begin, stretch.end)


class _Phases:
    """Phases of time between rows: that of what runs before and after, if it is one."""

    def __init__(self, one: RankReplay) -> None:
        self._place = {
            point: (thread, mark)
            for thread in one.threads.of_track.values()
            for mark, point in enumerate(thread.points)
        }
        self._phase = one.rows.phase

    def at(self, point: int) -> str | None:
        """Phase of the segment that ends at a point."""
        if point not in self._place:
            return None
        thread, mark = self._place[point]
        owners = [thread.owners[at] for at in (mark - 2, mark) if 0 <= at < len(thread.owners)]
        near = {self._phase[owner] if owner != NONE else None for owner in owners}
        return near.pop() if len(near) == 1 else None


def _category(one: RankReplay, row: int, phase: str | None) -> str:
    if row == NONE:
        return "python"
    kind = one.rows.kind[row]
    if one.rows.is_collective[row] and (kind in ACTIVITY_KINDS or row in one.gloo.starts):
        return "communication"
    if row in one.gloo.starts:
        return "communication"
    if kind in ACTIVITY_KINDS:
        return "kernel" if kind == "kernel" else "memory"
    if phase == INPUT_WAIT:
        return "input"
    return "runtime" if kind == "runtime" else "op"


def _summed(window: int, path: Path) -> list[tuple[object, ...]]:
    total: dict[tuple[str, str | None, str | None, int | None], list[int]] = defaultdict(list)
    for part in path.parts:
        name = part.name if part.category != "python" else None
        total[part.category, name, part.phase, part.on_rank].append(part.end - part.begin)
    elapsed = sum(sum(times) for times in total.values())
    return [
        (window, path.rank, path.step, *key, len(times), sum(times), sum(times) / elapsed if elapsed else 0.0)
        for key, times in total.items()
    ]
