"""Where one step goes: the loop's phases and the GPU's work on one scale."""

import polars as pl

from chakra_capture.annotations import PHASE_NAMES
from chakra_capture.report import charts
from chakra_capture.report.blocks import (
    Block,
    Cell,
    Column,
    Drawing,
    Legend,
    Note,
    Row,
    Section,
    State,
    Table,
    number_cell,
)
from chakra_capture.report.charts import Segment
from chakra_capture.report.facts import Facts
from chakra_capture.report.scope import Scope, in_order, phase_tone, phase_word
from chakra_capture.report.verdict import cpu_segments, device_segments
from chakra_capture.report.words import Unit, number, prose, share, unit_for

_DEVICE = (
    ("GPU busy", ("compute_ns", "exposed_communication_ns", "exposed_memory_ns")),
    ("exposed communication", ("exposed_communication_ns",)),
    ("GPU idle", ("device_idle_ns",)),
)


def section(facts: Facts, scope: Scope) -> Section:
    """Two bars of equal length, and a table of phases."""
    what = ", what was the GPU doing" if facts.has_device else ""
    question = prose(f"What was the loop in{what}? Times are the {scope.over}.")
    if not scope.is_step:
        what = "the window, from the GPU's first activity to its last" if facts.has_device else scope.over
        question = prose(f"What was the GPU doing? Times are those of {what}.")
    title = "Where one step goes" if scope.is_step else "Where the window goes"
    if facts.ranks and scope.is_step and not _is_recorded(facts) and facts.phase_means["phase"].count():
        title += ", from annotations"
    return Section(anchor="step", nav="Step" if scope.is_step else "Window", title=title, question=question,
                   blocks=_blocks(facts, scope))  # fmt: skip


def _is_recorded(facts: Facts) -> bool:
    """Whether the recording marked the phases; else they are read from what torch marks."""
    return any(facts.steps[f"{phase}_ns"].count() for phase in PHASE_NAMES)


def _blocks(facts: Facts, scope: Scope) -> list[Block]:
    if scope.total_ns is None:
        return [
            State(
                "Nothing that was recorded has a time.",
                prose("A host trace holds the operators but no times. Record with the default settings, and give the "
                      "device trace too: `chakra-capture merge --host FILE --device FILE`."),
            )
        ]  # fmt: skip
    cpu, device = cpu_segments(facts, scope), device_segments(facts, scope)
    blocks: list[Block] = []
    if cpu:
        blocks.append(_drawing("anatomy-cpu", "The loop on the CPU", cpu))
    if device:
        blocks.append(_drawing("anatomy-gpu", "The GPU", device))
    elif facts.has_device:
        blocks.append(State("When the GPU was busy is not known.", prose("The end of its trace is lost.")))
    if cpu and facts.ranks:
        blocks.append(_table(facts, scope))
    elif not cpu and not device:
        blocks.append(
            State("No step is marked in this window.",
                  prose("With a step for each batch (`session.step(g)`, or an integration) its phases are shown here. "
                        "The operators below are those of the whole window."))
        )  # fmt: skip
    if facts.ranks and scope.is_step and not _is_recorded(facts):
        text = (
            "The recording marks no phases: those shown are read from what autograd, optimizer and loader mark. "
            "`chakra_profile.phases=true` marks all five."
        )
        blocks.append(Note(prose(text)))
    return blocks


def _drawing(name: str, title: str, segments: list[Segment]) -> Drawing:
    total = sum(segment.value for segment in segments)
    unit = unit_for([total], 1)
    label = ", ".join(f"{segment.name} {segment.text}" for segment in segments)
    legend = [
        Legend(tone=segment.tone, name=segment.name, value=segment.value,
               text=f"{segment.text}, {share(segment.value / total)}")
        for segment in segments
    ]  # fmt: skip
    return Drawing(name=name, title=f"{title}: {unit.text(total)}", legend=legend,
                   svg=charts.stack(segments, f"{title}, {unit.text(total)}: {label}"))  # fmt: skip


def _table(facts: Facts, scope: Scope) -> Table:
    means, total = facts.phase_means, float(facts.phase_means["wall_ns"].sum())
    unit = unit_for([total])
    on_device = means["device_idle_ns"].count() > 0
    heads = ["phase", unit.name, "share", f"own CPU time {unit.name}"]
    if on_device:
        heads += [f"{name} {unit.name}" for name, _ in _DEVICE] + ["launches"]
    columns = tuple(Column(head=head, kind="text" if at == 0 else "number") for at, head in enumerate(heads))
    by_phase = {row["phase"]: row for row in means.iter_rows(named=True)}
    rows = [_row(by_phase[phase], phase_word(phase), unit, total, on_device) for phase in in_order(list(by_phase))]
    sums = means.select(pl.exclude("phase", "num_steps").sum()).row(0, named=True)
    last = _row({**sums, "phase": None}, scope.noun, unit, total, on_device)
    summed = (Cell(text=scope.noun), *last[1:])
    note = prose("Own CPU time is that of all threads, so it may be more than the phase.")
    return Table(name="phases", columns=columns, rows=rows, total=summed, note=note)


def _row(row: dict[str, float | None], name: str, unit: Unit, total: float, on_device: bool) -> Row:
    wall = row["wall_ns"] or 0.0
    phase = row["phase"]
    cells = [
        Cell(text=name, tone=phase_tone(phase if isinstance(phase, str) else None)),
        number_cell(unit.cell(wall), wall),
        number_cell(share(wall / total if total else 0.0), wall / total if total else 0.0),
        number_cell(unit.cell(row["cpu_self_ns"]), row["cpu_self_ns"]),
    ]
    if on_device:
        for _, columns in _DEVICE:
            known = [value for column in columns if (value := row[column]) is not None]
            ns = sum(known) if len(known) == len(columns) else None
            cells.append(number_cell(unit.cell(ns), ns))
        launches = row["num_launches"]
        cells.append(number_cell("" if launches is None else number(launches, 0), launches))
    return tuple(cells)
