"""A file that torch writes to memory, and its copy on the disk."""

import errno
import io
import os
import random
import threading
import time

import pytest

from chakra_capture.recording import files
from chakra_capture.recording.relay import Relay, relay_to


@pytest.fixture
def target(tmp_path):
    files.reserve(tmp_path / "host.json.part")
    return tmp_path / "host.json.part"


def opened(relay: Relay) -> io.BufferedWriter:
    """Open it as torch does."""
    assert not relay.was_opened
    stream = relay.path.open("wb")
    assert relay.was_opened
    relay.start()
    return stream


def num_bytes_held(relay: Relay) -> int:
    return os.fstat(relay.descriptor).st_blocks * 512


def wait_for(condition) -> None:
    for _ in range(4000):
        if condition():
            return
        time.sleep(0.005)
    raise AssertionError("it does not come to that")


def test_all_that_is_written_is_on_the_disk_at_the_end_and_nothing_stays_open(target):
    before = set(os.listdir("/proc/self/fd"))
    chance, content = random.Random(1), b""
    relay = relay_to(target)
    with opened(relay) as stream:
        for _ in range(200):
            block = chance.randbytes(chance.choice([1, 100, 5000, 300_000]))
            content += block
            stream.write(block)
            if chance.random() < 0.2:
                relay.hurry()
    relay.finish()
    relay.finish()  # an interrupt may have come after the first
    assert target.read_bytes() == content
    assert set(os.listdir("/proc/self/fd")) == before


def test_what_is_there_is_copied_without_being_asked_and_its_memory_given_back(target):
    relay = relay_to(target)
    with opened(relay) as stream:
        stream.write(b"x" * 3_000_000)
        stream.flush()
        wait_for(lambda: relay.num_waiting == 0)
        assert target.stat().st_size == 3_000_000
        wait_for(lambda: num_bytes_held(relay) <= 4096)
        stream.write(b"y" * 10)
    relay.finish()
    assert target.read_bytes() == b"x" * 3_000_000 + b"y" * 10


def test_a_disk_that_does_not_answer_holds_no_writer_and_is_known_as_stuck(target):
    is_free, has_begun = threading.Event(), threading.Event()

    def copy(*arguments: int) -> int:
        has_begun.set()
        is_free.wait()
        return os.sendfile(*arguments)

    relay = relay_to(target, copy=copy)
    with opened(relay) as stream:
        for _ in range(5):
            stream.write(b"x" * 100_000)
            stream.flush()
            relay.hurry()
            has_begun.wait()
        wait_for(lambda: relay.is_stuck(0.02))
        assert not relay.is_stuck(1000)
        assert (relay.num_waiting, target.stat().st_size) == (500_000, 0)
        is_free.set()
    relay.finish()
    assert target.read_bytes() == b"x" * 500_000


def test_a_full_disk_is_told_at_the_end_and_memory_does_not_grow(target):
    def copy(*arguments: int) -> int:
        if target.stat().st_size >= 8192:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return os.sendfile(*arguments[:3], 4096)

    relay = relay_to(target, copy=copy)
    with opened(relay) as stream:
        for _ in range(10):
            stream.write(b"x" * 200_000)
            stream.flush()
            wait_for(lambda: relay.num_waiting == 0)
            wait_for(lambda: num_bytes_held(relay) <= 4096)
    with pytest.raises(OSError, match=r"No space left on device: '.*host.json.part'"):
        relay.finish()
    assert target.read_bytes() == b"x" * 8192


def test_a_reserved_file_that_is_gone_or_became_a_link_is_refused(target, tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("keep")
    target.unlink()
    with pytest.raises(FileNotFoundError):
        relay_to(target)
    target.symlink_to(victim)
    with pytest.raises(OSError, match="symbolic link"):
        relay_to(target)
    assert victim.read_text() == "keep"
