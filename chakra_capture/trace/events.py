"""Events of a device trace as columns, decoded by msgspec: the slow reader, and the layout of the fast one."""

from collections import Counter, deque
from itertools import repeat
from typing import Any

import msgspec
import numpy as np

from chakra_capture.trace import native
from chakra_capture.trace.columns import (
    MISSING,
    Int64,
    Rows,
    Sparse,
    coded,
    coded_bytes,
    int_column,
    missing,
    parse_ids,
    parse_ints,
)
from chakra_capture.trace.mend import EVENTS
from chakra_capture.trace.reading import SlowReader
from chakra_capture.trace.times import microseconds_to_ns

# Integer args that have a column of their own.
ID_ARGS = {
    "external_id": ("External id", "external id", "External Id"),
    "record_function_id": ("Record function id",),
    "correlation_id": ("correlation", "Correlation ID"),
    "sequence_number": ("Sequence number",),
    "device": ("device",),
    "stream": ("stream",),
}
# Kineto writes 0 where there is no record function; a correlation of 0 joins nothing either.
_ZERO_IS_NONE = ("record_function_id", "correlation_id")
# Integer args that differ from row to row: kept apart, or every row would have args text of its own.
WIDE_ARGS = (
    "Ev Idx", "Profiler Event Index", "Python id", "Python parent id", "Python module id", "Addr", "Bytes",
    "Total Allocated", "Total Reserved", "bytes", "wait_on_cuda_event_record_corr_id", "wait_on_cuda_event_id",
)  # fmt: skip
_WIDE_END = 10**18
_TEXT_ARGS = {"input_shapes": "Input Dims", "input_types": "Input type"}
# Slices and instants; the others are flows, counters and metadata.
_ROW_PHASES = frozenset(("X", "i", "I"))
_CATEGORY = 1


class _Event(msgspec.Struct, gc=False):
    ph: str = ""
    cat: str | None = None
    name: str | int | float | None = None
    pid: int | str | float | None = None
    tid: int | str | float | None = None
    ts: msgspec.Raw = msgspec.Raw()
    dur: msgspec.Raw = msgspec.Raw()
    args: dict[str, msgspec.Raw] | None = None


class EventReader(SlowReader):
    """Reads events; ``categories`` counts all of them, rows or not ("" = none)."""

    shape = EVENTS

    def restart(self) -> None:
        super().restart()
        self.categories: Counter[str] = Counter()
        self._decoder = msgspec.json.Decoder(_Event)

    def decode(self, text: bytes) -> Any:
        return self._decoder.decode(text)

    def decode_all(self, array: bytes) -> list[Any]:
        return msgspec.json.decode(array, type=list[_Event])

    def keep(self, elements: list[Any]) -> list[Any]:
        self.categories.update([event.cat or "" for event in elements])
        return [event for event in elements if event.ph in _ROW_PHASES]

    def to_rows(self, elements: list[Any]) -> Rows:
        return event_rows(elements)

    def native_layout(self) -> native.Layout:
        return native.Layout(
            is_host=False,
            ints=("pid", "tid", "ts_ns", "dur_ns", *ID_ARGS),
            texts=("phase_type", "category", "name", *_TEXT_ARGS, "residue"),
            num_quoted=3,
            wide=WIDE_ARGS,
        )

    def counts(self) -> dict[str, int]:
        return dict(self.categories)

    def add_native_counts(self, scan: native.NativeScanner) -> None:
        counts = scan.counts(_CATEGORY)
        counts[""] = counts.get("", 0) + scan.count - self.num_taken - sum(counts.values())
        self.categories.update({category: n for category, n in counts.items() if n})


def event_rows(events: list[_Event]) -> Rows:
    """Columns of slices and instants."""
    args = [event.args or {} for event in events]
    present: set[str] = set().union(*args)
    ids = {column: _take_ids(args, [key for key in keys if key in present]) for column, keys in ID_ARGS.items()}
    texts = {
        column: coded_bytes(_bytes(a.pop(key, None)) for a in args) if key in present else coded([None] * len(args))
        for column, key in _TEXT_ARGS.items()
    }
    for column in _ZERO_IS_NONE:
        ids[column][ids[column] == 0] = MISSING
    wide = {key: _take_wide(args, key) if key in present else _NO_WIDE for key in WIDE_ARGS}
    encode = msgspec.json.Encoder().encode
    return Rows(
        ints={
            # 'Spans' and its like are no process or thread.
            "pid": int_column([event.pid for event in events]),
            "tid": int_column([event.tid for event in events]),
            "ts_ns": microseconds_to_ns(_lines([event.ts for event in events])),
            "dur_ns": microseconds_to_ns(_lines([event.dur for event in events])),
            **ids,
        },
        texts={
            "phase_type": coded([event.ph for event in events]),
            "category": coded([event.cat for event in events]),
            "name": coded([_name(event.name) for event in events]),
            **texts,
            "residue": coded_bytes([encode(a) if a else None for a in args]),
        },
        wide=wide,
    )


_NO_WIDE = Sparse(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64))


def _take_ids(args: list[dict[str, msgspec.Raw]], keys: list[str]) -> Int64:
    """Take an integer arg out of every event's args; what is no integer (ROCm's "0x0") stays there."""
    column = missing(len(args))
    for key in keys:
        raws = list(map(dict.get, args, repeat(key)))
        values = parse_ids(raws)
        taken = (values != MISSING) & (column == MISSING)
        column[taken] = values[taken]
        if np.count_nonzero(taken) == len(raws) - raws.count(None):
            deque(map(dict.pop, args, repeat(key), repeat(None)), maxlen=0)
        else:
            for row in np.flatnonzero(taken).tolist():
                del args[row][key]
    return column


def _take_wide(args: list[dict[str, msgspec.Raw]], key: str) -> Sparse:
    raws = list(map(dict.get, args, repeat(key)))
    rows = np.flatnonzero([raw is not None for raw in raws])
    texts = [bytes(raw) for raw in raws if raw is not None]
    values = parse_ints([None if text[:1] == b'"' else text for text in texts])
    taken = (values > -_WIDE_END) & (values < _WIDE_END)
    for row in rows[taken].tolist():
        del args[row][key]
    return Sparse(rows[taken], values[taken])


def _name(name: Any) -> str:
    return name if isinstance(name, str) else "" if name is None else str(name)


def _bytes(raw: msgspec.Raw | None) -> bytes | None:
    return None if raw is None else bytes(raw)


def _lines(raws: list[Any]) -> list[str]:
    lines = b"\n".join(raws).decode("utf-8", "replace").split("\n") if raws else []
    # A value laid out over several lines is no time, but it would shift the rows.
    return lines if len(lines) == len(raws) else [str(bytes(raw), "utf-8", "replace") for raw in raws]
