"""What stands before something of the user's while its calls are timed."""

from typing import Any


class StandIn:
    """Passes on everything but calls: what the user reads, writes, copies and pickles is his own ``_chakra_thing``.

    Names of its own are such as nobody else has, for they hide those of the thing.
    """

    def __init__(self, thing: Any, **own: Any) -> None:
        for name, value in {"_chakra_thing": thing, **own}.items():
            object.__setattr__(self, name, value)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._chakra_thing, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._chakra_thing, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._chakra_thing, name)

    def __repr__(self) -> str:
        return f"<timed {self._chakra_thing!r}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return _itself, (self._chakra_thing,)


def _itself(thing: Any) -> Any:
    return thing
