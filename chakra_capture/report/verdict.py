"""What is wrong, in one sentence that anybody understands; four figures and one bar below it."""

from collections.abc import Sequence
from dataclasses import dataclass

import polars as pl
from markupsafe import Markup

from chakra_capture.analysis.findings import Finding, Severity
from chakra_capture.annotations import INPUT_WAIT
from chakra_capture.report.charts import Segment, stack
from chakra_capture.report.facts import Facts
from chakra_capture.report.quality import Quality, Word
from chakra_capture.report.scope import (
    COMMUNICATION,
    COMPUTE,
    DEVICE_PARTS,
    IDLE,
    Scope,
    device_parts,
    idle_by_cause,
    in_order,
    loop_parts,
    phase_tone,
    phase_word,
)
from chakra_capture.report.words import (
    DASH,
    NOT_RECORDED,
    Prose,
    count_of,
    plain,
    share,
    share_of,
    span,
    unit_for,
)

_MUCH, _BUSY, _COMPUTES = 0.10, 0.85, 0.90
# Steps of one kind of work that differ by so much are unsteady.
_UNSTEADY = 1.5
# Of so many steps the shortest and the longest are chance.
_FEWEST, _MANY = 3, 20


@dataclass(frozen=True, slots=True)
class Figure:
    """One of the four numbers."""

    value: str
    label: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """The head of the page."""

    headline: str
    text: Prose
    figures: tuple[Figure, ...]
    bar: Markup | None
    bar_note: str


def verdict(facts: Facts, scope: Scope, quality: Quality, found: Sequence[Finding]) -> Verdict:
    """Say what is wrong with a run."""
    headline, text = _said(facts, scope, quality, found)
    bar, note = _bar(facts, scope)
    return Verdict(headline, text, _figures(facts, scope), bar, note)


def input_wait_ns(facts: Facts, scope: Scope) -> tuple[float | None, float | None]:
    """Mean wait for input of a step and its share: of all steps where phases were timed, else of the recorded ones."""
    told = [
        (row["mean_ns"], summary.step_mean_ns)
        for summary in facts.phases.values()
        for row in summary.table.filter((pl.col("phase") == INPUT_WAIT) & (pl.col("place") == "step")).iter_rows(
            named=True
        )
        if row["mean_ns"] is not None and summary.step_mean_ns
    ]
    if told:
        waits, steps = (sum(values) / len(told) for values in zip(*told, strict=True))
        return waits, waits / steps
    known = facts.whole_steps.filter(pl.col("input_wait_ns").is_not_null()) if facts.steps.height else None
    if known is not None and known.height:
        waits = float(known["input_wait_ns"].sum()) / known.height
        return waits, waits * known.height / float(known["dur_ns"].sum())
    # What the loader marks; without such a mark nobody knows.
    marked = facts.phase_means.filter(pl.col("phase") == INPUT_WAIT) if facts.phase_means.height else None
    if marked is not None and marked.height and scope.total_ns:
        waits = float(marked["wall_ns"][0])
        return waits, waits / scope.total_ns
    return None, None


def communication_share(facts: Facts, scope: Scope) -> float | None:
    """Part of a step: of a device's what no compute hides; without a device the time in operations, on any thread."""
    if facts.communication is None or facts.communication.is_empty():
        return None
    parts = device_parts(facts, scope)
    if parts is None:
        return facts.communication_share
    total = sum(parts.values())
    return parts[COMMUNICATION] / total if total else None


def _said(facts: Facts, scope: Scope, quality: Quality, found: Sequence[Finding]) -> tuple[str, Prose]:
    if quality.word == Word.POOR:
        why = "; ".join(f"{check.name}: {check.result}" for check in quality.checks if check.word == Word.POOR)
        return "Not enough of the run was recorded for a verdict.", plain(f"{why[0].upper()}{why[1:]}.")
    for rule in (_straggler, _by_input, _by_finding, _by_device, _by_steps):
        said = rule(facts, scope, found)
        if said is not None:
            return said
    return _on_cpu(facts, scope)


def _straggler(facts: Facts, scope: Scope, found: Sequence[Finding]) -> tuple[str, Prose] | None:
    late = facts.stragglers
    if late is None or not late.ranks:
        return None
    rank = late.ranks[0]
    row = late.table.row(by_predicate=pl.col("rank") == rank, named=True)
    noun = "steps" if late.has_steps else "stretches"
    where = late.late_in.get(rank)
    place = f", in {where.phase}" if where is not None and where.phase else ""
    head = (
        f"Rank {rank} is late in {row['num_latest']} of {row['num_steps']} {noun}; the other ranks wait "
        f"{span(row['delay_ns'])} for it{place}."
    )
    return head, plain(f"That is {share(row['share'])} of a step. Making any other rank faster will not help.")


