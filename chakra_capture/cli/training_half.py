"""Asking the training half, which the command line never imports: a process of its own answers in JSON lines."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from chakra_capture.cli.output import count_of
from chakra_capture.errors import ChakraCaptureError

_MOST_TEXT = 300
_END_WAIT_S = 2.0


class NoAnswerError(ChakraCaptureError):
    """The process ended before it had said all, or did not end."""


def ask(module: str, *arguments: str, limit_s: float) -> Iterator[dict[str, Any]]:
    """Run a module of the training half with this Python, and pass on each object that it writes.

    Raises:
        NoAnswerError: it crashed, failed or took too long; what it had said by then has been passed on.
    """
    # -P: the folder that the command is called in may hold anything, also a torch.py.
    command = [sys.executable, "-P", "-m", module, *arguments]
    with tempfile.TemporaryFile() as errors:
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, start_new_session=True
        )
        is_late = threading.Event()

        def give_up() -> None:
            is_late.set()
            _end(child)

        clock = threading.Timer(limit_s, give_up)
        clock.daemon = True
        clock.start()
        try:
            assert child.stdout is not None
            with child.stdout:
                for line in child.stdout:
                    if (found := _parsed(line)) is not None:
                        yield found
            child.wait()
        finally:
            clock.cancel()
            clock.join()
            _end(child)
        if is_late.is_set():
            raise NoAnswerError(f"it did not end within {count_of(round(limit_s), 'second')}")
        if child.returncode:
            errors.seek(0)
            raise NoAnswerError(_reason(child.returncode, errors.read().decode(errors="replace")))


def _end(child: "subprocess.Popen[bytes]") -> None:
    """End the process and what it has started."""
    if child.returncode is None:
        # The first: it has ended meanwhile. The second: it waits for a disk, where no signal reaches it.
        with suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(child.pid, signal.SIGKILL)
            child.wait(_END_WAIT_S)


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(line)
    except ValueError:  # somebody else's print, as the interpreter started
        return None
    return found if isinstance(found, dict) else None


def _reason(code: int, said: str) -> str:
    lines = [line for line in said.splitlines() if line.strip()]
    last = f" (its last line: {lines[-1][-_MOST_TEXT:].strip()})" if lines else ""
    if code > 0:
        return f"it ended with status {code}{last}"
    try:
        return f"signal {signal.Signals(-code).name} ended it{last}"
    except ValueError:
        return f"signal {-code} ended it{last}"
