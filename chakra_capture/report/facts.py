"""What the report is made from: each analysis of a run, computed once."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import polars as pl

from chakra_capture.analysis.communication import communication_statistics
from chakra_capture.analysis.communication_cover import communication_cover
from chakra_capture.analysis.copies import copy_statistics
from chakra_capture.analysis.critical_path import Paths, sum_paths
from chakra_capture.analysis.device import device_breakdown
from chakra_capture.analysis.diagnosis import Diagnosis, diagnose_series, series_of
from chakra_capture.analysis.exposed import exposed_of_kernels
from chakra_capture.analysis.idle import idle_causes
from chakra_capture.analysis.kernels import kernel_statistics
from chakra_capture.analysis.launches import launch_statistics
from chakra_capture.analysis.loop import loop_windows
from chakra_capture.analysis.operator_spread import operator_spread
from chakra_capture.analysis.operators import operator_statistics
from chakra_capture.analysis.overview import RankOverview, rank_overview, run_notes, stated_world_size
from chakra_capture.analysis.own_times import own_times
from chakra_capture.analysis.phase_times import mean_phase_times, phase_times
from chakra_capture.analysis.phases import PhaseSummary, phase_summary
from chakra_capture.analysis.replay.graph import ReplayError
from chakra_capture.analysis.run_findings import RunFindings, run_findings
from chakra_capture.analysis.step_series import StepSeries
from chakra_capture.analysis.step_tables import step_table
from chakra_capture.analysis.stragglers import Stragglers, find_stragglers
from chakra_capture.analysis.what_if.predict import models
from chakra_capture.analysis.what_if.prizes import prizes
from chakra_capture.report.blocks import MOST_ROWS
from chakra_capture.trace.discovery import ManifestHead, Run
from chakra_capture.trace.merged import MergedRun, MergedTrace
from chakra_capture.trace.phase_records import PhaseRecords, read_phases

# Up to so many steps are shown one by one.
MOST_STEP_ROWS = 40
_NO_REPLAY = "It was left out, with --no-replay."


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """What replaying the run gives; None with the reason where it was not or could not be.

    Attributes:
        path: critical paths, of ``critical_path.SCHEMA``.
        prizes: of ``prizes.SCHEMA``.
        no_path, no_prizes: why there are none.
    """

    path: pl.DataFrame | None = None
    prizes: pl.DataFrame | None = None
    no_path: str = _NO_REPLAY
    no_prizes: str = _NO_REPLAY


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Everything the page tells, in tables.

    Attributes:
        steps: of the recorded windows, one by one; rows of windows that mark none have no number.
        phase_means: mean over the steps of the ranks, by phase, on the CPU and on the device.
        phase_rows: the same of each step, with ``rank``.
        device: ``device_breakdown`` of all ranks.
        idle: ``idle_causes`` of all ranks, by step.
        spread: median and longest self time of operators by name; None where a device was recorded.
        communication: None where the operations of ranks were not matched.
        communication_share: part of the steps in which an operation is under way, on any thread or stream.
        phases: of ranks that timed the phases of all steps.
        diagnosis: what these say; ``findings`` has the problems of it, and what recorded windows show.
        history: all whole steps that were timed: ``rank``, ``row``, ``step``, ``work_ns``, ``gap_ns``, ``profiled``,
            ``first``.
        history_parts: their phases, where they are few enough to be shown: ``rank``, ``row``, ``in_gap``, ``phase``,
            ``dur_ns``.
    """

    run: Run
    ranks: tuple[RankOverview, ...]
    links: dict[int, list[dict[str, Any]]]
    clocks: dict[int, int | None]
    world_size: int | None
    manifests: dict[int, ManifestHead]
    notes: tuple[str, ...]
    steps: pl.DataFrame
    phase_means: pl.DataFrame
    phase_rows: pl.DataFrame
    device: pl.DataFrame
    idle: pl.DataFrame
    kernels: pl.DataFrame
    operators: pl.DataFrame
    spread: pl.DataFrame | None
    launches: pl.DataFrame
    copies: pl.DataFrame
    communication: pl.DataFrame | None
    communication_share: float | None
    stragglers: Stragglers | None
    phases: dict[int, PhaseSummary]
    history: pl.DataFrame
    history_parts: pl.DataFrame
    diagnosis: Diagnosis | None
    findings: RunFindings
    replayed: Replayed

    @property
    def has_device(self) -> bool:
        """Whether any activity of a device was recorded."""
        return self.device.height > 0

    @property
    def whole_steps(self) -> pl.DataFrame:
        """The recorded steps that have a number and their whole time."""
        is_step = pl.col("step").is_not_null() & pl.col("dur_ns").is_not_null()
        return self.steps.filter(is_step & ~pl.col("partial").fill_null(value=False))

    @property
    def step_ns(self) -> float | None:
        """Mean time of the steps that phases are known of: what they sum to."""
        return float(self.phase_means["wall_ns"].sum()) if self.phase_means.height else None


