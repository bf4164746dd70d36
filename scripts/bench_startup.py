"""CPU seconds of the command line, median of 5 processes each, against the bars of the project.

    .venv/bin/python scripts/bench_startup.py [FOLDER OF THE HANDED DATA]

The twin pair is left out where the handed data is not there. Run it on a quiet machine: CPU seconds of a
contended one are higher.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

RUNS = 5
DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
EVENT = {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 1, "ts": 1, "dur": 2, "args": {}}


def cpu_seconds(*args: str, expected: int = 0) -> float:
    """User and system time of one process, its children included."""
    before = os.times()
    command = [sys.executable, "-m", "chakra_capture", *args]
    # As where the package is installed: its byte code is there from the first run on.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    after = os.times()
    if done.returncode != expected:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}: {done.stderr}")
    return after.children_user + after.children_system - before.children_user - before.children_system


def main() -> int:
    data = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(os.environ.get("CHAKRA_CAPTURE_DATA", DATA))
    twin = data / "pairs" / "resnet50_ddp_twin"
    missed = 0
    with tempfile.TemporaryDirectory() as folder:
        trace_dir = Path(folder) / "0_kineto"
        trace_dir.mkdir()
        (trace_dir / "rank-0.json").write_text(json.dumps({"traceEvents": [EVENT]}))
        rows: list[tuple[str, float, tuple[str, ...], int]] = [
            ("--help", 0.3, ("--help",), 0),
            ("usage error", 0.3, ("merge", "--nonsense"), 2),
            ("inspect", 0.4, ("inspect", folder), 0),
            ("tiny merge", 0.8, ("merge", folder), 0),
        ]
        if twin.is_dir():
            rows.append(("twin merge", 2.0, ("merge", str(twin), "--force", "-o", str(Path(folder) / "out")), 0))
        else:
            print(f"twin merge left out: {twin} is not here")
        print(f"{'what':12} {'CPU s':>6} {'bar':>5}")
        for what, bar, args, expected in rows:
            seconds = statistics.median(cpu_seconds(*args, expected=expected) for _ in range(RUNS))
            missed += seconds > bar
            print(f"{what:12} {seconds:6.2f} {bar:5.1f} {'' if seconds <= bar else '  over the bar'}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
