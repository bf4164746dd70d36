"""Which chain of work fixes the length of a step."""

import polars as pl

from chakra_capture.analysis.path_labels import CATEGORIES
from chakra_capture.report import charts
from chakra_capture.report.blocks import Block, Cell, Column, Drawing, Legend, Section, State, Table, number_cell
from chakra_capture.report.charts import Segment
from chakra_capture.report.facts import Facts
from chakra_capture.report.scope import phase_word
from chakra_capture.report.words import count, exact, plain, prose, share, unit_for

_ROWS = 15
_WORDS = {
    "op": ("CPU inside operators", "op"),
    "python": ("CPU between operators", "other"),
    "runtime": ("calls of the GPU's runtime", "call"),
    "input": ("input", "input_wait"),
    "kernel": ("kernels", "kernel"),
    "communication": ("communication", "communication"),
    "memory": ("copies", "copy"),
    "hand_over": ("hand-over between threads", "sync"),
    "launch_lag": ("launch latency", "sync"),
    "stream_lag": ("between activities of a stream", "sync"),
    "sync_lag": ("until a waiting call returns", "sync"),
    "wait_lag": ("until a wait ends", "sync"),
    "not_recorded": ("not recorded", "missing"),
    "unexplained": ("unexplained", "missing"),
}


def shown_path(facts: Facts) -> tuple[str, pl.DataFrame] | None:
    """The path of the median step of the first rank; of a run without steps that of its window."""
    table = facts.replayed.path
    if table is None or table.is_empty():
        return None
    rank = int(table["rank"].min())  # type: ignore[arg-type]
    mine = table.filter(pl.col("rank") == rank)
    steps = mine.filter(pl.col("step").is_not_null()).group_by("window", "step").agg(pl.col("total_ns").sum())
    of_rank = f" of rank {rank}" if table["rank"].n_unique() > 1 else ""
    if steps.is_empty():
        window = int(mine["window"].min())  # type: ignore[arg-type]
        return f"the window{of_rank}", mine.filter((pl.col("window") == window) & pl.col("step").is_null())
    ordered = steps.sort("total_ns", "window", "step")
    window, step, _ = ordered.row((ordered.height - 1) // 2)
    return f"step {step}{of_rank}", mine.filter((pl.col("window") == window) & (pl.col("step") == step))


def section(facts: Facts) -> Section:
    """One bar as long as the step, and what is longest on it."""
    found = shown_path(facts)
    if found is None:
        no_window = prose("No window was recorded; `chakra_profile.start_step` and `end_step` choose one.")
        why = plain(facts.replayed.no_path) if facts.ranks else no_window
        blocks: list[Block] = [State("There is no critical path.", why)]
        question = "Which chain of work and waiting fixes the length of a step?"
    else:
        what, rows = found
        total = int(rows["total_ns"].sum())
        question = (
            f"The one chain of work and waiting that fixes the length of {what}. It is {exact(total)} long, equal to "
            f"the {'step' if what.startswith('step') else 'window'}."
        )
        blocks = [_drawing(rows, total), _table(rows, total, several=len(facts.ranks) > 1)]
    return Section(anchor="path", nav="Critical path", title="Critical path", question=prose(question), blocks=blocks)


def _drawing(rows: pl.DataFrame, total: int) -> Drawing:
    unit = unit_for([total], 1)
    summed = dict(rows.group_by("category").agg(pl.col("total_ns").sum()).iter_rows())
    segments, legend = [], []
    for category in CATEGORIES:
        ns = summed.get(category, 0)
        if ns:
            name, tone = _WORDS[category]
            segments.append(Segment(name=name, value=ns, tone=tone, text=unit.text(ns)))
            legend.append(Legend(tone=tone, name=name, value=ns, text=f"{unit.text(ns)}, {share(ns / total)}"))
    label = f"critical path, {exact(total)}: " + ", ".join(f"{s.name} {s.text}" for s in segments)
    return Drawing(name="path", svg=charts.stack(segments, label), legend=legend)


def _table(rows: pl.DataFrame, total: int, *, several: bool) -> Table:
    unit = unit_for([total])
    heads = ["name", "what", "phase", *(["rank"] if several else []), "", unit.name, "share", "parts"]
    kinds = {"name": "name", "": "bar", "what": "text", "phase": "text"}
    columns = tuple(
        Column(head=head, hidden="" if head else "part of the longest", kind=kinds.get(head, "number"))
        for head in heads
    )
    keys = ["category", "name", "phase", "on_rank"]
    summed = rows.group_by(keys).agg(pl.col("total_ns", "count").sum())
    summed = summed.sort("total_ns", *keys, descending=[True, *[False] * 4], nulls_last=True)
    most = int(summed["total_ns"][0]) or 1
    found = [_row(row, total, most, several) for row in summed.head(_ROWS).iter_rows(named=True)]
    rest = summed[_ROWS:]
    if rest.height:
        ns = int(rest["total_ns"].sum())
        others = {"category": None, "name": None, "phase": None, "on_rank": None}
        row = _row({**others, "total_ns": ns, "count": int(rest["count"].sum())}, total, most, several)
        found.append((Cell(text=f"{rest.height:,} others"), *row[1:-4], Cell(), *row[-3:]))  # longer than any bar
    last = [Cell(text="critical path"), *[Cell()] * (3 + several), number_cell(unit.cell(total), total),
            number_cell("100 %", 1.0), Cell()]  # fmt: skip
    return Table(name="path-names", title="Longest on it", columns=columns, rows=found, total=tuple(last))


def _row(row: dict[str, object], total: int, most: int, several: bool) -> tuple[Cell, ...]:
    unit, ns, parts = unit_for([total]), row["total_ns"], row["count"]
    assert isinstance(ns, int)
    assert isinstance(parts, int)
    category = row["category"]
    word, tone = _WORDS[category] if isinstance(category, str) else ("", "other")
    name = (
        row["name"] if isinstance(row["name"], str) else "(between operators)" if category == "python" else f"({word})"
    )
    phase = row["phase"] if isinstance(row["phase"], str) else None
    cells = [
        Cell(text=name, full=name, tone=tone),
        Cell(text=word),
        Cell(text="" if phase is None else phase_word(phase)),
    ]
    if several:
        rank = row["on_rank"]
        cells.append(Cell(text=str(rank), value=rank) if isinstance(rank, int) else Cell())
    return (*cells, Cell(svg=charts.bar(ns / most, tone)), number_cell(unit.cell(ns), ns),
            number_cell(share(ns / total), ns / total), number_cell(count(parts), parts))  # fmt: skip
