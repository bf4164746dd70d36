"""What can read a trace: the C scanner where it is built for this machine, or msgspec. Imports none of the two."""

from enum import StrEnum
from pathlib import Path

from chakra_capture.trace import compiled

LIBRARY, INTERFACE = Path(__file__).with_name("_scan"), 2


class ScannerKind(StrEnum):
    """What read a file: the C core, or msgspec where it is not built."""

    NATIVE = "native"
    MSGSPEC = "msgspec"


def is_built() -> bool:
    """Whether the C scanner is there."""
    return compiled.load(LIBRARY, INTERFACE) is not None
