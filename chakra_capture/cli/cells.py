"""Tables of any columns on a screen: a number is never cut, and what finds no room is named."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

_GAP = 2


def print_cells(
    out: "Console", names: list[str], cells: list[list[str]], is_number: list[bool], *, others: str
) -> None:
    """Print columns of cells, as many as there is room for, from the first on; ``others`` says where the rest is."""
    from rich.table import Table

    widths = _widths(names, cells, is_number, out.width)
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name, numeric, width in zip(names, is_number, widths, strict=False):
        table.add_column(name, justify="right" if numeric else "left", no_wrap=True, width=width, overflow="ellipsis")
    for row in zip(*cells[: len(widths)], strict=True):
        table.add_row(*row)
    if widths:
        out.print(table)
    if len(widths) < len(names):
        left = ", ".join(names[len(widths) :])
        out.print(f"not enough room for the columns {left}; {others}")


def _widths(names: list[str], cells: list[list[str]], is_number: list[bool], room: int) -> list[int]:
    """How wide each column is; a number is never cut, so columns that do not fit are left out, from the last on."""
    from rich.cells import cell_len

    full = [max(map(cell_len, [name, *column])) for name, column in zip(names, cells, strict=True)]
    least = [w if numeric else min(w, max(12, cell_len(name)))
             for w, numeric, name in zip(full, is_number, names, strict=True)]  # fmt: skip
    count = len(full)
    while count > 1 and sum(least[:count]) + _GAP * (count - 1) > room:
        count -= 1
    widths, spare = least[:count], room - sum(least[:count]) - _GAP * (count - 1)
    for at in range(count):
        grown = min(full[at] - widths[at], max(0, spare))
        widths[at] += grown
        spare -= grown
    return widths
