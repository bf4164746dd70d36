"""What the parts of critical paths are: every distinct label once, so that parts are told by its number."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import polars as pl

from chakra_capture.analysis.replay.calibrated import NONE, Calibrated
from chakra_capture.analysis.replay.graph import KINDS
from chakra_capture.analysis.replay.path import Stretches
from chakra_capture.analysis.replay.replay import RankReplay
from chakra_capture.annotations import INPUT_WAIT
from chakra_capture.trace.columns import Int64, Positions, pick

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
CATEGORY = pl.Enum([*CATEGORIES])
LABEL: dict[str, pl.DataType | type[pl.DataType]] = {
    "category": CATEGORY,
    "name": pl.String,
    "phase": pl.String,
    "on_rank": pl.Int32,
}
_LAGS = {
    "hand_over": "hand_over", "launch": "launch_lag", "stream_order": "stream_lag", "sync": "sync_lag",
    "queue": "wait_lag", "event_wait": "wait_lag", "contention": "wait_lag", "collective": "communication",
    "input": "input", "begin": "unexplained",
}  # fmt: skip
_NUMBER = {name: number for number, name in enumerate(CATEGORIES)}
_ROOTLESS = ("not_recorded", "unexplained")
_OF_ROW = NONE
_OUTSIDE = -2
# Lags up to this much over what is usual are as lags vary; as in the replay's own unexplained waits.
_UNEXPLAINED_NS = 50_000


@dataclass(frozen=True, slots=True)
class Labelled:
    """Parts of a path, in no order; times in ns.

    Attributes:
        label: of each, a row of ``Labels.table``.
        edge: why it took its time; -1 where nothing says that.
    """

    label: Positions
    edge: Positions
    begin: Int64
    end: Int64


class Labels:
    """Labels of all that a path through a replay may consist of."""

    def __init__(self, model: Calibrated) -> None:
        self._model = model
        ranks = [_RankLabels(model, number) for number in range(len(model.ranks))]
        first = np.cumsum([0, *(len(one.key) for one in ranks)]).tolist()
        self._of_edge = np.full(len(model.src), NONE, dtype=np.int32)
        for one, before in zip(ranks, first[:-1], strict=True):
            self._of_edge[one.edges] = one.of_edge + before
        of_no_rank = pl.DataFrame({"category": [*_ROOTLESS]}, schema={"category": CATEGORY})
        self.table = pl.concat([*(one.table for one in ranks), of_no_rank], how="diagonal").cast(pl.Schema(LABEL))
        # By label the one of what takes more time than usual.
        more = [one.with_category("unexplained", one.key) + before for one, before in zip(ranks, first, strict=False)]
        self._more = np.concatenate([*more, np.arange(first[-1], self.table.height)])
        # By rank the labels of what comes before a point that waits for nothing that is known.
        nameless = np.zeros(1, dtype=np.int64)
        self._rootless: dict[int | None, dict[str, int]] = {
            None: {name: first[-1] + at for at, name in enumerate(_ROOTLESS)}
        } | {
            rank: {name: int(one.with_category(name, nameless)[0]) + before for name in _ROOTLESS}
            for rank, one, before in zip(model.ranks, ranks, first, strict=False)
        }

    def of(self, rank: int, found: Stretches) -> Labelled:
        """Label the stretches of a rank's path; what is much more than usual becomes a part of its own."""
        label = pick(self._of_edge, found.edge, NONE)
        for at in np.flatnonzero(found.edge == NONE).tolist():
            label[at] = self._before(rank, int(found.point[at]))
        is_more = found.excess > _UNEXPLAINED_NS
        more, cut = found.lags[is_more], found.end.copy()
        cut[more] -= found.excess[is_more]
        usual = found.begin < cut
        return Labelled(
            np.append(label[usual], self._more[label[more]]),
            np.append(found.edge[usual], found.edge[more]),
            np.append(found.begin[usual], cut[more]),
            np.append(cut[usual], found.end[more]),
        )

    def node_ids(self, edge: Positions) -> pl.Series:
        """Of edges the row of nodes, of the rank that they are on, that runs or waits there; null for none."""
        model = self._model
        firsts = np.array([model.replay.ranks[rank].rows.first for rank in model.ranks] or [0], dtype=np.int64)
        row = pick(model.row, edge, NONE).astype(np.int64)
        found = pl.Series(row + firsts[np.maximum(pick(model.rank, edge, NONE), 0)])
        return found.set(pl.Series(row == NONE), None)

    def _before(self, rank: int, point: int) -> int:
        """The label of what comes before a point that waits for nothing that is known."""
        number = int(self._model.point_rank[point])
        on_rank = None if number == NONE else self._model.ranks[number]
        starts = on_rank is not None and point in self._starts[on_rank]
        return self._rootless[on_rank]["not_recorded" if starts or on_rank != rank else "unexplained"]

    @cached_property
    def _starts(self) -> dict[int, set[int]]:
        """By rank, points where device activities start."""
        return {rank: {*one.activities.starts.tolist()} for rank, one in self._model.replay.ranks.items()}


