"""The args of events as columns: layout by layout where that pays, one by one where they are odd."""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import repeat

import msgspec
import numpy as np

from chakra_capture.trace.columns import MISSING, Int64, Positions, Sparse, missing, parse_ids
from chakra_capture.trace.dictionary import Numbers
from chakra_capture.trace.layouts import (
    Block,
    Integers,
    Plans,
    Span,
    Template,
    by_layout,
    has_digits,
    is_integer,
    span,
)

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
TEXT_ARGS = {"input_shapes": "Input Dims", "input_types": "Input type"}
RESIDUE = "residue"
_WIDE_END = 10**18

_Members = dict[str, msgspec.Raw]


@dataclass(frozen=True, slots=True)
class _Plan:
    """Where the args of one layout have what; ``texts`` includes the residue.

    Attributes:
        ids, wide: what the integers are, one after the other.
    """

    ids: list[str]
    wide: list[str]
    integers: Integers
    texts: dict[str, Template]


class ArgsColumns:
    """Columns of args: all of them null until something is put in."""

    def __init__(self, size: int) -> None:
        self.ids = {column: missing(size) for column in ID_ARGS}
        self.codes: dict[str, Positions] = {
            column: np.full(size, -1, dtype=np.int32) for column in (*TEXT_ARGS, RESIDUE)
        }
        self._wide: dict[str, list[tuple[Int64, Int64]]] = {key: [] for key in WIDE_ARGS}

    def add_wide(self, key: str, rows: Int64, values: Int64) -> None:
        """Values of some rows."""
        self._wide[key].append((rows, values))

    def wide(self) -> dict[str, Sparse]:
        """All of them in order of their rows."""
        return {key: _sparse(parts) for key, parts in self._wide.items()}


class ArgsReader:
    """Reads args as they stand in the file; one object for all parts of it, as it learns their layouts."""

    def __init__(self) -> None:
        self._plans = Plans(self._new_plan)
        self._decoder = msgspec.json.Decoder(_Members | None)
        self._encode = msgspec.json.Encoder().encode

    def check(self, texts: Iterable[bytes]) -> None:
        """Make sure of args that become no row.

        Raises:
            msgspec.DecodeError: they are no object.
        """
        for text in set(texts):
            if text:
                self._decoder.decode(text)

    def read(self, texts: Sequence[bytes], numbers: dict[str, Numbers[bytes]]) -> ArgsColumns:
        """Columns of args; an empty text stands for none.

        Raises:
            msgspec.DecodeError: one of them is no object.
        """
        columns = ArgsColumns(len(texts))
        odd = [np.zeros(0, dtype=np.int64)]
        for layout, rows in by_layout(texts):
            if not layout:
                continue
            plan = self._plans.of(layout, texts[int(rows[0])], len(rows))
            if plan is None:
                odd.append(rows)
            else:
                self._read_block(plan, Block([texts[row] for row in rows.tolist()]), rows, columns, numbers)
        self._read_each(np.sort(np.concatenate(odd)), texts, columns, numbers)
        for column in _ZERO_IS_NONE:
            columns.ids[column][columns.ids[column] == 0] = MISSING
        return columns

    def _new_plan(self, text: bytes) -> _Plan | None:
        """What stands where in args laid out as these; None if it cannot be told from their layout."""
        members = self._decoder.decode(text) or {}
        if members and not _are_all(text, members):
            return None
        left = dict(members)
        ids: dict[str, Span] = {}
        wide: dict[str, Span] = {}
        for column, keys in [*ID_ARGS.items(), *((key, (key,)) for key in WIDE_ARGS)]:
            for key in keys:
                integer = is_integer(bytes(members[key])) if key in members else False
                if integer is None:
                    return None
                spans = ids if column in ID_ARGS else wide
                if integer and column not in spans:
                    spans[column] = span(text, left.pop(key))
        texts = {column: (span(text, left.pop(key)),) for column, key in TEXT_ARGS.items() if key in left}
        pieces: list[bytes | Span] = []
        for key, raw in left.items():
            pieces += [b"," if pieces else b"{", self._encode(key) + b":", span(text, raw)]
        residue = {RESIDUE: [*pieces, b"}"]} if left else {}
        integers = Integers(text, [*ids.values(), *wide.values()])
        templates = {column: Template(text, parts) for column, parts in {**texts, **residue}.items()}
        return _Plan([*ids], [*wide], integers, templates)

    def _read_block(
        self, plan: _Plan, block: Block, rows: Int64, columns: ArgsColumns, numbers: dict[str, Numbers[bytes]]
    ) -> None:
        if plan.ids or plan.wide:
            values = block.integers(plan.integers)
            for column, column_values in zip(plan.ids, values, strict=False):
                columns.ids[column][rows] = column_values
            for key, column_values in zip(plan.wide, values[len(plan.ids) :], strict=True):
                columns.add_wide(key, rows, column_values)
        for column, pieces in plan.texts.items():
            columns.codes[column][rows] = block.codes(pieces, numbers[column])

    def _read_each(
        self, rows: Int64, texts: Sequence[bytes], columns: ArgsColumns, numbers: dict[str, Numbers[bytes]]
    ) -> None:
        """The way for all that is odd or rare."""
        args = [self._decoder.decode(texts[row]) or {} for row in rows.tolist()]
        present: set[str] = set().union(*args)
        for column, keys in ID_ARGS.items():
            columns.ids[column][rows] = _take_ids(args, [key for key in keys if key in present])
        for column, key in TEXT_ARGS.items():
            if key in present:
                columns.codes[column][rows] = numbers[column].codes([_bytes(a.pop(key, None)) for a in args])
        for key in WIDE_ARGS:
            if key in present:
                at, values = _take_wide(args, key)
                columns.add_wide(key, rows[at], values)
        columns.codes[RESIDUE][rows] = numbers[RESIDUE].codes([self._encode(a) if a else None for a in args])


def _are_all(text: bytes, members: _Members) -> bool:
    """Whether nothing else stands in an object, no key is there twice, and no key differs within its layout."""
    left, end = b"", 0
    for raw in members.values():
        begin, next_end = span(text, raw)
        left, end = left + text[end:begin], next_end
    left += text[end:]
    keys = b",".join(msgspec.json.encode(key) + b":" for key in members)
    blanks = b" \t\r\n"
    return left.translate(None, blanks) == b"{" + keys.translate(None, blanks) + b"}" and not has_digits(left)


def _take_ids(args: list[_Members], keys: list[str]) -> Int64:
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


def _take_wide(args: list[_Members], key: str) -> tuple[Int64, Int64]:
    """Take another one; which args had it, and its values."""
    raws = list(map(dict.get, args, repeat(key)))
    rows = np.flatnonzero([raw is not None for raw in raws])
    texts = [bytes(raw) for raw in raws if raw is not None]
    values = parse_ids([None if text[:1] == b'"' else text for text in texts])
    taken = (values > -_WIDE_END) & (values < _WIDE_END)
    for row in rows[taken].tolist():
        del args[row][key]
    return rows[taken], values[taken]


def _sparse(parts: list[tuple[Int64, Int64]]) -> Sparse:
    if not parts:
        return Sparse(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64))
    rows, values = (np.concatenate(column) for column in zip(*parts, strict=True))
    order = np.argsort(rows)
    return Sparse(rows[order], values[order])


def _bytes(raw: msgspec.Raw | None) -> bytes | None:
    return None if raw is None else bytes(raw)
