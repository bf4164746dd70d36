"""Windows on demand on two ranks: the same steps on both, or nothing and a reason from both."""

import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import pytest
import torch.distributed as dist

from chakra_capture import capture
from chakra_capture.layout import RunPaths
from chakra_capture.recording import trigger
from chakra_capture.recording.agreement import default_store
from chakra_capture.recording.disk import Disk
from chakra_capture.recording.manifest import Manifest
from chakra_capture.recording.rank import RankInfo
from chakra_capture.recording.run import Run
from chakra_capture.recording.trigger.meeting import Announcement, Meeting
from recording.recorded import settings, traces
from recording.test_trigger import LIMIT_S, answer, ask, train_until

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


@pytest.fixture
def store(monkeypatch):
    """What the ranks share; none of these tests gets as far as to need the profiler."""
    shared = dist.HashStore()
    monkeypatch.setattr(trigger, "INTERVAL_S", 0.05)
    monkeypatch.setattr(trigger, "Meeting", partial(Meeting, find_store=lambda: shared))
    return shared


def trigger_of(folder, rank, num_demanded=0, **changes):
    paths = RunPaths(folder, "0")
    paths.run_dir.mkdir(exist_ok=True)
    said = Manifest("id", "0", rank, 2, settings={}, versions={})
    run = Run(paths, said, Disk(folder), num_demanded=num_demanded)
    return trigger.Trigger(settings(folder, None, None, **changes), run, lambda: None)


@pytest.mark.parametrize("where", APART)
@pytest.mark.usefixtures("store")
def test_ranks_that_are_apart_record_nothing_and_both_say_why(tmp_path, caplog, where):
    # The triggers of two ranks in one process, after five windows that have not opened: these count for nothing.
    first, pause_s, why = APART[where]
    is_over = threading.Event()

    def job(rank, step, pause_s):
        ours = trigger_of(tmp_path, rank, num_demanded=5)
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


def wait_for(is_there):
    end = time.monotonic() + LIMIT_S
    while not is_there():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_rank_that_could_not_ask_in_time_does_not_have_the_others_record_without_it(tmp_path, store, monkeypatch):
    is_open = threading.Event()
    is_open.set()

    def slow_store():
        is_open.wait()
        return store

    monkeypatch.setattr(trigger, "Meeting", partial(Meeting, find_store=slow_store))
    monkeypatch.setattr(trigger, "_VERDICT_S", 0.05)
    other, ours = Meeting("id", 2, lambda: store), trigger_of(tmp_path, 1)
    other.announce(Announcement(0, 7, 8, "why"))
    ours.start()
    wait_for(lambda: ours.next_step < 7)
    assert ours.attend(5, no_window) is None
    other.accept(0)
    wait_for(lambda: store.add("chakra_capture/trigger/id/0/accepted", 0) == 2)
    is_open.clear()

    assert ours.attend(7, no_window) is None
    is_open.set()

    wait_for(lambda: other.verdict(0))
    assert other.decide(0) == "the other ranks could not be asked within 0.05 s"
    ours.close()


def test_rank_that_ends_before_the_steps_says_so_once_though_it_trains_again(tmp_path, store, caplog):
    other, ours = Meeting("id", 2, lambda: store), trigger_of(tmp_path, 1)
    other.announce(Announcement(0, 7, 8, "why"))
    ours.start()
    wait_for(lambda: ours.next_step < 7)
    ours.close()
    assert other.decide(0) == "training ended on rank 1 before step 7"
    again = trigger_of(tmp_path, 1, num_demanded=ours._run.num_demanded)
    again.start()
    other.announce(Announcement(1, 9, 9, "why"))
    wait_for(lambda: again.next_step < 9)
    again.close()

    assert [line.split(" are ")[0] for line in said(caplog)] == ["Steps 7 to 8", "Steps 9 to 9"]


def test_request_that_comes_while_training_ends_is_answered(tmp_path, store, monkeypatch):
    is_open, is_asked = threading.Event(), threading.Event()

    def slow_store():
        is_asked.set()
        is_open.wait()
        return store

    monkeypatch.setattr(trigger, "Meeting", partial(Meeting, find_store=slow_store))
    ours = trigger_of(tmp_path, 0)
    ask(tmp_path)
    ours.start()
    is_asked.wait(LIMIT_S)
    threading.Timer(0.1, is_open.set).start()
    ours.close()

    assert (answer(tmp_path)["state"], answer(tmp_path)["why"]) == ("refused", "training ended")


@pytest.mark.usefixtures("store")
def test_what_nobody_asks_for_is_tried_no_more_often_than_windows_may_open(tmp_path, caplog):
    ours = trigger_of(tmp_path, 0, num_demanded=3, trigger={"slow_factor": 2})
    for step, ns in enumerate([1] * 20 + [9]):
        ours.watch(step, ns)
    ours.start()
    wait_for(lambda: caplog.messages)
    ours.close()

    assert caplog.messages[0].endswith(
        "this run has announced 3 windows on demand, and chakra_profile.trigger.max is 3."
    )


def test_a_store_that_is_gone_is_not_asked_again_and_the_next_one_is(tmp_path, store, monkeypatch):
    # A job may end its process group and make another; the store of the first goes with the process of rank 0.
    gone = dist.TCPStore("127.0.0.1", 0, 1, is_master=True)
    lost = dist.TCPStore("127.0.0.1", gone.port, 1, is_master=False)
    del gone
    found = [lost]
    monkeypatch.setattr(trigger, "Meeting", partial(Meeting, find_store=lambda: found[-1]))
    ours = trigger_of(tmp_path, 1)
    ours.start()
    wait_for(lambda: not ours._meeting.has_store)
    found.append(store)
    Meeting("id", 2, lambda: store).announce(Announcement(0, 7, 8, "why"))

    wait_for(lambda: ours.next_step < 7)
    ours.close()


def test_a_group_that_ends_while_it_is_asked_for_its_store_has_none(monkeypatch):
    monkeypatch.setattr(dist, "is_initialized", lambda: True)

    assert default_store() is None


@pytest.mark.usefixtures("store")
def test_a_rank_that_does_not_record_announces_and_records_not_even_what_is_planned(tmp_path):
    with capture(settings(tmp_path, 5, 6, ranks=[1]), rank=RankInfo(0, 2)) as session:
        ask(tmp_path)
        wait_for(lambda: answer(tmp_path).get("state") == "seen")
        step = train_until(session, lambda: answer(tmp_path).get("state") == "announced", sleep_s=0.01)

    assert step > 6
    assert traces(tmp_path) == []
    # The others shall not record after this: nobody would tell who has asked.
    assert answer(tmp_path)["state"] == "refused"
    assert answer(tmp_path)["why"].startswith("training ended on rank 0 before step ")


def no_window(step, num_steps):
    return step


def said(caplog):
    return [record.getMessage() for record in caplog.records if "are not recorded on rank" in record.getMessage()]
