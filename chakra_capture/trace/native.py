"""The C scanner: finding and loading it, feeding it, and taking its columns over without a Python loop over rows."""

import ctypes
import importlib.machinery
import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import TracebackType

import msgspec
import numpy as np

from chakra_capture.trace.columns import Coded, Rows, Sparse
from chakra_capture.trace.walk import Feed, State, Step, Taker

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
    "cc_ints": (_POINTER, [_POINTER, ctypes.c_int]),
    "cc_codes": (_POINTER, [_POINTER, ctypes.c_int]),
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


def library_path() -> Path | None:
    """Where the package's own build left the scanner; None if it could not be built."""
    here = Path(__file__)
    names = (here.with_name(f"_scan{suffix}") for suffix in importlib.machinery.EXTENSION_SUFFIXES)
    return next((path for path in names if path.exists()), None)


@cache
def load(path: Path | None = None) -> Library | None:
    """Load the scanner; None where it is not built or not for this machine."""
    path = path or library_path()
    if path is None:
        return None
    try:
        library = ctypes.CDLL(str(path))
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
    except (OSError, AttributeError):
        return None
    return library


class NativeScanner:
    """One scan; see ``walk.Scanner``. Calls into C release the GIL."""

    def __init__(self, library: Library, layout: Layout, reader: Taker) -> None:
        self._c = library
        self._layout = layout
        self._reader = reader
        self._out = _PAIR()
        self._pinned: tuple[object, int] = (None, 0)
        self._scan = self._new()

    def __enter__(self) -> "NativeScanner":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
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
        return Step(step), self._out[0], self._out[1]

    def value(self, feed: Feed, at: int) -> tuple[Step, int]:
        step = self._c.cc_value(self._scan, self._address(feed), feed.length, at, self._out)
        return Step(step), self._out[0]

    def take(self, text: bytes) -> str | None:
        return self._reader.take(text, int(self._c.cc_rows(self._scan)))

    def restart(self) -> None:
        self._c.cc_free(self._scan)
        self._scan = self._new()
        self._reader.restart()

    def rows(self) -> Rows:
        """The columns, copied out of the memory of the C core."""
        size = int(self._c.cc_rows(self._scan))
        layout = self._layout
        return Rows(
            ints={key: self._array(self._c.cc_ints(self._scan, i), size) for i, key in enumerate(layout.ints)},
            texts={key: self._coded(i, size) for i, key in enumerate(layout.texts)},
            wide={key: self._sparse(i) for i, key in enumerate(layout.wide)},
        )

    def counts(self, column: int) -> dict[str, int]:
        """How often each text of a column was seen, in rows and other elements."""
        numbers = self._array(self._c.cc_dict_counts(self._scan, column), len(self._texts(column)))
        counts: dict[str, int] = {}
        for text, count in zip(self._decoded(column), numbers.tolist(), strict=True):
            counts[text] = counts.get(text, 0) + count
        return counts

    def _new(self) -> int:
        scan = self._c.cc_new(int(self._layout.is_host), int.from_bytes(os.urandom(8), "little"))
        if not scan:
            raise MemoryError("no memory for a scan")
        return int(scan)

    def _address(self, feed: Feed) -> int:
        if self._pinned[0] is not feed.buffer:
            assert isinstance(feed.buffer, bytearray)
            first = ctypes.c_char.from_buffer(feed.buffer)
            self._pinned = (feed.buffer, ctypes.addressof(first))
        return self._pinned[1]

    def _array(self, pointer: int | None, size: int, dtype: type = np.int64) -> "np.typing.NDArray[np.int64]":
        if not size or not pointer:
            return np.zeros(0, dtype=dtype)
        raw = (ctypes.c_char * (size * np.dtype(dtype).itemsize)).from_address(pointer)
        return np.frombuffer(raw, dtype=dtype).copy()

    def _coded(self, column: int, size: int) -> Coded:
        codes = self._array(self._c.cc_codes(self._scan, column), size, np.int32).astype(np.int32, copy=False)
        values = self._decoded(column)
        known: dict[str, int] = {}
        table = np.array([known.setdefault(v, len(known)) for v in values] or [0], dtype=np.int32)
        if len(known) < len(values):  # two spellings of one text
            codes = np.where(codes >= 0, table[codes], np.int32(-1)).astype(np.int32)
        return Coded(codes, list(known))

    def _decoded(self, column: int) -> list[str]:
        values = self._texts(column)
        if column < self._layout.num_quoted:
            return [msgspec.json.decode(f'"{v}"', type=str) if "\\" in v else v for v in values]
        return values

    def _texts(self, column: int) -> list[str]:
        """Entries of a dictionary, in order."""
        size = int(self._c.cc_dict_size(self._scan, column))
        if not size:
            return []
        ends = self._array(self._c.cc_dict_ends(self._scan, column), size).tolist()
        blob = ctypes.string_at(self._c.cc_dict_text(self._scan, column), ends[-1]) if ends[-1] else b""
        begins = [0, *ends[:-1]]
        if blob.isascii():
            text = blob.decode("ascii")
            return [text[a:b] for a, b in zip(begins, ends, strict=True)]
        return [blob[a:b].decode("utf-8", "replace") for a, b in zip(begins, ends, strict=True)]

    def _sparse(self, column: int) -> Sparse:
        size = int(self._c.cc_wide_size(self._scan, column))
        rows, values = self._c.cc_wide_rows(self._scan, column), self._c.cc_wide_values(self._scan, column)
        return Sparse(self._array(rows, size), self._array(values, size))
