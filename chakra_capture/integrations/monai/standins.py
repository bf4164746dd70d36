"""What stands in for a part of a trainer while its calls are timed."""

from collections.abc import Callable
from typing import Any

_OWN = ("_chakra_part", "_chakra_begin", "_chakra_end")


class TimedCall:
    """Calls ``part`` between ``begin()`` and ``end()``; everything else reaches ``part``, and a copy of this is one
    of ``part``."""

    __slots__ = _OWN

    def __init__(self, part: Any, begin: Callable[[], object], end: Callable[[], object]) -> None:
        for name, value in zip(_OWN, (part, begin, end), strict=True):
            object.__setattr__(self, name, value)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Call the part."""
        self._chakra_begin()
        try:
            return self._chakra_part(*arguments, **named)
        finally:
            self._chakra_end()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._chakra_part, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._chakra_part, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._chakra_part, name)

    def __repr__(self) -> str:
        return f"<timed {self._chakra_part!r}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return _itself, (self._chakra_part,)


def _itself(part: Any) -> Any:
    return part
