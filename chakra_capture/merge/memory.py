"""Keeping the peak memory of a merging process low, where the C library is glibc."""

import ctypes
import gc
from functools import cache

_M_ARENA_MAX = -8


@cache
def _glibc() -> ctypes.CDLL | None:
    library = ctypes.CDLL(None)
    return library if hasattr(library, "mallopt") and hasattr(library, "malloc_trim") else None


def prepare_process() -> None:
    """For a process that only merges: one heap for all threads, and no search for cycles among millions of objects."""
    gc.disable()
    if library := _glibc():
        library.mallopt(_M_ARENA_MAX, 1)


def give_back() -> None:
    """Return what was freed to the system, so that the next stage does not come on top of it."""
    if library := _glibc():
        library.malloc_trim(0)
