"""A file system that does not answer: training goes on, and what was lost is said."""

import os
import subprocess
from pathlib import Path

import pytest

from recording.recorded import check_pair, files, manifest, read
from recording.scripts import run_script


@pytest.fixture(scope="module")
def hanging(tmp_path_factory) -> Path:
    """A library that makes calls on files block; no file system that hangs can be had in a test."""
    library = tmp_path_factory.mktemp("hang") / "hang.so"
    source = Path(__file__).with_name("hang.c")
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", str(library), str(source), "-ldl"], check=True, timeout=60)
    return library


HEAD = """
from chakra_capture.recording import disk
disk.LIMIT_S = disk._OPEN_LIMIT_S = 1.5
mark = Path(os.environ["HANG_WHILE"])
"""


def run(hanging, folder, body, returncode=0):
    (folder / "traces").mkdir()
    environ = {
        "LD_PRELOAD": str(hanging),
        "HANG_UNDER": str(folder / "traces"),
        "HANG_WHILE": str(folder / "mark"),
        "USED": str(folder / "traces"),
    }
    return run_script(folder, HEAD + body, returncode, environ={**os.environ, **environ})


def test_file_system_that_hangs_at_the_end_of_the_window_costs_the_window_and_nothing_else(tmp_path, hanging):
    said = run(
        hanging,
        tmp_path,
        """
with capture(settings(folder / "traces", 1, 3)) as session:
    train(session, 3)
    mark.touch()
    train(session, 20, first=3)
    assert mark.exists() and not autograd._is_profiler_enabled
    mark.unlink()
# It has come back, and nothing of torch is left in use.
with capture(settings(folder / "traces", 1, 2)) as session:
    train(session, 4)
""",
    )

    assert said.count("traces does not answer: its file system took longer than") == 1, said
    assert "0_chakra/rank-0.json.part" in files(tmp_path / "traces")
    check_pair(tmp_path / "traces", [1, 2], cycle=1)
    found = manifest(tmp_path / "traces")
    first, second = found["windows"]
    assert (found["complete"], found["reason"], second["reason"]) == (False, "fault", "complete")
    assert (first["steps"], first["host_trace"], first["device_trace"]) == ([1, 2, 3], None, None)
    assert "does not answer" in found["faults"][0]


@pytest.mark.parametrize("pause", [0, 2])
def test_file_system_that_hangs_in_the_window_holds_no_step(tmp_path, hanging, pause):
    said = run(
        hanging,
        tmp_path,
        f"""
with capture(settings(folder / "traces", 1, 40)) as session:
    train(session, 20)
    mark.touch()
    for step in range(20, 60):
        if step == 30:
            time.sleep({pause})
        train(session, step + 1, first=step)
    assert mark.exists() and not autograd._is_profiler_enabled
    mark.unlink()
with capture(settings(folder / "traces", 1, 2)) as session:
    train(session, 4)
""",
    )

    assert said.count("traces does not answer: its file system took longer than") == 1, said
    check_pair(tmp_path / "traces", [1, 2], cycle=1)
    window = manifest(tmp_path / "traces")["windows"][0]
    assert (window["host_trace"], window["device_trace"]) == (None, None)
    # A pause makes the hang known within the window, which ends there.
    assert window["steps"] == [*range(1, 30 if pause else 41)]


def test_file_system_that_hangs_between_the_two_files_costs_the_second(tmp_path, hanging):
    said = run(
        hanging,
        tmp_path,
        """
with capture(settings(folder / "traces", 1, 3)) as session:
    train(session, 4)
    mark.touch()
    time.sleep(0.3)
    train(session, 9, first=4)
    mark.unlink()
""",
    )

    assert said.count("does not answer") == 1
    found = manifest(tmp_path / "traces")
    assert (found["reason"], found["windows"][0]["host_trace"]) == ("fault", None)
    assert read(tmp_path / "traces/0_kineto/rank-0.json.part")["traceEvents"]


@pytest.mark.parametrize("mark_at", ["open", "window"])
def test_file_system_that_hangs_from_the_start_is_given_up(tmp_path, hanging, mark_at):
    said = run(
        hanging,
        tmp_path,
        f"""
if {mark_at!r} == "open":
    mark.touch()
with capture(settings(folder / "traces", 1, 3)) as session:
    mark.touch()
    train(session, 9)
print("trained", file=sys.stderr)
""",
    )

    assert said.count("ERROR Recording stops on rank 0, training goes on") == 1
    assert said.splitlines()[-1] == "trained"


def test_sigterm_while_the_file_system_hangs_ends_the_process(tmp_path, hanging):
    run(
        hanging,
        tmp_path,
        """
session = capture(settings(folder / "traces", 1, 9))
session.open()
train(session, 3)
mark.touch()
os.kill(os.getpid(), signal.SIGTERM)
""",
        returncode=-15,
    )
