"""Events of a device trace as columns, decoded by msgspec: the slow reader, and the layout of the fast one."""

from collections import Counter
from typing import Any

import msgspec

from chakra_capture.trace import native
from chakra_capture.trace.args import ID_ARGS, RESIDUE, TEXT_ARGS, WIDE_ARGS, ArgsReader
from chakra_capture.trace.columns import int_column
from chakra_capture.trace.mend import EVENTS
from chakra_capture.trace.reading import Part, SlowReader
from chakra_capture.trace.times import parse_times

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
    args: msgspec.Raw = msgspec.Raw()


class EventReader(SlowReader):
    """Reads events; ``categories`` counts all of them, rows or not ("" = none)."""

    shape = EVENTS

    def restart(self) -> None:
        super().restart()
        self.categories: Counter[str] = Counter()
        self._decoder = msgspec.json.Decoder(_Event)
        self._array_decoder = msgspec.json.Decoder(list[_Event])
        self._args = ArgsReader()

    def decode(self, text: bytes) -> Any:
        event = self._decoder.decode(text)
        self._args.check([bytes(event.args)])
        return event

    def decode_all(self, array: bytes) -> list[Any]:
        events: list[Any] = self._array_decoder.decode(array)
        self._args.check(bytes(event.args) for event in events if event.ph not in _ROW_PHASES)
        return events

    def count(self, elements: list[Any]) -> None:
        self.categories.update([event.cat or "" for event in elements])

    def kept(self, elements: list[Any]) -> list[Any]:
        return [event for event in elements if event.ph in _ROW_PHASES]

    def to_part(self, elements: list[Any]) -> Part:
        numbers = self.numbers
        args = self._args.read([bytes(event.args) for event in elements], numbers)
        return Part(
            ints={
                # 'Spans' and its like are no process or thread.
                "pid": int_column([event.pid for event in elements]),
                "tid": int_column([event.tid for event in elements]),
                "ts_ns": parse_times([event.ts for event in elements]),
                "dur_ns": parse_times([event.dur for event in elements]),
                **args.ids,
            },
            codes={
                "phase_type": numbers["phase_type"].codes([event.ph for event in elements]),
                "category": numbers["category"].codes([event.cat for event in elements]),
                "name": numbers["name"].codes(_names([event.name for event in elements])),
                **args.codes,
            },
            wide=args.wide(),
        )

    def native_layout(self) -> native.Layout:
        return native.Layout(
            is_host=False,
            ints=("pid", "tid", "ts_ns", "dur_ns", *ID_ARGS),
            texts=("phase_type", "category", "name", *TEXT_ARGS, RESIDUE),
            num_quoted=3,
            wide=WIDE_ARGS,
        )

    def counts(self) -> dict[str, int]:
        return dict(self.categories)

    def add_native_counts(self, scan: native.NativeScanner) -> None:
        counts = scan.counts(_CATEGORY)
        counts[""] = counts.get("", 0) + scan.count - self.num_taken - sum(counts.values())
        self.categories.update({category: n for category, n in counts.items() if n})


def _names(names: list[Any]) -> list[str]:
    if set(map(type, names)) == {str}:
        return names
    return [name if isinstance(name, str) else "" if name is None else str(name) for name in names]
