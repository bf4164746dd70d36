"""The last lines of ``summary``: what is wrong with a run, and what to do next."""

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
    window, problems = diagnosis.window, diagnosis.problems
    steps = count_of(window.num_steps, "step")
    ranks = "" if window.num_ranks == 1 else f" of {len(window.ranks)} of {window.num_ranks} ranks"
    out.print()
    if problems:
        more = "" if len(problems) <= _MOST else f"; the first {_MOST} of {len(problems)}, --json has all"
        out.print(f"What is wrong (from {steps}{ranks}{more})", style="bold")
        for number, finding in enumerate(problems[:_MOST], 1):
            _print_lines(out, f"{number} {finding.severity.name}", finding.summary)
            _print_lines(out, "", f"Next: {finding.action}")
        return
    verdict = diagnosis.step_time[0]
    is_healthy = verdict.kind in ("BALANCED", "COMPUTE_BOUND")
    out.print(f"{'No bottleneck found' if is_healthy else 'No verdict'} (from {steps}{ranks})", style="bold")
    _print_lines(out, "", verdict.summary)
    for finding in diagnosis.findings:
        if finding is not verdict:
            _print_lines(out, "", f"{finding.summary} {finding.action}")
    _print_lines(out, "", f"Next: {verdict.action}")


def _print_lines(out: "Console", head: str, text: str) -> None:
    for number, line in enumerate(wrap(plain(text), _WIDTH - 7)):
        out.print(f"{head if number == 0 else '':<7}{line}")
