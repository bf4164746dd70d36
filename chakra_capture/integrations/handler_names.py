"""What handlers and callbacks are called in the traces of recorded steps."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

from chakra_capture.recording.session import Session

_MOST_WRAPPERS = 16


class Named:
    """Shows in the traces of a recorded step from when to when a handler runs."""

    def __init__(self, session: Session, label: str) -> None:
        self._session, self._label = session, label

    def begin(self, *_: Any, **__: Any) -> None:
        """It is about to be called."""
        self._session.begin_annotation(self._label)

    def end(self, *_: Any, **__: Any) -> None:
        """It has returned."""
        self._session.end_annotation(self._label)

    def call(self, handler: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call it."""
        self.begin()
        try:
            return handler(*args, **kwargs)
        finally:
            self.end()

    @contextmanager
    def around(self, inner: AbstractContextManager[Any]) -> Iterator[Any]:
        """The same as a context, around another one."""
        self.begin()
        try:
            with inner as entered:
                yield entered
        finally:
            self.end()


def name_of(handler: Any) -> str:
    """Name a function, a method by its object's class too, and any other callable by its class.

    No attribute is read of what is not known: that may raise.
    """
    for _ in range(_MOST_WRAPPERS):
        if isinstance(handler, partial):
            handler = handler.func
        elif isinstance(handler, FunctionType) and "__wrapped__" in vars(handler):
            handler = vars(handler)["__wrapped__"]
        else:
            break
    if isinstance(handler, MethodType):
        owner = handler.__self__
        cls = owner if isinstance(owner, type) else type(owner)
        return f"{cls.__name__}.{_own_name(handler.__func__)}"
    return _own_name(handler)


def _own_name(function: Any) -> str:
    if isinstance(function, FunctionType | BuiltinFunctionType):
        return str(function.__name__)
    return type(function).__name__


def overridden(owner: Any) -> list[str]:
    """The hooks (``on_...``) that an object does not have from the most basic class that knows them."""
    kin = [getattr(owner, "__dict__", {}), *(vars(cls) for cls in type(owner).__mro__)]
    names = {name for each in kin for name in each if name.startswith("on_")}
    return sorted(name for name in names if sum(name in each for each in kin) > 1)


def is_ours(callback: Any) -> bool:
    """Say whether a callback is one of this package."""
    return type(callback).__module__.startswith(__package__)
