"""A function of somebody else's module, replaced for a while."""

from collections.abc import Callable
from types import ModuleType
from typing import Any


class Patch:
    """Replaces ``module.name`` by a call of ``instead(original, *arguments)`` until ``undo``.

    Where somebody has wrapped the replacement meanwhile it stays in place and calls the original.
    """

    def __init__(self, module: ModuleType, name: str, instead: Callable[..., Any]) -> None:
        self._module = module
        self._name = name
        self._original = original = getattr(module, name)
        self._is_undone = False

        def replacement(*arguments: Any, **options: Any) -> Any:
            if self._is_undone:
                return original(*arguments, **options)
            return instead(original, *arguments, **options)

        self._replacement = replacement
        setattr(module, name, replacement)

    def undo(self) -> None:
        """Put the function back."""
        self._is_undone = True
        if getattr(self._module, self._name) is self._replacement:
            setattr(self._module, self._name, self._original)
