"""The optional C parts: plain shared libraries that the package's own build leaves beside the module of their name."""

import ctypes
import importlib.machinery
from functools import cache
from pathlib import Path


@cache
def load(stem: Path) -> ctypes.CDLL | None:
    """Load the library ``stem`` (path without suffix); None where it is not built or not for this machine."""
    for suffix in importlib.machinery.EXTENSION_SUFFIXES:
        path = stem.with_name(stem.name + suffix)
        if path.exists():
            try:
                return ctypes.CDLL(str(path))
            except OSError:
                return None
    return None
