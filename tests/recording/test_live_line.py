"""The line on the terminal while a job trains: what it says, where it is silent, and on a real pseudo-terminal."""

import os
import pty
import re
import select
import subprocess
import sys
import time
from io import StringIO

import pytest

from chakra_capture.recording.live_line import LiveLine
from chakra_capture.recording.spans import Stretch, Total

TESTS = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def step(ns, begin=1000, **phases):
    done = Stretch(begin, {name: Total(time, 1) for name, time in phases.items()})
    done.end_ns = begin + ns
    return done


def drawn(*steps):
    stream = StringIO()
    line = LiveLine(stream)
    for number, done in enumerate(steps):
        line.add(number, done)
    line.draw()
    return stream.getvalue()


def test_mean_of_the_steps_and_the_share_of_each_phase():
    text = drawn(step(10_000_000, forward=6_000_000), step(20_000_000, forward=6_000_000, backward=15_000_000))
    assert text.startswith("\r")
    assert text.strip() == "step 1: 15.00 ms  forward 40 %, backward 50 %, rest 10 %  much outside phases"


@pytest.mark.parametrize(
    ("phases", "verdict"),
    [
        ({"input_wait": 100, "forward": 900}, "input-bound"), ({"input_wait": 99, "forward": 901}, ""),
        ({"h2d": 150, "input_wait": 120, "forward": 730}, "copy-bound"), ({"forward": 901}, ""),
        ({"forward": 900}, "much outside phases"),
    ],
)  # fmt: skip
def test_verdict_begins_at_a_tenth_of_the_step(phases, verdict):
    assert drawn(step(1000, **phases)).strip().rpartition("  ")[2].endswith(verdict or "%")


def test_what_comes_between_batches_is_no_part_of_the_step():
    assert (
        drawn(step(1_000_000, forward=500_000, validation=500_000)).strip()
        == "step 0: 0.50 ms  forward 100 %, rest 0 %"
    )


def test_line_covers_the_one_before_and_a_draw_without_steps_draws_nothing(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    stream = StringIO()
    line = LiveLine(stream)
    line.add(1, step(1000, forward=500, backward=300))
    line.draw()
    line.draw()
    line.add(2, step(1000))
    line.draw()
    line.close()
    assert [len(text) for text in stream.getvalue().rstrip("\n").split("\r")[1:]] == [39, 39]
    assert stream.getvalue().endswith("\n")


def test_terminal_that_is_gone_ends_the_line_and_nothing_else():
    stream = StringIO()
    line = LiveLine(stream)
    stream.close()
    line.add(1, step(1000))
    line.draw()
    line.add(2, step(1000))
    line.draw()
    line.close()


@pytest.mark.parametrize("stream", [StringIO(), None, object()])
def test_silent_where_stderr_is_no_terminal(monkeypatch, stream):
    monkeypatch.setattr(sys, "stderr", stream)
    assert LiveLine.on_terminal(0) is None


def test_silent_on_other_ranks(monkeypatch):
    stream = StringIO()
    stream.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", stream)
    assert LiveLine.on_terminal(1) is None
    assert LiveLine.on_terminal(0) is not None


JOB = """
import sys, time
sys.path.insert(0, {tests!r})
from chakra_capture import capture
from chakra_capture.recording.rank import RankInfo
settings = dict(enabled=True, start_step=None, live={live}, trace_dir={folder!r}, job_id="0")
with capture(settings, rank=RankInfo(0, 1)) as session:
    for step in range({steps}):
        with session.step(step):
            with session.phase("forward"):
                time.sleep(0.04)
"""


def on_a_terminal(folder, *, live, steps):
    """What a job writes to its terminal."""
    parent, child = pty.openpty()
    body = JOB.format(tests=TESTS, folder=str(folder), live=live, steps=steps)
    job = subprocess.Popen([sys.executable, "-c", body], stdin=child, stdout=child, stderr=child, close_fds=True)
    os.close(child)
    found = b""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and select.select([parent], [], [], 30)[0]:
        try:
            more = os.read(parent, 65536)
        except OSError:  # the other side is closed
            break
        if not more:
            break
        found += more
    assert job.wait(30) == 0
    os.close(parent)
    return found.decode()


def test_job_on_a_terminal_shows_the_line_and_only_where_it_is_asked_for(tmp_path):
    shown = on_a_terminal(tmp_path / "on", live=True, steps=40)
    lines = re.findall(r"step (\d+): (\d+\.\d\d) ms  forward (\d+) %, rest \d+ %", shown)
    assert 1 <= len(lines) <= 4  # once a second, of about one and a half
    assert all(float(time) >= 40 and int(share) >= 50 for _, time, share in lines)
    assert on_a_terminal(tmp_path / "off", live=False, steps=3) == ""
