"""Generated runs: a planted slow op is named with its rank and phase, and nobody where none is planted."""

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "straggler_seeds.py"
OP = "aten::convolution_backward"


def verdicts(*options: object) -> tuple[int, list[str]]:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *map(str, options)], capture_output=True, text=True, check=False, timeout=240
    )
    assert done.stderr == ""
    return done.returncode, done.stdout.splitlines()


def test_planted_slow_op_is_named_with_its_phase_and_nobody_without_one() -> None:
    code, (_, *lines, last) = verdicts("--seeds", 2, "--op", OP, "--factor", 8)
    assert (code, last) == (0, "a slow rank: 2 of 2 right; none: 2 of 2 right")
    assert [line.endswith(f"in backward: {OP}") for line in lines] == [True, False] * 2


def test_script_ends_with_1_where_the_op_is_not_what_is_slow() -> None:
    # So little more than usual that it is not what a rank could be late by.
    code, lines = verdicts("--seeds", 1, "--op", OP, "--factor", 1.01)
    assert (code, lines[-1]) == (1, "a slow rank: 0 of 1 right; none: 1 of 1 right")
