"""Reading a device trace (Kineto) into columns: every slice and instant, exact to the nanosecond."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from chakra_capture.errors import TraceFileError
from chakra_capture.trace.columns import MISSING, Coded, Int64, coded, int_column, missing, parse_ints
from chakra_capture.trace.files import FileBytes, read_bytes
from chakra_capture.trace.salvage import EVENTS, Salvage, elements
from chakra_capture.trace.times import microseconds_to_ns, to_epoch

# Integer args that have a column of their own; the rest of the args stays as JSON text.
_ID_ARGS = {
    "external_id": ("External id", "external id", "External Id"),
    "record_function_id": ("Record function id",),
    "correlation_id": ("correlation", "Correlation ID"),
    "sequence_number": ("Sequence number",),
    "device": ("device",),
    "stream": ("stream",),
}
_TEXT_ARGS = {"input_shapes": "Input Dims", "input_types": "Input type"}
# Slices and instants; the others are flows, counters and metadata.
_ROW_PHASES = ("X", "i", "I")
# Kineto writes 0 where there is no record function; a correlation of 0 joins nothing either.
_ZERO_IS_NONE = ("record_function_id", "correlation_id")


LARGEST_RANK = 2**31 - 1


class _Event(msgspec.Struct, gc=False):
    ph: str = ""
    cat: str | None = None
    name: str | int | float | None = None
    pid: int | str | float | None = None
    tid: int | str | float | None = None
    ts: msgspec.Raw = msgspec.Raw()
    dur: msgspec.Raw = msgspec.Raw()
    args: dict[str, msgspec.Raw] | None = None


class _DistributedInfo(msgspec.Struct):
    rank: int | None = None
    world_size: int | None = None
    backend: str | None = None


class _File(msgspec.Struct):
    trace_events: list[_Event] | None = msgspec.field(name="traceEvents", default=None)
    base_ns: int = msgspec.field(name="baseTimeNanoseconds", default=0)
    distributed: _DistributedInfo | None = msgspec.field(name="distributedInfo", default=None)
    host_name: str | None = None


@dataclass(frozen=True, slots=True)
class DeviceTrace:
    """One device trace; every array has one entry per row, in file order.

    Attributes:
        ts_ns: start, ns since the Unix epoch.
        dur_ns: as read; ``MISSING`` where absent or negative (negative ones are counted), 0 for an instant.
        args: JSON text of the args that have no column.
        categories: events per category in the file, flows and metadata included ("" = none).
    """

    path: Path
    phase_type: Coded
    category: Coded
    name: Coded
    pid: Int64
    tid: Int64
    ts_ns: Int64
    dur_ns: Int64
    ids: dict[str, Int64]
    input_shapes: Coded
    input_types: Coded
    args: Coded
    categories: dict[str, int]
    num_events: int
    num_bad_times: int
    num_negative_durations: int
    rank: int | None
    world_size: int | None
    backend: str | None
    salvage: Salvage

    @property
    def num_rows(self) -> int:
        return len(self.ts_ns)


def read_device_trace(path: Path) -> DeviceTrace:
    """Read a Kineto trace, plain or gzip; a damaged one is read as far as it is whole.

    Raises:
        TraceFileError: the file is missing, or holds no trace events.
    """
    file = read_bytes(path)
    salvage = Salvage()
    if file.cut:
        salvage.note(file.cut)
    try:
        parsed = _decode_whole(file)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        salvage.note(f"not valid as a whole ({error}), read element by element")
        parsed = _decode_elements(file, salvage)
    if parsed.trace_events is None or (not parsed.trace_events and salvage):
        raise TraceFileError(
            f"{path} is no device trace: it has no 'traceEvents' with whole events. "
            "Give the JSON that torch.profiler's export_chrome_trace wrote."
        )
    if not any(event.ph in _ROW_PHASES for event in parsed.trace_events):
        raise TraceFileError(
            f"{path} holds no work events: of its {len(parsed.trace_events)} events none has a time. "
            "Record at least one step while the profiler runs."
        )
    return _columns(path, parsed, salvage)


def _decode_whole(file: FileBytes) -> _File:
    if file.data.lstrip()[:1] == b"[":  # a bare array of events is legal in this format
        return _File(trace_events=msgspec.json.decode(file.data, type=list[_Event]))
    return msgspec.json.decode(file.data, type=_File)


def _decode_elements(file: FileBytes, salvage: Salvage) -> _File:
    if b'"traceEvents"' not in file.data and file.data.lstrip()[:1] != b"[":
        return _File()
    decoder = msgspec.json.Decoder(_Event)
    parsed = _File(trace_events=list(_decode_each(elements(file.data, EVENTS, salvage), decoder, salvage)))
    base = re.search(rb'"baseTimeNanoseconds"\s*:\s*(\d{1,19})', file.data)
    parsed.base_ns = int(base.group(1)) if base else 0
    info = re.search(rb'"distributedInfo"\s*:\s*\{', file.data)
    if info:
        rank = re.search(rb'"rank"\s*:\s*(\d{1,9})', file.data[info.end() : info.end() + 2000])
        parsed.distributed = _DistributedInfo(rank=int(rank.group(1)) if rank else None)
    return parsed


def _decode_each(texts: Iterable[bytes], decoder: "msgspec.json.Decoder[_Event]", salvage: Salvage) -> Iterator[_Event]:
    for text in texts:
        try:
            yield decoder.decode(text)
        except msgspec.ValidationError:
            salvage.elements_lost += 1
            salvage.note("event with a field of a wrong type skipped")


def _columns(path: Path, parsed: _File, salvage: Salvage) -> DeviceTrace:
    events = parsed.trace_events or []
    kept = [e for e in events if e.ph in _ROW_PHASES]
    args = [e.args or {} for e in kept]
    ids = {column: _take_ids(args, keys) for column, keys in _ID_ARGS.items()}
    for column in _ZERO_IS_NONE:
        ids[column][ids[column] == 0] = MISSING
    texts = {column: coded(_text(a.pop(key, None)) for a in args) for column, key in _TEXT_ARGS.items()}
    ts_ns = to_epoch(microseconds_to_ns(_lines([e.ts for e in kept])), parsed.base_ns)
    dur_ns = microseconds_to_ns(_lines([e.dur for e in kept]))
    phase_type = coded(e.ph for e in kept)
    dur_ns[phase_type.mask(("i", "I"))] = 0
    negative = (dur_ns < 0) & (dur_ns != MISSING)
    bad_times = int(np.count_nonzero((ts_ns == MISSING) | (dur_ns == MISSING)))
    dur_ns[negative] = MISSING
    info = parsed.distributed or _DistributedInfo()
    return DeviceTrace(
        path=path,
        phase_type=phase_type,
        category=coded(e.cat for e in kept),
        name=coded(e.name if isinstance(e.name, str) else str(e.name) for e in kept),
        # 'Spans' and its like are no process or thread.
        pid=int_column(e.pid for e in kept),
        tid=int_column(e.tid for e in kept),
        ts_ns=ts_ns,
        dur_ns=dur_ns,
        ids=ids,
        input_shapes=texts["input_shapes"],
        input_types=texts["input_types"],
        args=coded(_text(msgspec.json.encode(a)) if a else None for a in args),
        categories=dict(Counter((e.cat or "") for e in events)),
        num_events=len(events),
        num_bad_times=bad_times,
        num_negative_durations=int(np.count_nonzero(negative)),
        rank=info.rank if info.rank is not None and 0 <= info.rank <= LARGEST_RANK else None,
        world_size=info.world_size,
        backend=info.backend,
        salvage=salvage,
    )


def _take_ids(args: list[dict[str, Any]], keys: tuple[str, ...]) -> Int64:
    """Take an integer arg out of every event's args; what is no integer (ROCm's "0x0") stays there."""
    column = missing(len(args))
    for key in keys:
        raws = [a.pop(key, None) for a in args]
        values = parse_ints(raws)
        for row in np.flatnonzero(values == MISSING).tolist():
            if raws[row] is not None:
                args[row][key] = raws[row]
        column = np.where(values == MISSING, column, values)
    return column


def _text(raw: Any) -> str | None:
    return None if raw is None else str(bytes(raw), "utf-8", "replace")


def _lines(raws: list[Any]) -> list[str]:
    lines = b"\n".join(raws).decode("utf-8", "replace").split("\n") if raws else []
    # A value laid out over several lines is no time, but it would shift the rows.
    return lines if len(lines) == len(raws) else [str(bytes(raw), "utf-8", "replace") for raw in raws]
