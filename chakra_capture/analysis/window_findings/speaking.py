"""How a rule speaks: a finding from what it measured, graded by its prize."""

from typing import Any

from chakra_capture.analysis.findings import Finding, Prize, Severity, graded
from chakra_capture.analysis.window_findings.recorded import Recorded

# Of a step: what saves less is not worth a word, what saves so much is critical.
BAR, CRITICAL = 0.03, 0.20
# Fewer steps are said so, and make nothing critical.
FEWEST_STEPS = 3


def speak(
    recorded: Recorded,
    kind: str,
    summary: str,
    action: str,
    prize: Prize | None,
    *,
    phase: str | None = None,
    ranks: tuple[int, ...] = (),
    **evidence: Any,
) -> Finding:
    """Make a finding: the larger its prize the more severe; below the bar, or without a prize, for information."""
    share = 0.0 if prize is None else prize.share
    severity = graded(share, BAR, CRITICAL) or Severity.info
    if recorded.num_steps < FEWEST_STEPS:
        severity = min(severity, Severity.warn)
        seen = "1 step" if recorded.num_steps == 1 else f"{recorded.num_steps} steps"
        summary = f"{summary.removesuffix('.')} (seen in {seen})."
    return Finding(
        kind=kind,
        severity=severity,
        summary=summary,
        action=action,
        phase=phase,
        metric="recorded_steps",
        score=share,
        share=None if prize is None else share,
        ranks=ranks,
        evidence={"num_steps": recorded.num_steps, "num_ranks": len(recorded.traces), **evidence},
        prize=prize,
    )


def listed(parts: list[str]) -> str:
    """Parts of a sentence: ``a, b and c``."""
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
