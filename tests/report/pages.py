"""Pages read back with the parser of the standard library."""

from dataclasses import dataclass, field
from html.parser import HTMLParser

_VOID = {"meta", "link", "br", "input", "img"}


@dataclass
class Row:
    """Cells of a row: their texts, and what they are sorted by."""

    texts: list[str] = field(default_factory=list)
    values: list[float | None] = field(default_factory=list)


@dataclass
class Page(HTMLParser):
    """What a page holds.

    Attributes:
        tables: by id, the rows of their bodies; ``totals`` their last row.
        legends: by id of a drawing, name and value of each entry.
        sections: by id, their text.
        tags: every start tag with its attributes.
        raw: what stands between the tags of script and style.
    """

    tables: dict[str, list[Row]] = field(default_factory=dict)
    totals: dict[str, Row] = field(default_factory=dict)
    heads: dict[str, list[str]] = field(default_factory=dict)
    legends: dict[str, list[tuple[str, float]]] = field(default_factory=dict)
    sections: dict[str, str] = field(default_factory=dict)
    tags: list[tuple[str, dict[str, str | None]]] = field(default_factory=list)
    raw: list[tuple[str, str]] = field(default_factory=list)
    text: str = ""

    def __post_init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self._open: list[tuple[str, dict[str, str | None]]] = []
        self._table = self._drawing = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.tags.append((tag, given))
        if tag not in _VOID and not self.get_starttag_text().endswith("/>"):
            self._open.append((tag, given))
        if tag == "table":
            self._table = str(given["id"])
            self.tables[self._table] = []
            self.heads[self._table] = []
        elif tag == "figure":
            self._drawing = str(given["id"])
            self.legends[self._drawing] = []
        elif tag == "section" and given.get("id"):
            self.sections[str(given["id"])] = ""
        elif tag == "tr" and self._within("tbody"):
            self.tables[self._table].append(Row())
        elif tag == "tr" and self._within("tfoot"):
            self.totals[self._table] = Row()
        elif tag == "th":
            self.heads[self._table].append("")
        elif tag == "td":
            row = self._row()
            row.texts.append("")
            value = given.get("data-v")
            row.values.append(None if value is None else float(value))
        elif tag == "li" and given.get("data-v") and self._drawing:
            self.legends[self._drawing].append(("", float(str(given["data-v"]))))

    def handle_endtag(self, tag: str) -> None:
        assert self._open[-1][0] == tag, (self._open[-1], tag)
        self._open.pop()
        if tag == "figure":
            self._drawing = ""

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        name = self._open[-1][0] if self._open else ""
        if name in ("script", "style"):
            self.raw.append((name, data))
            return
        self.text += data
        for tag, given in self._open:
            if tag == "section" and given.get("id"):
                self.sections[str(given["id"])] += data
        if self._within("td"):
            self._row().texts[-1] += data
        elif self._within("th"):
            self.heads[self._table][-1] += data
        elif self._within("li") and self._drawing and self.legends[self._drawing] and not self._within("b"):
            entry, value = self.legends[self._drawing][-1]
            self.legends[self._drawing][-1] = (f"{entry}{data}".strip(), value)

    def _within(self, tag: str) -> bool:
        return any(name == tag for name, _ in self._open)

    def _row(self) -> Row:
        return self.totals[self._table] if self._within("tfoot") else self.tables[self._table][-1]

    def column(self, table: str, head: str) -> list[float | None]:
        """The values of the column whose head starts so."""
        at = next(at for at, text in enumerate(self.heads[table]) if text.startswith(head))
        return [row.values[at] for row in self.tables[table]]

    def total(self, table: str, head: str) -> float | None:
        """The same of the last row."""
        at = next(at for at, text in enumerate(self.heads[table]) if text.startswith(head))
        return self.totals[table].values[at]


def read(page: str) -> Page:
    found = Page()
    found.feed(page)
    found.close()
    assert not found._open, "every element is closed"
    return found
