"""The critical path of each step: what its time consists of, over threads, streams and ranks; it sums to the step.

From the end of a step back over whatever set each point's time in the replay (see ``replay.calibrated``), to the
step's begin. At a collective that ranks met in, the path goes on with the rank that came last.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import polars as pl

from chakra_capture.analysis.replay.calibrated import NONE, Calibrated, calibrate
from chakra_capture.analysis.replay.graph import KINDS
from chakra_capture.analysis.replay.path import Stretches, Walker
from chakra_capture.analysis.replay.replay import RankReplay, replay
from chakra_capture.analysis.replay.run import windows_of
from chakra_capture.annotations import INPUT_WAIT
from chakra_capture.trace.columns import Coded, Int64, pick
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


CATEGORY = pl.Enum([*CATEGORIES])
PARTS: dict[str, pl.DataType | type[pl.DataType]] = {
    "category": CATEGORY,
    "name": pl.String,
    "phase": pl.String,
    "on_rank": pl.Int32,
    "begin_ns": pl.Int64,
    "end_ns": pl.Int64,
}


@dataclass(frozen=True, slots=True)
class Path:
    """The critical path of a step of a rank; ``step`` None: of all steps.

    Attributes:
        coded: its parts, with texts as codes: they take a fraction of the time.
    """

    rank: int
    step: int | None
    coded: pl.DataFrame

    @property
    def parts(self) -> pl.DataFrame:
        """Of ``PARTS``, the first first; they follow each other without a gap."""
        return self.coded.cast({name: PARTS[name] for name in self.coded.columns})


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
        ReplayError: what the points of a path wait for goes round in a circle.
    """

    def __init__(self, model: Calibrated) -> None:
        self._model = model
        self._walker, self._namer = Walker(model, model.times, model.lag), _Namer(model)

    def all(self) -> Iterator[Path]:
        """Of every rank: of each step, and of its window."""
        for rank, one in self._model.replay.ranks.items():
            for step, begin, end in one.steps:
                yield Path(rank, step, self._coded(rank, begin, end))
            yield self.whole(rank)

    def whole(self, rank: int) -> Path:
        """Of the window of a rank."""
        points = self._model.replay.ranks[rank].points
        first, last = (points[choose(self._model.times[points])] for choose in (np.argmin, np.argmax))
        return Path(rank, None, self._coded(rank, int(first), int(last)))

    def between(self, rank: int, begin: int, end: int) -> pl.DataFrame:
        """What the time between two points of a rank consists of; rows of ``PARTS``."""
        return Path(rank, None, self._coded(rank, begin, end)).parts

    def _coded(self, rank: int, begin: int, end: int) -> pl.DataFrame:
        return self._namer.named(rank, self._walker.walk(end, int(self._model.times[begin])))


def _summed(window: int, path: Path) -> pl.DataFrame:
    """Rows of ``SCHEMA``, in no order."""
    total = (pl.col("end_ns") - pl.col("begin_ns")).sum()
    found = path.coded.group_by("category", "name", "phase", "on_rank").agg(count=pl.len(), total_ns=total)
    return found.with_columns(
        window=pl.lit(window), rank=pl.lit(path.rank), step=pl.lit(path.step, dtype=pl.Int64),
        share=pl.col("total_ns") / pl.col("total_ns").sum(),
    )  # fmt: skip


