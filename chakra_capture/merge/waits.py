"""Where one side waits for the other: synchronising calls, event waits, and hand-overs between threads.

Taken from the ``cuda_sync`` records where the trace has them, else from the runtime calls; what neither shows is
left out. Which work is meant is read from the order of launches: a record or a wait sees what was launched before it.
"""

from dataclasses import dataclass

import msgspec
import numpy as np

from chakra_capture.merge.rows import ACTIVITY_KINDS, end_of
from chakra_capture.merge.tables import Columns
from chakra_capture.trace.columns import MISSING, Int64

_DEVICE_WIDE = ("DeviceSynchronize", "CtxSynchronize")
_RECORD_ID = "wait_on_cuda_event_record_corr_id"
_BLOCKING_COPIES = ("cudaMemcpy", "hipMemcpy", "hipMemcpyWithStream")


@dataclass(frozen=True, slots=True)
class Waits:
    """Pairs of rows: ``sync`` from the end of an activity to the end of a call, ``event`` between activities."""

    sync: list[tuple[int, int]]
    event: list[tuple[int, int]]


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


class _Launches:
    """Activities of each (device, stream), and of each launching thread, in the order of their launches."""

    def __init__(self, columns: Columns) -> None:
        rows = np.flatnonzero(columns.is_kind(*ACTIVITY_KINDS) & (columns.launch >= 0) & (columns.ts_ns != MISSING))
        launched = columns.ts_ns[columns.launch[rows]]
        rows, launched = rows[launched != MISSING], launched[launched != MISSING]
        order = np.lexsort((columns.ts_ns[rows], launched))
        rows, launched = rows[order], launched[order]
        self._thread_of_row = columns.track
        device, stream = columns.integers("device", rows), columns.integers("stream", rows)
        self._by_stream: dict[tuple[int, int], _Queue] = {}
        for key in sorted(set(zip(device.tolist(), stream.tolist(), strict=True))):
            mine = (device == key[0]) & (stream == key[1])
            self._by_stream[key] = _Queue(launched[mine], rows[mine])
        thread = self._thread_of_row[columns.launch[rows]]
        self._by_thread = {
            int(number): _Queue(launched[thread == number], rows[thread == number]) for number in np.unique(thread)
        }

    def streams(self, device: int) -> list[tuple[int, int]]:
        """Streams of a device; of all devices where the record does not name one."""
        return [key for key in self._by_stream if device in (MISSING, key[0])]

    def last_before(self, device: int, stream: int, time: int) -> int | None:
        """Last activity launched on a stream before ``time``."""
        queue = self._by_stream.get((device, stream))
        return queue.last_before(time) if queue else None

    def first_after(self, device: int, stream: int, time: int) -> int | None:
        """First activity launched on a stream at or after ``time``."""
        queue = self._by_stream.get((device, stream))
        return queue.first_after(time) if queue else None

    def last_of_thread(self, call: int, time: int) -> int | None:
        """Last activity that the thread of ``call`` launched on any stream before ``time``."""
        queue = self._by_thread.get(int(self._thread_of_row[call]))
        return queue.last_before(time) if queue else None


@dataclass(frozen=True, slots=True)
class _Queue:
    launched_ns: Int64
    rows: Int64

    def last_before(self, time: int) -> int | None:
        at = int(np.searchsorted(self.launched_ns, time, side="left"))
        return int(self.rows[at - 1]) if at else None

    def first_after(self, time: int) -> int | None:
        at = int(np.searchsorted(self.launched_ns, time, side="left"))
        return int(self.rows[at]) if at < len(self.rows) else None


def find_waits(columns: Columns) -> Waits:
    """All waits of one window that the trace shows."""
    launches = _Launches(columns)
    waits = Waits([], [])
    calls = np.flatnonzero(columns.is_kind("runtime") & (columns.ts_ns != MISSING) & (columns.dur_ns != MISSING))
    records = _records(columns)
    by_correlation = _by_correlation(columns, calls) if records else {}
    explained = set()
    for record in records:
        call = by_correlation.get(record.correlation)
        if call is not None:
            explained.add(call)
            _from_record(columns, launches, record, call, by_correlation, waits)
    per_name = [_waits_for(name) for name in columns.name.values]
    for call in calls.tolist():
        kind = per_name[columns.name.codes[call]] if call not in explained else None
        if kind is not None:
            _from_call(columns, launches, call, kind, waits)
    _blocking_copies(columns, waits)
    return waits


def _records(columns: Columns) -> list[_Record]:
    rows = np.flatnonzero(columns.is_kind("sync"))
    names = [columns.name[row] or "" for row in rows.tolist()]
    ids = [columns.integers(key, rows).tolist() for key in ("device", "stream", "correlation_id")]
    events = columns.wide(_RECORD_ID, rows).tolist()
    streams = [_wait_on_stream(columns.residue(row)) for row in rows.tolist()]
    return [_Record(*each) for each in zip(names, *ids, events, streams, strict=True)]


def _by_correlation(columns: Columns, calls: Int64) -> dict[int, int]:
    """Call of each correlation id, the outermost where calls are nested."""
    correlation = columns.integers("correlation_id", calls)
    return dict(zip(correlation[::-1].tolist(), calls[::-1].tolist(), strict=True))


def _from_record(
    columns: Columns, launches: _Launches, record: _Record, call: int, by_correlation: dict[int, int], waits: Waits
) -> None:
    """Waits of one ``cuda_sync`` record; ``call`` is the runtime call with its correlation id."""
    device, begun = record.device, int(columns.ts_ns[call])
    if record.name == "Context Sync":
        for on_device, stream in launches.streams(device):
            _add(waits.sync, launches.last_before(on_device, stream, begun), call)
    elif record.name == "Stream Sync":
        _add(waits.sync, launches.last_before(device, record.stream, begun), call)
    elif record.name in ("Event Sync", "Stream Wait Event"):
        event = by_correlation.get(record.event_record)
        if event is None or record.wait_on_stream is None:
            return
        source = launches.last_before(device, record.wait_on_stream, int(columns.ts_ns[event]))
        if record.name == "Event Sync":
            _add(waits.sync, source, call)
        else:
            waiting = launches.first_after(device, record.stream, begun)
            if waiting is not None:
                _add(waits.event, source, waiting)


def _waits_for(name: str) -> str | None:
    """What a call waits for, by its name: the device, what its thread launched on a stream, or nothing known."""
    if name.endswith(_DEVICE_WIDE):
        return "device"
    return "stream" if name.endswith("StreamSynchronize") else None


def _from_call(columns: Columns, launches: _Launches, call: int, kind: str, waits: Waits) -> None:
    """Waits of a synchronising call that has no record: the call does not say which stream it waits for."""
    begun = int(columns.ts_ns[call])
    if kind == "device":
        for device, stream in launches.streams(MISSING):
            _add(waits.sync, launches.last_before(device, stream, begun), call)
    else:
        _add(waits.sync, launches.last_of_thread(call, begun), call)


def _blocking_copies(columns: Columns, waits: Waits) -> None:
    """A copy to pageable memory blocks its own launch call, which returns when the copy is done."""
    pageable = np.array(["Pageable" in name for name in columns.name.values], dtype=bool)
    rows = np.flatnonzero(columns.is_kind("memcpy") & (columns.launch >= 0))
    calls = columns.launch[rows]
    blocks = columns.name.mask_of(pageable)[rows] | columns.name.mask(_BLOCKING_COPIES)[calls]
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
