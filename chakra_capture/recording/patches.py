"""A function of somebody else's module or object, replaced for a while."""

from collections.abc import Callable
from functools import wraps
from typing import Any

_NOTHING = object()


class Patch:
    """Replaces ``owner.name`` by a call of ``instead(original, *arguments)`` until ``undo``.

    Where somebody has wrapped the replacement meanwhile it stays in place and calls the original.
    """

    def __init__(self, owner: object, name: str, instead: Callable[..., Any]) -> None:
        self._owner = owner
        self._name = name
        # A method comes from the class: put back into its object it would stay there, and hide what the class gets.
        self._before = vars(owner).get(name, _NOTHING)
        self._is_undone = False
        original = getattr(owner, name)

        @wraps(original)
        def replacement(*arguments: Any, **options: Any) -> Any:
            if self._is_undone:
                return original(*arguments, **options)
            return instead(original, *arguments, **options)

        self.replacement = replacement
        setattr(owner, name, replacement)

    def undo(self) -> None:
        """Put the function back."""
        self._is_undone = True
        if vars(self._owner).get(self._name) is not self.replacement:
            return
        if self._before is _NOTHING:
            delattr(self._owner, self._name)
        else:
            setattr(self._owner, self._name, self._before)
