"""The critical path of each step: what its time consists of, over threads, streams and ranks; it sums to the step.

From the end of a step back over whatever set each point's time in the replay (see ``replay.calibrated``), to the
step's begin. At a collective that ranks met in, the path goes on with the rank that came last.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import polars as pl

from chakra_capture.analysis.replay.calibrated import KINDS, NONE, Calibrated, calibrate
from chakra_capture.analysis.replay.path import Stretches, Walker
from chakra_capture.analysis.replay.replay import RankReplay, replay
from chakra_capture.analysis.replay.rows import ACTIVITY_KINDS
from chakra_capture.analysis.replay.run import windows_of
from chakra_capture.annotations import INPUT_WAIT
from chakra_capture.trace.columns import Int64
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
_NUMBER = {name: number for number, name in enumerate(CATEGORIES)}
_OF_ROW = NONE
_OUTSIDE = -2
_NAMED = ("category", "name", "phase", "on_rank", "node_id")
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
class Path:
    """The critical path of a step of a rank; ``step`` None: of all steps.

    Attributes:
        parts: of ``PARTS``, the first first; they follow each other without a gap. ``node_id`` is of the row on
            ``on_rank`` that a part is named by: what ran, or waited.
    """

    rank: int
    step: int | None
    parts: pl.DataFrame


CATEGORY = pl.Enum([*CATEGORIES])
PARTS: dict[str, pl.DataType | type[pl.DataType]] = {
    "category": CATEGORY,
    "name": pl.String,
    "phase": pl.String,
    "on_rank": pl.Int32,
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


class Paths:
    """Critical paths of a replay whose lags are as recorded.

    Raises:
        ReplayError: the dependencies go round in a circle.
    """

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
        points = np.array(all_points(self._model.replay.ranks[rank]))
        first, last = (points[choose(self._model.times[points])] for choose in (np.argmin, np.argmax))
        return Path(rank, None, self.between(rank, int(first), int(last)))

    def between(self, rank: int, begin: int, end: int) -> pl.DataFrame:
        """What the time between two points of a rank consists of; rows of ``PARTS``."""
        return self._namer.named(rank, self._walker.walk(end, int(self._model.times[begin])))


def _summed(window: int, path: Path) -> pl.DataFrame:
    """Rows of ``SCHEMA``, in no order."""
    total = (pl.col("end_ns") - pl.col("begin_ns")).sum()
    found = path.parts.group_by("category", "name", "phase", "on_rank").agg(count=pl.len(), total_ns=total)
    return found.with_columns(
        window=pl.lit(window), rank=pl.lit(path.rank), step=pl.lit(path.step, dtype=pl.Int64),
        share=pl.col("total_ns") / pl.col("total_ns").sum(),
    )  # fmt: skip


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
        self._model = model
        self._ranks = [_NamedRank(model.replay.ranks[rank]) for rank in model.ranks]
        self._of_kind = np.array([_NUMBER[_LAGS[kind]] if kind in _LAGS else _OF_ROW for kind in KINDS])

    def named(self, rank: int, found: Stretches) -> pl.DataFrame:
        """Name the stretches of a rank's path; what is much more than usual becomes a part of its own."""
        excess = np.where(found.excess > _UNEXPLAINED_NS, found.excess, 0)
        cut = found.end - excess
        named = self._named(rank, found)
        usual = named.with_columns(begin_ns=pl.lit(found.begin), end_ns=pl.lit(cut))
        more = named.with_columns(
            category=pl.lit("unexplained", dtype=CATEGORY), begin_ns=pl.lit(cut), end_ns=pl.lit(found.end)
        )
        return (
            pl.concat([usual.filter(found.begin < cut), more.filter(excess > 0)]).sort("begin_ns").select(PARTS.keys())
        )

    def _named(self, rank: int, found: Stretches) -> pl.DataFrame:
        """Category, name, phase and rank of every stretch."""
        model, known = self._model, found.edge != NONE
        edge = np.maximum(found.edge, 0)
        number = np.where(known, model.rank[edge], NONE) if len(model.rank) else np.full(len(edge), NONE)
        tables, places = [], []
        for place, one in enumerate(self._ranks):
            mine = np.flatnonzero(number == place)
            if len(mine):
                edges = edge[mine]
                row = model.row[edges]
                category = self._of_kind[model.kind[edges]]
                category = np.where(category == _OF_ROW, one.category_of(row), category)
                tables.append(one.table(row, category, model.dst[edges], model.ranks[place]))
                places.append(mine)
        rest = np.flatnonzero(number == NONE)
        if len(rest):
            tables.append(self._rootless(rank, found.point[rest]))
            places.append(rest)
        if not tables:
            return pl.DataFrame(schema={name: PARTS[name] for name in _NAMED})
        return pl.concat(tables)[np.argsort(np.concatenate(places))]

    def _rootless(self, rank: int, points: Int64) -> pl.DataFrame:
        """What comes before points that wait for nothing that is known."""
        model = self._model
        rows = []
        for point in points.tolist():
            number = int(model.point_rank[point])
            is_activity = number != NONE and point in self._ranks[number].starts
            on_rank = None if number == NONE else model.ranks[number]
            category = "not_recorded" if is_activity or on_rank != rank else "unexplained"
            rows.append((category, None, None, on_rank, None))
        return pl.DataFrame(rows, schema={name: PARTS[name] for name in _NAMED}, orient="row")


