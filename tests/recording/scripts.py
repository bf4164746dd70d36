"""Training scripts run as processes of their own: what is tested there used to end the process."""

import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path

import warm

TESTS = Path(__file__).resolve().parents[1]
_HEAD = """
import logging, os, signal, sys, threading, time
from pathlib import Path
sys.path.insert(0, {tests!r})
logging.basicConfig(format="%(levelname)s %(message)s", level=logging.INFO)
import torch
import torch.autograd.profiler as autograd
from torch.profiler import ExecutionTraceObserver, ProfilerActivity, profile, schedule
from chakra_capture import capture
from chakra_capture.recording import registry
from recording.loops import train, work
from recording.recorded import read, settings
folder = Path({folder!r})

def export(profiler, name="theirs"):
    profiler.export_chrome_trace(str(folder / name))
    found = [event["name"] for event in read(folder / name)["traceEvents"]]
    assert "aten::mm" in found, found
"""


def run_script(folder: Path, body: str, returncode: int = 0, environ: Mapping[str, str] | None = None) -> str:
    """Run ``body`` after the imports above and return what it wrote to stderr."""
    script = _HEAD.format(tests=str(TESTS), folder=str(folder)) + textwrap.dedent(body)
    done = warm.run([sys.executable, "-c", script], env=environ)
    assert done.returncode == returncode, f"{done.returncode}\n{done.stdout}{done.stderr}"
    return done.stderr


def start_script(folder: Path, body: str, *arguments: str) -> warm.Running:
    """Start ``body`` as a script in a file, as children of multiprocessing need it."""
    path = folder / "script.py"
    path.write_text(_HEAD.format(tests=str(TESTS), folder=str(folder)) + textwrap.dedent(body))
    return warm.start([sys.executable, path, *arguments])
