"""What an export shows beside the rows of a run: intervals and counters that others work out, handed in as tables."""

from dataclasses import dataclass, field

import polars as pl

RUN, HOST = "run", "host"
# What ``Cut.kinds`` may name beside the kinds of rows.
CRITICAL_PATH, STEPS, PHASES, DEVICE_STATE, COUNTERS = "critical-path", "steps", "phases", "device-state", "counters"
MADE_KINDS = (CRITICAL_PATH, STEPS, PHASES, DEVICE_STATE, COUNTERS)

INTERVALS: dict[str, pl.DataType | type[pl.DataType]] = {
    "name": pl.String, "begin_ns": pl.Int64, "end_ns": pl.Int64,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Intervals:
    """A track of its own.

    Attributes:
        part: ``RUN``, ``HOST``, or the number of a device of the rank.
        track: its name.
        category: of all its slices.
        rows: columns ``INTERVALS``; whatever else there is becomes args of the slice.
    """

    part: str | int
    track: str
    category: str
    rows: pl.DataFrame


@dataclass(frozen=True, slots=True)
class Counter:
    """A number over time.

    Attributes:
        part: as of intervals.
        name: with its unit in brackets.
        rows: ``ts_ns`` and ``value``, ascending; a value holds until the next one.
        in_thousandths: the values are, and are integers.
    """

    part: str | int
    name: str
    rows: pl.DataFrame
    in_thousandths: bool = False


@dataclass(frozen=True, slots=True)
class Made:
    """What is shown of one rank, in times of its host's clock; or of the run, in those of the reference rank.

    Attributes:
        path: of the run: rows of the critical path in order, ``rank``, ``node_id``, ``begin_ns`` and ``end_ns``, for
            arrows from one row to the next.
    """

    intervals: tuple[Intervals, ...] = ()
    counters: tuple[Counter, ...] = ()
    path: pl.DataFrame | None = field(default=None)
    notes: tuple[str, ...] = ()
