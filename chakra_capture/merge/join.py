"""Joining the text of each row from pieces: in C where it is built, else by polars; both give the same."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from chakra_capture.trace.columns import MISSING, Int64, Positions, null_last
from chakra_capture.trace.compiled import load
from chakra_capture.trace.packed import Texts

_LIBRARY, _INTERFACE = Path(__file__).with_name("_join"), 1


def is_built() -> bool:
    """Say whether the C part is there and fits; without it the Python one gives the same."""
    return load(_LIBRARY, _INTERFACE) is not None


@dataclass(frozen=True, slots=True)
class TextPiece:
    """The text ``codes`` of a dictionary; -1 adds nothing."""

    codes: Positions
    texts: Texts


@dataclass(frozen=True, slots=True)
class NumberPiece:
    """``before`` and an integer; ``MISSING`` adds nothing."""

    before: Texts
    numbers: Int64


Piece = TextPiece | NumberPiece


def join(pieces: Sequence[Piece], size: int, *, compiled: bool = True) -> pl.Series:
    """Join the pieces of each row in their order.

    Args:
        pieces: columns of ``size`` rows.
        compiled: use the C loop where it is built.
    """
    library = load(_LIBRARY, _INTERFACE) if compiled else None
    if library is None:
        return pl.select(pl.concat_str(*map(_in_polars, pieces), ignore_nulls=True)).to_series()
    return pl.Series(_Joined(library, pieces, size))


def _in_polars(piece: Piece) -> pl.Expr:
    if isinstance(piece, TextPiece):
        texts = pl.Series([*piece.texts, None], dtype=pl.String)
        return pl.lit(texts.gather(null_last(piece.codes, len(piece.texts))))
    numbers = pl.Series(piece.numbers)
    known = pl.select(pl.when(numbers != MISSING).then(numbers)).to_series()
    return pl.concat_str(pl.lit(piece.before[0]), pl.lit(known))


class _CPiece(ctypes.Structure):
    _fields_ = [(name, ctypes.c_void_p) for name in ("codes", "text", "ends", "numbers")]


class _Schema(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("format", "name", "metadata")),
        *((name, ctypes.c_int64) for name in ("flags", "n_children")),
        *((name, ctypes.c_void_p) for name in ("children", "dictionary", "release", "private_data")),
    ]


class _Array(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("length", "null_count", "offset", "n_buffers", "n_children")),
        *((name, ctypes.c_void_p) for name in ("buffers", "children", "dictionary", "release", "private_data")),
    ]


class _Joined:
    """An Arrow array in memory of C, which whoever imports it frees (Arrow PyCapsule interface)."""

    def __init__(self, library: ctypes.CDLL, pieces: Sequence[Piece], size: int) -> None:
        self._schema, self._array = _Schema(), _Array()
        columns = [_arrays(piece) for piece in pieces]
        table = (_CPiece * len(pieces))(*(_CPiece(*map(_address, each)) for each in columns))
        library.cc_schema(ctypes.byref(self._schema))
        if library.cc_join(ctypes.c_int64(size), len(pieces), table, ctypes.byref(self._array)):
            raise MemoryError("no memory for the text of a block of rows")

    def __arrow_c_array__(self, requested_schema: object = None) -> tuple[object, object]:
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        schema = new(ctypes.addressof(self._schema), b"arrow_schema", None)
        return schema, new(ctypes.addressof(self._array), b"arrow_array", None)


def _arrays(piece: Piece) -> tuple["np.typing.NDArray[Any] | None", ...]:
    """Codes, text, ends and numbers as the C loop reads them."""
    if isinstance(piece, TextPiece):
        return np.ascontiguousarray(piece.codes, dtype=np.int32), piece.texts.data, piece.texts.ends, None
    return None, piece.before.data, piece.before.ends, np.ascontiguousarray(piece.numbers)


def _address(array: "np.typing.NDArray[Any] | None") -> int | None:
    return None if array is None else array.ctypes.data
