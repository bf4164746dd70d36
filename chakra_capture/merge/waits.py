"""Where one side waits for the other: synchronising calls, event waits, blocking copies.

Taken from the ``cuda_sync`` records where the trace has them, else from the runtime calls; what neither shows is
left out. Which work is meant is read from the order of launches: a record or a wait sees what was launched before it.
"""

from dataclasses import dataclass, field

import msgspec
import numpy as np

from chakra_capture.merge.event_calls import is_event_wait, read_event_calls
from chakra_capture.merge.launched import Launches
from chakra_capture.merge.rows import CODE, end_of
from chakra_capture.merge.tables import Columns
from chakra_capture.trace.columns import MISSING, Int64

_DEVICE_WIDE = ("DeviceSynchronize", "CtxSynchronize")
_RECORD_ID = "wait_on_cuda_event_record_corr_id"
_BLOCKING_COPIES = ("cudaMemcpy", "hipMemcpy", "hipMemcpyWithStream")


@dataclass(frozen=True, slots=True)
class Waits:
    """Pairs of rows: ``sync`` from the end of an activity to the end of a call, ``event`` between activities.

    Attributes:
        unresolved: waits, by name of the call, of which nothing shows what they wait for.
    """

    sync: list[tuple[int, int]] = field(default_factory=list)
    event: list[tuple[int, int]] = field(default_factory=list)
    unresolved: dict[str, int] = field(default_factory=dict)

    def leave_out(self, name: str | None) -> None:
        self.unresolved[name or ""] = self.unresolved.get(name or "", 0) + 1


@dataclass(frozen=True, slots=True)
class _Record:
    """A ``cuda_sync`` record: what it waits for, and the correlation ids of its call and of the event's record."""

    name: str
    device: int
    stream: int
    correlation: int
    event_record: int
    wait_on_stream: int | None


class _SyncArgs(msgspec.Struct):
    wait_on_stream: int | None = None


def find_waits(columns: Columns) -> Waits:
    """All waits of one window that the trace shows."""
    waits = Waits()
    _blocking_copies(columns, waits)
    calls = np.flatnonzero((columns.kind == CODE["runtime"]) & (columns.ts_ns != MISSING) & (columns.dur_ns != MISSING))
    recorded = np.flatnonzero(columns.kind == CODE["sync"])
    waiting = calls[columns.name.accepted(calls, _is_wait)]
    if not len(recorded) and not len(waiting):
        return waits
    launches = Launches(columns)
    explained = _from_records(columns, launches, recorded, calls, waits) if len(recorded) else set()
    events, device_wide = list[int](), list[int]()
    # A call of the driver within one of the runtime is the same wait.
    around = columns.parent[waiting]
    nested = (around >= 0) & (columns.kind[around] == CODE["runtime"]) & columns.name.accepted(around, _is_wait)
    for call in waiting[~nested].tolist():
        if call in explained:
            continue
        kind = _waits_for(columns.name[call] or "")
        if kind == "device":
            device_wide.append(call)
        elif kind == "stream":
            _from_stream_call(columns, launches, call, waits)
        elif len(recorded):
            waits.leave_out(columns.name[call])
        else:
            events.append(call)
    if events:
        _from_event_calls(columns, events, waits)
    _from_device_wide(columns, launches, MISSING, device_wide, waits)
    return waits


def _from_event_calls(columns: Columns, calls: list[int], waits: Waits) -> None:
    found = read_event_calls(columns, np.array(calls, dtype=np.int64))
    for call, src, dst, is_sync in zip(calls, found.src.tolist(), found.dst.tolist(), found.is_sync, strict=True):
        if src < 0:
            waits.leave_out(columns.name[call])
        else:
            (waits.sync if is_sync else waits.event).append((src, dst))


