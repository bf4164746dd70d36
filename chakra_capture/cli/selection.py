"""Steps, ranks and rows as users name them: ``1,3-5``, the way they are printed."""

import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from chakra_capture.cli.output import UsageError, number_ranges
from chakra_capture.errors import TraceFileError

if TYPE_CHECKING:
    from pathlib import Path

    from chakra_capture.trace.sql import RunTables

_RANGE = re.compile(r"([0-9]{1,18})(?:\s*-\s*([0-9]{1,18}))?")


def parse_ranges(texts: Iterable[str], option: str) -> list[range]:
    """Read ``1,3-5``, in one text or several, as ranges.

    Raises:
        UsageError: it is none, or a range ends before it begins.
    """
    found = []
    for part in ",".join(texts).split(","):
        match = _RANGE.fullmatch(part.strip())
        if match is None:
            raise UsageError(f"{option} {part.strip()!r} is no number or range. Give such as 5, 5-8 or 1,3-5.")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise UsageError(f"{option} {part.strip()} ends before it begins. Give {last}-{first}.")
        found.append(range(first, last + 1))
    return found


def first_missing(ranges: Sequence[range], there: Iterable[int]) -> int | None:
    """The first number that is named and not there."""
    known = set(there)
    # A range may be as long as it likes: what is there ends it.
    missing = (next((number for number in each if number not in known), None) for each in ranges)
    return next((number for number in missing if number is not None), None)


def chosen(ranges: Sequence[range] | None, there: Iterable[int]) -> list[int]:
    """The numbers that are there and named, in order; all, where none are named."""
    return sorted({number for number in there if ranges is None or any(number in each for each in ranges)})


def chosen_ranks(tables: "RunTables", path: "Path", texts: list[str] | None) -> list[int]:
    """Merged ranks that are named, or all.

    Raises:
        TraceFileError: one is not merged.
    """
    ranges = None if texts is None else parse_ranges(texts, "--ranks")
    if ranges is not None and (missing := first_missing(ranges, tables.ranks)) is not None:
        raise TraceFileError(
            f"{path} has no merged rank {missing}; it has {number_ranges(list(tables.ranks))}. Name some of them."
        )
    return chosen(ranges, tables.ranks)


def chosen_steps(tables: "RunTables", path: "Path", ranks: list[int], texts: list[str]) -> list[int]:
    """Recorded steps of some ranks that are named.

    Raises:
        TraceFileError: one is not recorded on any of the ranks, or no step is marked.
    """
    import polars as pl

    from chakra_capture.merge.slices.tables import readable

    ranges = parse_ranges(texts, "--steps")
    with readable(tables.folder):
        steps = tables.frames["steps"].filter(pl.col("rank").is_in(ranks)).select("step").unique().collect()
    there = steps["step"].drop_nulls().sort().to_list()
    if not there:
        raise TraceFileError(
            f"{path} marks no step (ProfilerStep), so none can be named. Name ranks or a node instead."
        )
    if (missing := first_missing(ranges, there)) is not None:
        raise TraceFileError(f"{path} has no step {missing}; it has {number_ranges(there)}. Name some of them.")
    return chosen(ranges, there)
