"""One thing that was looked at, and what was found."""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from enum import Enum


class Level(Enum):
    """What a finding means for a recording."""

    ok = "ok"
    warning = "warning"
    cannot_record = "cannot record"


@dataclass(frozen=True, slots=True)
class Check:
    """What was found of ``subject``; of a problem also why it matters and what to do about it."""

    subject: str
    level: Level
    what: str
    why: str = ""
    todo: str = ""

    def __str__(self) -> str:
        text = " ".join(part for part in (self.what, self.why, self.todo) if part)
        # Names of files and variables may hold anything, line breaks too.
        return "".join(c if c.isprintable() else "\ufffd" for c in f"{self.level.value}: {self.subject}: {text}")

    def as_json(self) -> dict[str, str]:
        """Return it as plain JSON values."""
        return {**asdict(self), "level": self.level.value}


# A subject, and what looks at it.
Planned = tuple[str, Callable[[], Iterator[Check]]]


def fine(subject: str, what: str) -> Check:
    """Say what works."""
    return Check(subject, Level.ok, what)


def warning(subject: str, what: str, why: str, todo: str) -> Check:
    """Say what will not work, while a recording does."""
    return Check(subject, Level.warning, what, why, todo)


def blocking(subject: str, what: str, why: str, todo: str) -> Check:
    """Say why nothing can be recorded."""
    return Check(subject, Level.cannot_record, what, why, todo)
