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
class Prize:
    """By how much a step would be shorter without what a finding is about.

    Attributes:
        least_ns: per step; None where nothing tells more than that it is at most ``most_ns``.
        most_ns: per step.
        step_ns: what the steps take that this is of.
        is_predicted: a replay without it says so, else it is the time that was measured of it.
        doubt: what is not known of it, a half sentence.
    """

    least_ns: float | None
    most_ns: float
    step_ns: float
    is_predicted: bool = False
    doubt: str | None = None

    @property
    def share(self) -> float:
        """At most so much of a step, from 0 to 1."""
        return self.most_ns / self.step_ns if self.step_ns else 0.0

    @property
    def sentence(self) -> str:
        """As findings have it."""
        whole = f"{written_ms(self.step_ns)} per step ({written(self.share)})"
        if not self.most_ns:
            said = "none of " + whole
        elif self.least_ns is None:
            said = f"at most {written_ms(self.most_ns)} of {whole}"
        elif self.least_ns >= self.most_ns:
            said = f"about {written_ms(self.most_ns)} of {whole}"
        else:
            said = f"{written_ms(self.least_ns)} to {written_ms(self.most_ns)} of {whole}"
        by = ", by a replay without it" if self.is_predicted else ""
        return f"{said}{by}{'' if self.doubt is None else f'; {self.doubt}'}."

    def as_json(self) -> dict[str, Any]:
        """The same as plain JSON values."""
        return {**{name: getattr(self, name) for name in self.__slots__}, "share": self.share}


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
        prize: what removing it would save; None where nothing tells.
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
    prize: Prize | None = None

    def as_json(self) -> dict[str, Any]:
        """The same as plain JSON values."""
        found = {name: getattr(self, name) for name in self.__slots__}
        prize = None if self.prize is None else self.prize.as_json()
        return {**found, "severity": self.severity.name, "ranks": list(self.ranks), "prize": prize}


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
