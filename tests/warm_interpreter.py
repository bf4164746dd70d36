"""An interpreter that imports modules once and forks a child for each command it is asked for.

    python warm_interpreter.py MODULE... <SOCKET

A child goes on as ``python -c``, ``python -m`` or ``python FILE`` would, with the given argv, environment, folder and
streams, and falls off the end of this program, so that exit handlers, threads, finalisation, exit codes and signals are
those of any process. Only imports are inherited: no thread may run when it forks. ``warm.py`` is the other end.
"""

import ctypes
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import struct
import sys
from contextlib import suppress
from importlib.machinery import SourceFileLoader
from types import ModuleType
from typing import Any

PATH = sys.path[not sys.flags.safe_path :]  # without the folder of this file; before a module changes it
REQUEST_BYTES = 1 << 20
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


class _Forks:
    """The children that run, each with the pipe that its process id and its wait status are to be written to."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._running: dict[int, tuple[int, int]] = {}  # by descriptor of the process: its id, the pipe
        self._poll = select.poll()
        self._poll.register(control, select.POLLIN)

    def serve(self) -> dict[str, Any]:
        """Fork whenever asked to, until nobody is there to ask; returns in the children alone, with what to run."""
        while True:
            for descriptor, _ in self._poll.poll():
                if descriptor != self._control.fileno():
                    self._report(descriptor)
                    continue
                data, descriptors, _, _ = socket.recv_fds(self._control, REQUEST_BYTES, 4)
                if not data:
                    os._exit(0)
                report, *streams = descriptors
                child = self._fork()
                if not child:
                    self._close_all(report)
                    for number, stream in enumerate(streams):
                        os.dup2(stream, number)
                        os.close(stream)
                    return dict(json.loads(data))
                self._follow(child, report)
                for stream in streams:
                    os.close(stream)

    def _fork(self) -> int:
        tasks = os.listdir("/proc/self/task")
        assert len(tasks) == 1, f"an import has started {len(tasks) - 1} threads, which a fork would lose"
        me, child = os.getpid(), os.fork()
        if not child:
            _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != me:
                os._exit(1)
        return child

    def _follow(self, child: int, report: int) -> None:
        process = os.pidfd_open(child)
        self._running[process] = (child, report)
        self._poll.register(process, select.POLLIN)
        with suppress(BrokenPipeError):
            os.write(report, struct.pack("i", child))

    def _report(self, process: int) -> None:
        child, report = self._running.pop(process)
        status = os.waitpid(child, 0)[1]
        with suppress(BrokenPipeError):
            os.write(report, struct.pack("i", status))
        self._poll.unregister(process)
        os.close(process)
        os.close(report)

    def _close_all(self, report: int) -> None:
        """Let go, in a child, of what is its parent's."""
        self._control.close()
        os.close(report)
        for process, (_, pipe) in self._running.items():
            os.close(process)
            os.close(pipe)


def _become(request: dict[str, Any]) -> list[str]:
    """Take on folder, environment and path of a process of its own; returns its arguments."""
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environ"])
    arguments: list[str] = request["arguments"]
    sys.orig_argv[:] = [sys.executable, *arguments]
    first = os.path.dirname(os.path.realpath(arguments[0])) if arguments[0][0] != "-" else ""
    given = [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]
    sys.path[:] = [*([] if sys.flags.safe_path else [first]), *given, *PATH]
    if "torch" in sys.modules and "OMP_NUM_THREADS" in os.environ:  # read once, as torch is loaded
        sys.modules["torch"].set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()  # or all children would draw the same
    return arguments


def _run(arguments: list[str]) -> None:
    """Run a command line of Python's as ``__main__``."""
    module = sys.modules["__main__"] = ModuleType("__main__")
    names = vars(module)
    names.update(__builtins__=__builtins__, __annotations__={})
    if arguments[0] == "-m":
        sys.argv[:] = ["-m", *arguments[2:]]
        if not sys.flags.safe_path:
            sys.path[0] = os.getcwd()
        runpy._run_module_as_main(arguments[1])  # what Python itself calls
    elif arguments[0] == "-c":
        sys.argv[:] = ["-c", *arguments[2:]]
        exec(compile(arguments[1], "<string>", "exec", dont_inherit=True), names)
    else:
        sys.argv[:] = arguments
        path = arguments[0]
        names.update(__file__=os.path.abspath(path), __cached__=None, __loader__=SourceFileLoader("__main__", path))
        with open(path, "rb") as file:
            code = compile(file.read(), os.path.abspath(path), "exec", dont_inherit=True)
        exec(code, names)


def _main() -> None:
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # it starts its threads as numpy is imported
    for name in sys.argv[1:]:
        importlib.import_module(name)
    gc.freeze()  # else each child looks through, and so copies, all that was imported as it ends: 0.7 s of torch's
    # Ctrl-C is for those who ask. What is sent to a child before it is ready waits for it.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    with socket.socket(fileno=os.dup(0)) as control:
        request = _Forks(control).serve()
    arguments = _become(request)
    # A shell has what it puts in the background ignore Ctrl-C, and what that starts, too.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    try:
        _run(arguments)
    except Exception as error:  # noqa: BLE001 (shown without the frames of this file, as Python would)
        error = error.with_traceback(_own_part(error))
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
        sys.excepthook(type(error), error, error.__traceback__)
        sys.exit(1)


def _own_part(error: Exception) -> Any:
    """The traceback from the first frame on that is not of this file."""
    part = error.__traceback__
    while part is not None and part.tb_frame.f_code.co_filename == __file__:
        part = part.tb_next
    return part


_main()
