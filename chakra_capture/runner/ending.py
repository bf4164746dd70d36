"""What is made and shown when a script has ended: its summary, and the merged traces where that is asked for."""

import json
import subprocess
import sys
import time
from contextlib import suppress
from itertools import count
from pathlib import Path

from chakra_capture.config import ChakraProfileConfig
from chakra_capture.layout import RunPaths
from chakra_capture.recording.manifest import Reason
from chakra_capture.recording.run import planned_paths

_RANKS_LIMIT_S = 10.0
_COMMAND_LIMIT_S = 600.0


def show_run(paths: RunPaths, num_ranks: int, *, merge: bool) -> None:
    """Print on stderr what a run says of itself; whatever goes wrong here is not the script's fault."""
    say(f"recorded in {paths.trace_dir} (job {paths.job})")
    if merge:
        _wait_for_ranks(paths, num_ranks)
        _command("merge", paths)
        _command("summary", paths)
        return
    text = _text_of(paths.summary)
    _write(f"{text}\n" if text else "")
    say(f"more by: chakra-capture summary {paths.trace_dir} --job {paths.job}")


def say(text: str) -> None:
    """Tell whoever runs the script, apart from what it prints."""
    _write(f"chakra-capture: {text}\n")


def _write(text: str) -> None:
    # A script may have closed it, or put in its place what raises anything.
    with suppress(Exception):
        sys.stderr.write(text)


def runs_since(settings: ChakraProfileConfig, began: float) -> list[RunPaths]:
    """The runs that processes of the script, which have ended, began under its name after Unix time ``began`` (s)."""
    found = []
    for paths in map(planned_paths(settings).suffixed, count()):
        with suppress(OSError):
            if paths.claim.stat().st_mtime >= began:
                found.append(paths)
        if not (paths.run_dir.exists() or paths.host_dir.exists()):
            return found
    raise AssertionError("numbers do not end")


def _wait_for_ranks(paths: RunPaths, num_ranks: int) -> None:
    """Ranks of one job end a little apart."""
    deadline = time.monotonic() + _RANKS_LIMIT_S
    while time.monotonic() < deadline and not all(_is_over(paths.manifest(rank)) for rank in range(num_ranks)):
        time.sleep(0.1)


def _is_over(manifest: Path) -> bool:
    try:
        return bool(json.loads(manifest.read_text())["reason"] != Reason.running.value)
    except (OSError, ValueError, KeyError):
        return False


def _text_of(summary: Path) -> str:
    try:
        return str(json.loads(summary.read_text())["text"]).rstrip()
    except (OSError, ValueError, KeyError):
        return ""


def _command(verb: str, paths: RunPaths) -> None:
    command = [sys.executable, "-P", "-m", "chakra_capture", verb, str(paths.trace_dir), "--job", paths.job]
    try:
        subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=sys.stderr.fileno(), timeout=_COMMAND_LIMIT_S, check=False
        )
    except (OSError, ValueError, subprocess.TimeoutExpired) as fault:
        say(f"{' '.join(command)} did not end: {fault}")
