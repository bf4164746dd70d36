"""A killed training leaves its phases, all but those of the last second; the script does it oftener."""

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "phase_kill.py"


def test_sigkill_costs_at_most_the_last_second_of_the_phases():
    command = [sys.executable, str(SCRIPT), "--times", "3", "--seed", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "3 of 3 times all but the last second is there"
