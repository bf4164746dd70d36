"""What is known of a run before its ranks are aligned, and after; without the libraries that do it, as it travels."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from chakra_capture.trace import SCHEMA_VERSION


@dataclass(frozen=True, slots=True, kw_only=True)
class Clock:
    """The clock of a rank: it shows t + offset + drift (t - t0) when the reference shows t.

    Attributes:
        reference: rank whose clock counts; the lowest of those that operations link with this one.
        drift_ppm: None where the data does not tell it from 0; then 0 is used.
        low_ns: causality excludes a smaller offset (at this drift); high_ns: a larger one. None: not bounded.
        spread_ns: 9 of 10 ends that the offset was found from agree within it; None where none were.
        evidence: what the offset rests on.
        reason: why times cannot be compared with those of the reference; None where they can.
    """

    rank: int
    reference: int
    t0_ns: int
    offset_ns: int | None = None
    drift_ppm: float | None = None
    low_ns: int | None = None
    high_ns: int | None = None
    spread_ns: int | None = None
    num_operations: int = 0
    evidence: str
    reason: str | None = None

    @property
    def comparable(self) -> bool:
        return self.reason is None

    @property
    def is_bounded(self) -> bool:
        return self.rank == self.reference or (self.low_ns is not None and self.high_ns is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """What the manifests of a run state: the number of ranks of the job, and the machine of each rank."""

    world_size: int | None = None
    hosts: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Alignment:
    """What matching the ranks of a run gave; the content of ``alignment.json``."""

    ranks: tuple[int, ...]
    missing_ranks: tuple[int, ...]
    extra_ranks: tuple[int, ...]
    unreadable: Mapping[int, str]
    clocks: Mapping[int, Clock]
    groups: tuple[Mapping[str, Any], ...]
    num_operations: int
    num_matched: int
    notes: tuple[str, ...]

    @property
    def doubt_ns(self) -> dict[int, int]:
        """How well the clock of each rank is known, as far as the ends of operations tell."""
        return {rank: clock.spread_ns or 0 for rank, clock in self.clocks.items()}

    def as_json(self) -> dict[str, Any]:
        """The same as plain JSON values."""
        return {
            "schema_version": SCHEMA_VERSION,
            "ranks": list(self.ranks),
            "missing_ranks": list(self.missing_ranks),
            "extra_ranks": list(self.extra_ranks),
            "unreadable": {str(rank): why for rank, why in self.unreadable.items()},
            "clocks": {str(r): {**asdict(clock), "comparable": clock.comparable} for r, clock in self.clocks.items()},
            "groups": list(self.groups),
            "num_operations": self.num_operations,
            "num_matched": self.num_matched,
            "notes": list(self.notes),
        }
