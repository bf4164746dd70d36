"""Reads the phases of a rank's steps, as the training half writes them: one JSON object in a line.

The process that writes may be killed at any moment, so a last line may be cut; whatever else cannot be read is left out
and counted.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import msgspec
import polars as pl

from chakra_capture.annotations import BETWEEN_STEPS, FIRST, PARTIAL, PROFILED, UPDATE_SKIPPED, WHOLE_STEP
from chakra_capture.errors import TraceFileError

# Sums of three of them stay within 64 bits.
_Count = Annotated[int, msgspec.Meta(ge=-(2**61), le=2**61)]
# A duration, or how often; a year has fewer ns.
_MOST = 2**55
_Amount = Annotated[int, msgspec.Meta(ge=0, le=_MOST)]
# The training half writes 65 names at most; with more, a line is none of ours, and neither is one of further names.
_MOST_IN_LINE, _MOST_NAMES = 65, 1000
_MOST_BATCHES = 64
_MOST_TEXT = 300
# Rows that are held as Python objects at a time.
_BLOCK = 100_000
# Longer than any line of ours, whose spans are bounded.
_MOST_BYTES = 1 << 20

STEPS_SCHEMA = pl.Schema(
    {
        "fit": pl.Int32,
        "step": pl.Int64,
        "begin_ns": pl.Int64,
        "ts_ns": pl.Int64,
        "dur_ns": pl.Int64,
        "gap_ns": pl.Int64,
        "profiled": pl.Boolean,
        "first": pl.Boolean,
        "partial": pl.Boolean,
        "update_skipped": pl.Boolean,
        "rss_bytes": pl.Int64,
        "device_ns": pl.Int64,
        "batch_size": pl.Int64,
    }
)
PHASES_SCHEMA = pl.Schema(
    {
        "row": pl.UInt32,
        "in_gap": pl.Boolean,
        "phase": pl.String,
        "dur_ns": pl.Int64,
        "num_calls": pl.Int64,
        "device_ns": pl.Int64,
    }
)
MEMORY_SCHEMA = pl.Schema(
    {
        "row": pl.UInt32,
        "allocated_bytes": pl.Int64,
        "peak_allocated_bytes": pl.Int64,
        "peak_reserved_bytes": pl.Int64,
        "capacity_bytes": pl.Int64,
    }
)


class _Line(msgspec.Struct, tag_field="kind"):
    """What every line is one of."""


class _Open(_Line, tag="open"):
    run_id: str | None = None
    rank: _Count | None = None
    world_size: _Count | None = None
    unix_ns: _Count | None = None
    monotonic_ns: _Count | None = None


class _Measures(_Line, tag="measures"):
    phases: Annotated[dict[str, str | None], msgspec.Meta(max_length=_MOST_IN_LINE)]


_Phases = Annotated[dict[str, tuple[_Amount, _Amount]], msgspec.Meta(max_length=_MOST_IN_LINE)]


class _Gap(msgspec.Struct):
    ns: _Amount
    phases: _Phases


class _DeviceMemory(msgspec.Struct):
    allocated_bytes: _Amount | None = None
    peak_allocated_bytes: _Amount | None = None
    peak_reserved_bytes: _Amount | None = None
    capacity_bytes: _Amount | None = None


class _Step(_Line, tag="step"):
    step: _Count
    begin_ns: _Count
    ns: _Amount
    phases: _Phases
    gap: _Gap | None = None
    flags: list[str] = msgspec.field(default_factory=list)
    device_ns: dict[str, _Count] | None = None
    rss_bytes: _Amount | None = None
    batch_size: _Amount | None = None
    device_bytes: _DeviceMemory | None = None


class _Dropped(_Line, tag="dropped"):
    step: _Count
    batches: list[_Count]
    why: str


class _Anchor(_Line, tag="anchor"):
    unix_ns: _Count | None = None
    monotonic_ns: _Count | None = None


class _Close(_Line, tag="close"):
    gap: _Gap | None = None


_DECODER = msgspec.json.Decoder(_Open | _Measures | _Step | _Dropped | _Anchor | _Close)


@dataclass(slots=True)
class PhaseRecords:
    """What one rank's phase file holds.

    Attributes:
        steps: one row per step, in the order they ended (``STEPS_SCHEMA``); ``fit`` counts trainings of the
            process, ``ts_ns`` is the begin on the Unix clock as it stood when the training or its window began;
            ``batch_size`` is looked at once a second.
        phases: one row per phase of a step, or of the time before it (``in_gap``); ``row`` is the step's row.
        memory: of the device, one row per step that says it (``MEMORY_SCHEMA``); peaks: since the process began.
        measured: (fit, row, phase, None or why it is not measured) from that row of ``steps`` to the end of its fit, or
            until more is said of the phase.
        dropped: (step, batches, why) of batches whose gradients came to nothing; the first batches, and how many.
        is_closed: the last training was followed to its end.
        num_unreadable: lines that are not what this project writes; a cut last line is not among them.
        is_cut: the last line is cut.
    """

    rank: int | None = None
    run_id: str | None = None
    world_size: int | None = None
    steps: pl.DataFrame = field(default_factory=lambda: pl.DataFrame(schema=STEPS_SCHEMA))
    phases: pl.DataFrame = field(default_factory=lambda: pl.DataFrame(schema=PHASES_SCHEMA))
    memory: pl.DataFrame = field(default_factory=lambda: pl.DataFrame(schema=MEMORY_SCHEMA))
    measured: list[tuple[int, int, str, str | None]] = field(default_factory=list)
    dropped: list[tuple[int, tuple[int, ...], int, str]] = field(default_factory=list)
    is_closed: bool = False
    num_unreadable: int = 0
    is_cut: bool = False

    @property
    def work(self) -> pl.DataFrame:
        """The whole steps with their ``row``, and ``work_ns``: their duration less what comes between their batches.

        That is measured in a step that accumulates, and is none of its work; it is ``inside_ns``.
        """
        inside = self.phases.filter(~pl.col("in_gap") & pl.col("phase").is_in(BETWEEN_STEPS))
        inside = inside.group_by("row").agg(pl.col("dur_ns").sum().alias("inside_ns"))
        whole = self.steps.with_row_index("row").filter(~pl.col("partial"))
        whole = whole.join(inside, on="row", how="left", validate="1:1", maintain_order="left")
        return whole.with_columns(pl.col("inside_ns").fill_null(0)).with_columns(
            work_ns=pl.col("dur_ns") - pl.col("inside_ns")
        )


USUAL = ~pl.col("profiled") & ~pl.col("first")
"""Of whole steps those that ran as they always do."""


class Untimed:
    """In which steps each phase that a file names was not timed, so that its absence says nothing.

    A phase is timed where the training half says so, or, if nothing is said of it in a training, where any step of
    that training has it.
    """

    def __init__(self, records: PhaseRecords) -> None:
        rows = records.steps.with_row_index("row")
        bounds = rows.group_by("fit").agg(pl.col("row").min().alias("first"), pl.col("row").max() + 1)
        self._fits = {fit: (first, end) for fit, first, end in bounds.iter_rows()}
        self._num_steps = rows.height
        said: dict[str, dict[int, list[tuple[int, str | None]]]] = defaultdict(dict)
        self.reasons: dict[str, str | None] = {}
        for fit, row, name, why in records.measured:
            said[name].setdefault(fit, []).append((row, why))
            self.reasons[name] = why
        seen = records.phases.select("row", "phase").join(rows.select("row", "fit"), on="row", validate="m:1")
        for fit, name in seen.select("fit", "phase").unique().iter_rows():
            said[name].setdefault(fit, [])
        self._ranges = {name: list(self._untimed(fits)) for name, fits in said.items()}

    def mask(self, name: str, rows: pl.Series) -> pl.Series:
        """Say for each row whether the phase was not timed in it."""
        ranges = self._ranges.get(name, [range(self._num_steps)])
        starts = pl.Series([each.start for each in ranges], dtype=pl.UInt32)
        ends = pl.Series([0, *(each.stop for each in ranges)], dtype=pl.UInt32)
        return rows < ends.gather(starts.search_sorted(rows, side="right"))

    def _untimed(self, fits: dict[int, list[tuple[int, str | None]]]) -> Iterator[range]:
        at = 0
        for fit in sorted(fits.keys() & self._fits.keys()):
            first, end = self._fits[fit]
            if at < first:
                yield range(at, first)
            # What is said first holds from the beginning: it is said when the phase could first have come.
            bounds = [first, *(row for row, _ in fits[fit][1:]), end]
            for (_, why), start, stop in zip(fits[fit], bounds, bounds[1:], strict=False):
                if why is not None and start < stop:
                    yield range(start, stop)
            at = end
        if at < self._num_steps:
            yield range(at, self._num_steps)


def read_phases(path: Path) -> PhaseRecords:
    """Read a phase file, finished or not.

    Raises:
        TraceFileError: the file cannot be opened.
    """
    records, rows = PhaseRecords(), _Rows()
    try:
        with path.open("rb") as file:
            for line, is_whole in _lines(file):
                _take(line, is_whole, records, rows)
    except OSError as fault:
        raise TraceFileError(
            f"{path} cannot be read: {fault.strerror or fault}. Give the trace_dir of a run that recorded phases."
        ) from fault
    records.steps, records.phases, records.memory = rows.steps.table(), rows.phases.table(), rows.memory.table()
    return records


def _lines(file: BinaryIO) -> Iterator[tuple[bytes, bool]]:
    """The lines, and whether each has its end; of one that is too long only so much that it cannot be read."""
    while line := file.readline(_MOST_BYTES):
        is_whole = line.endswith(b"\n") or len(line) == _MOST_BYTES
        rest = line
        while len(rest) == _MOST_BYTES and not rest.endswith(b"\n"):
            rest = file.readline(_MOST_BYTES)
        yield line, is_whole


def _take(text: bytes, is_whole: bool, records: PhaseRecords, rows: "_Rows") -> None:
    try:
        line = _DECODER.decode(text)
        rows.check(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        if is_whole:
            records.num_unreadable += 1
        else:
            records.is_cut = True
        return
    records.is_closed = False
    match line:
        case _Open():
            rows.begin_fit(line)
            records.rank, records.run_id, records.world_size = line.rank, line.run_id, line.world_size
        case _Measures():
            records.measured += rows.news(line)
        case _Step():
            rows.add(line)
        case _Dropped():
            records.dropped.append(
                (line.step, tuple(line.batches[:_MOST_BATCHES]), len(line.batches), line.why[:_MOST_TEXT])
            )
        case _Anchor():
            rows.set_clock(line)
        case _Close():
            records.is_closed = True


class _Table:
    """Collects rows; what is there goes into columns from time to time, which take a tenth of the memory."""

    def __init__(self, schema: pl.Schema) -> None:
        self._schema = schema
        self._blocks: list[pl.DataFrame] = []
        self._rows: list[tuple[Any, ...]] = []
        self.height = 0

    def add(self, *row: Any) -> None:
        self._rows.append(row)
        self.height += 1
        if len(self._rows) >= _BLOCK:
            self._pack()

    def table(self) -> pl.DataFrame:
        self._pack()
        return pl.concat(self._blocks)

    def _pack(self) -> None:
        self._blocks.append(pl.DataFrame(self._rows, schema=self._schema, orient="row"))
        self._rows = []


class _Rows:
    def __init__(self) -> None:
        self._fit = -1
        self._offset_ns: int | None = None
        self._names: set[str] = set()
        self._measured: dict[str, str | None] = {}
        self.steps, self.phases, self.memory = _Table(STEPS_SCHEMA), _Table(PHASES_SCHEMA), _Table(MEMORY_SCHEMA)

    def check(self, line: _Line) -> None:
        """Refuse a line that the training half cannot have written.

        Raises:
            msgspec.DecodeError: there are too many names, or phases that do not fit into what they are part of.
        """
        if isinstance(line, _Measures):
            self._check_names(line.phases)
        elif isinstance(line, _Step):
            for part in (line, line.gap):
                if part is not None:
                    self._check_names(part.phases)
                    if sum([ns for ns, _ in part.phases.values()]) > part.ns:
                        raise msgspec.DecodeError("phases longer than what they are part of")

    def _check_names(self, phases: dict[str, Any]) -> None:
        if phases.keys() <= self._names:
            return
        if len(self._names | phases.keys()) > _MOST_NAMES:
            raise msgspec.DecodeError("too many names")
        self._names |= phases.keys()

    def begin_fit(self, line: _Open) -> None:
        self._fit += 1
        self._measured = {}
        self.set_clock(line)

    def set_clock(self, line: _Open | _Anchor) -> None:
        if line.unix_ns is not None and line.monotonic_ns is not None:
            self._offset_ns = line.unix_ns - line.monotonic_ns

    def news(self, line: _Measures) -> list[tuple[int, int, str, str | None]]:
        """What a line says that was not said before in this fit."""
        missing = object()
        cut = {name: why and why[:_MOST_TEXT] for name, why in line.phases.items()}
        told = [(name, why) for name, why in cut.items() if self._measured.get(name, missing) != why]
        self._measured.update(told)
        return [(self._fit, self.steps.height, name, why) for name, why in told]

    def add(self, line: _Step) -> None:
        # Events of two streams tell no time: what they give may be below 0.
        device = {name: ns for name, ns in (line.device_ns or {}).items() if 0 <= ns <= _MOST}
        row = self.steps.height
        gap_ns = line.gap.ns if line.gap is not None else None
        flags = [name in line.flags for name in (PROFILED, FIRST, PARTIAL, UPDATE_SKIPPED)]
        whole = device.get(WHOLE_STEP)
        ts = None if self._offset_ns is None else line.begin_ns + self._offset_ns
        told = (line.rss_bytes, whole, line.batch_size)
        self.steps.add(self._fit, line.step, line.begin_ns, ts, line.ns, gap_ns, *flags, *told)
        if (memory := line.device_bytes) is not None:
            self.memory.add(row, *(getattr(memory, name) for name in memory.__struct_fields__))
        for name, (ns, calls) in line.phases.items():
            self.phases.add(row, False, name, ns, calls, device.get(name))
        for name, (ns, calls) in line.gap.phases.items() if line.gap is not None else ():
            self.phases.add(row, True, name, ns, calls, None)
