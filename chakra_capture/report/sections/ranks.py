"""Which rank makes the others wait, and for what."""

import polars as pl

from chakra_capture.annotations import PHASE_NAMES
from chakra_capture.report import charts
from chakra_capture.report.blocks import Block, Cell, Column, Note, Section, State, Table, number_cell
from chakra_capture.report.facts import Facts
from chakra_capture.report.scope import phase_word
from chakra_capture.report.words import number, plain, prose, ranges, share, span, unit_for

_MOST = 64


def section(facts: Facts) -> Section:
    """The ranks beside each other."""
    question = prose("Which rank makes the others wait, and for what?")
    return Section(anchor="ranks", nav="Ranks", title="Ranks", question=question, blocks=_blocks(facts))


def _blocks(facts: Facts) -> list[Block]:
    known = sorted({rank.rank for rank in facts.ranks} or set(facts.phases))
    blocks: list[Block] = []
    if len(known) < 2:
        return [_alone(facts, known)]
    if facts.ranks:
        blocks.append(_table(facts))
    if len(facts.phases) > 1:
        blocks.append(_phase_table(facts))
    if not facts.ranks:
        text = "Who waits for whom in which operation is known of a recorded window: `chakra_profile.start_step`."
        return [*blocks, State("No window was recorded.", prose(text))]
    late = facts.stragglers
    if late is None:
        text = "Merge all ranks at once, with `chakra-capture merge`."
        blocks.append(State("The operations of the ranks were not matched with each other.", prose(text)))
    elif late.reason is not None:
        blocks.append(State("No rank is named.", plain(f"{late.reason[0].upper()}{late.reason[1:]}.")))
    for rank in () if late is None else late.ranks:
        blocks.append(_named(facts, rank))
    return blocks


def _alone(facts: Facts, known: list[int]) -> Block:
    size = facts.world_size
    if size is None or size < 2:
        return State("The run has one rank.", prose("Nobody waits for another one."))
    text = "Stragglers and clock offsets need at least two ranks. Record all with `chakra_profile.ranks=null`."
    return State(f"Only rank {ranges(known)} of {size} was recorded.", prose(text))


def _named(facts: Facts, rank: int) -> Block:
    late = facts.stragglers
    assert late is not None
    row = late.table.row(by_predicate=pl.col("rank") == rank, named=True)
    where = late.late_in.get(rank)
    text = f"The others wait for rank {rank}: it is late by {span(row['delay_ns'])}, {share(row['share'])} of a step."
    if where is not None:
        text += (
            f" It is slow {'in ' if where.phase else ''}{phase_word(where.phase)}: {span(where.own_ns)} of its own, "
        )
        text += f"the others {span(where.others_ns)}."
    return Note(plain(text))


def _phase_table(facts: Facts) -> Table:
    """What the steps of each rank take outside the window, by phase."""
    steps = {rank: summary.step_mean_ns for rank, summary in facts.phases.items()}
    means = {
        rank: dict(summary.table.filter(pl.col("place") == "step").select("phase", "mean_ns").iter_rows())
        for rank, summary in facts.phases.items()
    }
    names = [name for name in PHASE_NAMES if any(mine.get(name) is not None for mine in means.values())]
    unit = unit_for(steps.values())
    most = max((ns for ns in steps.values() if ns), default=1.0)
    columns = (
        Column(head="rank", kind="number"), Column(hidden="step, part of the longest", kind="bar"),
        Column(head=f"step {unit.name}", kind="number"),
        *(Column(head=f"{phase_word(name)} {unit.name}", kind="number") for name in names),
    )  # fmt: skip
    rows = [
        (
            Cell(text=str(rank), value=rank), Cell(svg=charts.bar((ns or 0.0) / most, "op")),
            number_cell(unit.cell(ns), ns),
            *(number_cell(unit.cell(means[rank].get(name)), means[rank].get(name)) for name in names),
        )
        for rank, ns in list(steps.items())[:_MOST]
    ]  # fmt: skip
    said = f" The first {_MOST} of {len(steps)} ranks are shown." if len(steps) > _MOST else ""
    return Table(name="ranks-phases", title="Outside the window", columns=columns, rows=rows,
                 note=prose(f"Means of all steps that were timed by phase. Empty: not recorded.{said}"))  # fmt: skip


def _table(facts: Facts) -> Table:
    late = None if facts.stragglers is None or facts.stragglers.table.is_empty() else facts.stragglers.table
    by_rank = {} if late is None else {row["rank"]: row for row in late.iter_rows(named=True)}
    times = {rank.rank: (rank.step_time or {}).get("median_ns") for rank in facts.ranks}
    unit = unit_for(times.values())
    most = max((value for value in times.values() if value), default=1.0)
    heads = ["rank", "", f"step {unit.name}"]
    if late is not None:
        heads += [f"late by {unit.name}", f"waits {unit.name}", "late by, of a step", "latest in"]
    columns = tuple(
        Column(head=head, kind="number") if head else Column(hidden="step, part of the longest", kind="bar")
        for head in heads
    )
    rows = []
    for rank, ns in list(times.items())[:_MOST]:
        cells = [Cell(text=str(rank), value=rank), Cell(svg=charts.bar((ns or 0.0) / most, "op")),
                 Cell(text="not recorded") if ns is None else number_cell(unit.cell(ns), ns)]  # fmt: skip
        if late is not None:
            row = by_rank.get(rank)
            cells += [Cell()] * 4 if row is None else [
                number_cell(unit.cell(row["delay_ns"]), row["delay_ns"]),
                number_cell(unit.cell(row["waiting_ns"]), row["waiting_ns"]),
                number_cell(share(row["share"]), row["share"]),
                number_cell(f"{row['num_latest']} of {number(row['num_steps'], 0)}", row["num_latest"]),
            ]  # fmt: skip
        rows.append(tuple(cells))
    said = f" The first {_MOST} of {len(times)} ranks are shown." if len(times) > _MOST else ""
    note = None
    if late is not None:
        noun = "steps" if facts.stragglers is not None and facts.stragglers.has_steps else "stretches of operations"
        note = prose(f"Medians of {noun}. Late: after half of the others, less the time it waited itself.{said}")
    elif said:
        note = prose(said.strip())
    return Table(name="ranks", columns=columns, rows=rows, note=note)
