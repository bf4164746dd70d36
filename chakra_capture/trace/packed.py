"""Columns and dictionaries of a whole trace in little memory."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from chakra_capture.trace.columns import MISSING, Bool, Codes, Int64, IntColumn, Part, Positions, missing
from chakra_capture.trace.spill import Spill


class Packed:
    """Integer column in as few bytes as its values need; what is taken out of it is int64.

    Args:
        packed: the values in a type of ``int_dtype``; its smallest number stands for ``MISSING``.
    """

    def __init__(self, packed: Codes) -> None:
        self._packed = packed
        self._none = int(np.iinfo(packed.dtype).min)

    def __len__(self) -> int:
        return len(self._packed)

    def __getitem__(self, part: Part | Bool) -> Int64:
        """Values of the given rows, ``MISSING`` where there is none."""
        packed = self._packed[part]
        values = packed.astype(np.int64)
        if self._none != MISSING:
            np.putmask(values, packed == self._none, MISSING)
        return values

    def pick(self, at: Int64 | Positions) -> Int64:
        """Values of the given rows, ``MISSING`` also where ``at`` is negative."""
        if not len(self):
            return missing(len(at))
        values = self[at]
        np.putmask(values, at < 0, MISSING)
        return values

    def kept(self, spill: Spill) -> "Packed":
        """The same, on disk where memory is short."""
        return Packed(spill.keep(self._packed))


def int_dtype(low: int, high: int) -> "np.dtype[np.signedinteger[Any]]":
    """The narrowest type that holds ``low`` to ``high`` and one number more for ``MISSING``."""
    return np.dtype(next(f"i{width}" for width in (1, 2, 4, 8) if max(-low, high) < 2 ** (8 * width - 1)))


def pack(column: IntColumn, spill: Spill | None = None) -> Packed:
    """Pack a column that is not packed yet; with ``spill``, on disk where memory is short."""
    packed = column if isinstance(column, Packed) else _packed(column[:])
    return packed.kept(spill) if spill else packed


def _packed(values: Int64) -> Packed:
    known = values[values != MISSING]
    low, high = (int(known.min()), int(known.max())) if len(known) else (0, 0)
    packed = values.astype(int_dtype(low, high))
    if len(known) < len(values):
        packed[values == MISSING] = np.iinfo(packed.dtype).min
    return Packed(packed)


class Texts(Sequence[str]):
    """Texts one after the other in one array of UTF-8 bytes: a large dictionary without an object per entry.

    Attributes:
        data: the bytes.
        ends: where each text ends.
    """

    def __init__(self, data: npt.NDArray[np.uint8], ends: Int64) -> None:
        self.data, self.ends = data, ends

    @classmethod
    def of(cls, texts: Iterable[str | bytes]) -> "Texts":
        parts = [text if isinstance(text, bytes) else text.encode("utf-8", "replace") for text in texts]
        ends = np.cumsum([len(part) for part in parts], dtype=np.int64)
        return cls(np.frombuffer(b"".join(parts), dtype=np.uint8), ends)

    def __len__(self) -> int:
        return len(self.ends)

    @overload
    def __getitem__(self, at: int) -> str: ...
    @overload
    def __getitem__(self, at: slice) -> "list[str]": ...
    def __getitem__(self, at: int | slice) -> "str | list[str]":
        if isinstance(at, slice):
            return [self[i] for i in range(*at.indices(len(self)))]
        at = range(len(self))[at]
        begin = int(self.ends[at - 1]) if at else 0
        return self.data[begin : int(self.ends[at])].tobytes().decode("utf-8", "replace")

    def __iter__(self) -> Iterator[str]:
        begin, content = 0, self.data.tobytes()
        for end in self.ends.tolist():
            yield content[begin:end].decode("utf-8", "replace")
            begin = end


def texts(values: Sequence[str]) -> Texts:
    """The values of a dictionary as ``Texts``."""
    return values if isinstance(values, Texts) else Texts.of(values)
