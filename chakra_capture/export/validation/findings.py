"""What validation found: equal findings are one, with a count and the first places."""

from dataclasses import dataclass, field
from enum import StrEnum

_MOST_PLACES = 20


class Level(StrEnum):
    """An error keeps a simulator from running the trace, or makes it simulate something else."""

    ERROR = "error"
    WARNING = "warning"


@dataclass(frozen=True, slots=True)
class Check:
    """One kind of defect.

    Attributes:
        rule: V1 to V20, as documented in the help of the verb.
        name: what tells it from others of its rule.
        cause: what is wrong, and what comes of it.
        fix: what to do.
    """

    rule: str
    name: str
    level: Level
    cause: str
    fix: str

    def __str__(self) -> str:
        return f"{self.rule}-{self.name}"


@dataclass(frozen=True, slots=True)
class Place:
    """Where a defect was seen; what does not apply is None or empty."""

    rank: int | None = None
    node: int | None = None
    name: str = ""
    detail: str = ""


@dataclass(slots=True)
class Finding:
    """All defects of one kind."""

    check: Check
    count: int = 0
    places: list[Place] = field(default_factory=list)


class Findings:
    """Findings by their kind, in the order of the rules; memory does not grow with their number."""

    def __init__(self) -> None:
        self._found: dict[Check, Finding] = {}

    def add(self, check: Check, place: Place | None = None, *, count: int = 1) -> None:
        """Count a defect, ``count`` times where it is one place that stands for several."""
        finding = self._found.setdefault(check, Finding(check))
        finding.count += count
        if len(finding.places) < _MOST_PLACES:
            finding.places.append(place or Place())

    def has(self, check: Check) -> bool:
        """Say whether a defect of this kind was found."""
        return check in self._found

    def sorted(self) -> list[Finding]:
        """Errors first, then in the order of the rules."""
        return sorted(
            self._found.values(),
            key=lambda one: (one.check.level != Level.ERROR, int(one.check.rule[1:]), one.check.name),
        )

    def count(self, level: Level) -> int:
        """How many kinds of findings there are of a level."""
        return sum(one.check.level == level for one in self._found.values())
