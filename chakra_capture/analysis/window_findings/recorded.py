"""What the rules look at: the recorded steps of a run and the tables made from them, each made once and only if asked.

Every time is a mean per step and rank over the steps that count: marked, whole, no warm-up, and none that takes three
times as long as others do (the first ones of a training, say).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import polars as pl

from chakra_capture.analysis import idle_gaps, idle_host
from chakra_capture.analysis.activities import device_activities
from chakra_capture.analysis.ancestry import nearest, outermost, positions
from chakra_capture.analysis.exposed import waiting_ops
from chakra_capture.analysis.findings import Prize, written_ms
from chakra_capture.analysis.idle import UNEXPLAINED, idle_pieces
from chakra_capture.analysis.stragglers import Stragglers
from chakra_capture.analysis.what_if.changes import Changes
from chakra_capture.analysis.window_findings.loop_time import loop_pieces
from chakra_capture.analysis.window_findings.replays import Replays
from chakra_capture.trace.columns import Bool, Int64
from chakra_capture.trace.merged import MergedRun, MergedTrace

# A step that takes so many times as long as the median one is not one of those that matter.
_UNUSUAL = 3.0
_UNKNOWN = "less what the profiler adds (unknown: no unprofiled steps)"
_HOST = (
    idle_host.OP, idle_host.BETWEEN, idle_host.IN_ENGINE, idle_host.CALL, idle_gaps.LAUNCHING, idle_gaps.LATENCY,
)  # fmt: skip
_UNIT = ("rank", "window", "step")
_HOST_COLUMNS = ("window", "node_id", "kind", "name", "parent_id", "ts_ns", "dur_ns", "step", "phase", "tid", "pid",
                 "sequence_number")  # fmt: skip


@dataclass(frozen=True, slots=True)
class Pace:
    """Steps outside the profiler: their median time, and how many there are."""

    step_ns: float
    num_steps: int


class Recorded:
    """The recorded windows of some ranks."""

    def __init__(
        self,
        traces: Sequence[MergedTrace],
        run: MergedRun,
        *,
        pace: Pace | None = None,
        stragglers: Stragglers | None = None,
        steps: Sequence[int] | None = None,
    ) -> None:
        """Take what rules look at.

        Args:
            traces: ranks with times.
            run: what they have in common.
            pace: of steps outside the profiler; None where too few were timed.
            stragglers: which ranks the others wait for; None where nothing was matched.
            steps: only these.
        """
        self.traces, self.run, self.pace, self.stragglers = tuple(traces), run, pace, stragglers
        self._steps = steps
        self.replays = Replays(run, self.traces)

    @cached_property
    def units(self) -> pl.DataFrame:
        """The steps that count, of each rank."""
        tables = [
            trace.steps.select(
                pl.lit(trace.rank, dtype=pl.Int64).alias("rank"), "window", "step", "dur_ns", "warmup", "partial",
            )
            for trace in self.traces
        ]  # fmt: skip
        steps = pl.concat(tables).filter(
            pl.col("step").is_not_null(),
            pl.col("dur_ns") > 0,
            ~pl.col("partial").fill_null(value=False),
            ~pl.col("warmup").fill_null(value=False),
        )
        if self._steps is not None:
            steps = steps.filter(pl.col("step").is_in(list(self._steps)))
        # A step that counts does so on all ranks.
        middle = steps.group_by("window", "step").agg(pl.col("dur_ns").median())
        usual = middle.filter(pl.col("dur_ns") < _UNUSUAL * pl.col("dur_ns").median())
        return steps.join(usual.select("window", "step"), on=["window", "step"], how="semi", maintain_order="left")

    @property
    def num_steps(self) -> int:
        """Different steps that count."""
        return self.units.n_unique(["window", "step"])

    @cached_property
    def numbers(self) -> list[int]:
        """Their numbers."""
        return self.units["step"].unique().sort().to_list()

    @cached_property
    def step_ns(self) -> float:
        """Mean time of a step."""
        return float(self.units["dur_ns"].sum()) / max(self.units.height, 1)

    def per_step(self, total_ns: float) -> float:
        """A sum over all steps that count as a mean per step and rank."""
        return total_ns / max(self.units.height, 1)

    def share(self, total_ns: float) -> float:
        """The same as a part of a step."""
        return self.per_step(total_ns) / self.step_ns if self.step_ns else 0.0

    @cached_property
    def has_device(self) -> bool:
        """Something ran on a device, and is not lost in part."""
        return all(trace.num_activities > 0 and not trace.device_tail_lost for trace in self.traces)

    @cached_property
    def is_cpu_only(self) -> bool:
        return all(trace.num_activities == 0 for trace in self.traces)

    @cached_property
    def all_idle(self) -> pl.DataFrame:
        """Pieces of idle time, in steps or not."""
        wanted = ("step", "name", "detail", "phase", "drained_by")
        return pl.concat([idle_pieces(trace, wanted) for trace in self.traces])

    @cached_property
    def idle(self) -> pl.DataFrame:
        """Pieces of idle time of the device in the steps that count."""
        return self.within(self.all_idle)

    @cached_property
    def host_idle(self) -> pl.DataFrame:
        """Of these the time in which the host had nothing queued, and no call that waited for the device was why."""
        return self.idle.filter(pl.col("cause").is_in(_HOST) & pl.col("drained_by").is_null())

    @cached_property
    def loop(self) -> pl.DataFrame:
        """Pieces of the loop's thread in them."""
        return self.within(pl.concat([loop_pieces(trace) for trace in self.traces]))

    def within(self, rows: pl.DataFrame) -> pl.DataFrame:
        """Rows of the steps that count."""
        return rows.join(self.units.select(_UNIT), on=_UNIT, how="semi", maintain_order="left")

    @cached_property
    def idle_ns(self) -> int:
        """Sum of idle time in the steps that count."""
        return int(self.idle["dur_ns"].sum())

    @cached_property
    def unexplained(self) -> float:
        """Part of the idle time for which nothing recorded is a reason."""
        rows = self.idle.filter(pl.col("cause").is_in(UNEXPLAINED))
        return int(rows["dur_ns"].sum()) / self.idle_ns if self.idle_ns else 0.0

    @cached_property
    def linked(self) -> float:
        """Part of the device activities whose launch is in the file."""
        windows = [window["device"] for trace in self.traces for window in trace.link["windows"] if window["device"]]
        total = sum(device["num_activities"] for device in windows)
        return sum(device["num_launched"] for device in windows) / total if total else 1.0

    @cached_property
    def activities(self) -> pl.DataFrame:
        """What the steps that count launched on devices."""
        rows = [
            device_activities(trace, "name", "step", "phase", "parent_id").with_columns(
                rank=pl.lit(trace.rank, dtype=pl.Int64)
            )
            for trace in self.traces
        ]
        return self.within(pl.concat(rows))

    @cached_property
    def compute_ns(self) -> int:
        """Summed time of their kernels that are not communication."""
        return int(self.activities.filter(pl.col("part") == "compute")["self_dur_ns"].sum())

    @cached_property
    def waiting(self) -> pl.DataFrame:
        """Communication that no compute hides, by what waits for it."""
        return waiting_ops(self.traces, steps=self.numbers)

    @cached_property
    def collectives(self) -> pl.DataFrame | None:
        """Communication of the steps that count, but the first of each group in a window: ranks begin apart."""
        table = self.run.collectives
        if table is None:
            return None
        ranks = [trace.rank for trace in self.traces]
        return table.filter(pl.col("step").is_in(self.numbers), pl.col("rank").is_in(ranks), pl.col("order") > 0)

    @cached_property
    def hosts(self) -> "list[HostRows]":
        """The CPU rows of each rank."""
        return [HostRows(trace) for trace in self.traces]

    @property
    def inflation_ns(self) -> float | None:
        """By how much a recorded step is longer than one outside the profiler; None where that is not known."""
        if self.pace is None:
            return None
        return max(0.0, float(np.median(self.units["dur_ns"].to_numpy())) - self.pace.step_ns)

    def at_most(self, total_ns: float, *, of_host: bool = False) -> Prize:
        """What was measured of something, as a prize: it cannot save more.

        Args:
            of_host: CPU time, which the profiler makes longer.
        """
        most = self.per_step(total_ns)
        if not of_host:
            return Prize(least_ns=None, most_ns=most, step_ns=self.step_ns)
        if self.pace is None or self.inflation_ns is None:
            return Prize(least_ns=None, most_ns=most, step_ns=self.step_ns, doubt=_UNKNOWN)
        # All the time that is not the profiler's is the most that any part of it can be.
        whole = self.per_step(self.idle_ns) if self.has_device else self.step_ns
        most = max(0.0, min(most, whole - self.inflation_ns))
        doubt = f"the profiler adds {written_ms(self.inflation_ns)} to a recorded step, perhaps here"
        return Prize(least_ns=None, most_ns=most, step_ns=self.pace.step_ns, doubt=doubt if most else None)

    def less_profiler(self, total_ns: float) -> Prize:
        """The same of CPU time that may be the profiler's first of all: what it adds is taken off."""
        measured = self.at_most(total_ns, of_host=True)
        if self.inflation_ns is None:
            return measured
        most = max(0.0, self.per_step(total_ns) - self.inflation_ns)
        return replace(measured, most_ns=most, doubt="without what the profiler adds")

    def prize(self, changes: Changes | None, total_ns: float, *, of_host: bool = False) -> Prize:
        """By a replay after changes, where one tells and what was measured does not say less."""
        measured = self.at_most(total_ns, of_host=of_host)
        replayed = None if changes is None else self.replays.prize(changes, self.step_ns)
        if replayed is None or replayed.share > measured.share:
            return measured
        return replace(replayed, doubt=measured.doubt)


class HostRows:
    """CPU rows of one rank in order of ``node_id``, with the rows around them."""

    def __init__(self, trace: MergedTrace) -> None:
        rows = trace.some_of_nodes(*_HOST_COLUMNS).filter(
            pl.col("kind").is_in(["host_op", "annotation", "runtime"]) & pl.col("ts_ns").is_not_null()
        )
        self.table = rows.sort("node_id").with_columns(rank=pl.lit(trace.rank, dtype=pl.Int64))
        self.ids = self.table["node_id"].to_numpy()
        self.parent = positions(self.ids, self.table["parent_id"].fill_null(-1).to_numpy())

    def mask(self, rule: pl.Expr) -> Bool:
        """Which rows fit."""
        return self.table.select(rule.fill_null(value=False)).to_series().to_numpy()

    def outer(self, accepted: Bool) -> Int64:
        """The outermost of the accepted rows, each once."""
        rows = np.flatnonzero(accepted)
        return np.asarray(rows[outermost(self.parent, rows, accepted) == rows])

    def is_under(self, rows: Int64, around: Bool) -> Bool:
        """Which of some rows are within an accepted one."""
        return np.asarray(nearest(self.parent, rows, around) >= 0)
