"""A function of somebody else's module or object, replaced for a while."""

from collections.abc import Callable
from functools import update_wrapper
from types import ModuleType
from typing import Any

_NOTHING = object()


class Patch:
    """Replaces ``owner.name`` by a call of ``instead(original, *arguments)`` until ``undo``.

    Where somebody has wrapped the replacement meanwhile it stays in place and calls the original. A copy or a pickle of
    the owner has what the owner had before.
    """

    def __init__(self, owner: object, name: str, instead: Callable[..., Any]) -> None:
        self._owner = owner
        self._name = name
        # A method comes from the class: put back into its object it would stay there, and hide what the class gets.
        self._before = vars(owner).get(name, _NOTHING)
        copied: str | tuple[Any, ...] = (_itself, (self._before,))
        if self._before is _NOTHING:
            copied = getattr, (owner, name)
        elif isinstance(owner, ModuleType):
            copied = name  # as Python does with functions: whatever has the name where it is read
        self.replacement = Replacement(getattr(owner, name), instead, copied)
        setattr(owner, name, self.replacement)

    @property
    def is_undone(self) -> bool:
        """Whether the function is put back, or calls the original alone."""
        return self.replacement.instead is None

    def undo(self) -> None:
        """Put the function back."""
        self.replacement.instead = None
        if vars(self._owner).get(self._name) is not self.replacement:
            return
        if self._before is _NOTHING:
            delattr(self._owner, self._name)
        else:
            setattr(self._owner, self._name, self._before)


class Replacement:
    """What stands in the place of the original."""

    # What a call reads is not beside what it has from the original: it takes longer to find there.
    __slots__ = ("__dict__", "_copied", "instead", "original")

    def __init__(
        self, original: Callable[..., Any], instead: Callable[..., Any], copied: str | tuple[Any, ...]
    ) -> None:
        update_wrapper(self, original)
        self.original = original
        self.instead: Callable[..., Any] | None = instead
        self._copied = copied

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        instead = self.instead
        if instead is None:
            return self.original(*arguments, **options)
        return instead(self.original, *arguments, **options)

    def __reduce__(self) -> str | tuple[Any, ...]:
        return self._copied


def _itself(before: Any) -> Any:
    return before
