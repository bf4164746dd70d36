"""Running the product's command line: in this process for speed, or as a user's process."""

import contextlib
import io
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from chakra_capture.cli.main import main


@dataclass(frozen=True)
class Outcome:
    """What a command gave back."""

    code: int
    out: str
    err: str


def run(*args: Any) -> Outcome:
    """Run ``chakra-capture ARGS`` in this process."""
    out, err = io.StringIO(), io.StringIO()
    code: object = None
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main([str(a) for a in args])
        except SystemExit as end:
            code = end.code
    assert isinstance(code, int)
    return Outcome(code, out.getvalue(), err.getvalue())


def taken_over(folder: Path, *args: Any) -> list[str] | Outcome:
    """The command that ``chakra-capture ARGS`` becomes in a folder, or what it says where it becomes none."""
    commands: list[list[str]] = []

    def become(_: str, command: list[str]) -> None:
        commands.append(command)
        sys.exit(0)  # nothing follows

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(os, "execv", become)
        outcome = run(*args)
    return commands[0] if commands else outcome


def process(*args: Any, before: str = "", cwd: Path | None = None, **options: Any) -> Outcome:
    """Run the same in a process of its own; ``before`` is Python that runs first in it."""
    script = f"{before}\nfrom chakra_capture.cli.main import main\nimport sys\nmain(sys.argv[1:])"
    command = [sys.executable, "-c", script, *[str(a) for a in args]]
    done = subprocess.run(command, capture_output=True, text=True, cwd=cwd, timeout=120, check=False, **options)
    return Outcome(done.returncode, done.stdout, done.stderr)


def refused(outcome: Outcome, *parts: str) -> str:
    """Check that a command ended with one clear message for bad input; returns the message."""
    assert outcome.code == 1, outcome
    assert "Traceback" not in outcome.err + outcome.out
    lines = outcome.err.strip().splitlines()
    assert len(lines) == 1, outcome.err
    assert lines[0].startswith("chakra-capture: ")
    assert lines[0].endswith(".")
    for part in parts:
        assert part in lines[0]
    return lines[0]
