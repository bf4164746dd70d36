"""The part of ``chakra-capture validate`` that checks files for simulators."""

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from chakra_capture.cli.output import (
    EXIT_BAD_INPUT,
    EXIT_OK,
    UsageError,
    count_of,
    number_ranges,
    plain,
    print_json,
    print_line,
    shortened,
    size,
)

if TYPE_CHECKING:
    from chakra_capture.export.validation.findings import Finding, Place
    from chakra_capture.export.validation.run import Validation

_MOST_SHOWN = 3
_WIDTH = 80
_LARGEST_NPUS = 1 << 40


def validate_files(
    path: Path, *, job: str | None, profile: str, comm_group: Path | None, npus: str | None, json: bool
) -> int:
    """Validate the .et files that ``path`` means, and print what was found."""
    from chakra_capture.export.et_files import find_et
    from chakra_capture.export.validation.node_checks import Profile
    from chakra_capture.export.validation.run import Asked, validate_et

    dimensions = None if npus is None else _dimensions(npus)
    paths = find_et(path, job)
    with _progress(sum(file.stat().st_size for file in paths.by_rank.values())) as seen:
        asked = Asked(profile=Profile(profile), comm_group=comm_group, npus=dimensions, seen=seen)
        found = validate_et(paths, asked)
    if json:
        print_json(_as_json(found, profile))
    else:
        _print(found, path)
    return EXIT_OK if found.is_valid else EXIT_BAD_INPUT


def _dimensions(npus: str) -> list[int]:
    """Sizes such as ``8``, ``2x4`` or ``[2, 4]``."""
    sizes = [int(part) for part in re.findall(r"\d{1,9}", npus)]
    product = 1
    for one in sizes:
        product *= one
    if not re.fullmatch(r"\[?\s*\d{1,9}(\s*[x,]\s*\d{1,9})*\s*\]?", npus) or not 0 < product <= _LARGEST_NPUS:
        raise UsageError(f"--npus {npus!r} is no number of NPUs; give one such as 8, or dimensions such as 2x4.")
    return sizes


@contextmanager
def _progress(num_bytes: int) -> Iterator[Callable[[int, int], None] | None]:
    """A bar on a terminal; nothing elsewhere."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("validating", total=num_bytes)
        read: dict[int, int] = {}

        def seen(rank: int, size: int) -> None:
            read[rank] = size
            bar.update(task, completed=min(sum(read.values()), num_bytes), description=f"rank {rank}")

        yield seen


def _as_json(found: "Validation", profile: str) -> dict[str, Any]:
    return {
        "schema_version": 1,
        "is_valid": found.is_valid,
        "profile": profile,
        "num_groups": found.num_groups,
        "files": [asdict(one) for one in found.files],
        "findings": [
            {
                "rule": one.check.rule,
                "check": str(one.check),
                "level": one.check.level.value,
                "cause": one.check.cause,
                "fix": one.check.fix,
                "count": one.count,
                "places": [asdict(place) for place in one.places],
            }
            for one in found.findings.sorted()
        ],
    }


def _print(found: "Validation", path: Path) -> None:
    from chakra_capture.export.validation.findings import Level

    ranks = f"rank{'s' * (len(found.files) > 1)} {number_ranges([one.rank for one in found.files])}"
    nodes, num_bytes = sum(one.num_nodes for one in found.files), sum(one.num_bytes for one in found.files)
    print_line(f"{path}: {ranks}, {count_of(nodes, 'node')}, {size(num_bytes)}, {count_of(found.num_groups, 'group')}")
    for finding in found.findings.sorted():
        for line in _lines(finding):
            print_line(line)
    errors, warnings = found.findings.count(Level.ERROR), found.findings.count(Level.WARNING)
    said = f"{count_of(errors, 'error')}, {count_of(warnings, 'warning')}"
    print_line(f"Not valid: {said}." if errors else f"Valid: {said}." if warnings else "Valid.")


def _lines(finding: "Finding") -> Iterator[str]:
    check = finding.check
    times = "" if finding.count == 1 else f" ({finding.count} times)"
    yield from _wrapped(f"{check.level} {check.rule}", f"{check.cause}{times}")
    for place in finding.places[:_MOST_SHOWN]:
        yield from _wrapped("", _where(place))
    if finding.count > _MOST_SHOWN and len(finding.places) > _MOST_SHOWN:
        yield from _wrapped("", "...")
    yield from _wrapped("", f"Fix: {check.fix}")


def _where(place: "Place") -> str:
    parts = [] if place.rank is None else [f"rank {place.rank}"]
    if place.node is not None:
        parts.append(f"node {place.node}" + (f" {shortened(place.name, 40)}" if place.name else ""))
    return ": ".join(filter(None, [", ".join(parts), place.detail]))


def _wrapped(head: str, text: str) -> Iterator[str]:
    for number, line in enumerate(wrap(plain(text), _WIDTH - 12)):
        yield f"{head if number == 0 else '':<12}{line}"
