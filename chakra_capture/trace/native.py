"""The C scanner: loading it, feeding it, and taking its columns over without a Python loop over rows."""

import ctypes
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from chakra_capture.trace import compiled
from chakra_capture.trace.columns import Coded, Codes, IntColumn, Rows, Sparse, code_dtype
from chakra_capture.trace.feed import Feed, State, Step, Taker
from chakra_capture.trace.packed import Packed, Texts, int_dtype
from chakra_capture.trace.scanners import INTERFACE, LIBRARY
from chakra_capture.trace.spill import Batches, Column, Spill

_I64 = ctypes.c_int64
_POINTER = ctypes.c_void_p
_PAIR = _I64 * 2
_SIGNATURES: dict[str, tuple[type | None, list[type]]] = {
    "cc_new": (_POINTER, [ctypes.c_int, ctypes.c_uint64]),
    "cc_free": (None, [_POINTER]),
    "cc_state": (ctypes.c_int, [_POINTER]),
    "cc_set_state": (None, [_POINTER, ctypes.c_int]),
    "cc_elements": (ctypes.c_int, [_POINTER, _POINTER, _I64, _I64, _POINTER]),
    "cc_value": (ctypes.c_int, [_POINTER, _POINTER, _I64, _I64, _POINTER]),
    "cc_rows": (_I64, [_POINTER]),
    "cc_elements_read": (_I64, [_POINTER]),
    "cc_block_rows": (_I64, []),
    "cc_block": (_POINTER, [_POINTER, _I64]),
    "cc_free_block": (None, [_POINTER, _I64]),
    "cc_range": (None, [_POINTER, ctypes.c_int, _POINTER]),
    "cc_take": (None, [_POINTER, ctypes.c_int, ctypes.c_int, _POINTER]),
    "cc_free_blocks": (None, [_POINTER]),
    "cc_dict_text": (_POINTER, [_POINTER, ctypes.c_int]),
    "cc_dict_ends": (_POINTER, [_POINTER, ctypes.c_int]),
    "cc_dict_counts": (_POINTER, [_POINTER, ctypes.c_int]),
    "cc_dict_size": (_I64, [_POINTER, ctypes.c_int]),
    "cc_wide_size": (_I64, [_POINTER, ctypes.c_int]),
    "cc_wide_rows": (_POINTER, [_POINTER, ctypes.c_int]),
    "cc_wide_values": (_POINTER, [_POINTER, ctypes.c_int]),
}

Library = ctypes.CDLL


@dataclass(frozen=True, slots=True)
class Layout:
    """The columns of one kind of trace in the order in which _scan.c numbers them.

    Attributes:
        num_quoted: so many of ``texts`` are bodies of JSON strings; the others are raw JSON.
    """

    is_host: bool
    ints: tuple[str, ...]
    texts: tuple[str, ...]
    num_quoted: int
    wide: tuple[str, ...]


@cache
def load(stem: Path = LIBRARY) -> Library | None:
    """Load the scanner; None where it is not built or not for this machine."""
    library = compiled.load(stem, INTERFACE)
    try:
        for name, (result, arguments) in _SIGNATURES.items() if library else ():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
    except AttributeError:
        return None
    return library


