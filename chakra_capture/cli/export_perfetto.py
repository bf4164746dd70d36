"""``chakra-capture export perfetto``: one trace of all ranks for Perfetto's viewer, or one per rank for other tools."""

import re
from dataclasses import asdict
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from chakra_capture import layout
from chakra_capture.cli.output import (
    EXIT_OK,
    UsageError,
    count_of,
    number_ranges,
    print_error,
    print_json,
    print_line,
    size,
    status,
)
from chakra_capture.cli.selection import chosen_ranks, chosen_steps

if TYPE_CHECKING:
    from chakra_capture.export.perfetto.run import Source, Written

Kind = Literal[
    "host_op", "annotation", "python_function", "runtime", "kernel", "memcpy", "memset", "device_annotation", "sync",
    "overhead", "memory", "instant", "other", "phases", "device-state", "critical-path", "steps", "counters",
]  # fmt: skip
_TIME = re.compile(r"([0-9]{1,12}(?:\.[0-9]{1,9})?)\s*(ns|us|ms|s)")
_UNITS = {"ns": 1, "us": 10**3, "ms": 10**6, "s": 10**9}
_LARGE = 10**9
_MOST_LANES = 5


def export_perfetto(
    path: Path,
    /,
    *,
    output: Annotated[Path, Parameter(name=["--output", "-o"])],
    steps: Annotated[list[str] | None, Parameter(negative=(), consume_multiple=True)] = None,
    ranks: Annotated[list[str] | None, Parameter(negative=(), consume_multiple=True)] = None,
    from_: Annotated[str | None, Parameter(name="--from")] = None,
    to: str | None = None,
    kind: Annotated[list[Kind] | None, Parameter(negative=(), consume_multiple=True)] = None,
    per_rank: Annotated[bool, Parameter(negative=())] = False,
    job: str | None = None,
    overwrite: Annotated[bool, Parameter(negative=())] = False,
    json: Annotated[bool, Parameter(negative=())] = False,
) -> int:
    """Write a merged run as one trace for Perfetto (https://ui.perfetto.dev).

    All ranks on one clock: threads and streams; the phases of each step; what the
    GPU does when, and why it is idle; the critical path; queue lengths, memory
    and bandwidth as counters. Arrows go from launch to kernel, from forward to
    backward, from the rank that came last to a collective to those that waited
    (of more than 64 ranks the 8 that waited longest), and along the critical path.

    Every row of the tables that has a time is in it once, with its arguments and
    its node_id. Rows that cross each other on one track are put on lanes below
    it, "stream 7 compute (2)", so that no viewer drops them. Process and thread
    numbers are our own: the recorded ones stand in the arguments. Times are in us
    with three decimals since baseTimeNanoseconds (Unix time). A rank is moved by
    its clock offset of alignment.json, a device by that of link.json.

    --steps shows the time of these steps, to the end of the last thing they
    launched. --from and --to count from the first event of the ranks that are
    shown. What reaches out of it is clipped, and says so; arrows with one end
    outside are left out and counted.

    --per-rank writes a file per rank with rows and launches alone, for tools that
    read one rank at a time, such as HolisticTraceAnalysis.

    Examples:
        chakra-capture export perfetto ./traces -o run.json.gz
        chakra-capture export perfetto ./traces -o part.json.gz --steps 5-6
        chakra-capture export perfetto ./traces -o part.json.gz --ranks 0,2
            --from 1.2s --to 1350ms --kind kernel memcpy device-state
        chakra-capture export perfetto ./traces -o for_hta --per-rank

    Parameters
    ----------
    path
        Folder of a run, its merged folder, or one rank=<R> folder in it.
    output
        File to write; compressed where its name ends in .gz. With --per-rank a folder.
    steps
        Steps to show, such as 5, 5-6 or 1,3-5.
    ranks
        Ranks to show, such as 0 or 0,2-3; default: all.
    from_
        Leave out what is before, such as 250ms or 1.5s.
    to
        Leave out what is after.
    kind
        Kinds to show: of rows as in the table nodes, or what is made of them; default: all.
    per_rank
        Write rank-<R>.json.gz for each rank.
    job
        Job of a trace_dir that holds several runs; default: the newest.
    overwrite
        Replace files that are there already, instead of refusing.
    json
        Print a JSON report.
    """
    begin, end = (None if said is None else _time(said, name) for said, name in ((from_, "--from"), (to, "--to")))
    if begin is not None and end is not None and end <= begin:
        raise UsageError(f"--to {to} is not after --from {from_}. Give a later time.")
    if kind is not None and not kind:
        raise UsageError("--kind names no kind. Give some, or leave it out for all.")
    from chakra_capture.export.perfetto.cut import Cut
    from chakra_capture.export.perfetto.run import Source, estimate, export_ranks, export_run
    from chakra_capture.export.perfetto.writer import check_free
    from chakra_capture.trace.merged import MergedRun, MergedTrace
    from chakra_capture.trace.sql import open_tables

    tables = open_tables(path, job)
    chosen = chosen_ranks(tables, path, ranks)
    numbers = None if steps is None else frozenset(chosen_steps(tables, path, chosen, steps))
    cut = Cut(numbers, begin, end, None if kind is None else frozenset(kind))
    traces = [MergedTrace(rank, tables.folder / layout.rank_folder_name(rank)) for rank in chosen]
    source = Source(MergedRun(tables.folder), traces, cut)
    files = [output / layout.perfetto_file_name(rank) for rank in chosen] if per_rank else [output]
    check_free(files, overwrite=overwrite)
    about = estimate(source, per_rank=per_rank)
    if not json:
        print_line(f"about {size(about)} of JSON in all, before anything is cut or compressed")
    if about > _LARGE and cut.is_whole:
        print_error(
            f"warning: browsers run out of memory on much more than {size(_LARGE)}; see --steps, --ranks, --from"
        )
    with status(f"exporting {count_of(len(chosen), 'rank')}") as say:
        written = (
            export_ranks(source, output, seen=say) if per_rank else [export_run(_full(source, say), output, seen=say)]
        )
    notes = [f"rank {number_ranges([*tables.unmerged])} is not merged and not in here"] if tables.unmerged else []
    if json:
        print_json({"schema_version": 1, "files": [_as_json(one) for one in written], "notes": notes})
        return EXIT_OK
    for one in written:
        _print(one)
    for note in notes:
        print_line(f"note: {note}")
    if not per_rank:
        print_line(f"open it: https://ui.perfetto.dev, Open trace file, {output}")
    return EXIT_OK


