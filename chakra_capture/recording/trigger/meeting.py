"""How the ranks of a job come to the same window on demand: through the store of the process group.

Rank 0 announces the steps; each rank that hears of it in time accepts. Whoever comes to the first step decides for all:
the window opens if every rank that records has accepted by then, else on none. One write that only the first can make
settles it, so no rank ever records alone.
"""

import json
import weakref
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from chakra_capture.recording.agreement import default_store

GO = "go"


@dataclass(frozen=True, slots=True)
class Announcement:
    """Steps that all ranks are to record, and why."""

    number: int
    first_step: int
    last_step: int
    why: str


class Meeting:
    """What the ranks of one run tell each other; every call asks the store once or twice, and none waits.

    Args:
        run_id: of the run, the same on all ranks.
        num_ranks: how many ranks record.
        find_store: gives the store; None while there is none.
    """

    def __init__(self, run_id: str, num_ranks: int, find_store: Callable[[], Any | None] = default_store) -> None:
        self.num_ranks = num_ranks
        self._prefix, self._find_store = f"chakra_capture/trigger/{run_id}", find_store
        # Weak: a store that is kept would keep its port.
        self._used: weakref.ref[Any] | None = None
        self._lost: weakref.ref[Any] | None = None

    @property
    def has_store(self) -> bool:
        """Whether the ranks can meet now."""
        store = self._find_store()
        return store is not None and (self._lost is None or store is not self._lost())

    def give_up_store(self) -> None:
        """Wait for another process group: the store does not answer any more."""
        self._lost = self._used

    def ask(self, why: str) -> None:
        """Ask rank 0 for a window; of several that ask at the same time one is heard."""
        self._store.compare_set(self._key("ask"), "", why)

    def asked(self) -> str | None:
        """Return why some rank wants a window, once."""
        why = self._get("ask")
        if not why:
            return None
        self._store.set(self._key("ask"), "")
        return why

    def announce(self, announcement: Announcement) -> None:
        """Tell the other ranks; rank 0 does."""
        self._store.set(self._key(announcement.number, "steps"), json.dumps(asdict(announcement)))

    def announced(self, number: int) -> Announcement | None:
        """Return announcement ``number`` if there is one by now."""
        text = self._get(number, "steps")
        return Announcement(**json.loads(text)) if text is not None else None

    def verdict(self, number: int) -> str | None:
        """Return what was decided of an announcement, as it stands in the store; None while nothing is."""
        return self._get(number, "verdict")

    def accept(self, number: int) -> None:
        """Say that this rank will record the announced steps if all do."""
        self._store.add(self._key(number, "accepted"), 1)

    def decide(self, number: int, why_not: Callable[[], str | None] = lambda: None) -> str | None:
        """Decide, or hear what was decided: None if the window opens, else why not.

        Args:
            number: of the announcement.
            why_not: says, at the last moment, what this rank has against it.
        """
        num_accepted = self._store.add(self._key(number, "accepted"), 0)
        missing = self.num_ranks - num_accepted
        unheard = f"{missing} of {self.num_ranks} ranks had not heard of it" if missing else None
        return self._settle(number, why_not() or unheard or GO)

    def refuse(self, number: int, why: str) -> str | None:
        """Decide that the window does not open, unless it is decided; returns as ``decide`` does."""
        return self._settle(number, why)

    def _settle(self, number: int, proposal: str) -> str | None:
        verdict = bytes(self._store.compare_set(self._key(number, "verdict"), "", proposal)).decode()
        return None if verdict == GO else verdict

    def _get(self, *parts: object) -> str | None:
        key = self._key(*parts)
        return bytes(self._store.get(key)).decode() if self._store.check([key]) else None

    def _key(self, *parts: object) -> str:
        return "/".join([self._prefix, *map(str, parts)])

    @property
    def _store(self) -> Any:
        store = self._find_store()
        if store is None:
            raise RuntimeError("the process group is gone")
        self._used = weakref.ref(store)
        return store


class OwnStore:
    """Stands in for a store where there is one rank."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}

    def check(self, keys: list[str]) -> bool:
        """Whether all of ``keys`` are there."""
        return all(key in self._values for key in keys)

    def get(self, key: str) -> bytes:
        """Return a value."""
        return self._values[key]

    def set(self, key: str, value: str) -> None:
        """Put a value."""
        self._values[key] = value.encode()

    def add(self, key: str, amount: int) -> int:
        """Count."""
        total = int(self._values.get(key, b"0")) + amount
        self._values[key] = str(total).encode()
        return total

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Put a value where there is none, or ``expected``; return what is there then."""
        if self._values.get(key, b"") == expected.encode():
            self._values[key] = desired.encode()
        return self._values[key]