class _RankLabels:
    """Labels of the edges of a rank.

    Attributes:
        edges: of this rank.
        of_edge: of each of them the number of its label.
        key: of each label, what it is put together from.
    """

    def __init__(self, model: Calibrated, number: int) -> None:
        self._one, self._rank = model.replay.ranks[model.ranks[number]], model.ranks[number]
        self._num_phases = len(self._one.rows.phase.values) + 1
        mine = model.rank == number
        self.edges = slice(None) if mine.all() else np.flatnonzero(mine)
        row, kind = model.row[self.edges], model.kind[self.edges]
        of_lag = [_NUMBER[_LAGS[name]] if name in _LAGS else _OF_ROW for name in KINDS]
        of_kind = np.array(of_lag, dtype=np.int8)[kind]
        category = np.where(of_kind == _OF_ROW, pick(self._category, row, _NUMBER["python"]), of_kind)
        key = pick(self._one.rows.name.codes.astype(np.int32), row, NONE)
        # No int64: these are as many as the edges, and memory that is touched is what takes the time.
        key = (key + 1) * np.int32(self._num_phases) + self._phase_of(row, model.dst[self.edges]) + 1
        key = key * np.int32(len(CATEGORIES)) + category
        is_used = np.zeros((int(key.max(initial=0)) // len(CATEGORIES) + 1, len(CATEGORIES)), dtype=bool)
        is_used.reshape(-1)[key] = True
        is_used[is_used.any(axis=1), _NUMBER["unexplained"]] = True
        is_used[0, [_NUMBER[name] for name in _ROOTLESS]] = True
        self.key = np.flatnonzero(is_used)
        self._label = (np.cumsum(is_used) - 1).astype(np.int32)
        self.of_edge = self._label[key]

    def with_category(self, category: str, key: Int64) -> Positions:
        """Labels that are as others, but of another category."""
        return self._label[key // len(CATEGORIES) * len(CATEGORIES) + _NUMBER[category]]

    @property
    def table(self) -> pl.DataFrame:
        """Rows of ``LABEL``."""
        rows, (rest, category) = self._one.rows, np.divmod(self.key, len(CATEGORIES))
        name, phase = np.divmod(rest, self._num_phases)
        return pl.DataFrame(
            {
                "category": pl.Series([*CATEGORIES], dtype=CATEGORY).gather(category),
                "name": pl.Series([None, *rows.name.values], dtype=pl.String).gather(name),
                "phase": pl.Series([None, *rows.phase.values], dtype=pl.String).gather(phase),
                "on_rank": pl.Series([self._rank], dtype=pl.Int32).new_from_index(0, len(name)),
            }
        )

    @property
    def _category(self) -> npt.NDArray[np.int8]:
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
        return found.astype(np.int8)

    def _phase_of(self, row: Positions, point: Positions) -> Positions:
        """Phase of what ends at points; ``row`` -1 for nobody's."""
        of_row, threads = self._one.rows.phase.codes.astype(np.int32), self._one.threads
        found, nobody = pick(of_row, row, NONE), np.flatnonzero(row == NONE)
        if len(threads):
            mark = point[nobody] - threads.points[0]
            is_mark = (mark >= 0) & (mark < len(threads.points))
            found[nobody[is_mark]] = _phase_at(self._one, of_row)[mark[is_mark]]
        return found


def _phase_at(one: RankReplay, of_row: Positions) -> Positions:
    """Of marks of threads the phase of the segment that ends there: that of what runs around it, if it is one."""
    threads = one.threads
    # Mark k ends segment k - 1: between the owners of segments k - 2 and k.
    after = np.where(threads.is_segment, pick(of_row, threads.owners, NONE), np.int32(_OUTSIDE))
    before, firsts = np.roll(after, 2), threads.first[:-1]
    before[firsts] = _OUTSIDE
    before[np.minimum(firsts + 1, len(before) - 1)] = _OUTSIDE
    before = np.where(before == _OUTSIDE, after, before)
    after = np.where(after == _OUTSIDE, before, after)
    return np.where((before == after) & (before >= 0), before, np.int32(NONE))
