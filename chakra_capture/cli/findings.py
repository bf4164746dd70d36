"""The last lines of ``summary``: what is wrong with a run, and what to do next."""

from collections.abc import Iterator
from textwrap import wrap
from typing import TYPE_CHECKING

from chakra_capture.cli.output import count_of, plain

if TYPE_CHECKING:
    from rich.console import Console

    from chakra_capture.analysis.diagnosis import Diagnosis

_MOST = 3
_WIDTH = 80


def print_findings(out: "Console", diagnosis: "Diagnosis") -> None:
    """Print the most important findings; of a healthy run that there are none."""
    out.print()
    for number, line in enumerate(findings_text(diagnosis)):
        out.print(line, style="bold" if number == 0 else None)


def findings_text(diagnosis: "Diagnosis") -> list[str]:
    """The lines that say what was found and what to do next; the first is their head."""
    return [*_lines(diagnosis)]


def _lines(diagnosis: "Diagnosis") -> Iterator[str]:
    window, problems = diagnosis.window, diagnosis.problems
    steps = count_of(window.num_steps, "step")
    ranks = "" if window.num_ranks == 1 else f" of {len(window.ranks)} of {window.num_ranks} ranks"
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
