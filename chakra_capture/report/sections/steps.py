"""Whether the run is steady: its steps one by one, or many of them as a line."""

from collections.abc import Sequence

import numpy as np
import polars as pl

from chakra_capture.annotations import BETWEEN_STEPS
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
from chakra_capture.report.charts import MOST_BUCKETS, Bucket, Segment
from chakra_capture.report.facts import MOST_STEP_ROWS, Facts
from chakra_capture.report.scope import in_order, phase_tone, phase_word
from chakra_capture.report.words import Unit, count, count_of, prose, share, span, unit_for

# What comes before a step is named from this part of the step on.
_GAP = 0.05


def section(facts: Facts) -> Section:
    """All steps that were timed, and the recorded ones."""
    question = prose("Is the run steady, and do the ranks agree?")
    blocks: list[Block] = []
    if facts.history.height:
        blocks += _of_phases(facts)
    if facts.whole_steps.height if facts.steps.height else False:
        blocks += _recorded(facts)
    if not facts.history.height:
        num = facts.whole_steps.n_unique(["window", "step"]) if facts.steps.height else 0
        lead = f"Only the {num} profiled steps are known." if num > 1 else "Only one profiled step is known."
        lead = lead if num else "No step is known."
        text = "With `chakra_profile.phases=true` this section covers every step and profiler overhead can be stated."
        blocks.append(State(lead, prose(text)))
    return Section(anchor="steps", nav="Steps", title="Steps", question=question, blocks=blocks)


def _of_phases(facts: Facts) -> list[Block]:
    history = facts.history
    blocks: list[Block] = []
    if history.height <= MOST_STEP_ROWS:
        blocks.append(_rows(facts))
    else:
        blocks.append(_line(history))
    blocks.append(_phase_table(facts))
    for rank, summary in facts.phases.items():
        for name, why in summary.not_measured.items():
            blocks.append(Note(prose(f"{{}} of rank {rank} is not measured: {{}}.", phase_word(name), why)))
        break
    return blocks


