"""The part of ``chakra-capture inspect`` that looks into a Chakra .et file."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from chakra_capture.cli.output import (
    EXIT_OK,
    console,
    count_of,
    duration,
    make_table,
    percent,
    plain,
    print_json,
    print_line,
    shortened,
    size,
)

if TYPE_CHECKING:
    from chakra_capture.export.et_summary import EtSummary, Traffic


def dump_file(path: Path) -> int:
    """Print one line of JSON for each record."""
    from chakra_capture.export.et_dump import dump_et

    for line in dump_et(path):
        print_line(line)
    return EXIT_OK


def inspect_file(path: Path, *, json: bool) -> int:
    """Print what a .et file holds."""
    from chakra_capture.export.et_dump import speakable
    from chakra_capture.export.et_summary import summarize_et

    found = summarize_et(path)
    if json:
        print_json({"schema_version": 1, "path": str(path), **speakable(asdict(found))})
    else:
        _print(found, path)
    return EXIT_OK


def _print(found: "EtSummary", path: Path) -> None:
    types = ", ".join(f"{number:,} {name}" for name, number in found.types.items())
    print_line(f"{path}: {count_of(found.num_nodes, 'node')}, {size(path.stat().st_size)}")
    print_line(f"nodes: {types or 'none'}; {found.num_on_cpu:,} on the CPU")
    if found.metadata or found.version:
        said = ", ".join(f"{name}={shortened(str(value), 40)}" for name, value in found.metadata.items())
        print_line(f"metadata: version {found.version or 'not stated'}{', ' * bool(said)}{said}")
    gone = f", {found.dangling:,} of them on nodes that are not there" if found.dangling else ""
    print_line(
        f"dependencies: {found.data_deps:,} data, {found.ctrl_deps:,} control{gone}; "
        f"{count_of(found.num_roots, 'node')} with none"
    )
    _print_traffic("Communication", "type", found.collectives)
    _print_traffic("Process groups", "pg_name", found.groups)
    print_line(
        f"time: {duration(1e3 * found.duration_us)} in all nodes, "
        + ("starts not stated" if found.span_us is None else f"{duration(1e3 * found.span_us)} from first to last")
    )
    stuck = f"; {count_of(found.num_never_run, 'node')} never run: they wait for each other" * bool(found.num_never_run)
    print_line(
        f"longest path: {duration(1e3 * found.path_us)} in {count_of(found.path_nodes, 'node')}"
        f" ({percent(found.path_us, found.span_us)} of the span){stuck}"
    )
    if found.on_path:
        table = make_table("On the longest path", "name", "nodes", "time", "share")
        table.columns[0].justify = "left"
        for one in found.on_path:
            share = percent(one.duration_us, found.path_us)
            table.add_row(shortened(one.name, 44), str(one.num_nodes), duration(1e3 * one.duration_us), share)
        console().print(table)


def _print_traffic(title: str, what: str, rows: "list[Traffic]") -> None:
    if not rows:
        return
    table = make_table(title, what, "nodes", "bytes")
    table.columns[0].justify = "left"
    for one in rows:
        table.add_row(plain(one.kind), f"{one.num_nodes:,}", f"{one.num_bytes:,}")
    console().print(table)
