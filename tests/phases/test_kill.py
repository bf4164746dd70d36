"""A killed training leaves its phases, all but those of the last second; the script does it oftener."""

import sys
from pathlib import Path

import warm

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "phase_kill.py"


def test_sigkill_costs_at_most_the_last_second_of_the_phases():
    done = warm.run([sys.executable, SCRIPT, "--times", "3", "--seed", "1"], timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "3 of 3 times all but the last second is there"