def gather(run: Run, ranks: list[int] | None = None, *, replay: bool = True, say: Callable[[str], None]) -> Facts:
    """Look at a run that is merged.

    Args:
        ranks: those to show; default: all.
        replay: replay it, which takes the longest.
        say: told what is going on.
    """
    merged = {rank: folder for rank, folder in run.merged_ranks.items() if ranks is None or rank in ranks}
    traces = [MergedTrace(rank, folder) for rank, folder in merged.items()]
    across = MergedRun(run.merged_dir)
    say("reading the phases of all steps")
    told = _phases(run, ranks)
    say("looking at the recorded steps")
    found = _of_traces(traces)
    say("looking at communication")
    collectives = across.collectives if traces else None
    stragglers = _stragglers(across, collectives, traces)
    if collectives is not None and traces:
        mine = collectives.filter(pl.col("rank").is_in([trace.rank for trace in traces]))
        kernels = pl.concat([exposed_of_kernels(trace) for trace in traces])
        communication = communication_statistics(mine, kernels)
    else:
        communication = None
    say("looking for what is wrong")
    diagnosis = diagnose_series(told.series, stragglers) if told.series else None
    findings = run_findings(traces, across, series=told.series, diagnosis=diagnosis, stragglers=stragglers)
    say("replaying the run")
    world_size = stated_world_size(run, traces) or told.world_size
    return Facts(
        run=run,
        ranks=tuple(rank_overview(trace) for trace in traces),
        links={trace.rank: trace.link["windows"] for trace in traces},
        clocks={rank: clock.spread_ns for rank, clock in across.clocks.items()},
        world_size=world_size,
        manifests=run.manifests,
        notes=tuple(run_notes(run, set(merged) or set(told.summaries), world_size)),
        steps=found.steps,
        phase_means=found.phase_means,
        phase_rows=found.phase_rows,
        device=found.device,
        idle=found.idle,
        kernels=found.kernels,
        operators=found.operators,
        spread=found.spread,
        launches=found.launches,
        copies=found.copies,
        communication=communication,
        communication_share=communication_cover(traces),
        stragglers=stragglers,
        phases=told.summaries,
        history=told.history,
        history_parts=told.parts,
        diagnosis=diagnosis,
        findings=findings,
        replayed=_replayed(across, traces) if replay and traces else Replayed(),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tables:
    """The tables of the recorded windows; see ``Facts``."""

    steps: pl.DataFrame
    phase_means: pl.DataFrame
    phase_rows: pl.DataFrame
    device: pl.DataFrame
    idle: pl.DataFrame
    kernels: pl.DataFrame
    operators: pl.DataFrame
    spread: pl.DataFrame | None
    launches: pl.DataFrame
    copies: pl.DataFrame


def _of_traces(traces: list[MergedTrace]) -> _Tables:
    times = []
    for trace in traces:
        rows = phase_times(trace, windows=loop_windows(trace))
        times.append(rows.with_columns(rank=pl.lit(trace.rank, dtype=pl.Int64)))
    device = pl.concat([device_breakdown(trace) for trace in traces]) if traces else pl.DataFrame()
    operators = operator_statistics(traces)
    names = operators["name"].head(MOST_ROWS).to_list() if operators.height and not device.height else None
    return _Tables(
        steps=step_table(traces),
        phase_means=mean_phase_times([rows.drop("rank") for rows in times]),
        phase_rows=pl.concat(times) if times else pl.DataFrame(),
        device=device,
        idle=idle_causes(traces, by=("step",)),
        kernels=kernel_statistics(traces),
        operators=operators,
        spread=None if names is None else operator_spread(traces, names),
        launches=launch_statistics(traces),
        copies=copy_statistics(traces),
    )


def _stragglers(across: MergedRun, collectives: pl.DataFrame | None, traces: list[MergedTrace]) -> Stragglers | None:
    if collectives is None or collectives["rank"].n_unique() < 2:
        return None
    found = find_stragglers(collectives, {rank: clock.spread_ns or 0 for rank, clock in across.clocks.items()})
    if not found.ranks:
        return found
    own = {trace.rank: own_times(trace, loop_windows(trace)) for trace in traces}
    return found.located(own, {trace.rank: trace for trace in traces})


@dataclass(frozen=True, slots=True, kw_only=True)
class _Told:
    summaries: dict[int, PhaseSummary]
    series: list[StepSeries]
    history: pl.DataFrame
    parts: pl.DataFrame
    world_size: int | None


def _phases(run: Run, ranks: list[int] | None) -> _Told:
    """What the phase files say: who makes others wait is a question about all ranks, what is shown about some."""
    summaries: dict[int, PhaseSummary] = {}
    series, world_size = [], None
    history, parts = [_no_history()], [_no_parts()]
    for rank, file in run.phase_files.items():
        records = read_phases(file)
        world_size = records.world_size or world_size
        series.append(series_of(rank, records, len(run.phase_files)))
        if ranks is None or rank in ranks:
            summaries[rank] = phase_summary(records)
            history.append(_history(rank, records))
            parts.append(_parts(rank, records))
    return _Told(
        summaries=summaries, series=series, history=pl.concat(history), parts=pl.concat(parts), world_size=world_size
    )


def _history(rank: int, records: PhaseRecords) -> pl.DataFrame:
    empty = _no_history()
    return records.work.with_columns(rank=pl.lit(rank)).select(
        pl.col(name).cast(dtype) for name, dtype in empty.schema.items()
    )


def _parts(rank: int, records: PhaseRecords) -> pl.DataFrame:
    if records.steps.height > MOST_STEP_ROWS:
        return _no_parts()
    return records.phases.with_columns(rank=pl.lit(rank)).select(
        pl.col(name).cast(dtype) for name, dtype in _no_parts().schema.items()
    )


def _no_history() -> pl.DataFrame:
    numbers = dict.fromkeys(("rank", "row", "fit", "step", "work_ns", "gap_ns"), pl.Int64)
    return pl.DataFrame(schema={**numbers, "profiled": pl.Boolean, "first": pl.Boolean})


def _no_parts() -> pl.DataFrame:
    return pl.DataFrame(
        schema={"rank": pl.Int64, "row": pl.Int64, "in_gap": pl.Boolean, "phase": pl.String, "dur_ns": pl.Int64}
    )


def _replayed(across: MergedRun, traces: list[MergedTrace]) -> Replayed:
    try:
        windows = list(models(across, traces))
    except ReplayError as error:
        return Replayed(no_path=f"The run cannot be replayed: {error}", no_prizes=f"It cannot be replayed: {error}")
    if not windows:
        why = "Nothing that was recorded has a time: a host trace alone has none."
        return Replayed(no_path=why, no_prizes=why)
    path = sum_paths((one.window, Paths(one.model)) for one in windows)
    bad = [(one.window, rank) for one in windows for rank in one.not_replayable]
    if bad:
        window, score = bad[0]
        why = (
            f"Rank {score.rank} of window {window} cannot be replayed: {100 * score.unexplained_share:.1f} % of it are "
            "waits that nothing in the trace explains, and with more than 5 % nothing is predicted."
        )
        return Replayed(path=path, no_prizes=why)
    return Replayed(path=path, prizes=prizes(windows))
