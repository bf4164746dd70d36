"""A part of a trainer whose calls are timed."""

from collections.abc import Callable
from typing import Any

from chakra_capture.recording.standin import StandIn


class TimedCall(StandIn):
    """Calls ``part`` between ``begin()`` and ``end()``."""

    def __init__(self, part: Any, begin: Callable[[], object], end: Callable[[], object]) -> None:
        # One attribute for all: of a class that passes attributes on each takes Python a long way.
        super().__init__(part, _chakra_call=(begin, part, end))

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Call the part."""
        begin, part, end = self._chakra_call
        begin()
        try:
            return part(*arguments, **named)
        finally:
            end()
