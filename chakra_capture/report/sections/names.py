"""Which names hold the time: kernels by GPU time, operators by own CPU time."""

from chakra_capture.analysis.operators import OUTSIDE
from chakra_capture.report import charts
from chakra_capture.report.blocks import (
    FIRST_ROWS,
    MOST_ROWS,
    Beside,
    Block,
    Cell,
    Column,
    Section,
    State,
    Table,
    cut_table,
    number_cell,
)
from chakra_capture.report.facts import Facts
from chakra_capture.report.scope import Scope
from chakra_capture.report.words import count, display_name, prose, share, unit_for


def section(facts: Facts, scope: Scope) -> Section:
    """Kernels and operators of all ranks that are shown."""
    of_steps = "the whole recorded steps" if scope.is_step else "all that was recorded"
    if facts.kernels.height:
        title = nav = "Kernels and operators"
        over = (
            f"Which names hold the time? Kernels of all that was recorded, operators of {of_steps}, all ranks together."
        )
    else:
        title, nav = "Operators by own CPU time", "Operators"
        over = f"Which names hold the time? Of {of_steps}, all ranks and threads together."
        if facts.spread is not None:
            over += ' "Longest" far above "median" marks an operator that was interrupted.'
    return Section(anchor="names", nav=nav, title=title, question=prose(over), blocks=_blocks(facts))


def _blocks(facts: Facts) -> list[Block]:
    operators = _operators(facts) if _is_timed(facts) else None
    if facts.kernels.height:
        tables: list[Block] = [_kernels(facts)]
        if operators is not None:
            tables.append(operators)
        return [Beside(tuple(tables)) if len(tables) > 1 else tables[0]]
    if operators is not None:
        return [operators]
    if not facts.ranks:
        text = "With `chakra_profile.start_step` and `end_step` a window of steps is recorded, with its operators."
        return [State("No window was recorded.", prose(text))]
    return [State("No operator has a time.", prose("A host trace alone has none; give the device trace, too."))]


def _is_timed(facts: Facts) -> bool:
    return facts.operators.height > 0 and int(facts.operators["self_ns"].sum()) > 0


def _kernels(facts: Facts) -> Table:
    rows = facts.kernels.head(MOST_ROWS)
    unit = unit_for(rows["total_ns"].head(FIRST_ROWS).to_list())
    single = unit_for(rows["p50_ns"].to_list())
    most = float(rows["total_ns"][0]) or 1.0
    columns = _columns(("name", "", unit.name, "share", "count"))
    long = _columns(("name", "", unit.name, "share", "count", *(f"{head} {single.name}" for head in
                    ("mean", "median", "9 of 10 within", "longest"))))  # fmt: skip
    found, all_of = [], []
    for row in rows.iter_rows(named=True):
        tone = _tone(row["kind"], row["name"])
        is_kernel = row["kind"] == "kernel"
        cells = (
            Cell(text=display_name(row["name"]) if is_kernel else row["name"], full=row["name"], tone=tone),
            Cell(svg=charts.bar(row["total_ns"] / most, tone)),
            number_cell(unit.cell(row["total_ns"]), row["total_ns"]),
            number_cell(share(row["share"]), row["share"]),
            number_cell(count(row["count"]), row["count"]),
        )
        found.append(cells)
        keys = ("mean_ns", "p50_ns", "p90_ns", "max_ns")
        all_of.append((Cell(text=row["name"], tone=tone), *cells[1:],
                       *(number_cell(single.cell(row[key]), row[key]) for key in keys)))  # fmt: skip
    table = Table(name="kernels", title="Kernels and copies by GPU time", columns=columns, rows=found)
    return cut_table(table, long, all_of)


def _tone(kind: str, name: str) -> str:
    if kind != "kernel":
        return "copy"
    return "communication" if "nccl" in name.lower() or "rccl" in name.lower() else "kernel"


def _operators(facts: Facts) -> Table:
    rows = facts.operators.head(MOST_ROWS)
    if facts.spread is not None:
        rows = rows.join(facts.spread, on="name", how="left", maintain_order="left")
    unit = unit_for(rows["self_ns"].head(FIRST_ROWS).to_list())
    most = float(rows["self_ns"][0]) or 1.0
    heads = ["name", "", unit.name, "share", "count"]
    more = [f"with what is inside {unit.name}"]
    if rows["device_total_ns"].count():
        more += [f"GPU, launched right in it {unit.name}", f"GPU, launched in it at all {unit.name}"]
    if facts.spread is not None:
        heads += [f"median {unit.name}", f"longest {unit.name}"]
    found, all_of = [], []
    for row in rows.iter_rows(named=True):
        name = "(between operators)" if row["name"] == OUTSIDE else row["name"]
        tone = "call" if name.startswith(("cuda", "hip", "cu")) and "::" not in name else "op"
        cells = [
            Cell(text=name, full=name, tone=tone), Cell(svg=charts.bar(row["self_ns"] / most, tone)),
            number_cell(unit.cell(row["self_ns"]), row["self_ns"]), number_cell(share(row["share"]), row["share"]),
            number_cell(count(row["count"]), row["count"]),
        ]  # fmt: skip
        if facts.spread is not None:
            cells += [number_cell(unit.cell(row[key]), row[key]) for key in ("p50_ns", "max_ns")]
        found.append(tuple(cells))
        keys = ["total_ns", *(["device_self_ns", "device_total_ns"] if len(more) > 1 else [])]
        all_of.append((*cells, *(number_cell(unit.cell(row[key]), row[key]) for key in keys)))
    title = "Operators by own CPU time" if facts.kernels.height else None
    table = Table(name="operators", title=title, columns=_columns(heads), rows=found)
    return cut_table(table, _columns((*heads, *more)), all_of)


def _columns(heads: tuple[str, ...] | list[str]) -> tuple[Column, ...]:
    found = []
    for head in heads:
        if head == "name":
            found.append(Column(head=head, kind="name"))
        elif not head:
            found.append(Column(hidden="part of the longest", kind="bar"))
        else:
            found.append(Column(head=head, kind="number"))
    return tuple(found)
