"""The optional C parts: plain shared libraries that the package's own build leaves beside the module of their name."""

import ctypes
import importlib.machinery
from functools import cache
from pathlib import Path


@cache
def load(stem: Path, interface: int) -> ctypes.CDLL | None:
    """Load the library ``stem`` (path without suffix); None where it is not built, or not for this machine or code.

    Args:
        interface: number that the library must state (``cc_interface``). It changes with the arguments of the
            functions, so that a library left over from older code is not called with those of newer code.
    """
    for suffix in importlib.machinery.EXTENSION_SUFFIXES:
        path = stem.with_name(stem.name + suffix)
        if path.exists():
            try:
                library = ctypes.CDLL(str(path))
                return library if library.cc_interface() == interface else None
            except (OSError, AttributeError):
                return None
    return None
