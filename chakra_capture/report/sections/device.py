"""What kept the GPU from working: idle time by cause, launches, copies."""

import polars as pl

from chakra_capture.annotations import INPUT_WAIT
from chakra_capture.report import charts
from chakra_capture.report.blocks import Beside, Block, Cell, Column, Section, State, Table, number_cell
from chakra_capture.report.facts import Facts
from chakra_capture.report.scope import IDLE, Scope, device_parts, idle_by_cause
from chakra_capture.report.words import bandwidth, count, prose, share, share_of, size, unit_for


def section(facts: Facts, scope: Scope) -> Section:
    """The GPU of all ranks that are shown."""
    question = prose("What kept the GPU from working? Idle time is split by cause; the causes add up to the idle time.")
    return Section(anchor="gpu", nav="GPU", title="GPU", question=question, blocks=_blocks(facts, scope))


def _blocks(facts: Facts, scope: Scope) -> list[Block]:
    if not facts.has_device:
        return [_nothing(facts)]
    if device_parts(facts, scope) is None:
        times: Block = State(
            "When the GPU was busy or idle is not measured.",
            prose("The end of the device trace is lost, so what it did last is not known. Record the window again."),
        )
    else:
        times = _idle(facts, scope)
    blocks: list[Block] = [Beside((times, _activities(facts)))]
    if facts.launches.height:
        blocks.append(_launches(facts))
    if facts.copies.height:
        blocks.append(_copies(facts))
    return blocks


def _nothing(facts: Facts) -> Block:
    if not facts.ranks:
        text = "With `chakra_profile.start_step` and `end_step` a window of steps is recorded, with what the GPU did."
        return State("No window was recorded.", prose(text))
    device = any(rank.activities is not None for rank in facts.ranks)
    if not device:
        text = "Give the device trace beside the host trace to see when operators and the GPU ran."
        return State("There is no device trace.", prose(text))
    versions = {head.versions.get("torch") or "" for head in facts.manifests.values()}
    how = " (torch without CUDA)" if any("+cpu" in version for version in versions) else ""
    text = "Nothing is missing: where the time of the CPU goes is in the sections on the step and on operators."
    return State(f"This run recorded no GPU activity{how}.", prose(text))


def _idle(facts: Facts, scope: Scope) -> Block:
    parts = device_parts(facts, scope) or {}
    idle = parts[IDLE]
    causes = idle_by_cause(facts, scope)
    if not causes:
        per_device = facts.device["device"].n_unique() > 1
        why = "A rank has several devices, each idle at other times." if per_device else "No gap was found."
        return State("The idle time is not split by cause.", prose(why))
    unit = unit_for([idle])
    columns = (
        Column(head="cause"), Column(hidden="share of idle time", kind="bar"), Column(head=unit.name, kind="number"),
        Column(head="share", kind="number"), Column(head="gaps", kind="number"),
        Column(head=f"longest {unit.name}", kind="number"),
    )  # fmt: skip
    rows = [
        (
            Cell(text=cause.name), Cell(svg=charts.bar(cause.ns / causes[0].ns, "sync")),
            number_cell(unit.cell(cause.ns), cause.ns), number_cell(share(cause.ns / idle), cause.ns / idle),
            number_cell(count(round(cause.num_gaps)), cause.num_gaps),
            number_cell(unit.cell(cause.longest_ns), cause.longest_ns),
        )
        for cause in causes
    ]  # fmt: skip
    total = (Cell(text="idle"), Cell(), number_cell(unit.cell(idle), idle), number_cell("100 %", 1.0), Cell(), Cell())
    marked = facts.steps["input_wait_ns"].count() or (facts.phase_means["phase"] == INPUT_WAIT).any()
    if not any(cause.is_input for cause in causes) and not marked:
        rows.append((Cell(text="input wait"), Cell(), Cell(text="not recorded"), Cell(), Cell(), Cell()))
    title = f"Idle by cause, per {scope.noun}"
    return Table(name="idle", title=title, columns=columns, rows=rows, total=total)


def _activities(facts: Facts) -> Block:
    launches = facts.launches
    num, short = int(launches["num_activities"].sum()), int(launches["num_short"].sum())
    known = launches.filter(pl.col("call").is_not_null())
    backward, queue = int(known["num_backward"].sum()), known["queue_max"].max()
    rows = [
        ("GPU activities", count(num), num),
        ("shorter than their launch call", f"{count(short)} ({share_of(short, num)})", short),
    ]
    if isinstance(queue, int):
        rows.append(("longest queue of a stream", count(queue), queue))
    missing = num - int(known["num_activities"].sum())
    rows.append(("whose launch is not recorded", count(missing), missing))
    if backward:
        rows.append(("that start before their launch (clocks)", count(backward), backward))
    columns = (Column(head="of all that was recorded"), Column(head="number", kind="number"))
    cells = [(Cell(text=name), number_cell(text, value)) for name, text, value in rows]
    return Table(name="activities", title="Activities", columns=columns, rows=cells)


def _launches(facts: Facts) -> Table:
    table = facts.launches.filter(pl.col("call").is_not_null())
    heads = (
        "call",
        "rank",
        "stream",
        "calls",
        "call µs",
        "until start µs",
        "9 of 10 within µs",
        "work µs",
        "shorter than call",
        "queue",
    )
    columns = tuple(Column(head=head, kind="name" if at == 0 else "number") for at, head in enumerate(heads))
    us = unit_for([1.0])
    rows = [
        (
            Cell(text=row["call"]),
            number_cell(str(row["rank"]), row["rank"]),
            number_cell(str(row["stream"]), row["stream"]),
            number_cell(count(row["num_launches"]), row["num_launches"]),
            *(
                number_cell(us.cell(row[key]), row[key])
                for key in ("call_p50_ns", "delay_p50_ns", "delay_p90_ns", "activity_p50_ns")
            ),
            number_cell(count(row["num_short"]), row["num_short"]),
            number_cell(count(row["queue_max"]), row["queue_max"]),
        )
        for row in table.head(12).iter_rows(named=True)
    ]
    note = prose("Medians. Until start: from the start of the call; where the queue is long that is waiting in line.")
    return Table(name="launches", title="Launches", columns=columns, rows=rows, note=note)


def _copies(facts: Facts) -> Block:
    unit = unit_for(facts.copies["total_ns"].to_list())
    heads = ("direction", "memory", "rank", "count", "moved", unit.name, f"exposed {unit.name}", "GB/s")
    columns = tuple(Column(head=head, kind="text" if at < 2 else "number") for at, head in enumerate(heads))
    rows = [
        (
            Cell(text=row["direction"] or "not said"), Cell(text=row["memory"] or ""),
            number_cell(str(row["rank"]), row["rank"]), number_cell(count(row["count"]), row["count"]),
            number_cell(size(row["bytes"]), row["bytes"]), number_cell(unit.cell(row["total_ns"]), row["total_ns"]),
            number_cell(unit.cell(row["exposed_ns"]), row["exposed_ns"]),
            number_cell(bandwidth(row["bandwidth"]), row["bandwidth"]),
        )
        for row in facts.copies.head(12).iter_rows(named=True)
    ]  # fmt: skip
    return Table(name="copies", title="Copies and memsets, of all that was recorded", columns=columns, rows=rows)