def _from_records(columns: Columns, launches: Launches, recorded: Int64, calls: Int64, waits: Waits) -> set[int]:
    """Waits of all ``cuda_sync`` records; returns the calls that have one."""
    records = _records(columns, recorded)
    # Of nested calls the outermost: it stands before the others.
    correlation = columns.integers("correlation_id", calls)
    named = np.isin(correlation, [number for record in records for number in (record.correlation, record.event_record)])
    correlation, calls = correlation[named], calls[named]
    by_correlation = dict(zip(correlation[::-1].tolist(), calls[::-1].tolist(), strict=True))
    by_correlation.pop(MISSING, None)
    explained = set()
    device_wide: dict[int, list[int]] = {}
    for record in records:
        call = by_correlation.get(record.correlation)
        if call is None:
            waits.leave_out(record.name)
        else:
            explained.add(call)
            if record.name == "Context Sync":
                device_wide.setdefault(record.device, []).append(call)
            _from_record(columns, launches, record, call, by_correlation.get(record.event_record), waits)
    for device, waiting in device_wide.items():
        _from_device_wide(columns, launches, device, waiting, waits)
    return explained


def _from_device_wide(columns: Columns, launches: Launches, device: int, calls: list[int], waits: Waits) -> None:
    """Waits of calls for all streams of a device, or of every device (``MISSING``)."""
    waiting = np.array(calls, dtype=np.int64)
    for sources in launches.last_of_streams(device, columns.ts_ns[waiting]):
        known = sources >= 0
        waits.sync.extend(zip(sources[known].tolist(), waiting[known].tolist(), strict=True))


def _records(columns: Columns, rows: Int64) -> list[_Record]:
    names = [columns.name[row] or "" for row in rows.tolist()]
    ids = [columns.integers(key, rows).tolist() for key in ("device", "stream", "correlation_id")]
    events = columns.wide(_RECORD_ID, rows).tolist()
    streams = [_wait_on_stream(columns.residue(row)) for row in rows.tolist()]
    return [_Record(*each) for each in zip(names, *ids, events, streams, strict=True)]


def _from_record(
    columns: Columns, launches: Launches, record: _Record, call: int, event: int | None, waits: Waits
) -> None:
    """Waits of one record for a stream; ``call`` waits, ``event`` is the call that recorded its event."""
    device, begun = record.device, int(columns.ts_ns[call])
    if record.name == "Stream Sync":
        _add(waits.sync, launches.last_before(device, record.stream, begun), call)
    elif record.name in ("Event Sync", "Stream Wait Event"):
        if event is None or record.wait_on_stream is None:
            waits.leave_out(columns.name[call])
            return
        source = launches.last_before(device, record.wait_on_stream, int(columns.ts_ns[event]))
        if record.name == "Event Sync":
            _add(waits.sync, source, call)
        else:
            waiting = launches.first_after(device, record.stream, begun)
            if waiting is not None:
                _add(waits.event, source, waiting)


def _waits_for(name: str) -> str | None:
    """What a call waits for, by its name: the device, what its thread launched on a stream, an event, or nothing."""
    if name.endswith(_DEVICE_WIDE):
        return "device"
    if name.endswith("StreamSynchronize"):
        return "stream"
    return "event" if is_event_wait(name) else None


def _is_wait(name: str) -> bool:
    return _waits_for(name) is not None


def _from_stream_call(columns: Columns, launches: Launches, call: int, waits: Waits) -> None:
    """Wait of a call that has no record: it does not say which stream it waits for."""
    source = launches.last_of_thread(call, int(columns.ts_ns[call]))
    if source is None:
        waits.leave_out(columns.name[call])
    _add(waits.sync, source, call)


def _blocking_copies(columns: Columns, waits: Waits) -> None:
    """A copy to pageable memory blocks its own launch call, which returns when the copy is done."""
    rows = np.flatnonzero((columns.kind == CODE["memcpy"]) & (columns.launch >= 0))
    calls = columns.launch[rows]
    pageable = columns.name.accepted(rows, lambda name: "Pageable" in name)
    blocks = pageable | columns.name.accepted(calls, _BLOCKING_COPIES.__contains__)
    done, returned = (end_of(columns.ts_ns[r], columns.dur_ns[r]) for r in (rows, calls))
    inside = blocks & (done != MISSING) & (done <= returned)
    waits.sync.extend(zip(rows[inside].tolist(), calls[inside].tolist(), strict=True))


def _add(pairs: list[tuple[int, int]], source: int | None, target: int) -> None:
    if source is not None and source != target:
        pairs.append((source, target))


def _wait_on_stream(args: str | None) -> int | None:
    try:
        return msgspec.json.decode(args or "{}", type=_SyncArgs).wait_on_stream
    except msgspec.DecodeError:
        return None
