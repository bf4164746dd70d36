"""Records put together from the bytes that each has of its own and those that it shares with others of its kind."""

import ctypes
from collections.abc import Sequence
from itertools import accumulate, chain, pairwise
from pathlib import Path

import numpy as np

from chakra_capture.trace.columns import Int64
from chakra_capture.trace.compiled import load

_LIBRARY, _INTERFACE = Path(__file__).with_name("_weave"), 1


def is_built() -> bool:
    """Say whether the C part is there and fits; without it the Python one gives the same."""
    return load(_LIBRARY, _INTERFACE) is not None


def weave(
    own: bytes, own_size: Int64, shared: Sequence[bytes], kind: Int64, *, compiled: bool = True
) -> bytes | memoryview:
    """Put records together.

    Args:
        own: what the records have of their own, one after the other, ``own_size`` bytes of each.
        shared: what the records of each kind have alike, which comes after.
        kind: of each record.
        compiled: use the C loop where it is built; the Python one gives the same.
    """
    library = load(_LIBRARY, _INTERFACE) if compiled else None
    if library is None:
        bounds = [0, *accumulate(own_size.tolist())]
        parts = [own[begin:end] for begin, end in pairwise(bounds)]
        return b"".join(chain.from_iterable(zip(parts, [shared[one] for one in kind.tolist()], strict=True)))
    first = np.array([0, *accumulate(map(len, shared))], dtype=np.int64)
    out = np.empty(len(own) + int(np.diff(first)[kind].sum()), dtype=np.uint8)
    kind, own_size = np.ascontiguousarray(kind, dtype=np.int64), np.ascontiguousarray(own_size, dtype=np.int64)
    numbers = (own_size, np.frombuffer(b"".join(shared) or b"\0", dtype=np.uint8), first, kind, out)
    library.cc_weave(ctypes.c_int64(len(kind)), own, *(ctypes.c_void_p(one.ctypes.data) for one in numbers))
    return out.data
