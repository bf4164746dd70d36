"""Python commands run in processes of their own that need not import torch again: forked from an interpreter that has.

For tests whose scripts would else spend seconds on imports, and a moment on what is tested. The process is a real one
to its end (see ``warm_interpreter.py``); what it does not have is a start of its own. A test of the start, of what is
imported when, or of a command line that ``ps`` shows, starts Python itself.
"""

import functools
import json
import os
import selectors
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

TRAINING = ("torch", "torch._dynamo")  # the latter comes with the first optimizer
LIGHTNING = (*TRAINING, "pytorch_lightning")
MONAI = (*TRAINING, "monai.engines")

_SERVER = Path(__file__).with_name("warm_interpreter.py")
# What Python, its libraries and torch read as they start: other values are for another interpreter.
_AT_START = ("PYTHON", "LD_", "LC_", "LANG", "MALLOC_", "OMP_", "MKL_", "KMP_", "TORCH_", "PYTORCH_", "KINETO_")
_LATER = ("PYTHONPATH", "OMP_NUM_THREADS")  # set in the child
_STATUS = struct.Struct("i")


class Running:
    """A command that was started, to be used as a ``subprocess.Popen`` of text."""

    def __init__(self, command: list[str], report: int, outputs: list[int]) -> None:
        self.args = command
        self.returncode: int | None = None
        self._report, self._outputs = report, dict.fromkeys(outputs, b"")
        self.pid = self._read_report()

    def __enter__(self) -> "Running":
        return self

    def __exit__(self, *_: object) -> None:
        self.wait()
        for descriptor in (self._report, *self._outputs):
            os.close(descriptor)

    def poll(self) -> int | None:
        """Its exit code, minus the number of the signal that ended it, or None while it runs."""
        with suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end."""
        if self.returncode is None:
            with selectors.DefaultSelector() as selector:
                selector.register(self._report, selectors.EVENT_READ)
                if not selector.select(timeout):
                    raise subprocess.TimeoutExpired(self.args, timeout or 0)
            self.returncode = os.waitstatus_to_exitcode(self._read_report())
        return self.returncode

    def communicate(self, timeout: float) -> tuple[str, str]:
        """Read what it writes until nobody can write there any more, wait for its end, and return both texts."""
        deadline = time.monotonic() + timeout
        with selectors.DefaultSelector() as selector:
            for descriptor in self._outputs:
                selector.register(descriptor, selectors.EVENT_READ)
            while selector.get_map():
                ready = selector.select(max(deadline - time.monotonic(), 0))
                if not ready:
                    raise subprocess.TimeoutExpired(self.args, timeout, *self._outputs.values())
                for key, _ in ready:
                    found = os.read(key.fd, 1 << 16)
                    self._outputs[key.fd] += found
                    if not found:
                        selector.unregister(key.fd)
        self.wait(max(deadline - time.monotonic(), 0))
        out, err = (text.decode() for text in self._outputs.values())
        return out, err

    def send_signal(self, number: int) -> None:
        """Send it a signal, unless it has ended."""
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """End it at once."""
        self.send_signal(signal.SIGKILL)

    def _read_report(self) -> int:
        data = os.read(self._report, _STATUS.size)
        assert data, f"the interpreter that runs {self.args} has died"
        return int(_STATUS.unpack(data)[0])


class _Interpreter:
    """One process that has imported modules, and forks; with more modules it is a fork of one itself."""

    def __init__(
        self, flags: list[str], modules: tuple[str, ...], environ: Mapping[str, str], base: "_Interpreter | None"
    ) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._process: subprocess.Popen[bytes] | Running
        with theirs, open(os.devnull, "wb") as nowhere:
            arguments = [str(_SERVER), *modules]
            if base is None:
                command = [sys.executable, *flags, *arguments]
                self._process = subprocess.Popen(command, env=environ, stdin=theirs, stdout=nowhere)
            else:
                streams = [theirs.fileno(), nowhere.fileno(), 2]
                self._process = Running(arguments, base.fork(_request(arguments, Path.cwd(), environ), streams), [])

    def fork(self, request: bytes, streams: list[int]) -> int:
        """Have it fork a child; returns where its process id and its status are to be read."""
        report, theirs = os.pipe()
        try:
            socket.send_fds(self._control, [request], [theirs, *streams])
        finally:
            os.close(theirs)
        return report

    def close(self) -> None:
        """End it, and what it still runs."""
        self._control.close()
        with self._process:
            self._process.wait()


def _request(arguments: list[str], cwd: Path, environ: Mapping[str, str]) -> bytes:
    return json.dumps({"arguments": arguments, "cwd": str(cwd), "environ": dict(environ)}).encode()


@functools.cache
def _interpreters() -> dict[object, _Interpreter]:
    """Those of this process; ``close_all`` ends them."""
    return {}


def _interpreter(flags: list[str], modules: tuple[str, ...], environ: Mapping[str, str]) -> _Interpreter:
    read = tuple(sorted((k, v) for k, v in environ.items() if k.startswith(_AT_START) and k not in _LATER))
    key = (*flags, modules, read)
    if key not in _interpreters():
        base = _interpreter(flags, TRAINING, environ) if set(modules) > set(TRAINING) else None
        own = {name: value for name, value in environ.items() if name not in _LATER}
        _interpreters()[key] = _Interpreter(flags, modules, own, base)
    return _interpreters()[key]


def outputs(running: list[Running], timeout: float) -> list[str]:
    """Wait for commands that were started, and return what each has written."""
    with ExitStack() as stack:
        for one in running:
            stack.enter_context(one)
            stack.callback(one.kill)
        return ["".join(one.communicate(timeout)) for one in running]


def close_all() -> None:
    """End all interpreters of this process."""
    while _interpreters():
        _interpreters().popitem()[1].close()


def start(
    command: Iterable[object],
    *,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    input: str = "",
    modules: tuple[str, ...] = TRAINING,
) -> Running:
    """Start a command, whose first word is this Python, in a process that has imported ``modules``."""
    python, *rest = map(str, command)
    assert python == sys.executable
    place = 0
    while rest[place].startswith("-") and rest[place] not in ("-c", "-m"):
        place += 2 if rest[place] in ("-W", "-X") else 1
    environ = dict(os.environ if env is None else env)
    interpreter = _interpreter(rest[:place], modules, environ)
    (typed, typing), (out, their_out), (err, their_err) = os.pipe(), os.pipe(), os.pipe()
    with os.fdopen(typing, "wb") as file:
        file.write(input.encode())  # a word or two: what a pipe holds
    streams = [typed, their_out, their_err]
    try:
        report = interpreter.fork(_request(rest[place:], cwd or Path.cwd(), environ), streams)
    finally:
        for stream in streams:
            os.close(stream)
    return Running([python, *rest], report, [out, err])


def run(
    command: Iterable[object], *, timeout: float = 120, check: bool = False, **options: Any
) -> "subprocess.CompletedProcess[str]":
    """Run a command to its end; options are those of ``start``."""
    with start(command, **options) as running, ExitStack() as stack:
        stack.callback(running.kill)
        out, err = running.communicate(timeout)
    assert running.returncode is not None
    done = subprocess.CompletedProcess(running.args, running.returncode, out, err)
    if check:
        done.check_returncode()
    return done
