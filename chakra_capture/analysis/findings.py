"""A finding: what makes a training slow or endangers it, with its evidence and what to do next."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any


class Severity(IntEnum):
    """How much a finding matters."""

    info = 0
    warn = 1
    crit = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One finding.

    Attributes:
        kind: as TraceML names it, where it has the rule.
        phase: where, None for the whole step.
        metric: what was measured.
        summary: the evidence in one sentence.
        action: what to do next, in one sentence.
        score: what severities are given by; findings of one severity are ordered by it.
        share: of the time of a step (of the wall, between steps), from 0 to 1.
        skew: how much more the worst rank has than the median one, as a part of the latter.
        ranks: whom it is about; empty: all of them.
        evidence: the numbers.
    """

    kind: str
    severity: Severity
    summary: str
    action: str
    phase: str | None = None
    metric: str | None = None
    score: float | None = None
    share: float | None = None
    skew: float | None = None
    ranks: tuple[int, ...] = ()
    evidence: dict[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """The same as plain JSON values."""
        found = {name: getattr(self, name) for name in self.__slots__}
        return {**found, "severity": self.severity.name, "ranks": list(self.ranks)}


def graded(value: float, warn: float, crit: float) -> Severity | None:
    """The severity of a value; None below both limits."""
    return Severity.crit if value >= crit else Severity.warn if value >= warn else None


def written(share: float) -> str:
    """A share as sentences have it."""
    return f"{100 * share:.1f} %"


def written_ms(ns: float) -> str:
    """A time as sentences have it."""
    return f"{ns / 1e6:.1f} ms" if abs(ns) >= 1e6 else f"{ns / 1e6:.3f} ms"


def in_order(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """The most important first: by severity, then score; of equals the one about certain ranks."""

    def weight(finding: Finding) -> tuple[int, float, bool]:
        return finding.severity, finding.score or 0.0, finding.kind.endswith("STRAGGLER")

    return tuple(sorted(findings, key=weight, reverse=True))
