"""Windows on demand on two ranks: the same steps on both, or nothing and a reason from both."""

import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import pytest
import torch.distributed as dist

from chakra_capture.layout import RunPaths
from chakra_capture.recording import trigger
from chakra_capture.recording.disk import Disk
from chakra_capture.recording.manifest import Manifest
from chakra_capture.recording.run import Run
from chakra_capture.recording.trigger.meeting import Meeting
from recording.recorded import settings
from recording.test_trigger import LIMIT_S, answer, ask

TRIES = Path(__file__).parents[2] / "scripts" / "trigger_tries.py"


def test_two_gloo_ranks_record_the_same_steps():
    done = subprocess.run([sys.executable, TRIES, "--tries", "1"], capture_output=True, text=True, timeout=240)

    assert done.returncode == 0, done.stdout + done.stderr
    assert '"num_ranks": 2' in done.stdout


# Where rank 1 is when rank 0 announces, from what step on and at what pace; and what is said then.
APART = {
    "ahead": (10**6, 0.001, "rank 1 was at step 10"),
    "in one long step": (0, 4, "1 of 2 ranks had not heard of it"),
}


@pytest.mark.parametrize("where", APART)
def test_ranks_that_are_apart_record_nothing_and_both_say_why(tmp_path, monkeypatch, caplog, where):
    # The triggers of two ranks in one process: none of them gets as far as to need the profiler.
    store = dist.HashStore()
    monkeypatch.setattr(trigger, "INTERVAL_S", 0.05)
    monkeypatch.setattr(trigger, "Meeting", partial(Meeting, find_store=lambda: store))
    first, pause_s, why = APART[where]
    chosen, paths, is_over = settings(tmp_path, None, None), RunPaths(tmp_path, "0"), threading.Event()
    paths.run_dir.mkdir()

    def job(rank, step, pause_s):
        said = Manifest("id", "0", rank, 2, settings={}, versions={})
        ours = trigger.Trigger(chosen, Run(paths, said, Disk(tmp_path)), lambda: None)
        ours.start()
        while not is_over.is_set():
            assert ours.attend(step, lambda step, _: step) is None
            is_over.wait(pause_s)
            step += 1
        ours.close()

    ranks = [threading.Thread(target=job, args=(0, 0, 0.01)), threading.Thread(target=job, args=(1, first, pause_s))]
    for thread in ranks:
        thread.start()
    try:
        ask(tmp_path)
        end = time.monotonic() + LIMIT_S
        while answer(tmp_path).get("state") != "refused" or len(said(caplog)) < 2:
            assert time.monotonic() < end, (answer(tmp_path), said(caplog))
            time.sleep(0.01)
    finally:
        is_over.set()
        for thread in ranks:
            thread.join()

    assert why in answer(tmp_path)["why"]
    lines = said(caplog)
    assert len(lines) == 2
    assert all(why in line for line in lines)
    assert ["on rank 0" in line for line in sorted(lines, key=lambda line: "on rank 1" in line)] == [True, False]


def said(caplog):
    return [record.getMessage() for record in caplog.records if "are not recorded on rank" in record.getMessage()]
