"""The examples, as a user runs them."""

import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parents[2] / "scripts" / "examples"


def test_the_plain_loop_counts_as_many_updates_as_there_are_steps(tmp_path):
    command = [sys.executable, str(EXAMPLES / "plain_loop.py"), "traces"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")
    # 10 batches an epoch, 3 to an update, and the rest of the epoch: 4 updates, twice.
    first, *table = done.stdout.splitlines()
    assert first == f"8 updates by the loop's own count, 8 steps in {tmp_path}/traces/0_phases/rank-0.jsonl"
    assert [row.rpartition("ms, ")[2] for row in table] == ["in 8 steps"] * 4
