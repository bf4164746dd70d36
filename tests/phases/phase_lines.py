"""What a phase file says, beside what a job itself has noted on the same clock."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

NAP = 0.02
NAP_NS = 20_000_000


@dataclass
class Diary:
    """Intervals that a job notes by itself: ``with diary("loss"): ...`` naps inside."""

    entries: list[tuple[str, int, int]] = field(default_factory=list)

    @contextmanager
    def __call__(self, name: str, nap: float = NAP) -> Iterator[None]:
        begin = time.monotonic_ns()
        time.sleep(nap)
        yield
        self.entries.append((name, begin, time.monotonic_ns()))

    def of(self, name: str) -> list[tuple[int, int]]:
        return [(begin, end) for found, begin, end in self.entries if found == name]


def lines(folder: Path, kind: str, job: str = "0") -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (folder / f"{job}_phases/rank-0.jsonl").read_text().splitlines()]
    return [line for line in found if line["kind"] == kind]


def steps(folder: Path) -> list[dict[str, Any]]:
    return lines(folder, "step")


def gaps(folder: Path) -> list[dict[str, Any]]:
    """The times between steps: before the first one, between two, after the last one."""
    return [line["gap"] for kind in ("step", "close") for line in lines(folder, kind)]


def measured(folder: Path) -> dict[str, str | None]:
    return lines(folder, "measures")[-1]["phases"]


def calls(stretch: dict[str, Any], name: str) -> int:
    return stretch["phases"].get(name, [0, 0])[1]


def ns(stretch: dict[str, Any], name: str) -> int:
    return stretch["phases"].get(name, [0, 0])[0]


def place(folder: Path, interval: tuple[int, int]) -> tuple[int, str | None]:
    """The step that holds an interval of the diary, and the innermost of its phases that does (None: no phase).

    Raises:
        AssertionError: no step holds it, or a phase holds a part of it alone.
    """
    begin, end = interval
    step = next((s for s in steps(folder) if s["begin_ns"] <= begin and end <= s["begin_ns"] + s["ns"]), None)
    assert step is not None, "it is in no step"
    spans = [(name, step["begin_ns"] + first, step["begin_ns"] + last) for name, first, last in step["spans"]]
    met = [span for span in spans if span[1] < end and begin < span[2]]
    holding = [span for span in met if span[1] <= begin and end <= span[2]]
    inside = [span for span in met if begin <= span[1] and span[2] <= end]
    assert len(holding) + len(inside) == len(met), f"cut by {met}"
    return step["step"], min(holding, key=lambda span: span[2] - span[1])[0] if holding else None
