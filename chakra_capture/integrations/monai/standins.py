"""A part of a trainer whose calls are timed."""

from collections.abc import Callable
from typing import Any

from chakra_capture.recording.standin import StandIn


class TimedCall(StandIn):
    """Calls ``part`` between ``begin()`` and ``end()``."""

    def __init__(self, part: Any, begin: Callable[[], object], end: Callable[[], object]) -> None:
        super().__init__(part, _chakra_begin=begin, _chakra_end=end)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Call the part."""
        self._chakra_begin()
        try:
            return self._chakra_thing(*arguments, **named)
        finally:
            self._chakra_end()
