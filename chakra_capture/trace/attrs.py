"""The attributes of host nodes as columns: layout by layout where that pays, one by one where they are odd."""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from chakra_capture.trace.columns import MISSING, Int64, missing, parse_ids
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

INT_ATTRS = ("rf_id", "seq_id", "scope", "tid", "fw_tid", "fw_parent")
_EMPTY_TEXT = b'""'


class _Attr(msgspec.Struct, gc=False):
    name: str
    value: msgspec.Raw


@dataclass(frozen=True, slots=True)
class _Plan:
    """Where the attributes of one layout have what; ``rest`` is what they add to the details, if anything."""

    ints: list[str]
    integers: Integers
    rest: Template


@dataclass(frozen=True, slots=True)
class AttrsColumns:
    """Columns of attributes.

    Attributes:
        rest: the members of the JSON object that the other attributes make, without its braces.
        odd: rows whose other attributes are in ``members`` instead, by name.
    """

    ints: dict[str, Int64]
    rest: list[bytes]
    members: dict[int, dict[str, msgspec.Raw]]


class AttrsReader:
    """Reads attributes as they stand in the file; one object for all parts of it, as it learns their layouts."""

    def __init__(self, taken: Sequence[str]) -> None:
        """Args:
        taken: names that the details have for something else; attributes called so are read one by one.
        """
        self._taken = {*taken}
        self._plans = Plans(self._new_plan)
        self._decoder = msgspec.json.Decoder(list[_Attr])

    def check(self, text: bytes) -> None:
        """Make sure that they are attributes.

        Raises:
            msgspec.DecodeError: they are not.
        """
        self._decoder.decode(text)

    def read(self, texts: Sequence[bytes]) -> AttrsColumns:
        """Columns of attributes.

        Raises:
            msgspec.DecodeError: one of the texts is no array of attributes.
        """
        columns = AttrsColumns({key: missing(len(texts)) for key in INT_ATTRS}, [b""] * len(texts), {})
        odd: list[int] = []
        for layout, rows in by_layout(texts):
            plan = self._plans.of(layout, texts[int(rows[0])], len(rows))
            if plan is None:
                odd += rows.tolist()
                continue
            block = Block([texts[row] for row in rows.tolist()])
            if plan.ints:
                for key, values in zip(plan.ints, block.integers(plan.integers), strict=True):
                    columns.ints[key][rows] = values
            if plan.rest.first:
                for row, text in zip(rows.tolist(), block.texts(plan.rest), strict=True):
                    columns.rest[row] = text
        self._read_each(odd, texts, columns)
        # The observer writes 0 for no record function, -1 for no sequence number.
        columns.ints["rf_id"][columns.ints["rf_id"] == 0] = MISSING
        columns.ints["seq_id"][columns.ints["seq_id"] < 0] = MISSING
        return columns

    def _new_plan(self, text: bytes) -> _Plan | None:
        """What stands where in attributes laid out as these; None if it cannot be told from their layout."""
        attrs = self._decoder.decode(text)
        names = [attr.name for attr in attrs]
        if len({*names, *self._taken}) < len(names) + len(self._taken) or has_digits("".join(names).encode()):
            return None
        ints: dict[str, Span] = {}
        rest: list[bytes | Span] = []
        for attr in attrs:
            value = bytes(attr.value)
            if attr.name not in INT_ATTRS:
                if value != _EMPTY_TEXT:
                    rest += [b"," if rest else b"", msgspec.json.encode(attr.name) + b":", span(text, attr.value)]
                continue
            integer = is_integer(value)
            if integer is None:
                return None
            if integer:
                ints[attr.name] = span(text, attr.value)
        return _Plan([*ints], Integers(text, ints.values()), Template(text, rest))

    def _read_each(self, rows: list[int], texts: Sequence[bytes], columns: AttrsColumns) -> None:
        """The way for all that is odd or rare."""
        ints: dict[str, dict[int, msgspec.Raw]] = {key: {} for key in INT_ATTRS}
        for row in rows:
            columns.members[row] = members = {}
            for attr in self._decoder.decode(texts[row]):
                if attr.name in INT_ATTRS:
                    ints[attr.name][row] = attr.value
                elif bytes(attr.value) != _EMPTY_TEXT:
                    members[attr.name] = attr.value
        for key, values in ints.items():
            columns.ints[key][list(values)] = parse_ids(list(values.values()))
