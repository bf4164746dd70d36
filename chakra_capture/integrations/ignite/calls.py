"""Handlers on an engine that know their engine, keep their place, and mean nothing in a copy of it.

Ignite gives a handler the engine by a weak reference: that cannot be pickled, and in a copy it names the original. It
has no public way to order handlers, or to take one out while its event is being handled; all of that needs the list.
"""

import weakref
from collections.abc import Callable
from typing import Any

from ignite.engine import Engine, Events

Handler = Callable[..., None]
# A handler with its arguments, as Ignite lists it.
_Entry = tuple[Any, tuple[Any, ...], dict[str, Any]]


class Call:
    """Calls ``function(engine, ...)`` as a handler."""

    def __init__(self, engine: Engine, function: Handler) -> None:
        self.function = function
        self._engine = weakref.ref(engine)

    def __call__(self, *told: Any, **named: Any) -> None:
        """Pass on what the event says."""
        engine = self._engine()
        if engine is not None:
            self.function(engine, *told, **named)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Copied, (self._engine(),)


class _Copied:
    """What a copy of an engine has instead: it is not recorded."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def __call__(self, *told: Any, **named: Any) -> None:
        if told and isinstance(told[0], BaseException) and nobody_else_listens(self._engine, self):
            raise told[0]


def add(engine: Engine, event: Any, function: Handler, *, is_first: bool = False) -> None:
    """Have ``function(engine)`` called at an event, before or after the handlers that are there now."""
    rest = _entries(engine, event)
    entry = _entry(engine, function)
    _put(engine, event, [entry, *rest] if is_first else [*rest, entry])


def place(engine: Engine, event: Any, function: Handler, *, is_first: bool) -> None:
    """Make a handler of ours the first or the last of its event."""
    entries = sorted(_entries(engine, event), key=lambda entry: _is_call(entry, function) != is_first)
    _put(engine, event, entries)


def surround(engine: Engine, pair_for: Callable[[Any], tuple[Handler, Handler] | None]) -> None:
    """Have ``before(engine)`` and ``after(engine)`` called around every handler of others that has such a pair."""

    def around(entry: _Entry) -> list[_Entry]:
        pair = None if isinstance(entry[0], Call | _Copied) else pair_for(entry[0])
        return [entry] if pair is None else [_entry(engine, pair[0]), entry, _entry(engine, pair[1])]

    for event, entries in list(engine._event_handlers.items()):
        _put(engine, event, [each for entry in entries for each in around(entry)])


def remove(engine: Engine, is_ours: Callable[[Handler], bool]) -> None:
    """Take handlers of ours out; an event that is being handled goes on with the list it has."""
    for event, entries in list(engine._event_handlers.items()):
        kept = [entry for entry in entries if not (isinstance(entry[0], Call) and is_ours(entry[0].function))]
        if len(kept) != len(entries):
            _put(engine, event, kept)


def is_attached(engine: Engine, event: Any, function: Handler) -> bool:
    """Say whether ``function`` is a handler of ours of an event."""
    return any(_is_call(entry, function) for entry in _entries(engine, event))


def has_others(engine: Engine, event: Any) -> bool:
    """Say whether an event has handlers that are none of ours."""
    return not all(type(entry[0]) is Call for entry in engine._event_handlers.get(event, ()))


def nobody_else_listens(engine: Engine, me: Any) -> bool:
    """Say whether an exception is heard by handlers of ours alone, ``me`` (a call or its function) being the last.

    Ignite raises by itself only where nobody listens; who else listens decides what becomes of the exception.
    """
    listeners = [entry[0] for entry in _entries(engine, Events.EXCEPTION_RAISED)]
    if not all(isinstance(one, Call | _Copied) for one in listeners):
        return False
    return not listeners or listeners[-1] is me or getattr(listeners[-1], "function", None) == me


def owner_of(handler: Any) -> Any:
    """The object whose method a handler is, or the handler; Ignite wraps one that is to run every so often."""
    handler = getattr(handler, "_parent", lambda: handler)()
    return getattr(handler, "__self__", handler)


def owners(engine: Engine) -> list[Any]:
    """The objects that handle events of an engine."""
    return [owner_of(entry[0]) for entries in engine._event_handlers.values() for entry in entries]


def followers(engine: Engine) -> list[Any]:
    """The objects of ours that are told of an engine's starts."""
    entries = _entries(engine, Events.STARTED)
    return [getattr(entry[0].function, "__self__", None) for entry in entries if isinstance(entry[0], Call)]


def _entry(engine: Engine, function: Handler) -> _Entry:
    return Call(engine, function), (), {}


def _is_call(entry: _Entry, function: Handler) -> bool:
    return isinstance(entry[0], Call) and entry[0].function == function


def _entries(engine: Engine, event: Any) -> list[_Entry]:
    return list(engine._event_handlers.get(event, ()))


def _put(engine: Engine, event: Any, entries: list[_Entry]) -> None:
    # A new list: the old one may be being gone through. None rather than an empty one: Ignite raises an exception only
    # where the event of exceptions has no list at all.
    if entries:
        engine._event_handlers[event] = entries
    else:
        engine._event_handlers.pop(event, None)
