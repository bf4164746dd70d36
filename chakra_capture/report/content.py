"""What stands on the page: the head, then the sections in the order in which somebody asks."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from chakra_capture.report.blocks import Section
from chakra_capture.report.facts import Facts
from chakra_capture.report.quality import Quality, judge
from chakra_capture.report.scope import scope_of
from chakra_capture.report.sections import (
    anatomy,
    communication,
    device,
    findings,
    names,
    path,
    quality,
    ranks,
    steps,
    what_if,
)
from chakra_capture.report.verdict import Verdict, verdict
from chakra_capture.report.words import DASH, count_of, ranges


@dataclass(frozen=True, slots=True)
class Fact:
    """A piece of the head; ``strong`` is what the eye looks for, between the two other texts."""

    before: str = ""
    strong: str = ""
    after: str = ""


@dataclass(frozen=True, slots=True)
class Content:
    """Everything that stands on the page.

    Attributes:
        sections: in their order; ``timeline_after`` is the anchor after which the timeline comes, where there is one.
    """

    name: str
    head: tuple[Fact, ...]
    quality: Quality
    verdict: Verdict
    sections: Sequence[Section]
    timeline_after: str = "steps"


def content(facts: Facts, command: str, *, show_paths: bool = False) -> Content:
    """Say what the facts are.

    Args:
        command: how the page was made.
        show_paths: name the folder of the run in full.
    """
    scope, judged = scope_of(facts), judge(facts, show_hosts=show_paths)
    sections = [
        findings.section(facts, scope),
        anatomy.section(facts, scope),
        steps.section(facts),
        device.section(facts, scope),
        names.section(facts, scope),
        communication.section(facts),
        ranks.section(facts),
        path.section(facts),
        what_if.section(facts),
        quality.section(facts, judged),
        quality.definitions(facts, command),
    ]
    said = verdict(facts, scope, judged, findings.findings_of(facts))
    return Content(_name(facts, show_paths=show_paths), _head(facts), judged, said, sections)


def _name(facts: Facts, *, show_paths: bool) -> str:
    folder, job = facts.run.paths.trace_dir, facts.run.paths.job
    if show_paths:
        return f"{folder} {job}"
    name = folder.resolve().name or "run"
    return name if job in ("0", name) else f"{name} {job}"


def _head(facts: Facts) -> tuple[Fact, ...]:
    found = []
    numbers = facts.steps["step"].drop_nulls().unique().sort().to_list() if facts.steps.height else []
    if numbers:
        found.append(Fact("", f"step{'s' if len(numbers) > 1 else ''} {_some(numbers)}", "profiled"))
    elif facts.ranks:
        found.append(Fact("", "one window", "profiled, no step marked in it"))
    if facts.history.height:
        found.append(Fact("", count_of(facts.history.n_unique(["fit", "step"]), "step"), "timed by phase"))
    known = sorted({rank.rank for rank in facts.ranks} or set(facts.phases))
    if known:
        of = f"of {facts.world_size} recorded" if facts.world_size else "recorded"
        found.append(Fact("", f"rank{'s' if len(known) > 1 else ''} {_some(known)}", of))
    found.append(Fact(_devices(facts)))
    if torch := _stated(facts, "torch"):
        found.append(Fact(f"torch {torch}"))
    if when := _captured(facts):
        found.append(Fact("captured", when))
    return tuple(found)


def _some(numbers: list[int]) -> str:
    text = ranges(numbers)
    return text if len(text) <= 24 else f"{numbers[0]}{DASH}{numbers[-1]} ({len(numbers)} of them)"


def _devices(facts: Facts) -> str:
    backends = {window["device"]["backend"] for mine in facts.links.values() for window in mine
                if window["device"]} - {None}  # fmt: skip
    said = [f", {backend.upper() if backend == 'nccl' else backend}" for backend in sorted(backends)]
    num = facts.device.select("rank", "device").unique().height if facts.has_device else 0
    silent = "CPU only" if facts.ranks else "phases only"
    return (count_of(num, "GPU") if num else silent) + "".join(said)


def _stated(facts: Facts, what: str) -> str | None:
    return next((value for head in facts.manifests.values() if (value := head.versions.get(what))), None)


def _captured(facts: Facts) -> str | None:
    """When the first window began, by its events; of a run of phases alone what its manifest says."""
    starts = facts.steps["ts_ns"].drop_nulls().to_list() if facts.steps.height else []
    if not starts:
        starts = [head.opened.unix_ns for head in facts.manifests.values() if head.opened is not None]
    if not starts or min(starts) < 10**17:  # times since some boot say nothing of the day
        return None
    return datetime.fromtimestamp(min(starts) / 1e9, tz=UTC).strftime("%Y-%m-%d %H:%M UTC")
