"""What would help most: changes that were tried on a replay of the run, each alone."""

from chakra_capture.report import charts
from chakra_capture.report.blocks import Block, Cell, Column, Note, Section, State, Table, number_cell
from chakra_capture.report.facts import Facts
from chakra_capture.report.words import plain, prose, saving, share, span, unit_for

_MOST = 12
_SMALL = 0.01


def section(facts: Facts) -> Section:
    """The changes that save most."""
    table = facts.replayed.prizes
    if table is None:
        no_window = prose("No window was recorded; `chakra_profile.start_step` and `end_step` choose one.")
        why = plain(facts.replayed.no_prizes) if facts.ranks else no_window
        blocks: list[Block] = [State("Nothing was predicted.", why)]
        question = "What would help most?"
    elif table.is_empty():
        blocks = [Note(prose("Nothing that was tried would make the steps shorter."))]
        question = "What would help most?"
    else:
        first = table.row(0, named=True)
        error = f"An unchanged replay is {share(first['replay_error'])} off"
        question = (
            f"Length of a step ({span(first['measured_ns'])}, with the device's work after it) when one thing changes. "
            f"{error}; a prediction is hardly better. Each is tried alone: savings do not add up."
        )
        blocks = [_table(facts)]
        if table.head(_MOST)["at_most"].any():
            text = "Up to: how much of it the run would really gain, this trace cannot tell; perhaps nothing."
            blocks.append(Note(prose(text)))
    return Section(anchor="what-if", nav="What if", title="What if", question=prose(question), blocks=blocks)


def _table(facts: Facts) -> Table:
    table = facts.replayed.prizes
    assert table is not None
    measured = float(table["measured_ns"][0]) or 1.0
    unit = unit_for([measured])
    columns = (
        Column(head="change", kind="name"),
        Column(head="meaning"),
        Column(hidden="new step, part of the old", kind="bar"),
        Column(head=f"step {unit.name}", kind="number"),
        Column(head="saves", kind="number"),
        Column(head="share", kind="number"),
    )
    rows = [
        (
            Cell(text=row["name"], full=row["name"]), Cell(text=row["meaning"]),
            Cell(svg=charts.bar(row["fastest_ns"] / measured, "prize")),
            number_cell(unit.cell(row["fastest_ns"]), row["fastest_ns"]),
            number_cell(saving(row["saved_ns"], at_most=row["at_most"]), row["saved_ns"]),
            number_cell("under 1 %" if row["share"] < _SMALL else share(row["share"]), row["share"]),
        )
        for row in table.head(_MOST).iter_rows(named=True)
    ]  # fmt: skip
    note = prose("A change is written as `chakra-capture what-if` takes it: a preset, or for `--scale`.")
    return Table(name="what-if", columns=columns, rows=rows, note=note)
