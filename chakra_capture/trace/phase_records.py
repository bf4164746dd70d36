"""Reads the phases of a rank's steps, as the training half writes them: one JSON object in a line.

The process that writes may be killed at any moment, so a last line may be cut; whatever else cannot be read is left out
and counted.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import msgspec
import polars as pl

from chakra_capture.errors import TraceFileError

# Sums of three of them stay within 64 bits.
_Count = Annotated[int, msgspec.Meta(ge=-(2**61), le=2**61)]
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


class _Line(msgspec.Struct, tag_field="kind"):
    """What every line is one of."""


class _Open(_Line, tag="open"):
    run_id: str | None = None
    rank: _Count | None = None
    world_size: _Count | None = None
    unix_ns: _Count | None = None
    monotonic_ns: _Count | None = None


class _Measures(_Line, tag="measures"):
    phases: dict[str, str | None]


class _Gap(msgspec.Struct):
    ns: _Count
    phases: dict[str, tuple[_Count, _Count]]


class _Step(_Line, tag="step"):
    step: _Count
    begin_ns: _Count
    ns: _Count
    phases: dict[str, tuple[_Count, _Count]]
    gap: _Gap | None = None
    flags: list[str] = msgspec.field(default_factory=list)
    device_ns: dict[str, _Count] | None = None
    rss_bytes: _Count | None = None


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
_WHOLE_STEP = "(step)"


@dataclass(slots=True)
class PhaseRecords:
    """What one rank's phase file holds.

    Attributes:
        steps: one row per step, in the order they ended (``STEPS_SCHEMA``); ``fit`` counts trainings of the
            process, ``ts_ns`` is the begin on the Unix clock as it stood when the training or its window began.
        phases: one row per phase of a step, or of the time before it (``in_gap``); ``row`` is the step's row.
        measured: for each phase that the training half knows how to time, None, or why it is not measured.
        dropped: (step, batches, why) of batches whose gradients came to nothing.
        is_closed: the last training was followed to its end.
        num_unreadable: lines that are not what this project writes; a cut last line is not among them.
        is_cut: the last line is cut.
    """

    rank: int | None = None
    run_id: str | None = None
    world_size: int | None = None
    steps: pl.DataFrame = field(default_factory=lambda: pl.DataFrame(schema=STEPS_SCHEMA))
    phases: pl.DataFrame = field(default_factory=lambda: pl.DataFrame(schema=PHASES_SCHEMA))
    measured: dict[str, str | None] = field(default_factory=dict)
    dropped: list[tuple[int, tuple[int, ...], str]] = field(default_factory=list)
    is_closed: bool = False
    num_unreadable: int = 0
    is_cut: bool = False


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
    records.steps = pl.DataFrame(rows.steps, schema=STEPS_SCHEMA, orient="row")
    records.phases = pl.DataFrame(rows.phases, schema=PHASES_SCHEMA, orient="row")
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
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        if is_whole:
            records.num_unreadable += 1
        else:
            records.is_cut = True
        return
    records.is_closed = False
    match line:
        case _Open():
            rows.fit += 1
            rows.set_clock(line)
            records.rank, records.run_id, records.world_size = line.rank, line.run_id, line.world_size
        case _Measures():
            records.measured.update(line.phases)
        case _Step():
            rows.add(line)
        case _Dropped():
            records.dropped.append((line.step, tuple(line.batches), line.why))
        case _Anchor():
            rows.set_clock(line)
        case _Close():
            records.is_closed = True


class _Rows:
    def __init__(self) -> None:
        self.fit = -1
        self._offset_ns: int | None = None
        self.steps: list[tuple[Any, ...]] = []
        self.phases: list[tuple[Any, ...]] = []

    def set_clock(self, line: _Open | _Anchor) -> None:
        if line.unix_ns is not None and line.monotonic_ns is not None:
            self._offset_ns = line.unix_ns - line.monotonic_ns

    def add(self, line: _Step) -> None:
        row, device = len(self.steps), line.device_ns or {}
        gap_ns = line.gap.ns if line.gap is not None else None
        flags = [name in line.flags for name in ("profiled", "first", "partial", "update_skipped")]
        whole = device.get(_WHOLE_STEP)
        ts = None if self._offset_ns is None else line.begin_ns + self._offset_ns
        self.steps.append((self.fit, line.step, line.begin_ns, ts, line.ns, gap_ns, *flags, line.rss_bytes, whole))
        for name, (ns, calls) in line.phases.items():
            self.phases.append((row, False, name, ns, calls, device.get(name)))
        for name, (ns, calls) in line.gap.phases.items() if line.gap is not None else ():
            self.phases.append((row, True, name, ns, calls, None))
