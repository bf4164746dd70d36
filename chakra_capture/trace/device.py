"""Reading a device trace (Kineto) into columns: every slice and instant, exact to the nanosecond."""

from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import numpy as np

from chakra_capture.errors import TraceFileError
from chakra_capture.trace.args import ID_ARGS
from chakra_capture.trace.columns import MISSING, Coded, Int64, Sparse, coded, missing
from chakra_capture.trace.events import EventReader
from chakra_capture.trace.head import LARGEST_RANK
from chakra_capture.trace.packed import Packed, pack
from chakra_capture.trace.process_groups import ProcessGroup, groups_in_config
from chakra_capture.trace.reading import ReadFile, ReadOptions, head_integer, read_file
from chakra_capture.trace.salvage import Salvage
from chakra_capture.trace.scanners import ScannerKind
from chakra_capture.trace.spill import Spill
from chakra_capture.trace.times import to_epoch

# Category of "PyTorch Profiler (0)", which spans the whole recording.
_PROFILER_SPAN = "Trace"


# Longer than any recording, and short enough for sums over many rows to stay in 64 bits.
_LONGEST_NS = 2**53


class _DistributedInfo(msgspec.Struct):
    rank: int | None = None
    world_size: int | None = None
    backend: str | None = None
    pg_config: msgspec.Raw = msgspec.Raw(b"[]")


@dataclass(frozen=True, slots=True)
class DeviceTrace:
    """One device trace; every array has one entry per row, in file order.

    Attributes:
        ts_ns: start, ns since the Unix epoch.
        dur_ns: as read; ``MISSING`` where absent, negative (counted) or beyond 104 days, 0 for an instant.
        residue: JSON text of the args that have neither a column nor an entry in ``wide``.
        wide: integer args that differ from row to row, by key.
        categories: events per category in the file, flows and metadata included ("" = none).
        scanner: what read the file.
    """

    path: Path
    phase_type: Coded
    category: Coded
    name: Coded
    pid: Packed
    tid: Packed
    ts_ns: Int64
    dur_ns: Int64
    ids: dict[str, Packed]
    input_shapes: Coded
    input_types: Coded
    residue: Coded
    wide: dict[str, Sparse]
    categories: dict[str, int]
    num_events: int
    num_bad_times: int
    num_negative_durations: int
    rank: int | None
    world_size: int | None
    backend: str | None
    process_groups: tuple[ProcessGroup, ...]
    salvage: Salvage
    scanner: ScannerKind

    @property
    def num_rows(self) -> int:
        return len(self.name)

    def without_times(self) -> "DeviceTrace":
        """The same without starts and durations, which a merge holds in an order of its own."""
        return replace(self, ts_ns=missing(0), dur_ns=missing(0))

    @property
    def args(self) -> Coded:
        """JSON text of all args that have no column; put together anew each time."""
        members: dict[int, str] = {}
        for key, column in self.wide.items():
            for row, value in zip(column.rows.tolist(), column.values.tolist(), strict=True):
                members[row] = f'{members.get(row, "")},"{key}":{value}'
        if not members:
            return self.residue
        base = self.residue.values
        texts: list[str | None] = [None if code < 0 else base[code] for code in self.residue.codes.tolist()]
        for row, extra in members.items():
            text = texts[row]
            texts[row] = f"{{{extra[1:]}}}" if text is None else f"{text[:-1]}{extra}}}"
        return coded(texts)


def read_device_trace(
    path: Path, *, scanner: ScannerKind | None = None, options: ReadOptions | None = None
) -> DeviceTrace:
    """Read a Kineto trace, plain or gzip; a damaged one is read as far as it is whole.

    Args:
        path: the file.
        scanner: what to read it with; None takes the C core if it is built.
        options: more on how to read; its scanner counts where ``scanner`` is None.

    Raises:
        TraceFileError: the file is missing, or holds no trace events.
    """
    options = options or ReadOptions(scanner=scanner)
    file = read_file(path, EventReader, options)
    if not file.num_elements and file.salvage:
        raise TraceFileError(
            f"{path} is no device trace: its 'traceEvents' hold no whole event ({'; '.join(file.salvage.notes)}). "
            "Give the JSON that torch.profiler's export_chrome_trace wrote."
        )
    if not _holds_work(file):
        damage = f" ({'; '.join(file.salvage.notes)})" if file.salvage else ""
        raise TraceFileError(
            f"{path} holds no work events: none of its {file.num_elements} events is an op, a call or a device "
            f"activity{damage}. Record at least one step while the profiler runs, or give the host trace alone."
        )
    return _trace(path, file, options.spill)


def _holds_work(file: ReadFile) -> bool:
    """Marks ("Iteration Start") and the profiler's own span stand in a trace that recorded nothing, too."""
    texts = file.rows.texts
    return bool((texts["phase_type"].mask(("X",)) & ~texts["category"].mask((_PROFILER_SPAN,))).any())


def _trace(path: Path, file: ReadFile, spill: Spill | None) -> DeviceTrace:
    ints, texts = file.rows.ints, file.rows.texts
    ids = {column: pack(ints.pop(column), spill) for column in ID_ARGS}  # one by one, so that few are there twice
    ts_ns = to_epoch(ints["ts_ns"][:], head_integer(file.head.get("baseTimeNanoseconds")) or 0)
    dur_ns = ints["dur_ns"][:]
    dur_ns[texts["phase_type"].mask(("i", "I"))] = 0
    negative = (dur_ns < 0) & (dur_ns != MISSING)
    dur_ns[dur_ns > _LONGEST_NS] = MISSING
    bad_times = (ts_ns == MISSING) | (dur_ns == MISSING)
    dur_ns[negative] = MISSING
    for rows, fault in ((negative, "a negative duration"), (bad_times, "no possible start or duration")):
        _note_times(file.salvage, np.flatnonzero(rows), texts["name"], fault)
    info = _distributed(file.head.get("distributedInfo"))
    return DeviceTrace(
        path=path,
        phase_type=texts["phase_type"],
        category=texts["category"],
        name=texts["name"],
        pid=pack(ints.pop("pid"), spill),
        tid=pack(ints.pop("tid"), spill),
        ts_ns=ts_ns,
        dur_ns=dur_ns,
        ids=ids,
        input_shapes=texts["input_shapes"],
        input_types=texts["input_types"],
        residue=texts["residue"],
        wide=file.rows.wide,
        categories=file.counts,
        num_events=file.num_elements,
        num_bad_times=int(np.count_nonzero(bad_times)),
        num_negative_durations=int(np.count_nonzero(negative)),
        rank=info.rank if info.rank is not None and 0 <= info.rank <= LARGEST_RANK else None,
        world_size=info.world_size,
        backend=info.backend,
        process_groups=tuple(groups_in_config(bytes(info.pg_config))),
        salvage=file.salvage,
        scanner=file.scanner,
    )


def _note_times(salvage: Salvage, rows: Int64, name: Coded, fault: str) -> None:
    if len(rows):
        first = (name[int(rows[0])] or "")[:60]
        salvage.note(f"event with {fault} kept without its time, first {first!r}", count=len(rows))


def _distributed(raw: bytes | None) -> _DistributedInfo:
    try:
        return msgspec.json.decode(raw or b"{}", type=_DistributedInfo)
    except (msgspec.DecodeError, RecursionError):
        return _DistributedInfo()