class NativeScanner:
    """One scan; see ``walk.Scanner``. Calls into C release the GIL."""

    def __init__(self, library: Library, layout: Layout, reader: Taker, spill: Spill | None = None) -> None:
        self._c = library
        self._spill = spill
        self._spilled: list[Batches] = []
        self._num_spilled = 0
        self._layout = layout
        self._reader = reader
        self._out = _PAIR()
        self._pinned: tuple[object, int] = (None, 0)
        self._scan: int | None = self._new()

    def __enter__(self) -> "NativeScanner":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._c.cc_free(self._scan)
        self._scan = None

    @property
    def state(self) -> State:
        return State(self._c.cc_state(self._scan))

    @state.setter
    def state(self, state: State) -> None:
        self._c.cc_set_state(self._scan, int(state))

    @property
    def count(self) -> int:
        return int(self._c.cc_elements_read(self._scan)) + self._reader.num_taken

    def elements(self, feed: Feed, at: int) -> tuple[Step, int, int]:
        step = self._c.cc_elements(self._scan, self._address(feed), feed.length, at, self._out)
        if self._spill is not None:
            self._spill_blocks(self._spill)
        return Step(step), self._out[0], self._out[1]

    def value(self, feed: Feed, at: int) -> tuple[Step, int]:
        step = self._c.cc_value(self._scan, self._address(feed), feed.length, at, self._out)
        return Step(step), self._out[0]

    def take(self, text: bytes) -> str | None:
        return self._reader.take(text, int(self._c.cc_rows(self._scan)))

    def restart(self) -> None:
        self._c.cc_free(self._scan)
        self._scan = self._new()
        self._spilled, self._num_spilled = [], 0
        self._reader.restart()

    def rows(self) -> Rows:
        """The columns, taken over from the C core, which forgets them."""
        layout, num_ints = self._layout, len(self._layout.ints)
        ints: list[IntColumn]
        if self._spilled:
            columns = self._take_spilled()
            ints, codes = [*columns[:num_ints]], columns[num_ints:]
        else:
            ints = [self._take_ints(i) for i in range(num_ints)]
            codes = [self._take_codes(num_ints, i) for i in range(len(layout.texts))]
            self._c.cc_free_blocks(self._scan)
        return Rows(
            ints=dict(zip(layout.ints, ints, strict=True)),
            texts={key: self._coded(i, codes[i]) for i, key in enumerate(layout.texts)},
            wide={key: self._sparse(i) for i, key in enumerate(layout.wide)},
        )

    def _take_ints(self, column: int) -> Packed:
        self._c.cc_range(self._scan, column, self._out)
        packed = np.empty(int(self._c.cc_rows(self._scan)), dtype=int_dtype(*self._out))
        self._c.cc_take(self._scan, column, packed.itemsize, packed.ctypes.data)
        return Packed(packed)

    def _take_codes(self, num_ints: int, column: int) -> Codes:
        dtype = code_dtype(int(self._c.cc_dict_size(self._scan, column)))
        codes: Codes = np.empty(int(self._c.cc_rows(self._scan)), dtype=dtype)
        self._c.cc_take(self._scan, num_ints + column, codes.itemsize, codes.ctypes.data)
        return codes

    def _dtypes(self) -> list["np.dtype[Any]"]:
        layout = self._layout
        return [np.dtype(np.int64)] * len(layout.ints) + [np.dtype(np.int32)] * len(layout.texts)

    def _block(self, number: int, size: int) -> Iterator[Column]:
        """The columns of one block in their order, as they lie in the core."""
        pointer, length = int(self._c.cc_block(self._scan, number)), int(self._c.cc_block_rows())
        for dtype in self._dtypes():
            yield _view(pointer, size, dtype)
            pointer += length * dtype.itemsize

    def _spill_blocks(self, spill: Spill) -> None:
        """Move blocks that are full to disk once they outgrow the budget."""
        length = int(self._c.cc_block_rows())
        full = int(self._c.cc_rows(self._scan)) // length
        width = sum(dtype.itemsize for dtype in self._dtypes())
        if not self._spilled:
            # Reading ends with every column there twice for a moment: as read, and packed.
            if spill.fits(2 * full * length * width):
                return
            self._spilled = [spill.batches(dtype) for dtype in self._dtypes()]
        for number in range(self._num_spilled, full):
            for batches, part in zip(self._spilled, self._block(number, length), strict=True):
                batches.append(part)
            self._c.cc_free_block(self._scan, number)
        self._num_spilled = full

    def _take_spilled(self) -> list[Column]:
        left = int(self._c.cc_rows(self._scan)) - self._num_spilled * int(self._c.cc_block_rows())
        if left:
            for batches, part in zip(self._spilled, self._block(self._num_spilled, left), strict=True):
                batches.append(part)
            self._c.cc_free_block(self._scan, self._num_spilled)
        return [batches.column() for batches in self._spilled]

    def counts(self, column: int) -> dict[str, int]:
        """How often each text of a column was seen, in rows and other elements."""
        values = _unquoted(self._texts(column))
        numbers = _view(self._c.cc_dict_counts(self._scan, column), len(values), np.dtype(np.int64))
        counts: dict[str, int] = {}
        for text, count in zip(values, numbers.tolist(), strict=True):
            counts[text] = counts.get(text, 0) + count
        return counts

    def _new(self) -> int:
        scan = self._c.cc_new(int(self._layout.is_host), int.from_bytes(os.urandom(8), "little"))
        if not scan:
            raise MemoryError("no memory for a scan")
        return int(scan)

    def _address(self, feed: Feed) -> int:
        if self._pinned[0] is not feed.buffer:
            first = ctypes.c_char.from_buffer(feed.buffer)
            self._pinned = (feed.buffer, ctypes.addressof(first))
        return self._pinned[1]

    def _coded(self, column: int, codes: Codes) -> Coded:
        texts = self._texts(column)
        if column >= self._layout.num_quoted:
            return Coded(codes, texts)
        values = _unquoted(texts)
        if len(set(values)) == len(values):
            return Coded(codes, values)
        known: dict[str, int] = {}  # two spellings of one text
        table = np.array([known.setdefault(v, len(known)) for v in values], dtype=np.int32)
        return Coded(np.where(codes >= 0, table[codes], np.int32(-1)).astype(np.int32), list(known))

    def _texts(self, column: int) -> Texts:
        """Entries of a dictionary, in order."""
        size = int(self._c.cc_dict_size(self._scan, column))
        ends = _view(self._c.cc_dict_ends(self._scan, column), size, np.dtype(np.int64)).copy()
        length = int(ends[-1]) if size else 0
        return Texts(_view(self._c.cc_dict_text(self._scan, column), length, np.dtype(np.uint8)).copy(), ends)

    def _sparse(self, column: int) -> Sparse:
        size = int(self._c.cc_wide_size(self._scan, column))
        rows, values = self._c.cc_wide_rows(self._scan, column), self._c.cc_wide_values(self._scan, column)
        integer = np.dtype(np.int64)
        return Sparse(_view(rows, size, integer).copy(), _view(values, size, integer).copy())


def _unquoted(texts: Texts) -> list[str]:
    return [msgspec.json.decode(f'"{text}"', type=str) if "\\" in text else text for text in texts]


def _view(pointer: int | None, size: int, dtype: "np.dtype[Any]") -> "npt.NDArray[Any]":
    """Memory of the C core as an array; it is gone when the core frees it."""
    if not size or not pointer:
        return np.zeros(0, dtype=dtype)
    raw = (ctypes.c_char * (size * dtype.itemsize)).from_address(pointer)
    return np.frombuffer(memoryview(raw).cast("B"), dtype=dtype)