def _by_input(facts: Facts, scope: Scope, found: Sequence[Finding]) -> tuple[str, Prose] | None:
    waits, part = input_wait_ns(facts, scope)
    if waits is None or part is None or part < _MUCH:
        return None
    idle = next((cause for cause in idle_by_cause(facts, scope) if cause.is_input), None)
    text = "While it waits the loop does nothing else."
    if facts.has_device:
        text = (
            f"The GPU is idle for {span(idle.ns)} of a {scope.noun} meanwhile."
            if idle is not None
            else "The GPU has work left for all of that time, so the step would hardly get shorter."
        )
        if idle is None:
            return None
    return f"Every step waits {span(waits)} ({share(part)}) for the next batch.", plain(text)


def _by_finding(facts: Facts, scope: Scope, found: Sequence[Finding]) -> tuple[str, Prose] | None:
    """What the phases of all steps say, where it is bad and the GPU's times have no better word for it."""
    bad = [each for each in found if each.severity == Severity.crit or each.kind == "STEPS_SLOW_DOWN"]
    return (bad[0].summary, plain(bad[0].action)) if bad and not facts.has_device else None


def _by_device(facts: Facts, scope: Scope, found: Sequence[Finding]) -> tuple[str, Prose] | None:
    parts = device_parts(facts, scope)
    if parts is None or not (total := sum(parts.values())):
        return None
    shares = {name: ns / total for name, ns in parts.items()}
    takes = f"One step takes {span(total)}."
    if not scope.is_step:
        takes = f"From the GPU's first activity to its last it takes {span(total)}."
    takes += f" The GPU computes for {span(parts[COMPUTE])} of it."
    if shares[COMPUTE] >= _COMPUTES:
        kernels = facts.kernels
        half = int((kernels["total_ns"].cum_sum() < kernels["total_ns"].sum() / 2).sum()) + 1
        most = f"; {count_of(half, 'kernel')} take{'s' if half == 1 else ''} half of it" if kernels.height else ""
        return f"The GPU computes {share(shares[COMPUTE])} of the {scope.noun}{most}.", plain(takes)
    if shares[COMMUNICATION] >= max(_MUCH, shares[IDLE]):
        head = f"{share(shares[COMMUNICATION])} of the {scope.noun} is communication that nothing hides."
        return head, plain(takes)
    if 1 - shares[IDLE] >= _BUSY:
        return f"Nothing stands out: the GPU is busy {share(1 - shares[IDLE])} of the {scope.noun}.", plain(takes)
    causes = idle_by_cause(facts, scope)
    of_cpu = sum(cause.ns for cause in causes if cause.of_cpu)
    head = f"The GPU is idle {share(shares[IDLE])} of the {scope.noun}"
    if causes and of_cpu >= parts[IDLE] / 2:
        text = f"{takes} Making kernels faster will not help before the host side is fixed."
        return f"{head} because the CPU cannot issue work fast enough.", plain(text)
    if causes and not causes[0].name.startswith("unexplained"):
        part = share(causes[0].ns / parts[IDLE])
        return f"{head}, most of it for one reason: {causes[0].name}.", plain(f"{takes} That reason is {part} of it.")
    return f"{head}.", plain(takes)


def _by_steps(facts: Facts, scope: Scope, found: Sequence[Finding]) -> tuple[str, Prose] | None:
    if facts.has_device:
        return None
    usual = facts.history.filter(~pl.col("profiled") & ~pl.col("first"))["work_ns"]
    steps = facts.whole_steps["dur_ns"] if facts.steps.height else usual
    times = usual if len(usual) else steps
    if len(times) < _FEWEST:
        return None
    whole = len(times) < _MANY
    least, most = (_float(times.quantile(part, "nearest")) for part in ((0.0, 1.0) if whole else (0.1, 0.9)))
    if most < _UNSTEADY * least:
        return None
    unit = unit_for([most], 0)
    ranks = ", on all ranks together" if len(facts.ranks or facts.phases) > 1 else ""
    which = "" if whole else "8 of 10 take "
    head = f"Steps are unsteady: {which}{unit.cell(least)} to {unit.text(most)} for the same work{ranks}."
    return head, plain(f"No GPU was recorded, so all times are CPU times. {_largest(facts, scope)}")


def _on_cpu(facts: Facts, scope: Scope) -> tuple[str, Prose]:
    if facts.has_device or scope.total_ns is None:
        if not facts.phases:
            return "Not enough of the run was recorded for a verdict.", plain("Nothing that was recorded has a time.")
        diagnosis = facts.diagnosis
        said = None if diagnosis is None else diagnosis.step_time[0]
        if said is not None and said.kind in ("BALANCED", "COMPUTE_BOUND"):
            return f"Nothing stands out: {said.summary[0].lower()}{said.summary[1:]}", plain(said.action)
        text = "Only the phases of steps were recorded: which operators and kernels take the time is not known."
        return (said.summary if said is not None else "Only the phases of steps are known."), plain(text)
    return "No GPU was recorded, so all times are CPU times.", plain(_largest(facts, scope))


