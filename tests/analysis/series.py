"""Steps made by hand: the records of ranks whose phases take round numbers of ms."""

from collections.abc import Iterable, Mapping
from typing import Any

import polars as pl

from chakra_capture.analysis.diagnosis import Diagnosis, diagnose
from chakra_capture.analysis.findings import Finding
from chakra_capture.trace.phase_records import MEMORY_SCHEMA, PHASES_SCHEMA, STEPS_SCHEMA, PhaseRecords

MS = 1_000_000
NAMES = ("input_wait", "h2d", "forward", "backward", "optimizer")


def step(rest: float = 0, **phases: float) -> dict[str, Any]:
    """A step of these phases and a rest; ``gap``, ``device``, ``rss``, ``memory`` and ``flags`` may be added."""
    return {"phases": phases, "ms": sum(phases.values()) + rest}


def plain(ms: float = 100, **changes: float) -> dict[str, Any]:
    """A step of ``ms`` that nothing is wrong with: 5 % rest, no input wait worth a word."""
    parts = {"input_wait": 0.05, "forward": 0.30, "backward": 0.50, "optimizer": 0.10}
    return step(0.05 * ms, **{name: share * ms for name, share in parts.items()}) | changes


def records(steps: Iterable[Mapping[str, Any]], untimed: Mapping[str, str] | None = None) -> PhaseRecords:
    """The records of one rank."""
    rows, phases, memory = [], [], []
    for number, each in enumerate(steps):
        flags = [flag in each.get("flags", ()) for flag in ("profiled", "first", "partial", "update_skipped")]
        gap: dict[str, float] = each.get("gap", {})
        device = each.get("device")
        rows.append(
            (0, each.get("step", number), 0, None, round(each["ms"] * MS), round(sum(gap.values()) * MS), *flags,
             each.get("rss"), None if device is None else round(device["step"] * MS), None)
        )  # fmt: skip
        if "memory" in each:
            memory.append((number, *each["memory"]))
        for name, ms in each["phases"].items():
            on_device = None if device is None or name not in device else round(device[name] * MS)
            phases.append((number, False, name, round(ms * MS), 1, on_device))
        phases += [(number, True, name, round(ms * MS), 1, None) for name, ms in gap.items() if name != "other"]
    measured = dict.fromkeys(NAMES) | dict(untimed or {})
    return PhaseRecords(
        steps=pl.DataFrame(rows, schema=STEPS_SCHEMA, orient="row"),
        phases=pl.DataFrame(phases, schema=PHASES_SCHEMA, orient="row"),
        memory=pl.DataFrame(memory, schema=MEMORY_SCHEMA, orient="row"),
        measured=[(0, 0, name, why) for name, why in measured.items()],
        is_closed=True,
    )


def found(*ranks: list[dict[str, Any]], untimed: dict[str, str] | None = None, **more: Any) -> Diagnosis:
    return diagnose({rank: records(steps, untimed) for rank, steps in enumerate(ranks)}, **more)


def said(diagnosis: Diagnosis) -> list[tuple[str, str]]:
    return [(each.kind, each.severity.name) for each in diagnosis.findings]


def of_kind(diagnosis: Diagnosis, kind: str) -> Finding | None:
    return next((each for each in diagnosis.findings if each.kind == kind), None)


def pair(excess: float, phase: str = "input_wait", num: int = 20, good: int | None = None) -> Diagnosis:
    """Two ranks; rank 1 takes more in a phase, rank 0 waits for it in backward. In steps past ``good``, reversed."""
    slow = {"input_wait": 2.0, "h2d": 2.0, "forward": 30.0, "backward": 20.0, "optimizer": 5.0}
    # All steps take 100 ms: what rank 1 takes longer it lacks in backward.
    late = step(3, **{**slow, phase: slow[phase] + excess, "backward": 60 - excess})
    early = step(3, **{**slow, "backward": 60.0})
    late["ms"] = early["ms"] = 102
    num_good = num if good is None else good
    ranks = [early] * num_good + [late] * (num - num_good), [late] * num_good + [early] * (num - num_good)
    return found(*ranks)
