"""The whole road: train digits on two gloo processes, record steps 5 to 10, merge, summarise.

Usage: demo.py [OUTPUT_FOLDER] [OVERRIDE ...]; a second run into the same folder leaves both runs whole.
"""

import os
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# The sample of NeMo's documentation.
WINDOW = {"enabled": "true", "start_step": 5, "end_step": 10, "warmup_steps": 0, "active_steps": 1}


def main(arguments: list[str]) -> int:
    folder = Path(arguments[0]) if arguments else ROOT / "demo-output"
    traces = folder.resolve() / "traces"
    overrides = [f"chakra_profile.{key}={value}" for key, value in {**WINDOW, "trace_dir": traces}.items()]
    scripts = Path(sysconfig.get_path("scripts"))
    run(
        sys.executable,
        str(ROOT / "scripts" / "train_digits.py"),
        *overrides,
        f"hydra.run.dir={folder.resolve()}/hydra",
        *arguments[1:],
    )
    run(str(scripts / "merge-traces"), str(traces))
    run(str(scripts / "chakra-capture"), "summary", str(traces))
    print(f"\nTraces, manifests and merged tables: {traces}")
    print(f"See it again:  {os.path.relpath(scripts / 'chakra-capture')} summary {os.path.relpath(traces)}")
    return 0


def run(*command: str) -> None:
    """Run one command of the road, showing it first; its failure ends the demo."""
    print(f"\n$ {shlex.join([os.path.relpath(command[0]), *command[1:]])}", flush=True)
    # One intra-op thread per process: the two ranks share the machine.
    result = subprocess.run(command, cwd=ROOT, env={"OMP_NUM_THREADS": "1", **os.environ}, check=False)
    if result.returncode:
        sys.exit(result.returncode)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
