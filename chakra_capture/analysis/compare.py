"""Two runs side by side: is a step slower, which part of it, on which rank, and is it more than noise?"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from chakra_capture.analysis.batches import Batches, batch_sizes, batches_of
from chakra_capture.analysis.noise import Change, Verdict, compare_runs, compare_series, lowest
from chakra_capture.annotations import BETWEEN_STEPS, PHASE_NAMES
from chakra_capture.trace.phase_records import USUAL, PhaseRecords, Untimed

SCHEMA_VERSION = 1
STEP = "step"
RESIDUAL = "residual"
MEDIAN, LOWEST = "median", "lowest 10th percentile"
# Steps of runs of one program, of which one is a little longer, take as many batches but for this part.
_AS_MANY = 0.01

Float = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class RunSteps:
    """The steps of a run that ran as they always do, in ns.

    Attributes:
        label: what the run is called.
        ranks: by rank the series of each domain: the step, its phases, the residual.
        batches: None where nothing tells.
        batch_size: samples of a batch; None where nothing tells, or not all that were looked at hold as many.
        world_size: ranks of the job; None where nothing tells.
        averages: of a run of which only averages are known (a summary of TraceML's); then there are no series.
        schema_version: of such a summary.
        incomplete: why the run is not whole; None if it is.
    """

    label: str
    ranks: Mapping[int, Mapping[str, Float]]
    batches: Batches | None = None
    world_size: int | None = None
    averages: Mapping[str, float] = field(default_factory=dict)
    schema_version: float | str | None = None
    incomplete: str | None = None
    batch_size: int | None = None

    def series(self, domain: str) -> Float:
        """One series of the run: of each step that all ranks have the slowest one's."""
        found = [series[domain] for series in self.ranks.values() if domain in series]
        if not found:
            return np.zeros(0)
        size = min(len(each) for each in found)
        return np.asarray(np.max([each[:size] for each in found], axis=0), dtype=np.float64)

    @property
    def domains(self) -> list[str]:
        """Domains of any rank, in the order of a step."""
        known = {name for series in self.ranks.values() for name in series} | set(self.averages)
        order = [STEP, *PHASE_NAMES, RESIDUAL]
        return sorted(known, key=lambda name: (order.index(name) if name in order else len(order), name))


@dataclass(frozen=True, slots=True)
class Row:
    """One domain of two sides: its times in ns (per batch where the sides are compared so), and the change."""

    domain: str
    rank: int | None
    first_ns: float | None
    second_ns: float | None
    change: Change

    def as_json(self) -> dict[str, Any]:
        """The same as plain JSON values."""
        values = asdict(self)
        return {**{key: values[key] for key in ("domain", "rank", "first_ns", "second_ns")}, **values["change"]}


@dataclass(frozen=True, slots=True)
class Comparison:
    """What comparing two sides gave.

    Attributes:
        verdict: of the step; inconclusive, with the reason, also where the sides cannot be compared.
        statistic: what the times of the rows are.
        dominant: the part of a step whose time changed most in ns; None without a change.
        rows: the step first, then its parts; then the step of each rank.
        per_batch: the sides have steps of different numbers of batches, so all is per batch.
        per_sample: the sides have batches of different sizes, so all is per sample.
    """

    labels: tuple[str, str]
    verdict: Verdict
    reason: str | None
    change: float | None
    statistic: str
    dominant: str | None
    rows: tuple[Row, ...]
    per_batch: bool
    per_sample: bool
    notes: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        """The same as plain JSON values."""
        return {
            "schema_version": SCHEMA_VERSION,
            "labels": list(self.labels),
            "verdict": str(self.verdict),
            "reason": self.reason,
            "change": self.change,
            "statistic": self.statistic,
            "dominant": self.dominant,
            "per_batch": self.per_batch,
            "per_sample": self.per_sample,
            "rows": [row.as_json() for row in self.rows],
            "notes": list(self.notes),
        }


def run_steps(
    label: str, records: Mapping[int, PhaseRecords], world_size: int | None = None, failed: str | None = None
) -> RunSteps:
    """Gather the series of a run from the phase files of its ranks; ``failed`` is why it ended before its time."""
    found = {rank: _series(each) for rank, each in records.items()}
    killed = [rank for rank, each in records.items() if not each.is_closed]
    missing = next((rank for rank in range(world_size or 0) if rank not in records), None)
    why = None
    if failed is not None:
        why = f"the training failed ({failed})"
    elif killed:
        why = f"rank {killed[0]} did not finish its phases"
    elif missing is not None:
        why = f"rank {missing} of {world_size} is missing"
    return RunSteps(
        label,
        {rank: series for rank, (series, _) in found.items()},
        _of_ranks([batches for _, batches in found.values()]),
        world_size,
        incomplete=why,
        batch_size=_size_of_all([batch_sizes(each.steps) for each in records.values()]),
    )


def _size_of_all(found: Sequence[tuple[int, int] | None]) -> int | None:
    sizes = set(found)
    least, most = next(iter(sizes), None) or (0, 0)
    return least if len(sizes) == 1 and 0 < least == most else None


def _of_ranks(found: Sequence[Batches | None]) -> Batches | None:
    known = [each for each in found if each is not None]
    if len(known) < len(found) or not known:
        return None
    are_even = known[0].are_even and len(set(known)) == 1
    return Batches(sum(each.mean for each in known) / len(known), are_even)


def _series(records: PhaseRecords) -> tuple[dict[str, Float], Batches | None]:
    """The step, its phases and the residual of whole steps that are neither profiled nor the first."""
    steps = records.work.filter(USUAL)
    rows, work = steps["row"], steps["work_ns"].to_numpy().astype(np.float64)
    of_step = ~pl.col("in_gap") & ~pl.col("phase").is_in(BETWEEN_STEPS)
    phases = records.phases.filter(of_step & pl.col("row").is_in(rows.implode()))
    untimed = Untimed(records)
    names = [name for name in phases["phase"].unique().to_list() if not untimed.mask(name, rows).any()]
    timed = {name: _of_phase(phases, rows, name) for name in names}
    residual = {RESIDUAL: work - sum(timed.values())} if timed else {}
    # A phase of the user's own may be called as one of ours.
    return {**timed, STEP: work, **residual}, batches_of(phases, rows)


def _of_phase(phases: pl.DataFrame, rows: pl.Series, name: str) -> Float:
    sums = phases.filter(phase=name).group_by("row").agg(pl.col("dur_ns").sum())
    joined = rows.to_frame().join(sums, on="row", how="left", maintain_order="left")
    return joined["dur_ns"].fill_null(0).to_numpy().astype(np.float64)


def compare(first: Sequence[RunSteps], second: Sequence[RunSteps]) -> Comparison:
    """Compare two sides of one run, or of several runs each."""
    sides = (first, second)
    labels = ", ".join(run.label for run in first), ", ".join(run.label for run in second)
    batches = {run.batches for side in sides for run in side}
    sizes = {run.batch_size for side in sides for run in side}
    is_known = all(each is not None and each.are_even for each in batches)
    per_batch = len(batches) > 1 and is_known
    per_sample = len(sizes) > 1 and None not in sizes and is_known
    scales = [[_scale(run, per_batch=per_batch, per_sample=per_sample) for run in side] for side in sides]
    domains = [name for name in first[0].domains if name in second[0].domains]
    rows = [_row(name, sides, scales) for name in domains]
    refusal = _refusal(sides, batches)
    whole = next((row.change for row in rows if row.domain == STEP), Change(Verdict.inconclusive, None))
    if refusal is None and not rows:
        refusal = "the sides have no step time in common"
    dominant = _dominant(rows) if whole.verdict in (Verdict.slower, Verdict.faster) else None
    return Comparison(
        labels=labels,
        verdict=Verdict.inconclusive if refusal else whole.verdict,
        reason=refusal or whole.reason,
        change=whole.change,
        statistic=LOWEST if _has_several(sides) else MEDIAN,
        dominant=dominant,
        rows=(*rows, *_rank_rows(sides, scales)),
        per_batch=per_batch and not per_sample,
        per_sample=per_sample,
        notes=tuple(_notes(sides)),
    )


def _scale(run: RunSteps, *, per_batch: bool, per_sample: bool) -> float:
    if per_sample and run.batches and run.batch_size:
        return 1.0 / (run.batches.mean * run.batch_size)
    return 1.0 / run.batches.mean if per_batch and run.batches else 1.0


def _row(domain: str, sides: tuple[Sequence[RunSteps], Sequence[RunSteps]], scales: list[list[float]]) -> Row:
    series = [
        [run.series(domain) * scale for run, scale in zip(side, of_side, strict=True)]
        for side, of_side in zip(sides, scales, strict=True)
    ]
    # What is shown is what is judged: medians may move the other way.
    times = [lowest(each) if _has_several(sides) else _median(each) for each in series]
    if any(not any(len(run) for run in side) for side in series):
        times = [times[at] if times[at] is not None else _average(sides[at], domain, scales[at]) for at in (0, 1)]
        return Row(domain, None, times[0], times[1], _of_averages(times[0], times[1]))
    if not times[0] or times[1] is None:
        return Row(domain, None, times[0], times[1], Change(Verdict.inconclusive, None, reason="no time before"))
    return Row(domain, None, times[0], times[1], compare_runs(series[0], series[1]))


def _has_several(sides: tuple[Sequence[RunSteps], Sequence[RunSteps]]) -> bool:
    return any(len(side) > 1 for side in sides)


def _median(runs: list[Float]) -> float | None:
    found = [float(np.median(run)) for run in runs if len(run)]
    return float(np.median(found)) if found else None


def _average(side: Sequence[RunSteps], domain: str, scales: list[float]) -> float | None:
    found = [run.averages[domain] * s for run, s in zip(side, scales, strict=True) if domain in run.averages]
    return float(np.median(found)) if found else None


def _of_averages(first: float | None, second: float | None) -> Change:
    if not first or second is None:
        return Change(Verdict.inconclusive, None, reason="not measured on both sides")
    reason = "averages alone do not tell a change from noise"
    return Change(Verdict.inconclusive, second / first - 1, reason=reason)


def _refusal(sides: tuple[Sequence[RunSteps], Sequence[RunSteps]], batches: set[Batches | None]) -> str | None:
    """Why the sides must not be judged, whatever their times are."""
    sizes = {run.world_size for side in sides for run in side if run.world_size is not None}
    if len(sizes) > 1:
        return f"the world sizes differ: {' and '.join(str(size) for size in sorted(sizes))}"
    incomplete = [f"{run.label}: {run.incomplete}" for side in sides for run in side if run.incomplete]
    if incomplete:
        return incomplete[0]
    known = [each for each in batches if each is not None]
    if known and None in batches:
        return "how many batches a step takes is known of some runs only, and may differ"
    least, most = (bound((each.mean for each in known), default=1.0) for bound in (min, max))
    kinds = {each.are_even for each in known}
    # Of uneven steps medians tell nothing unless both sides mix them alike.
    if False in kinds and (True in kinds or most > (1 + _AS_MANY) * least):
        return f"how many batches a step takes differs within a run and between runs (means {least:.2f} to {most:.2f})"
    samples = {run.batch_size for side in sides for run in side if run.batch_size is not None}
    if len(samples) > 1 and (not known or False in kinds):
        return f"batches hold {' and '.join(map(str, sorted(samples)))} samples, and how many a step takes is not known"
    return None


def _rank_rows(sides: tuple[Sequence[RunSteps], Sequence[RunSteps]], scales: list[list[float]]) -> list[Row]:
    """The step of each rank that both sides have, where there are several."""
    if _has_several(sides):
        return []
    first, second = sides[0][0], sides[1][0]
    common = sorted(set(first.ranks) & set(second.ranks))
    rows = []
    for rank in common if len(common) > 1 else []:
        own = [run.ranks[rank][STEP] * scale[0] for run, scale in zip((first, second), scales, strict=True)]
        rows.append(Row(STEP, rank, _median([own[0]]), _median([own[1]]), compare_series(own[0], own[1])))
    return rows


def _dominant(rows: list[Row]) -> str | None:
    parts = [row for row in rows if row.domain != STEP and row.first_ns is not None and row.second_ns is not None]
    whole = next(row for row in rows if row.domain == STEP)
    sign = 1 if (whole.second_ns or 0) >= (whole.first_ns or 0) else -1
    moved = {row.domain: sign * ((row.second_ns or 0) - (row.first_ns or 0)) for row in parts}
    largest = max(moved, key=lambda name: moved[name], default=None)
    return largest if largest is not None and moved[largest] > 0 else None


def _notes(sides: tuple[Sequence[RunSteps], Sequence[RunSteps]]) -> list[str]:
    only = [set(sides[at][0].domains) - set(sides[1 - at][0].domains) for at in (0, 1)]
    schemas = {str(run.schema_version) for side in sides for run in side if run.schema_version is not None}
    notes = [f"the summaries have different schemas: {' and '.join(sorted(schemas))}"] if len(schemas) > 1 else []
    sizes = {run.batch_size for side in sides for run in side}
    if len(sizes) > 1 and None in sizes:
        notes.append("how many samples a batch holds is known of some runs only, or differs within one")
    return notes + [
        f"measured of {sides[at][0].label} alone: {', '.join(sorted(names))}" for at, names in enumerate(only) if names
    ]
