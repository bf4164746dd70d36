"""What the launcher calls this start of the job, as far as a process can know it alone."""

import os
import re
import secrets
import time
from collections.abc import Mapping
from pathlib import Path

from chakra_capture.recording.rank import RankInfo

_UNSAFE_IN_NAME = re.compile(r"[^A-Za-z0-9._=+-]+")


def safe_file_name(text: str) -> str:
    """Replace what does not belong in a file name."""
    return _UNSAFE_IN_NAME.sub("_", text)


def launch_id(environ: Mapping[str, str], *, with_address: bool) -> str:
    """Return what the launcher calls this start of the job, restarts told apart."""
    names = [
        "SLURM_JOB_ID",
        "SLURM_STEP_ID",
        "SLURM_RESTART_COUNT",
        "TORCHELASTIC_RUN_ID",
        "TORCHELASTIC_RESTART_COUNT",
    ]
    if with_address:
        names += ["MASTER_ADDR", "MASTER_PORT"]
    return "-".join(safe_file_name(environ[name]) for name in names if environ.get(name))


def own_run_id(ranks: RankInfo, environ: Mapping[str, str]) -> str:
    """Name a run without asking other ranks.

    One rank adds a random part. Several need one name without talking: the launcher's, and where all were started by
    one process of this machine (torchrun says so) that process. Ranks of several machines, or started by hand, share
    no more than the launcher's variables; that a second start has the same ones shows by the marks in the run folder,
    unless the first ended before some rank had opened its session.
    """
    launch = launch_id(environ, with_address=ranks.world_size > 1)
    if ranks.world_size == 1:
        return "-".join(part for part in (launch, secrets.token_hex(8)) if part)
    size = str(ranks.world_size)
    parent = os.getppid()
    started = _ticks_at_start(parent)
    if environ.get("WORLD_SIZE") == environ.get("LOCAL_WORLD_SIZE") == size and started is not None:
        launch = f"{launch or 'unnamed'}-{parent}-{started}"
    return launch or "unnamed"


def process_start_time() -> float | None:
    """Return the time of day at which this process began."""
    ticks = _ticks_at_start(os.getpid())
    if ticks is None or not hasattr(time, "CLOCK_BOOTTIME"):
        return None
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.time() - age


def _ticks_at_start(pid: int) -> int | None:
    try:
        # The second field is the command in brackets, and may hold anything.
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, IndexError, ValueError):
        return None
