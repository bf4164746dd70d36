"""The last lines of ``summary``: what is wrong with a run, what that would save, and what to do next."""

from collections.abc import Iterator
from textwrap import wrap
from typing import TYPE_CHECKING

from chakra_capture.cli.output import count_of, plain

if TYPE_CHECKING:
    from rich.console import Console

    from chakra_capture.analysis.diagnosis import Diagnosis
    from chakra_capture.analysis.findings import Finding
    from chakra_capture.analysis.run_findings import RunFindings

_MOST = 3
_WIDTH = 80


def print_findings(out: "Console", diagnosis: "Diagnosis | None", found: "RunFindings | None") -> None:
    """Print the most important findings; of a healthy run that there are none."""
    lines = findings_text(diagnosis) if diagnosis is not None else []
    if found is not None:
        lines = [*_of_run(found, diagnosis, lines)]
    if lines:
        out.print()
    for number, line in enumerate(lines):
        out.print(line, style="bold" if number == 0 else None)


def _of_run(found: "RunFindings", diagnosis: "Diagnosis | None", of_phases: list[str]) -> Iterator[str]:
    """What the phases of all steps and the recorded windows say together."""
    from chakra_capture.analysis.run_findings import MOST_SHOWN

    problems, sources = found.problems, _sources(found, diagnosis)
    if problems:
        more = "" if len(problems) <= MOST_SHOWN else f"; the first {MOST_SHOWN} of {len(problems)}, --json has all"
        yield f"What is wrong (from {sources}{more})"
        places = {finding.kind: number for number, finding in enumerate(problems, 1)}
        for number, finding in enumerate(problems[:MOST_SHOWN], 1):
            whole = places.get(finding.evidence.get("part_of", ""))
            yield from _told(f"{number} {finding.severity.name}", finding, whole)
    elif of_phases:
        yield from of_phases
    elif found.num_steps:
        yield f"{'No bottleneck above 3 % found' if found.is_told else 'No verdict'} (from {sources})"
    elif found.notes:
        yield "No verdict"
    for finding in found.notes:
        yield from _wrapped("note", f"{finding.summary} {finding.action}")


def print_run_findings(
    out: "Console", diagnosis: "Diagnosis | None", found: "RunFindings", *, with_minor: bool
) -> None:
    """Print all findings of a run, those that are not worth a word too if asked for."""
    of_phases = findings_text(diagnosis) if diagnosis is not None else []
    lines = [*_of_run(found, diagnosis, of_phases)] or ["No step with a time was recorded: nothing to say."]
    if with_minor:
        lines += [line for finding in found.minor for line in _told("minor", finding)]
    for number, line in enumerate(lines):
        out.print(line, style="bold" if number == 0 else None)


def _told(head: str, finding: "Finding", whole: int | None = None) -> Iterator[str]:
    """A finding, its prize (of the time of another one, by its number) and what to do."""
    yield from _wrapped(head, finding.summary)
    if finding.prize is not None:
        part = "" if whole is None else f" It is part of {whole}."
        yield from _wrapped("", f"Prize: {finding.prize.sentence}{part}")
    yield from _wrapped("", f"Next: {finding.action}")


def _sources(found: "RunFindings", diagnosis: "Diagnosis | None") -> str:
    parts = []
    if diagnosis is not None:
        window = diagnosis.window
        parts.append(count_of(window.num_steps, "step") + _of_ranks(window.num_ranks, len(window.ranks)))
    if found.num_steps:
        recorded = count_of(found.num_steps, "recorded step")
        parts.append(recorded + ("" if len(found.ranks) == 1 else f" of {len(found.ranks)} ranks"))
    return " and ".join(parts) or "no whole step"


def _of_ranks(num_ranks: int, num_used: int) -> str:
    return "" if num_ranks == 1 else f" of {num_used} of {num_ranks} ranks"


def findings_text(diagnosis: "Diagnosis") -> list[str]:
    """The lines that say what was found and what to do next; the first is their head."""
    return [*_lines(diagnosis)]


def _lines(diagnosis: "Diagnosis") -> Iterator[str]:
    window, problems = diagnosis.window, diagnosis.problems
    steps = count_of(window.num_steps, "step")
    ranks = _of_ranks(window.num_ranks, len(window.ranks))
    if problems:
        more = "" if len(problems) <= _MOST else f"; the first {_MOST} of {len(problems)}, --json has all"
        yield f"What is wrong (from {steps}{ranks}{more})"
        for number, finding in enumerate(problems[:_MOST], 1):
            yield from _wrapped(f"{number} {finding.severity.name}", finding.summary)
            yield from _wrapped("", f"Next: {finding.action}")
        return
    verdict = diagnosis.step_time[0]
    is_healthy = verdict.kind in ("BALANCED", "COMPUTE_BOUND")
    yield f"{'No bottleneck found' if is_healthy else 'No verdict'} (from {steps}{ranks})"
    yield from _wrapped("", verdict.summary)
    for finding in diagnosis.findings:
        if finding is not verdict:
            yield from _wrapped("", f"{finding.summary} {finding.action}")
    yield from _wrapped("", f"Next: {verdict.action}")


def _wrapped(head: str, text: str) -> Iterator[str]:
    for number, line in enumerate(wrap(plain(text), _WIDTH - 7)):
        yield f"{head if number == 0 else '':<7}{line}"
