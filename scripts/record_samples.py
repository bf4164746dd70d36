"""Record the small traces under traces/ anew, with this project itself.

Usage: record_samples.py; every sample's how.txt says what recorded it.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TRACES = ROOT / "traces"
COMMON = {"enabled": "true", "compress": "true", "trace_dir": "."}
SAMPLES = {
    "plain_loop": (
        "configs/plain_loop.py",
        {"start_step": 2, "end_step": 3},
        (),
    ),
    "digits_ddp2_gloo": (
        "scripts/train_digits.py",
        {"start_step": 5, "end_step": 6},
        ("trainer.max_epochs=1",),
    ),
    "digits_two_cycles": (
        "scripts/train_digits.py",
        {"start_step": 4, "end_step": 7, "warmup_steps": 1, "active_steps": 1},
        ("trainer.max_epochs=1", "trainer.devices=1", "trainer.strategy=auto"),
    ),
}


def record(name: str) -> None:
    script, settings, more = SAMPLES[name]
    overrides = [f"chakra_profile.{key}={value}" for key, value in {**COMMON, **settings}.items()]
    command = [sys.executable, str(ROOT / script), *overrides, *more, "hydra.run.dir=hydra"]
    # Kineto writes the path of the file into it: a temporary folder, not that of the recording machine's user.
    with tempfile.TemporaryDirectory(prefix="sample-") as recorded:
        subprocess.run(command, cwd=recorded, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True)
        shutil.rmtree(Path(recorded) / "hydra")
        folder = TRACES / name
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(recorded, folder)
    shown = " ".join(["python", script, *overrides, *more])
    (folder / "how.txt").write_text(f"{shown}\nrecorded with scripts/record_samples.py on a CPU\n")


if __name__ == "__main__":
    for sample in SAMPLES:
        record(sample)
