"""How long communication takes, how fast it is, and whether anything hides it."""

from chakra_capture.report import charts
from chakra_capture.report.blocks import Block, Cell, Column, Note, Section, State, Table, number_cell
from chakra_capture.report.facts import Facts
from chakra_capture.report.words import DASH, bandwidth, count, prose, share, size, unit_for

_MOST = 24


def section(facts: Facts) -> Section:
    """Operations by group, kind and size."""
    question = prose("How long, how fast, hidden or not? One row for each group, operation and class of sizes.")
    return Section(anchor="communication", nav="Communication", title="Communication", question=question,
                   blocks=_blocks(facts))  # fmt: skip


def _blocks(facts: Facts) -> list[Block]:
    table = facts.communication
    if table is None or table.is_empty():
        return [_nothing(facts)]
    unit = unit_for(table["total_ns"].to_list())
    single = unit_for(table["dur_ns"].to_list())
    heads = ("group", "operation", "bytes", "count", "", f"total {unit.name}", f"median {single.name}",
             f"waiting {single.name}", "bus GB/s", "algorithm GB/s", f"exposed {unit.name}", "hidden")  # fmt: skip
    most = max((value for value in table["total_ns"].to_list() if value), default=1.0)
    columns = tuple(_column(head, at) for at, head in enumerate(heads))
    rows = []
    for row in table.head(_MOST).iter_rows(named=True):
        group = row["process_group"] if row["process_group"] is not None else "not said"
        named = f"{group} ({row['mesh_dim']})" if row["mesh_dim"] else group
        total = row["total_ns"]
        rows.append(
            (
                Cell(text=named),
                Cell(text=row["collective"] or "not said"),
                Cell(text=_sizes(row), value=row["max_bytes"]),
                number_cell(count(row["count"]), row["count"]),
                Cell(svg=charts.bar((total or 0.0) / most, "communication")),
                number_cell(unit.cell(total), total),
                number_cell(single.cell(row["dur_ns"]), row["dur_ns"]),
                number_cell(single.cell(row["wait_ns"]), row["wait_ns"]),
                number_cell(bandwidth(row["bus_bytes_per_s"]), row["bus_bytes_per_s"]),
                number_cell(bandwidth(row["algorithm_bytes_per_s"]), row["algorithm_bytes_per_s"]),
                number_cell(unit.cell(row["exposed_ns"]), row["exposed_ns"]),
                number_cell(share(row["overlap"]), row["overlap"]),
            )
        )
    note = prose("Total: sum of the operations, mean of the ranks. Waiting: until the last rank it needs had come; "
                 "bandwidth is of what comes after. Empty: not known.")  # fmt: skip
    blocks: list[Block] = [Table(name="communication", columns=columns, rows=rows, note=note)]
    return blocks + _notes(facts)


def _column(head: str, at: int) -> Column:
    if not head:
        return Column(hidden="part of the longest", kind="bar")
    return Column(head=head, kind="text" if at < 2 else "number")


def _sizes(row: dict[str, int | None]) -> str:
    low, high = row["min_bytes"], row["max_bytes"]
    return size(high) if low == high or low is None else f"{size(low)}{DASH}{size(high)}"


def _notes(facts: Facts) -> list[Block]:
    table = facts.communication
    assert table is not None
    if table["wait_ns"].count():
        return []
    missing = facts.world_size is not None and len(facts.ranks) < facts.world_size
    if missing:
        text = (
            "Ranks that were not recorded may have been waited for, so neither waiting nor bandwidth is known. "
            "Record all ranks with `chakra_profile.ranks=null`."
        )
        return [Note(prose(text))]
    return [Note(prose("Neither waiting nor bandwidth is known: the clocks of the ranks could not be compared."))]


def _nothing(facts: Facts) -> Block:
    if not facts.ranks:
        return State("No window was recorded.", prose("With `chakra_profile.start_step` one is."))
    if facts.communication is None:
        text = "Merge all ranks at once, with `chakra-capture merge`, to see who waits for whom."
        return State("The operations of the ranks were not matched with each other.", prose(text))
    one = facts.world_size in (None, 1)
    text = "It ran as one process." if one else "The recorded window holds none."
    return State("This run recorded no communication.", prose(text))
