"""What a run recorded and how good it is: the numbers behind ``summary``."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import polars as pl

from chakra_capture.analysis.communication import communication_summary
from chakra_capture.analysis.device import device_time
from chakra_capture.analysis.diagnosis import Diagnosis, diagnose_series
from chakra_capture.analysis.kernels import kernel_summary
from chakra_capture.analysis.loop import loop_windows
from chakra_capture.analysis.operators import operator_summary
from chakra_capture.analysis.own_times import OwnTimes, own_times
from chakra_capture.analysis.phase_times import mean_phase_times, phase_times
from chakra_capture.analysis.phases import PhaseSummary
from chakra_capture.analysis.rest_parts import mean_rest_parts, rest_parts
from chakra_capture.analysis.run_findings import RunFindings, run_findings
from chakra_capture.analysis.shares import share_of
from chakra_capture.analysis.step_series import StepSeries
from chakra_capture.analysis.steps import step_summary
from chakra_capture.analysis.stragglers import Stragglers, find_stragglers
from chakra_capture.trace.discovery import ManifestHead, Run
from chakra_capture.trace.merged import MergedRun, MergedTrace

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class RankOverview:
    """One rank: what was recorded, linked and measured; None means not measured.

    Attributes:
        host_linked: host ops that are in the device trace too, of ``host_ops``, where both traces are there.
        host_alone: host ops of windows without a device trace.
        unmarked_windows: the windows that mark no step, with their duration and the device's share in it.
        launched: device activities whose launch is in the file, of ``activities``.
    """

    rank: int
    steps: tuple[int, ...]
    step_time: dict[str, Any] | None
    unmarked_windows: tuple[dict[str, Any], ...]
    device: dict[str, Any] | None
    host_ops: int | None
    host_linked: int | None
    host_alone: int
    activities: int | None
    launched: int | None
    salvaged: bool
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Overview:
    """A run in numbers.

    Attributes:
        world_size: as manifests or traces state it, None if neither does.
        operators: operator_summary summed over the ranks shown.
        kernels: kernel_summary summed over the ranks shown.
        recordings: per rank with a manifest, what was asked for and what was recorded.
        phases: per rank with a phase file, the phases of all its steps.
        phase_times: mean over the recorded steps and ranks shown of what phase_times finds.
        rest_parts: mean of what rest_parts finds in the part of these steps that is in no phase.
        communication: communication_summary of the ranks shown; None where their operations were not matched.
        stragglers: which ranks the others wait for; None for one rank, and where nothing was matched.
        diagnosis: of all ranks that recorded phases; None if none did.
        findings: what is wrong, by the phases and the recorded windows together; None without any window.
    """

    job: str
    trace_dir: str
    ranks: tuple[RankOverview, ...]
    world_size: int | None
    operators: pl.DataFrame
    kernels: pl.DataFrame
    recordings: dict[int, dict[str, Any]]
    phases: dict[int, PhaseSummary]
    phase_times: pl.DataFrame
    rest_parts: pl.DataFrame
    communication: pl.DataFrame | None
    stragglers: Stragglers | None
    diagnosis: Diagnosis | None
    findings: RunFindings | None
    notes: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        """The same as plain JSON values."""
        return {
            "schema_version": SCHEMA_VERSION,
            "job": self.job,
            "trace_dir": self.trace_dir,
            "world_size": self.world_size,
            "ranks": [{slot: getattr(rank, slot) for slot in RankOverview.__slots__} for rank in self.ranks],
            "operators": self.operators.to_dicts(),
            "kernels": self.kernels.to_dicts(),
            "recordings": {str(rank): value for rank, value in self.recordings.items()},
            "phases": {str(rank): value.as_json() for rank, value in self.phases.items()},
            "phase_times": self.phase_times.to_dicts(),
            "rest_parts": self.rest_parts.to_dicts(),
            "communication": None if self.communication is None else self.communication.to_dicts(),
            "stragglers": None if self.stragglers is None else self.stragglers.as_json(),
            "diagnosis": None if self.diagnosis is None else self.diagnosis.as_json(),
            "findings": None if self.findings is None else self.findings.as_json(),
            "notes": list(self.notes),
        }


def overview(
    run: Run, traces: list[MergedTrace], phases: dict[int, PhaseSummary], series: Sequence[StepSeries]
) -> Overview:
    """Sum up a run.

    Args:
        run: where it lies; its manifests say what was asked for.
        traces: the merged ranks to show; none, of a run that recorded phases alone.
        phases: of the ranks to show that have any.
        series: the steps of all ranks that have any: what is wrong with one is a question about all of them.
    """
    ranks = tuple(rank_overview(trace) for trace in traces)
    world_size = stated_world_size(run, traces)
    manifests = run.manifests
    recordings = {
        rank: {
            "complete": head.complete,
            "reason": head.reason,
            "detail": head.detail,
            "faults": head.faults,
            "num_steps_asked": _steps_asked(head),
            "windows": [{f: getattr(window, f) for f in window.__struct_fields__} for window in head.windows],
        }
        for rank, head in sorted(manifests.items())
    }
    shown = {trace.rank for trace in traces}
    communication, stragglers = _communication(MergedRun(run.merged_dir), shown) if traces else (None, None)
    has_late = stragglers is not None and bool(stragglers.ranks)
    by_phase = [_by_phase(trace, has_late=has_late) for trace in traces]
    if stragglers is not None:
        own = {trace.rank: own for trace, (_, _, own) in zip(traces, by_phase, strict=True)}
        stragglers = stragglers.located(own, {trace.rank: trace for trace in traces})
    diagnosis = diagnose_series(series, stragglers) if series else None
    operators = _summed([operator_summary(t) for t in traces], ["name"], "self_ns")
    kernels = _summed([kernel_summary(t) for t in traces], ["name", "kind"], "total_ns")
    return Overview(
        job=run.paths.job,
        trace_dir=str(run.paths.trace_dir),
        ranks=ranks,
        world_size=world_size,
        operators=operators,
        kernels=kernels,
        recordings=recordings,
        phases=phases,
        phase_times=mean_phase_times([times for times, _, _ in by_phase]),
        rest_parts=mean_rest_parts([rest for _, rest, _ in by_phase]),
        communication=communication,
        stragglers=stragglers,
        diagnosis=diagnosis,
        findings=_findings(run, traces, series, diagnosis, stragglers) if traces else None,
        notes=tuple(run_notes(run, shown or set(phases), world_size)),
    )


def _findings(
    run: Run,
    traces: Sequence[MergedTrace],
    series: Sequence[StepSeries],
    diagnosis: Diagnosis | None,
    stragglers: Stragglers | None,
) -> RunFindings:
    shared = MergedRun(run.merged_dir)
    return run_findings(traces, shared, series=series, diagnosis=diagnosis, stragglers=stragglers)


def _by_phase(trace: MergedTrace, *, has_late: bool) -> tuple[pl.DataFrame, pl.DataFrame, OwnTimes]:
    """Times of phases, parts of the rest, and times without waiting where collectives say that some rank is late."""
    windows = loop_windows(trace)
    own = own_times(trace, windows) if has_late else OwnTimes()
    return phase_times(trace, windows=windows), rest_parts(trace, windows=windows), own


def _communication(run: MergedRun, shown: set[int]) -> tuple[pl.DataFrame | None, Stragglers | None]:
    """Operations of the ranks shown; who is late is a question about all of them."""
    table = run.collectives
    if table is None:
        return None, None
    doubt = {rank: clock.spread_ns or 0 for rank, clock in run.clocks.items()}
    several = table["rank"].n_unique() > 1
    return communication_summary(table.filter(pl.col("rank").is_in(shown))), (
        find_stragglers(table, doubt) if several else None
    )


def _steps_asked(head: ManifestHead) -> int:
    """Steps that the windows of a manifest ask for, warm-up left out; a window that ran twice counts twice."""
    asked = 0
    plans = Counter((w.start_step, w.end_step, w.warmup_steps, w.active_steps, w.first_step) for w in head.windows)
    times: dict[tuple[int | None, ...], int] = {}
    for (*plan, _), count in plans.items():
        times[tuple(plan)] = max(times.get(tuple(plan), 0), count)
    for (start, end, warmup, active), count in times.items():
        if start is None or end is None or warmup is None or active is None:
            continue
        length = end - start + 1
        whole, rest = divmod(length, warmup + active) if warmup else (0, 0)
        asked += count * (whole * active + max(0, rest - warmup) if warmup else length)
    return asked


def rank_overview(trace: MergedTrace) -> RankOverview:
    """What was recorded of one rank, how it was linked, and what its steps took."""
    windows = trace.link["windows"]
    devices = [w["device"] for w in windows if w["device"]]
    alone = [w["host"] for w in windows if w["host"] and not w["device"]]
    both = [w["host"] for w in windows if w["host"] and w["device"]]
    step_time, device = step_summary(trace), device_time(trace)
    return RankOverview(
        rank=trace.rank,
        steps=tuple(sorted(set(trace.steps["step"].drop_nulls().to_list()))),
        step_time=None if step_time.is_empty() else step_time.row(0, named=True),
        unmarked_windows=tuple(
            trace.steps.filter(pl.col("step").is_null())
            .select("window", "dur_ns", "device_busy_ns", "device_idle_ns")
            .to_dicts()
        ),
        device=None if device.is_empty() else device.row(0, named=True),
        host_ops=sum(h["num_nodes"] - h["num_roots"] for h in both) if both else None,
        host_linked=sum(h["num_linked"] for h in both) if both else None,
        host_alone=sum(h["num_nodes"] - h["num_roots"] for h in alone),
        activities=sum(d["num_activities"] for d in devices) if devices else None,
        launched=sum(d["num_launched"] for d in devices) if devices else None,
        salvaged=any(w["salvaged"] for w in windows),
        notes=tuple(note for w in windows for note in _window_notes(w)),
    )


def _window_notes(window: dict[str, Any]) -> list[str]:
    notes = list(window["notes"])
    pairing, device = window["pairing"], window["device"]
    if pairing and pairing["faults"]:
        notes.append(f"merged by force: {'; '.join(pairing['faults'])}")
    if pairing and pairing["call_order"]:
        notes.append(_order_note(pairing["call_order"]))
    if device and device["orphans"]["launch_not_in_file"]:
        notes.append(f"{device['orphans']['launch_not_in_file']} device activities were launched outside the recording")
    if device and device["tail_lost"]:
        notes.append("the end of the device trace is lost: how long the device was busy or idle is not measured")
    if window["clock_offset_ns"]:
        notes.append(f"device clock is {window['clock_offset_ns']} ns behind the host clock")
    return notes


def _order_note(order: dict[str, int]) -> str:
    note = (
        "no record-function ids in common, so host ops were linked by call order: "
        f"{order['num_matched']} of {order['num_compared']}"
    )
    if order["num_occurrences"] > 1:
        note += f"; the host trace is one of {order['num_occurrences']} equal iterations of the device trace"
    if order["num_sequence_compared"] and not order["num_sequence_equal"]:
        note += "; its sequence numbers are those of another iteration"
    return note


def stated_world_size(run: Run, traces: list[MergedTrace]) -> int | None:
    """How many ranks the run had, as manifests or traces say; None if neither does."""
    stated = [head.world_size for head in run.manifests.values() if head.world_size]
    stated += [w["device"]["world_size"] for t in traces for w in t.link["windows"] if w["device"]]
    sizes = [size for size in stated if size]
    return max(sizes) if sizes else None


def run_notes(run: Run, shown_ranks: set[int], world_size: int | None) -> list[str]:
    """What a reader should know of the run as a whole."""
    notes = []
    missing = sorted(set(range(world_size or 0)) - shown_ranks)
    if missing:
        shown = ", ".join(str(rank) for rank in missing[:8]) + (" ..." if len(missing) > 8 else "")
        notes.append(f"{len(missing)} of {world_size} ranks are missing here: {shown}")
    for rank, head in sorted(run.manifests.items()):
        if head.complete is False:
            notes.append(f"rank {rank}: recording is incomplete ({head.detail or head.reason})")
    if run.other_jobs:
        shown = "newest run shown; others here" if run.is_newest else "other runs here"
        notes.append(f"{shown}: {', '.join(run.other_jobs)} (choose with --job)")
    return notes


def _summed(tables: list[pl.DataFrame], keys: list[str], weight: str) -> pl.DataFrame:
    """Add the tables of several ranks; shares anew from the sums."""
    if not tables:
        return pl.DataFrame()
    table = pl.concat(tables)
    sums = [c for c in table.columns if c not in keys and c not in ("share", "mean_ns")]
    summed = table.group_by(keys).agg(pl.col(c).sum() for c in sums)
    if "mean_ns" in table.columns:
        summed = summed.with_columns(mean_ns=pl.col(weight) / pl.col("count"))
    return (
        summed.with_columns(share=share_of(weight))
        .sort(weight, *keys, descending=[True, *[False] * len(keys)])
        .select(table.columns)
    )