def _line(history: pl.DataFrame) -> Drawing:
    found = buckets(history)
    top = unit_for([max(bucket.most_ns for bucket in found)], 1)
    most = max(bucket.most_ns for bucket in found)
    middle = float(np.median(history["work_ns"].to_numpy()))
    num, ranks = history.n_unique(["fit", "step"]), history["rank"].n_unique()
    label = f"{count_of(num, 'step')}: median {span(middle)}, longest {span(most)}"
    ticks = (top.text(most), top.text(most / 2), f"step {found[0].first_step}", f"step {found[-1].last_step}")
    per = -(-num // len(found))
    text = "Every step is a point of the line."
    if per > 1 or ranks > 1:
        of = f"{count_of(per, 'step')}{f' of {ranks} ranks' if ranks > 1 else ''}"
        text = f"Line: median of {of} each. Band: 8 of 10 of them. Dots: the longest."
    marked = " Ticks at the bottom mark profiled steps." if history["profiled"].any() else ""
    return Drawing(name="step-line", title=f"{count_of(num, 'step')} of the training",
                   svg=charts.step_line(found, label, ticks), note=prose(text + marked))  # fmt: skip


def buckets(history: pl.DataFrame) -> list[Bucket]:
    """The steps in order, as many to a bucket as leave 600 at most; those of all ranks together."""
    keys = history.select("fit", "step").unique().sort("fit", "step").with_row_index("at")
    size = -(-keys.height // MOST_BUCKETS)
    rows = history.join(keys, on=["fit", "step"], how="left").with_columns(bucket=pl.col("at") // size)
    work = pl.col("work_ns")
    table = rows.group_by("bucket").agg(
        pl.col("step").sort_by("at").first().alias("first"), pl.col("step").sort_by("at").last().alias("last"),
        work.quantile(0.1, "nearest").alias("low"), work.median().alias("median"),
        work.quantile(0.9, "nearest").alias("high"), work.max().alias("most"), pl.col("profiled").sum(),
    ).sort("bucket")  # fmt: skip
    return [Bucket(*row[1:]) for row in table.iter_rows()]


def _phase_table(facts: Facts) -> Table:
    """Means of the phases of all steps, of the first rank, and how far the ranks are apart."""
    tables = {rank: summary.table for rank, summary in facts.phases.items()}
    first = next(iter(tables))
    rows = tables[first].sort("place", descending=True, maintain_order=True)
    unit = unit_for(rows["mean_ns"].to_list())
    several = len(tables) > 1
    heads = [
        "phase",
        "where",
        f"mean {unit.name}",
        f"median {unit.name}",
        f"9 of 10 within {unit.name}",
        "share",
        "steps",
    ]
    if several:
        heads += [f"least of ranks {unit.name}", f"most of ranks {unit.name}"]
    columns = tuple(Column(head=head, kind="text" if at < 2 else "number") for at, head in enumerate(heads))
    all_means = pl.concat(tables.values())
    found = []
    for row in rows.iter_rows(named=True):
        phase, where = row["phase"], "in the step" if row["place"] == "step" else "between steps"
        name = {"residual": "in no phase", "other": "in no phase"}.get(phase, phase_word(phase))
        cells = [Cell(text=name, tone=phase_tone(phase)), Cell(text=where)]
        if row["mean_ns"] is None:
            cells += [Cell(text="not recorded"), *[Cell()] * 4]
        else:
            cells += [number_cell(unit.cell(row[key]), row[key]) for key in ("mean_ns", "median_ns", "p90_ns")]
            cells += [
                number_cell(share(row["share"]), row["share"]),
                number_cell(count(row["num_steps"]), row["num_steps"]),
            ]
        if several:
            means = all_means.filter((pl.col("place") == row["place"]) & (pl.col("phase") == phase))["mean_ns"]
            least, most = means.min(), means.max()
            cells += [number_cell(unit.cell(v), v) if isinstance(v, float) else Cell() for v in (least, most)]
        found.append(tuple(cells))
    summary = facts.phases[first]
    note = (
        f"Means over {count_of(summary.num_steps, 'step')} of rank {first} outside the window"
        f"{', the first of the training left out' if summary.left_out else ''}; shares are of the wall time."
    )
    return Table(name="all-phases", title="Phases of all steps", columns=columns, rows=found, note=prose(note))


def _rows(facts: Facts) -> Table:
    """Every step of every rank as a bar of its phases."""
    history = facts.history.sort("fit", "step", "rank")
    longest = float(history["work_ns"].max() or 1)  # type: ignore[arg-type]
    unit = unit_for(history["work_ns"].to_list())
    inside = facts.history_parts.filter(~pl.col("in_gap"))
    before = facts.history_parts.filter(pl.col("in_gap"))
    found = []
    for row in history.iter_rows(named=True):
        mine = (pl.col("rank") == row["rank"]) & (pl.col("row") == row["row"])
        names = dict(inside.filter(mine).group_by("phase").agg(pl.col("dur_ns").sum()).iter_rows())
        flags = [word for word in ("profiled", "first") if row[word]]
        gaps = before.filter(mine & pl.col("phase").is_in(BETWEEN_STEPS)).group_by("phase").agg(pl.col("dur_ns").sum())
        flags += [
            f"after {name}, {span(ns)}" for name, ns in gaps.sort("phase").iter_rows() if ns > _GAP * row["work_ns"]
        ]
        found.append(_step_row((str(row["step"]), row["rank"], flags), names, row["work_ns"], (longest, unit)))
    return Table(
        name="step-rows",
        title="Steps of the training",
        columns=_step_columns(unit),
        rows=found,
        legend=_legend(inside["phase"]),
        note=prose("Each bar is one step on one scale, its phases in order; the rest is in no phase."),
    )


def _step_columns(unit: Unit) -> tuple[Column, ...]:
    return (
        Column(head="step", kind="number"), Column(head="rank", kind="number"), Column(hidden="phases", kind="bar"),
        Column(head=unit.name, kind="number"), Column(head="", hidden="what is special"),
    )  # fmt: skip


def _step_row(
    who: tuple[str, int, Sequence[str]], names: dict[str | None, int], total: int, scale: tuple[float, Unit]
) -> Row:
    step, rank, flags = who
    longest, unit = scale
    parts = dict(names)
    parts[None] = max(0, total - sum(names.values()))
    segments = [
        Segment(name=phase_word(phase), value=parts[phase], tone=phase_tone(phase), text=unit.text(parts[phase]))
        for phase in in_order(list(parts))
        if parts[phase] > 0
    ]
    label = f"step {step}, rank {rank}: " + ", ".join(f"{s.name} {s.text}" for s in segments)
    return (
        Cell(text=step, value=int(step)), Cell(text=str(rank), value=rank),
        Cell(svg=charts.stack(segments, label, of=longest, height=14)),
        number_cell(unit.cell(total), total), Cell(text=", ".join(flags)),
    )  # fmt: skip


def _recorded(facts: Facts) -> list[Block]:
    """The profiled steps one by one."""
    steps = facts.whole_steps.sort("window", "step", "rank")
    shown = steps.head(MOST_STEP_ROWS)
    longest = float(shown["dur_ns"].max() or 1)  # type: ignore[arg-type]
    unit = unit_for(shown["dur_ns"].to_list())
    found = []
    for row in shown.iter_rows(named=True):
        mine = (pl.col("rank") == row["rank"]) & (pl.col("window") == row["window"]) & (pl.col("step") == row["step"])
        parts = facts.phase_rows.filter(mine & pl.col("phase").is_not_null())
        names = dict(parts.select("phase", "wall_ns").iter_rows())
        flags = [word for word, key in (("update skipped", "update_skipped"), ("warm-up", "warmup")) if row[key]]
        cells = _step_row((str(row["step"]), row["rank"], flags), names, row["dur_ns"], (longest, unit))
        found.append((*cells[:3], _device_bar(row, longest, unit), *cells[3:]) if facts.has_device else cells)
    columns = list(_step_columns(unit))
    if facts.has_device:
        columns.insert(3, Column(head="GPU busy", kind="bar"))
    more = "" if steps.height <= MOST_STEP_ROWS else f" The first {MOST_STEP_ROWS} of {steps.height:,} are shown."
    note = prose(f"These steps ran under the profiler, where small operators on the CPU take longer.{more}")
    legend = _legend(facts.phase_rows["phase"])
    if facts.has_device:
        legend.append(Legend(tone="kernel", name="GPU busy"))
    name = "profiled-steps-gpu" if facts.has_device else "profiled-steps"
    return [Table(name=name, title="Profiled steps", columns=tuple(columns), rows=found, legend=legend, note=note)]


def _legend(phases: pl.Series) -> list[Legend]:
    """What the colours of the phases mean; those without one of their own share the rest's."""
    known = in_order([phase for phase in phases.unique().to_list() if phase_tone(phase) != "other"])
    return [Legend(tone=phase_tone(phase), name=phase_word(phase)) for phase in (*known, None)]


def _device_bar(row: dict[str, int | None], longest: float, unit: Unit) -> Cell:
    busy = row["device_busy_ns"]
    if busy is None:
        return Cell(text="not recorded")
    segment = Segment(name="GPU busy", value=busy, tone="kernel", text=unit.text(busy))
    label = f"GPU busy {unit.text(busy)}"
    return Cell(svg=charts.stack([segment], label, of=longest, height=14), value=busy)
