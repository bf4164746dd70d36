"""Findings on the page: ordered by what they may save, seven and the rest in a fold."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from chakra_capture.analysis.findings import Finding, Severity
from chakra_capture.report.blocks import Prize
from chakra_capture.report.sections.findings import prize_of
from report.conftest import make_page, write_phases
from report.pages import read


@dataclass(frozen=True)
class Saved:
    """What a finding of a recorded window says that it would save."""

    least_ns: float | None
    most_ns: float
    share: float
    doubt: str | None = None


@dataclass(frozen=True)
class WindowFinding:
    """A finding with its prize, as far as the page looks at one."""

    prize: Saved | None
    share: float | None = None


def found(**more: object) -> Finding:
    return Finding(kind="INPUT_BOUND", severity=Severity.warn, summary="s", action="a", **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("finding", "prize"),
    [
        (found(share=0.3), Prize(None, 0.3)),
        (found(), None),
        (WindowFinding(Saved(None, 2e6, 0.2, "maybe")), Prize(2e6, 0.2, at_most=True, doubt="maybe")),
        (WindowFinding(Saved(2e6, 2e6, 0.2)), Prize(2e6, 0.2, at_most=False)),
        (WindowFinding(Saved(1e6, 2e6, 0.2)), Prize(2e6, 0.2, at_most=True)),
        (WindowFinding(None, share=0.1), Prize(None, 0.1)),
    ],
)
def test_a_finding_s_prize(finding: Finding, prize: Prize | None) -> None:
    assert prize_of(finding) == prize


def test_a_finding_has_evidence_next_step_and_bound(tmp_path: Path) -> None:
    page = read(make_page(write_phases(tmp_path / "run", 60, lambda _: 10.0), tmp_path / "r.html"))
    text = " ".join(page.sections["findings"].split())
    said = "Training waits for its input 10.0 % of each step (1.0 ms)."
    assert f"Training waits for its input {said} Next: Give the loader more workers" in text
    assert "up to 10 % of the step, upper bound" in text
    assert "Prizes overlap: they do not add up." in text