def _largest(facts: Facts, scope: Scope) -> str:
    """The phase that takes most of a step, and the operator."""
    said = []
    phases = facts.phase_means.filter(pl.col("phase").is_not_null()) if facts.phase_means.height else None
    if phases is not None and phases.height and scope.total_ns:
        most = phases.sort("wall_ns", descending=True).row(0, named=True)
        said.append(f"Most of a step is {phase_word(most['phase'])}: {span(most['wall_ns'])}, "
                    f"{share_of(most['wall_ns'], scope.total_ns)}.")  # fmt: skip
    if facts.operators.height:
        first = facts.operators.row(0, named=True)
        said.append(f"{first['name']} has most of the operators' own time, {share(first['share'])}.")
    return " ".join(said)


def _figures(facts: Facts, scope: Scope) -> tuple[Figure, ...]:
    parts = device_parts(facts, scope)
    if parts is not None:
        total, busy = sum(parts.values()), sum(parts.values()) - parts[IDLE]
        gpu = Figure(share_of(busy, total), f"GPU busy, {span(busy)}")
    elif facts.has_device:
        gpu = Figure(NOT_RECORDED, "GPU busy (the end of its trace is lost)")
    else:
        gpu = Figure("none", "GPU activity recorded")
    part = communication_share(facts, scope)
    if part is not None:
        what = "exposed communication" if parts is not None else "communication, of wall time"
        comm = Figure(share(part), what)
    elif facts.world_size == 1 or (facts.communication is not None and facts.communication.is_empty()):
        comm = Figure("none", "communication recorded")
    else:
        comm = Figure(NOT_RECORDED, "communication")
    waits, of_step = input_wait_ns(facts, scope)
    if waits is None:
        wait = Figure(NOT_RECORDED, "input wait (phases were off)" if not facts.phases else "input wait")
    else:
        wait = Figure(share(of_step), f"input wait, {span(waits)}")
    return (_step_figure(facts, scope), gpu, comm, wait)


def _step_figure(facts: Facts, scope: Scope) -> Figure:
    outside = [summary for summary in facts.phases.values() if summary.step_median_ns is not None]
    usual = facts.history.filter(~pl.col("profiled") & ~pl.col("first"))
    if outside and usual.height:
        low, high = (usual["work_ns"].quantile(part, "nearest") for part in (0.1, 0.9))
        median = _float(usual["work_ns"].median())
        return Figure(span(median), f"step, median of {usual.height:,} outside the window; {_range(low, high)}")
    steps = facts.whole_steps if facts.steps.height else None
    if steps is not None and steps.height:
        times = steps["dur_ns"]
        if steps.height == 1:
            return Figure(span(_float(times[0])), "step; one was recorded")
        ends = _range(times.min(), times.max())
        return Figure(span(_float(times.median())), f"step, median of {steps.height}; {ends}")
    return Figure(span(scope.total_ns), "the window; no step is marked")


def _float(value: object) -> float:
    assert isinstance(value, int | float)
    return float(value)


def _range(low: object, high: object) -> str:
    assert isinstance(low, int | float)
    assert isinstance(high, int | float)
    unit = unit_for([high], 1)
    return f"{unit.cell(low)}{DASH}{unit.cell(high)}{'' if unit.name == 'ms' else f' {unit.name}'}"


def _bar(facts: Facts, scope: Scope) -> tuple[Markup | None, str]:
    segments = device_segments(facts, scope) or cpu_segments(facts, scope)
    if not segments:
        return None, ""
    label = ", ".join(f"{segment.name} {segment.text}" for segment in segments)
    note = scope.over if scope.is_step else "from the GPU's first activity to its last; no step is marked"
    return stack(segments, f"One {scope.noun}: {label}"), note


def device_segments(facts: Facts, scope: Scope) -> list[Segment]:
    """What the GPU did; idle time by cause, small ones together."""
    parts = device_parts(facts, scope)
    if parts is None:
        return []
    found = [
        Segment(name=name, value=parts[name], tone=tone, text=span(parts[name]))
        for name, (_, tone) in DEVICE_PARTS.items()
    ]
    return [segment for segment in [*found, *_idle_segments(facts, scope, parts[IDLE])] if segment.value > 0]


def _idle_segments(facts: Facts, scope: Scope, idle: float) -> list[Segment]:
    causes = idle_by_cause(facts, scope)
    if not causes:
        return [Segment(name=IDLE, value=idle, tone="idle", text=span(idle))]
    times = {
        "GPU idle, waiting for the CPU": sum(cause.ns for cause in causes if cause.of_cpu),
        "GPU idle, waiting for input": sum(cause.ns for cause in causes if cause.is_input),
    }
    times["GPU idle, other reasons"] = idle - sum(times.values())
    return [Segment(name=name, value=ns, tone="idle", text=span(ns)) for name, ns in times.items() if ns > 0.5]


def cpu_segments(facts: Facts, scope: Scope) -> list[Segment]:
    """In which phases the loop was."""
    times = loop_parts(facts) if scope.is_step else {}
    return [
        Segment(name=phase_word(phase), value=times[phase], tone=phase_tone(phase), text=span(times[phase]))
        for phase in in_order(list(times))
        if times[phase] > 0
    ]