class _NamedRank:
    """Names, phases and categories of the rows of a rank."""

    def __init__(self, one: RankReplay) -> None:
        self._one = one
        self._names, self._row_phases = pl.Series(one.rows.name), pl.Series(one.rows.phase, dtype=pl.String)

    @cached_property
    def starts(self) -> set[int]:
        """Points where device activities start."""
        return {*self._one.activities.starts.values()}

    @cached_property
    def _category(self) -> Int64:
        """Category of each row where it runs itself, as its number."""
        rows, gloo = self._one.rows, self._one.gloo.starts
        kind = np.array(rows.kind)
        is_activity, is_collective = np.isin(kind, [*ACTIVITY_KINDS]), np.array(rows.is_collective, dtype=bool)
        is_gloo = np.zeros(len(rows), dtype=bool)
        is_gloo[[*gloo]] = True
        chosen = [
            ("communication", (is_collective & is_activity) | is_gloo),
            ("kernel", kind == "kernel"),
            ("memory", is_activity),
            ("input", (self._row_phases == INPUT_WAIT).fill_null(value=False).to_numpy()),
            ("runtime", kind == "runtime"),
        ]
        found = np.select([mask for _, mask in chosen], [_NUMBER[name] for name, _ in chosen], _NUMBER["op"])
        return np.asarray(found, dtype=np.int64)

    @cached_property
    def _phase_at(self) -> tuple[Int64, list[str]]:
        """Of points on threads the phase of the segment that ends there: that of what runs around it, if it is one."""
        names = [*dict.fromkeys(phase for phase in self._one.rows.phase if phase is not None)]
        of_name = {name: number for number, name in enumerate(names)}
        of_row = np.array([NONE if phase is None else of_name[phase] for phase in self._one.rows.phase], dtype=np.int64)
        threads = [*self._one.threads.of_track.values()]
        last = max((max(thread.points) for thread in threads), default=-1)
        found = np.full(last + 1, NONE, dtype=np.int64)
        for thread in threads:
            owners = np.asarray(thread.owners, dtype=np.int64)
            phases = np.where(owners == NONE, NONE, of_row[owners])
            # Mark k ends segment k - 1: between the owners of segments k - 2 and k.
            before, after = np.append([_OUTSIDE, _OUTSIDE], phases)[: len(thread.points)], np.append(phases, _OUTSIDE)
            before = np.where(before == _OUTSIDE, after, before)
            after = np.where(after == _OUTSIDE, before, after)
            found[thread.points] = np.where((before == after) & (before >= 0), before, NONE)
        return found, names

    def category_of(self, row: Int64) -> Int64:
        """Category of what runs, as its number; -1 for nobody's row."""
        return np.where(row == NONE, _NUMBER["python"], self._category[row] if len(self._category) else NONE)

    def table(self, row: Int64, category: Int64, point: Int64, rank: int) -> pl.DataFrame:
        """Category, name, phase and rank of parts that end at points; ``row`` -1 for nobody's."""
        at, names = self._phase_at
        is_there = point < len(at)
        between = np.where(is_there, at[np.where(is_there, point, 0)] if len(at) else NONE, NONE)
        rows, phase = _places(row), _places(np.where(row == NONE, between, NONE))
        return pl.DataFrame(
            {
                "category": pl.Series([*CATEGORIES], dtype=CATEGORY).gather(category),
                "name": self._names.gather(rows),
                "phase": self._row_phases.gather(rows).fill_null(pl.Series(names, dtype=pl.String).gather(phase)),
                "on_rank": pl.Series([rank], dtype=pl.Int32).new_from_index(0, len(row)),
                "node_id": rows + self._one.rows.first,
            }
        )


def _places(numbers: Int64) -> pl.Series:
    """Numbers to gather by; null for -1."""
    found = pl.Series(numbers)
    return found.set(found == NONE, None)
