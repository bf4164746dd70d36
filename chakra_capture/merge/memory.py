"""Keeping the peak memory of a merging process low."""

import atexit
import ctypes
import gc
import os
import sys
from functools import cache

_M_ARENA_MAX = -8
_ENVIRONMENT = {
    # polars' allocator: what is freed goes back soon, and threads share one pool.
    "_RJEM_MALLOC_CONF": "narenas:1,dirty_decay_ms:50,muzzy_decay_ms:0",
    # numpy's linear algebra is not used, yet its threads would wait for work in a busy loop.
    "OPENBLAS_NUM_THREADS": "1",
}


@cache
def _glibc() -> ctypes.CDLL | None:
    library = ctypes.CDLL(None)
    return library if hasattr(library, "mallopt") and hasattr(library, "malloc_trim") else None


def prepare_process(*, merges: bool) -> None:
    """For a process that is all ours, before it imports numpy and polars; its children inherit the environment.

    One heap for all threads, and no search for cycles among millions of objects that have none.
    """
    gc.disable()
    atexit.register(gc.freeze)  # leaving would look once more
    if merges:
        limit_threads()
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if library := _glibc():
        library.mallopt(_M_ARENA_MAX, 1)


def limit_threads() -> None:
    """One polars thread in this process, if polars is not imported yet: that is when it counts its threads.

    Ranks are merged side by side; one alone gains little from more threads, and costs more in all.
    """
    if "polars" not in sys.modules:
        os.environ.setdefault("POLARS_MAX_THREADS", "1")


def give_back() -> None:
    """Return what was freed to the system, so that the next stage does not come on top of it."""
    if library := _glibc():
        library.malloc_trim(0)
