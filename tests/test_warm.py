"""What a warm interpreter forks is to its end what Python would have started."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import warm

SEEN = """
import __main__, json, os, signal, sys, threading
print(json.dumps({
    "argv": sys.argv, "original": sys.orig_argv[-3:], "path": sys.path, "cwd": os.getcwd(), "stdin": sys.stdin.read(),
    "names": sorted(vars(__main__)), "file": globals().get("__file__"), "spec": getattr(__spec__, "name", None),
    "environ": dict(os.environ), "descriptors": len(os.listdir("/proc/self/fd")), "flags": str(sys.flags),
    "sigint": str(signal.getsignal(signal.SIGINT)), "sigpipe": str(signal.getsignal(signal.SIGPIPE)),
    "buffers": [stream.line_buffering for stream in (sys.stdout, sys.stderr)], "encoding": sys.stdout.encoding,
    "threads": threading.active_count(), "group": os.getpgrp(), "blocked": str(signal.pthread_sigmask(0, [])),
}))
"""


def alone(command: list[str], **options: object) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(command, capture_output=True, text=True, timeout=60, **options)


@pytest.mark.parametrize("flags", [[], ["-P", "-W", "ignore"]])
@pytest.mark.parametrize("how", ["file", "text", "module"])
def test_command_sees_what_it_would_see_in_a_process_of_its_own(tmp_path: Path, how: str, flags: list[str]) -> None:
    (tmp_path / "seen.py").write_text(SEEN)
    part = {"file": ["seen.py"], "text": ["-c", SEEN], "module": ["-m", "seen"]}[how]
    command = [sys.executable, *flags, *part, "-c", "x y"]
    environ = {**os.environ, "PYTHONPATH": str(tmp_path), "OWN": "1"}
    first, second = (
        json.loads(run(command, cwd=tmp_path, env=environ, input="typed\n").stdout)
        for run in (alone, lambda *given, **options: warm.run(*given, modules=(), **options))
    )
    assert first == second


ENDINGS = [
    "print('out'); sys.exit(3)",
    "sys.exit('said')",
    "def broken(): return 1 / 0\nbroken()",
    "import no.such",
    "a b",
    "os.kill(os.getpid(), signal.SIGTERM)",
    "os._exit(5)",
    "import atexit; atexit.register(print, 'at exit')",
    "import threading; threading.Thread(target=lambda: (threading.main_thread().join(), print('later'))).start()",
    "sys.excepthook = lambda *given: print('hook', given[0].__name__); {}['x']",
]


@pytest.mark.parametrize("ending", ENDINGS)
def test_it_ends_as_python_would_end_it(tmp_path: Path, ending: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(f"import os, signal, sys\n{ending}\n")
    for command in ([sys.executable, str(script)], [sys.executable, "-c", script.read_text()]):
        first, second = alone(command), warm.run(command, modules=())
        assert (first.returncode, first.stdout, first.stderr) == (second.returncode, second.stdout, second.stderr)


def test_interrupt_ends_it_by_that_signal_and_a_signal_sent_reaches_it() -> None:
    body = "import os, signal, sys, time\nprint('ready', flush=True)\ntime.sleep(60)"
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        with warm.start([sys.executable, "-c", body], modules=()) as running:
            assert running.poll() is None
            running.send_signal(number)  # it may not have begun
            assert running.wait(60) == -number


def test_commands_run_side_by_side_and_one_that_does_not_end_is_killed() -> None:
    waiting = "import sys; sys.stdout.write(sys.argv[1] * 100_000); sys.stdout.flush(); sys.stdin.read()"
    with warm.start([sys.executable, "-c", waiting, "a"], modules=()) as first:
        with warm.start([sys.executable, "-c", waiting, "b"], modules=()) as second:
            assert second.communicate(60)[0] == "b" * 100_000
        assert first.communicate(60)[0] == "a" * 100_000
    with pytest.raises(subprocess.TimeoutExpired):
        warm.run([sys.executable, "-c", "import time; time.sleep(60)"], modules=(), timeout=0.1)


@pytest.mark.parametrize("modules", [warm.TRAINING, warm.LIGHTNING])
def test_modules_are_there_before_the_command_and_nothing_runs_beside_it(modules: tuple[str, ...]) -> None:
    told = f"import os, sys; print({{*{modules}}} <= {{*sys.modules}}, len(os.listdir('/proc/self/task')))"
    assert warm.run([sys.executable, "-c", told], modules=modules).stdout == "True 1\n"