class _Namer:
    """What the stretches of paths are: numbers of texts that all ranks share."""

    def __init__(self, model: Calibrated) -> None:
        self._model = model
        self._names, self._phases = _Texts(), _Texts()
        self._ranks = [_NamedRank(model.replay.ranks[rank], self._names, self._phases) for rank in model.ranks]
        self._of_kind = np.array([_NUMBER[_LAGS[kind]] if kind in _LAGS else _OF_ROW for kind in KINDS])

    def named(self, rank: int, found: Stretches) -> pl.DataFrame:
        """Name the stretches of a rank's path; what is much more than usual becomes a part of its own."""
        excess = np.where(found.excess > _UNEXPLAINED_NS, found.excess, 0)
        category, name, phase, on_rank = self._coded(rank, found)
        cut = found.end - excess
        usual, more = np.flatnonzero(found.begin < cut), np.flatnonzero(excess > 0)
        of = np.append(usual, more)
        category = np.append(category[usual], np.full(len(more), _NUMBER["unexplained"]))
        begin, end = np.append(found.begin[usual], cut[more]), np.append(cut[usual], found.end[more])
        order = np.argsort(begin, kind="stable")
        of = of[order]
        return pl.DataFrame(
            {
                "category": _texts([*CATEGORIES], category[order]),
                "name": _texts(self._names.values, name[of]),
                "phase": _texts(self._phases.values, phase[of]),
                "on_rank": pl.Series(on_rank[of]).set(pl.Series(on_rank[of] == NONE), None).cast(pl.Int32),
                "begin_ns": begin[order],
                "end_ns": end[order],
            }
        )

    def _coded(self, rank: int, found: Stretches) -> tuple[Int64, Int64, Int64, Int64]:
        """Category, name, phase and rank of every stretch, as numbers."""
        model = self._model
        number = pick(model.rank, found.edge, NONE)
        category, name, phase, on_rank = (np.full(len(number), NONE, dtype=np.int64) for _ in range(4))
        for place, one in enumerate(self._ranks):
            mine = np.flatnonzero(number == place)
            if len(mine):
                edge = found.edge[mine]
                row, of_kind = model.row[edge], self._of_kind[model.kind[edge]]
                category[mine] = np.where(of_kind == _OF_ROW, pick(one.category, row, _NUMBER["python"]), of_kind)
                name[mine], phase[mine] = pick(one.name, row, NONE), one.phase_of(row, model.dst[edge])
                on_rank[mine] = model.ranks[place]
        for at in np.flatnonzero(number == NONE).tolist():
            category[at], on_rank[at] = self._rootless(rank, int(found.point[at]))
        return category, name, phase, on_rank

    def _rootless(self, rank: int, point: int) -> tuple[int, int]:
        """Category and rank of what comes before a point that waits for nothing that is known."""
        number = int(self._model.point_rank[point])
        on_rank = NONE if number == NONE else self._model.ranks[number]
        starts = number != NONE and point in self._ranks[number].starts
        return _NUMBER["not_recorded" if starts or on_rank != rank else "unexplained"], on_rank


class _Texts:
    """Texts that several columns share, by number."""

    def __init__(self) -> None:
        self._known: dict[str, int] = {}

    def numbers(self, column: Coded) -> Int64:
        """Number of the text of each row, -1 for none."""
        table = [self._known.setdefault(value, len(self._known)) for value in column.values]
        return np.array([*table, NONE], dtype=np.int64)[column.codes]

    @property
    def values(self) -> list[str]:
        """What the numbers stand for."""
        return [*self._known]


class _NamedRank:
    """Names, phases and categories of the rows of a rank, as numbers."""

    def __init__(self, one: RankReplay, names: _Texts, phases: _Texts) -> None:
        self._one = one
        self.name, self._phase = names.numbers(one.rows.name), phases.numbers(one.rows.phase)

    @cached_property
    def starts(self) -> set[int]:
        """Points where device activities start."""
        return {*self._one.activities.starts.tolist()}

    @cached_property
    def category(self) -> Int64:
        """Category of each row where it runs itself."""
        rows = self._one.rows
        is_gloo = np.zeros(len(rows), dtype=bool)
        is_gloo[self._one.gloo.rows] = True
        chosen = [
            ("communication", (rows.is_collective & rows.is_activity) | is_gloo),
            ("kernel", rows.is_kind("kernel")),
            ("memory", rows.is_activity),
            ("input", rows.phase.mask((INPUT_WAIT,))),
            ("runtime", rows.is_kind("runtime")),
        ]
        found = np.select([mask for _, mask in chosen], [_NUMBER[name] for name, _ in chosen], _NUMBER["op"])
        return np.asarray(found, dtype=np.int64)

    @cached_property
    def _phase_at(self) -> Int64:
        """Of marks of threads the phase of the segment that ends there: that of what runs around it, if it is one."""
        threads = self._one.threads
        # Mark k ends segment k - 1: between the owners of segments k - 2 and k.
        after = np.where(threads.is_segment, pick(self._phase, threads.owners, NONE), _OUTSIDE)
        before, firsts = np.roll(after, 2), threads.first[:-1]
        before[firsts] = _OUTSIDE
        before[np.minimum(firsts + 1, len(before) - 1)] = _OUTSIDE
        before = np.where(before == _OUTSIDE, after, before)
        after = np.where(after == _OUTSIDE, before, after)
        return np.where((before == after) & (before >= 0), before, NONE)

    def phase_of(self, row: Int64, point: Int64) -> Int64:
        """Phase of parts that end at points; ``row`` -1 for nobody's."""
        at = point - self._one.threads.points[0] if len(self._one.threads) else np.full(len(point), NONE)
        is_mark = (row == NONE) & (at >= 0) & (at < len(self._phase_at))
        return np.where(is_mark, pick(self._phase_at, np.where(is_mark, at, NONE), NONE), pick(self._phase, row, NONE))


def _texts(values: list[str], numbers: Int64) -> pl.Series:
    """Texts by their numbers, coded; null for -1."""
    coded = pl.Series([*values, None], dtype=pl.Enum(values))
    return coded.gather(np.where(numbers == NONE, len(values), numbers))
