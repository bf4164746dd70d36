"""The file of phases: what a slow, full or killed writer leaves."""

import errno
import itertools
import json
import logging
import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from chakra_capture.errors import RecordingError
from chakra_capture.recording.phase_file import INTERVAL_NS, PhaseFile


class Clock:
    def __init__(self) -> None:
        self.now = 0

    def __call__(self) -> int:
        return self.now


def lines(path: Path) -> list[int]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def test_lines_are_written_once_a_second_and_at_the_end(tmp_path):
    clock = Clock()
    file = PhaseFile(tmp_path / "phases" / "rank-0.jsonl", clock=clock)
    for number in range(30):
        clock.now += INTERVAL_NS // 10
        file.add(b"%d" % number)
        if file.is_due:
            file.flush()
        assert len(lines(file.path)) == (number + 1) // 10 * 10
    file.add(b"30")
    file.close()
    assert lines(file.path) == [*range(31)]
    assert file.path.stat().st_mode & 0o777 == 0o640 & ~_umask()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_a_file_that_is_there_is_not_touched_and_a_link_not_followed(tmp_path):
    path, victim = tmp_path / "rank-0.jsonl", tmp_path / "victim"
    victim.write_text("keep\n")
    path.symlink_to(victim)
    for is_continued in (False, True):
        with pytest.raises(RecordingError, match=r"rank-0.jsonl cannot be opened"):
            PhaseFile(path, is_continued=is_continued)
    assert victim.read_text() == "keep\n"


def test_a_second_fit_goes_on_in_the_same_file(tmp_path):
    for number in range(2):
        file = PhaseFile(tmp_path / "rank-0.jsonl", is_continued=number > 0)
        file.add(b"%d" % number)
        file.close()
    assert lines(file.path) == [0, 1]


def test_after_one_slow_write_none_is_waited_for_and_it_is_said_once(tmp_path, caplog):
    is_free = threading.Event()

    def write(descriptor: int, data: bytes) -> int:
        assert threading.current_thread() is not threading.main_thread()
        if data != b"0\n":
            is_free.wait()
        return os.write(descriptor, data)

    file = PhaseFile(tmp_path / "rank-0.jsonl", write=write)
    with caplog.at_level(logging.WARNING):
        for number in range(5):
            file.add(b"%d" % number)
            file.flush()
            assert (lines(file.path), file.num_slow_writes) == ([0], min(number, 1))
        is_free.set()
        file.close()
    assert [record.getMessage().partition(" once")[0] for record in caplog.records] == [
        f"Writing the phases to {file.path} took longer than 50 ms"
    ]
    assert (lines(file.path), file.num_bytes_lost) == ([0, 1, 2, 3, 4], 0)


def test_a_disk_that_hangs_holds_neither_the_loop_nor_its_end_and_memory_stays_bounded(tmp_path):
    is_free = threading.Event()

    def write(descriptor: int, data: bytes) -> int:
        is_free.wait()
        return os.write(descriptor, data)

    file = PhaseFile(tmp_path / "rank-0.jsonl", write=write)
    file.add(b"0")
    file.flush()
    for _ in range(9):
        file.add(b'"' + b"x" * (1 << 20) + b'"')
        file.flush()
    file.close()
    assert file.num_bytes_lost == 9 * ((1 << 20) + 3) + 2  # three fit in what may wait, and did not arrive
    is_free.set()
    for thread in threading.enumerate():
        if thread.name == "chakra-capture-phases":
            thread.join()
    assert len(lines(file.path)) == 4
    os.close(file._file)


def test_a_full_disk_leaves_whole_lines(tmp_path):
    room = 25

    def write(descriptor: int, data: bytes) -> int:
        nonlocal room
        if not room:
            raise OSError(errno.ENOSPC, "No space left on device")
        done = os.write(descriptor, data[: min(room, 7)])
        room -= done
        return done

    file = PhaseFile(tmp_path / "rank-0.jsonl", write=write)
    for number in range(10):
        file.add(b"%d" % (1000 + number))
    with pytest.raises(OSError, match="No space"):
        file.close()
    assert lines(file.path) == [1000, 1001, 1002, 1003, 1004]


WRITER = """
    import os, sys, time
    from pathlib import Path
    from chakra_capture.recording.phase_file import PhaseFile

    file = PhaseFile(Path(sys.argv[1]))
    told = os.open(sys.argv[2], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    print("ready", flush=True)
    while True:
        line = b"%d" % time.monotonic_ns()
        file.add(line)
        os.write(told, line + b"\\n")
        if file.is_due:
            file.flush()
        time.sleep(0.001)
"""


def test_kill_9_loses_at_most_the_last_second(tmp_path):
    chance = random.Random(5)
    started = []
    for number in range(20):  # all at once: each waits, mostly
        paths = tmp_path / f"rank-{number}.jsonl", tmp_path / f"told-{number}"
        command = [sys.executable, "-c", textwrap.dedent(WRITER), *map(str, paths)]
        started.append((subprocess.Popen(command, stdout=subprocess.PIPE), *paths))
    for process, _, _ in started:
        assert process.stdout.readline() == b"ready\n"
    num_lost = 0
    for process, path, told in started:
        time.sleep(chance.uniform(0, 0.2))
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()
        given, found = lines(told), lines(path)
        assert found == given[: len(found)]
        lost = given[len(found) :]
        num_lost += len(lost)
        # A busy machine may keep the writer from looking at the clock for a while.
        pause = max((b - a for a, b in itertools.pairwise(given)), default=0)
        assert not lost or lost[-1] - lost[0] <= INTERVAL_NS + pause
    assert num_lost  # some were killed between two writes
