"""The examples run, and what they print of steps agrees with what the training itself has counted."""

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[1] / "scripts" / "examples"


def printed(example: str, folder: Path, *options: str) -> dict[str, str]:
    command = [sys.executable, str(EXAMPLES / example), *options]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    return {name: value.strip() for name, _, value in (line.partition(":") for line in done.stdout.splitlines())}


@pytest.mark.parametrize(("options", "expected"), [((), 4), (("--accumulation-steps", "3"), 2)])
def test_monai_minimal(tmp_path, options, expected):
    said = printed("monai_minimal.py", tmp_path, "--volumes", "4", "--size", "8", *options)
    assert (said["updates made by the trainer"], said["steps recorded"]) == (str(expected), str(expected))


def test_plain_loop(tmp_path):
    # 10 batches an epoch, 3 to an update and the rest of the epoch: 4 updates, twice.
    said = printed("plain_loop.py", tmp_path)
    assert (said["updates made by the loop"], said["steps recorded"]) == ("8", "8")
    for name in ("input_wait", "forward", "backward", "optimizer"):
        assert said[name].endswith(" ms on average, 8 steps")


@pytest.mark.parametrize(("options", "expected"), [((), 20), (("--accumulation-steps", "3"), 8)])
def test_lightning_minimal(tmp_path, options, expected):
    said = printed("lightning_minimal.py", tmp_path, *options)
    assert (said["updates made by the trainer"], said["steps recorded"]) == (str(expected), str(expected))
