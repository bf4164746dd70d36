"""What a section consists of; a template says how each of them looks."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from markupsafe import Markup

from chakra_capture.report.words import Prose

FIRST_ROWS, MOST_ROWS = 12, 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A column of a table.

    Attributes:
        head: what is printed above it.
        hidden: head of a column that needs none for those who see it.
        kind: text, name (code), number or bar.
    """

    head: str = ""
    hidden: str = ""
    kind: str = "text"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A cell of a table.

    Attributes:
        value: what rows are sorted by, and what the text was made from.
        full: the whole of a name that is cut.
        tone: colour of the square before it.
        svg: a drawing in place of the text.
    """

    text: str = ""
    value: float | int | None = None
    full: str | None = None
    tone: str | None = None
    svg: Markup | None = None


Row = tuple[Cell, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Legend:
    """One entry beside a drawing: its word and, where it has one, its number."""

    tone: str
    name: str
    text: str = ""
    value: float | int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A table, the row that sums it, and in a fold the same at length."""

    kind: ClassVar[str] = "table"
    name: str
    columns: tuple[Column, ...]
    rows: Sequence[Row]
    title: str | None = None
    total: Row | None = None
    fold: "Table | None" = None
    legend: Sequence[Legend] = ()
    note: Prose | None = None

    @property
    def is_filtered(self) -> bool:
        """Whether a field to search it is worth its room."""
        return len(self.rows) > 20 and any(column.kind == "name" for column in self.columns)


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawing:
    """A drawing with what its colours mean."""

    kind: ClassVar[str] = "drawing"
    name: str
    svg: Markup
    title: str | None = None
    legend: Sequence[Legend] = ()
    note: Prose | None = None


@dataclass(frozen=True, slots=True)
class State:
    """Why there is nothing to see, and how to get it."""

    kind: ClassVar[str] = "state"
    lead: str
    text: Prose = ()


@dataclass(frozen=True, slots=True)
class Note:
    """A sentence below what it is about; ``good`` where it says that nothing is wrong."""

    kind: ClassVar[str] = "note"
    text: Prose
    good: bool = False


@dataclass(frozen=True, slots=True)
class Beside:
    """Blocks that stand beside each other where there is room."""

    kind: ClassVar[str] = "beside"
    blocks: tuple["Block", ...]


@dataclass(frozen=True, slots=True)
class Fold:
    """Blocks that are folded away."""

    kind: ClassVar[str] = "fold"
    title: str
    blocks: tuple["Block", ...]


@dataclass(frozen=True, slots=True)
class Prize:
    """What a finding would save.

    Attributes:
        most_ns: of a step; ``share`` of it at most.
        at_most: nothing tells more than that it is at most this.
        doubt: what is not known of it.
    """

    most_ns: float | None
    share: float | None
    at_most: bool = True
    doubt: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FindingItem:
    """A finding as the page shows it."""

    title: Prose
    evidence: Prose
    action: Prose
    severity: str
    prize_text: str | None
    prize_note: str | None
    bar: Markup | None


@dataclass(frozen=True, slots=True)
class Findings:
    """Numbered findings; ``start`` is the number of the first."""

    kind: ClassVar[str] = "findings"
    items: Sequence[FindingItem]
    start: int = 1


@dataclass(frozen=True, slots=True)
class Definitions:
    """Words and what they mean."""

    kind: ClassVar[str] = "definitions"
    entries: Sequence[tuple[str, Prose]]


Block = Table | Drawing | State | Note | Beside | Fold | Findings | Definitions


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A section: its title, the question that it answers and over what, and how it answers.

    Attributes:
        anchor: where links to it go; never made from a name of a trace.
        nav: what the navigation calls it.
    """

    anchor: str
    nav: str
    title: str
    question: Prose
    blocks: Sequence[Block] = field(default_factory=tuple)


def number_cell(text: str, value: float | int | None) -> Cell:
    """A cell with a number; empty where it is not known."""
    return Cell(text=text if value is not None else "", value=value)


def cut_table(table: Table, columns: tuple[Column, ...], rows: Sequence[Row]) -> Table:
    """A table of the first rows, with the columns and rows of all in a fold where there are more."""
    fold = Table(name=f"{table.name}-all", columns=columns, rows=rows[:MOST_ROWS])
    return Table(
        name=table.name, columns=table.columns, rows=table.rows[:FIRST_ROWS], title=table.title, total=table.total,
        fold=fold, note=table.note,
    )  # fmt: skip
