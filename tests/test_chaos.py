"""Fixed runs of scripts/chaos.py: trainings with a fault and a way out end the same with a recording as without."""

import subprocess
import sys
from pathlib import Path

CHAOS = Path(__file__).resolve().parents[1] / "scripts/chaos.py"
RUNS = [
    "plain/exception/gc/compile+fsdp2@9",
    "plain/sigterm/fork/lbfgs+threads@6",
    "plain/sys_exit/hung/accumulation@5",
    "plain/os_exit/folder_gone/checkpointing@5",
    "lightning/second_fit/disk_full/workers@10",
    "lightning/interrupt/op_error/validation@6",
    "huggingface/sigkill/none/bf16@6",
    "huggingface/end/stolen/accumulation@7",
    "monai/out_of_memory/observer/workers@5",
]


def test_fixed_runs_of_the_chaos_script_find_nothing():
    command = [sys.executable, str(CHAOS), "--jobs", "2", "--only", *RUNS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400)

    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(line.split()[1] for line in done.stdout.splitlines() if line.startswith("ok ")) == sorted(RUNS)
