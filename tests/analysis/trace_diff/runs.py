"""Recorded steps made by hand: calls in calls, of round lengths, as the tables that merge writes."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import polars as pl

from chakra_capture import layout
from chakra_capture.analysis.trace_diff.diff import RankDifference, RunDifference, compare_recorded
from chakra_capture.trace.merged import MergedRun, MergedTrace
from chakra_capture.trace.schema import COMMUNICATION, NODES, STEPS

PID, MAIN, WORKER = 7, 1, 2
START, BETWEEN = 1_000, 100


@dataclass(frozen=True)
class Call:
    """A call that takes ``own`` ns after ``before`` ns in which nothing runs, and what is inside in between."""

    name: str
    own: int = 10
    inside: tuple["Call", ...] = ()
    kind: str = "host_op"
    shapes: str | None = None
    before: int = 0
    phase: str | None = None
    kernels: tuple[tuple[str, int], ...] = ()

    @property
    def dur(self) -> int:
        return self.own + sum(each.before + each.dur for each in self.inside)


def op(name: str, own: int = 10, *inside: Call, **more: Any) -> Call:
    return Call(name, own, inside, **more)


def label(name: str, own: int = 10, *inside: Call, **more: Any) -> Call:
    return Call(name, own, inside, kind="annotation", **more)


def phase(name: str, own: int, *inside: Call, **more: Any) -> Call:
    """A phase as the recording marks it; what is inside is in it."""
    return Call(name, own, inside, kind="annotation", phase=name, **more)


@dataclass
class _Rows:
    rows: list[dict[str, Any]] = field(default_factory=list)

    def add(self, **columns: Any) -> int:
        self.rows.append({"node_id": len(self.rows), "window": 0, "pid": PID, "repaired": False, **columns})
        return len(self.rows) - 1

    def call(self, call: Call, at: int, parent: int | None, step: int | None, tid: int, phase: str | None) -> int:
        """Enter a call that begins at a time; returns its end."""
        phase = call.phase or phase
        me = self.add(
            kind=call.kind, name=call.name, ts_ns=at, dur_ns=call.dur, self_dur_ns=call.own, parent_id=parent, tid=tid,
            step=step, phase=phase, input_shapes=call.shapes,
        )  # fmt: skip
        now = at
        for name, dur in call.kernels:
            self.add(
                kind="kernel", name=name, ts_ns=now, dur_ns=dur, self_dur_ns=dur, parent_id=me, launch_id=me, step=step,
                phase=phase, device=0, stream=1, tid=None,
            )  # fmt: skip
            now += dur
        now = at
        for each in call.inside:
            now = self.call(each, now + each.before, me, step, tid, phase)
        return at + call.dur


def recorded(
    folder: Path,
    steps: Sequence[Sequence[Call]],
    *,
    worker: Sequence[Sequence[Call]] = (),
    rank: int = 0,
    first: int = 0,
    is_marked: bool = True,
    operations: Sequence[dict[str, Any]] = (),
) -> MergedTrace:
    """A rank that recorded steps; ``worker`` is what a thread of autograd does in each, from its start on."""
    rows, table, now = _Rows(), [], START
    for number, calls in enumerate(steps, first):
        step = number if is_marked else None
        whole = Call(f"ProfilerStep#{number}", 5, tuple(calls), kind="annotation")
        node = len(rows.rows)
        if is_marked:
            rows.call(whole, now, None, step, MAIN, None)
        else:
            inside = now
            for each in calls:
                inside = rows.call(each, inside + each.before, None, step, MAIN, None)
        beside = now
        for each in worker[number - first] if worker else ():
            beside = rows.call(each, beside + each.before, None, step, WORKER, "backward")
        busy = any(each.get("kind") == "kernel" for each in rows.rows)
        table.append(
            {"window": 0, "step": step, "node_id": node if is_marked else None, "pid": PID, "ts_ns": now,
             "dur_ns": whole.dur, "profiled": True, "device_busy_ns": 0 if busy else None}
        )  # fmt: skip
        now += whole.dur + BETWEEN
    out = folder / layout.rank_folder_name(rank)
    out.mkdir(parents=True)
    num = sum(row["kind"] == "kernel" for row in rows.rows)
    link = {"windows": [{"window": 0, "clock_offset_ns": 0, "device": {"num_activities": num, "tail_lost": False}}]}
    pl.DataFrame(rows.rows, schema=NODES.schema, orient="row").write_parquet(out / layout.NODES_FILE)
    pl.DataFrame(table, schema=STEPS.schema, orient="row").write_parquet(out / layout.STEPS_FILE)
    issued = [{"window": 0, "node_id": 10_000 + at, **each} for at, each in enumerate(operations)]
    pl.DataFrame(issued, schema=COMMUNICATION.schema, orient="row").write_parquet(out / layout.COMMUNICATION_FILE)
    (out / layout.LINK_FILE).write_text(json.dumps(link))
    return MergedTrace(rank, out)


def compared(*sides: MergedTrace | Sequence[MergedTrace]) -> RunDifference:
    """Compare two sides, of one rank or several."""
    ranks = [[side] if isinstance(side, MergedTrace) else side for side in sides]
    first, second = ({each.rank: each for each in side} for side in ranks)
    runs = MergedRun(ranks[0][0].folder.parent), MergedRun(ranks[1][0].folder.parent)
    return compare_recorded(first, second, runs)


def worst(*sides: MergedTrace) -> RankDifference:
    found = compared(*sides).worst
    assert found is not None
    return found


def told(each: RankDifference, *columns: str, table: str = "ops", all: bool = False) -> list[tuple[Any, ...]]:
    """Columns of the rows that differ, largest difference first."""
    rows = each.tables[table]
    return (rows if all else rows.filter(rows["exact_difference"] != 0)).select(columns).rows()


def sums(each: RankDifference) -> Iterator[int]:
    """What each split of the step's difference sums to."""
    phases = each.tables["phases"]
    yield each.tables["ops"]["exact_difference"].sum()
    for is_loop in (True, False):
        part = phases.filter((phases["part"] == "loop") == is_loop)
        if part.height:
            yield part["exact_difference"].sum()
