"""The summary at the end of a training: made by a process of its own, for this one must not load what makes it."""

import logging
import os
import subprocess
import sys

from chakra_capture.layout import RunPaths

logger = logging.getLogger(__name__)

OFF_VARIABLE = "CHAKRA_CAPTURE_NO_SUMMARY"
LIMIT_S = 60.0
_MOST_TEXT = 300


def write_summary(paths: RunPaths, *, limit_s: float = LIMIT_S) -> None:
    """Have ``chakra-capture summary`` write final_summary.json from the phases recorded so far.

    Whatever becomes of it, training goes on: what went wrong is said once.
    """
    if os.environ.get(OFF_VARIABLE, "0") not in ("", "0") or not sys.executable:
        return
    # -P: the folder that a job was started in holds its files, which are not to be taken for modules.
    command = [sys.executable, "-P", "-m", "chakra_capture", "summary", str(paths.trace_dir), "--job", paths.job]
    environ = {**os.environ, "POLARS_MAX_THREADS": "1"}
    try:
        done = subprocess.run(
            [*command, "--phases-only", "--json"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=environ,
            timeout=limit_s,
            check=False,
        )
        why = done.stderr.decode(errors="replace").strip()[-_MOST_TEXT:]
        if done.returncode == 0 and not why:
            return
    except subprocess.TimeoutExpired:
        why = f"it took longer than {limit_s:.0f} s"
    except (OSError, ValueError, RuntimeError) as fault:  # RuntimeError: the interpreter is ending
        why = str(fault)
    logger.warning(
        "%s was not written: %s. Write it with: chakra-capture summary %s --job %s",
        paths.summary,
        why or "the process ended without a word",
        paths.trace_dir,
        paths.job,
    )
