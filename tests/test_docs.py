"""The documents say what the code does."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_readme_tables_are_made_from_the_code() -> None:
    result = subprocess.run(
        [sys.executable, "scripts/doc_tables.py", "--check"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (result.returncode, result.stderr) == (0, "")


def test_makefile_documents_every_target_and_has_at_most_eight() -> None:
    lines = (ROOT / "Makefile").read_text().splitlines()
    phony = next(line for line in lines if line.startswith(".PHONY:")).removeprefix(".PHONY:").split()
    documented = [line.split(":")[0] for line in lines if "##" in line and ":" in line and line[0].isalpha()]
    named = [name for name in documented if not name.startswith("$")]
    assert sorted(set(named) | {"install"}) == sorted(phony)
    assert len(phony) <= 8
