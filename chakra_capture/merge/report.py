"""What merging a rank is asked, and what it answers; without the libraries that do it, as it travels."""

from dataclasses import dataclass
from typing import Any

from chakra_capture.trace.scanners import ScannerKind


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeOptions:
    """How strict a merge is, and how the files are read.

    Attributes:
        scanner: what reads the files; None takes the C scanner where it is built.
        memory_budget: bytes of columns as read that may stay in memory; the others go to unnamed files in the
            folder of the rank. None keeps all in memory.
    """

    force: bool = False
    strict: bool = False
    scanner: ScannerKind | None = None
    memory_budget: int | None = None


@dataclass(frozen=True, slots=True)
class RankReport:
    """What merging one rank gave, for the screen.

    Attributes:
        windows: the entries of link.json, one per window.
        error: why the rank did not merge; then there are no windows.
        unchanged: it was merged before, from the same files.
        notes: what is to be said of the merging itself.
    """

    rank: int
    windows: tuple[dict[str, Any], ...] = ()
    error: str | None = None
    unchanged: bool = False
    notes: tuple[str, ...] = ()

    @property
    def salvaged(self) -> bool:
        return any(window["salvaged"] for window in self.windows)
