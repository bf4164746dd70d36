"""The communication of a run as a table for people, and which rank the others wait for."""

from typing import TYPE_CHECKING, Any

from chakra_capture.cli.output import count_of, duration, make_table, percent, shortened, size

if TYPE_CHECKING:
    from rich.console import Console

    from chakra_capture.analysis.overview import Overview
    from chakra_capture.analysis.stragglers import Stragglers

_MOST_ROWS = 6
_WIDTH = 14


def print_communication(out: "Console", result: "Overview") -> None:
    """Print what takes most time, and who is late."""
    rows = result.communication
    if rows is not None and rows.height:
        table = make_table("Communication", "group", "operation", "count", "bytes", "median", "wait", "bus")
        table.columns[0].justify = table.columns[1].justify = "left"
        for row in rows.head(_MOST_ROWS).iter_rows(named=True):
            table.add_row(*_cells(row))
        out.print(table)
        if rows.height > _MOST_ROWS:
            out.print(f"... and {count_of(rows.height - _MOST_ROWS, 'kind')} more (--json has all)")
    if result.stragglers is not None:
        out.print(_verdict(result.stragglers))
    if result.stragglers is not None or (rows is not None and rows.height):
        out.print()


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    name = "?" if row["process_group"] is None else str(row["process_group"])
    group = f"{name} ({row['mesh_dim']})" if row["mesh_dim"] else name
    bus = row["bus_bytes_per_s"]
    return (
        shortened(group, _WIDTH),
        shortened(row["collective"], _WIDTH),
        str(row["count"]),
        _bytes(row["min_bytes"], row["max_bytes"]),
        duration(row["dur_ns"]),
        duration(row["wait_ns"]),
        "-" if bus is None else f"{size(int(bus))}/s",
    )


def _bytes(smallest: int | None, largest: int | None) -> str:
    if smallest is None or largest is None:
        return "-"
    return size(largest) if smallest == largest else f"to {size(largest)}"


def _verdict(stragglers: "Stragglers") -> str:
    steps = count_of(stragglers.num_steps, "step" if stragglers.has_steps else "stretch")
    if not stragglers.ranks:
        return f"straggler: none named, {stragglers.reason}"
    first = stragglers.table.filter(rank=stragglers.ranks[0]).row(0, named=True)
    named = ", ".join(map(str, stragglers.ranks))
    late = f"late by {duration(first['delay_ns'])} a step ({percent(first['share'], 1)})"
    return f"straggler: rank {named}, {late}, the latest in {first['num_latest']} of {steps}"
