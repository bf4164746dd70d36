"""Scripts that are run by hand must still fit the code when they are."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"


@pytest.mark.parametrize("faults", [path.name for path in SCRIPTS.glob("*faults*.toml")])
def test_every_planted_fault_still_finds_its_place_in_the_source(faults):
    command = [sys.executable, str(SCRIPTS / "planted_faults.py"), "--faults", str(SCRIPTS / faults), "--all", "--list"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert len(done.stdout.splitlines()) > 3