def _full(source: "Source", say: Any) -> "Source":
    """The source with what the analyses have to show."""
    from dataclasses import replace

    from chakra_capture.cli.perfetto_tracks import of_rank, of_run

    say("walking the critical path")
    of_all = of_run(source.run, source.traces, source.cut)
    return replace(source, made=lambda trace: of_rank(source.run, trace, source.cut), of_run=of_all)


def _time(said: str, option: str) -> int:
    """A time with its unit in ns."""
    match = _TIME.fullmatch(said.strip())
    if match is None:
        raise UsageError(f"{option} {said!r} is no time. Give a number with ns, us, ms or s, such as 250ms.")
    return int(Decimal(match[1]) * _UNITS[match[2]])


def _as_json(one: "Written") -> dict[str, Any]:
    return {
        "file": str(one.path),
        "ranks": one.ranks,
        "num_bytes": one.num_bytes,
        "num_bytes_unpacked": one.num_bytes_unpacked,
        "num_events": one.num_events,
        "rows": dict(sorted(one.rows.items())),
        "num_samples": one.num_samples,
        "num_clipped": one.num_clipped,
        "num_left_out": one.num_outside,
        "without_time": dict(sorted(one.without_time.items())),
        "made": dict(sorted(one.made.items())),
        "arrows": {kind: asdict(counted) for kind, counted in sorted(one.arrows.items())},
        "num_counter_events": one.num_counter_events,
        "lanes": [{"track": name, "num_lanes": number} for name, number in one.lanes],
        "notes": one.notes,
    }


def _print(one: "Written") -> None:
    packed = f" ({size(one.num_bytes_unpacked)} unpacked)" if one.path.suffix == ".gz" else ""
    print_line(
        f"{one.path}: {size(one.num_bytes)}{packed}, {one.num_events:,} events, {one.rows.total():,} rows of "
        f"{count_of(len(one.ranks), 'rank')}"
    )
    arrows = {kind: counted for kind, counted in one.arrows.items() if counted.written}
    if arrows:
        print_line("  arrows: " + ", ".join(f"{kind} {counted.written:,}" for kind, counted in arrows.items()))
    left = {
        "rows outside of what is shown": one.num_outside,
        "arrows with one end outside": sum(counted.outside for counted in one.arrows.values()),
        "arrows that would go back in time": sum(counted.backward for counted in one.arrows.values()),
        "rows without a time": one.without_time.total(),
    }
    if any(left.values()):
        print_line("  left out: " + ", ".join(f"{what} {count:,}" for what, count in left.items() if count))
    for name, number in one.lanes[:_MOST_LANES]:
        print_line(f"  note: rows of {name} cross each other; they are on {number} lanes")
    if len(one.lanes) > _MOST_LANES:
        print_line(f"  note: so are those of {count_of(len(one.lanes) - _MOST_LANES, 'more track')}")
    if not one.rows.total():
        print_line("  note: nothing lies in what was asked for")
    for note in one.notes:
        print_line(f"  note: {note}")
