"""Windows on demand: by file, by signal, from a slow step; on one rank, and as ranks agree on them."""

import contextlib
import faulthandler
import json
import os
import signal
import threading
import time

import numpy as np
import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.profiler import ProfilerActivity, profile

from chakra_capture import capture
from chakra_capture.config import WindowConfig
from chakra_capture.errors import SettingsError
from chakra_capture.layout import RunPaths
from chakra_capture.recording import trigger
from chakra_capture.recording.trigger.meeting import Announcement, Meeting
from chakra_capture.recording.trigger.request_file import Request, RequestFile
from chakra_capture.recording.trigger.slow_steps import SlowSteps
from chakra_capture.recording.window import StepPlan
from recording.loops import work
from recording.recorded import check_pair, manifest, settings, traces
from recording.scripts import run_script

LIMIT_S = 30


@pytest.fixture
def quick(monkeypatch):
    """Have the job look for requests 50 times a second, so that tests need not wait."""
    monkeypatch.setattr(trigger, "INTERVAL_S", 0.02)
    monkeypatch.setattr(trigger, "_VERDICT_S", 0)  # one rank has nobody to wait for


def phases_only(folder, **changes):
    return settings(folder, None, None, **changes)


def ask(folder, steps=2, **changes):
    """Ask as the command does, of which test_cli has its own tests."""
    content = {"steps": steps, "id": "abc1", **changes}
    RunPaths(folder, "0").trigger_request.write_text(json.dumps(content))


def answer(folder):
    path = RunPaths(folder, "0").trigger_answer
    return json.loads(path.read_text()) if path.exists() else {}


def num_whole(folder):
    return sum(not name.endswith(".part") for name in traces(folder))


def train_until(session, is_done, first=0, sleep_s=0.002):
    """Train until something has happened; returns how many steps that took."""
    end, step = time.monotonic() + LIMIT_S, first
    while not is_done():
        assert time.monotonic() < end, "it has not happened"
        with session.step(step):
            work()
            time.sleep(sleep_s)
        step += 1
    return step


def train_on(session, first, num_steps):
    for step in range(first, first + num_steps):
        with session.step(step):
            work()


def wait_for(is_there):
    end = time.monotonic() + LIMIT_S
    while not is_there():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(("phases", "number"), [(True, int), (False, np.int64)])
def test_a_request_by_file_records_the_steps_that_come_next(tmp_path, phases, number):
    # Without phases nothing but a planned window or a trigger gives a session something to do.
    with capture(phases_only(tmp_path, phases=phases)) as session:
        train_on(session, 0, 5)
        ask(tmp_path, steps=3)
        step = train_until(session, lambda: answer(tmp_path).get("state") == "recording", first=number(5))
        train_on(session, step, 10)

    said = answer(tmp_path)
    recorded = list(range(said["first_step"], said["last_step"] + 1))
    assert len(recorded) == 3
    assert recorded[0] >= 5
    check_pair(tmp_path, recorded)
    window = manifest(tmp_path)["windows"][0]
    assert (window["steps"], window["asked_by"]) == (recorded, "asked for by file")
    assert manifest(tmp_path)["complete"]
    assert not RunPaths(tmp_path, "0").trigger_request.exists()


@pytest.mark.usefixtures("quick")
def test_a_window_on_demand_is_recorded_beside_the_planned_ones(tmp_path):
    with capture(settings(tmp_path, 2, 3)) as session:
        train_on(session, 0, 6)
        ask(tmp_path, steps=1)
        step = train_until(session, lambda: answer(tmp_path).get("state") == "recording", first=6)
        train_on(session, step, 5)

    said = manifest(tmp_path)
    first = answer(tmp_path)["first_step"]
    assert [window["steps"] for window in said["windows"]] == [[2, 3], [first]]
    assert [window["asked_by"] is None for window in said["windows"]] == [True, False]
    assert said["complete"]
    assert len(traces(tmp_path)) == 4


@pytest.mark.usefixtures("quick")
def test_a_window_opens_with_a_step_and_not_in_the_middle_of_one_that_is_told_twice(tmp_path):
    with capture(phases_only(tmp_path)) as session:
        train_on(session, 0, 2)
        session.start_step(2)
        ask(tmp_path)
        wait_for(lambda: answer(tmp_path).get("state") == "seen")
        train_on(session, 2, 4)

    assert [window["steps"] for window in manifest(tmp_path)["windows"]] == [[3, 4]]


@pytest.mark.usefixtures("quick")
def test_where_steps_are_numbered_from_0_again_no_window_opens_twice(tmp_path):
    with capture(settings(tmp_path, 2, 3)) as session:
        train_on(session, 0, 6)
        ask(tmp_path, steps=1)
        wait_for(lambda: answer(tmp_path).get("state") == "seen")
        for _ in range(3):
            train_on(session, 0, 6)

    assert [window["steps"] for window in manifest(tmp_path)["windows"]] == [[2, 3], [4]]


@pytest.mark.usefixtures("quick")
def test_a_run_opens_no_more_windows_than_it_may(tmp_path, caplog):
    with capture(phases_only(tmp_path, trigger={"max": 1})) as session:
        ask(tmp_path, steps=1, id="1")
        step = train_until(session, lambda: answer(tmp_path).get("state") == "recording")
        step = train_until(session, lambda: num_whole(tmp_path) == 2, first=step)
        ask(tmp_path, steps=1, id="2")
        train_until(session, lambda: answer(tmp_path).get("id") == "2", first=step)

    assert answer(tmp_path)["state"] == "refused"
    assert "chakra_profile.trigger.max is 1" in answer(tmp_path)["why"]
    assert len(manifest(tmp_path)["windows"]) == 1
    assert "No window opens (asked for by file)" in caplog.text


@pytest.mark.usefixtures("quick")
def test_a_slow_step_opens_a_window_and_says_which_it_was(tmp_path):
    with capture(phases_only(tmp_path, trigger={"slow_factor": 10})) as session:
        train_on(session, 0, 60)
        with session.step(60):
            time.sleep(0.4)
        train_until(session, lambda: num_whole(tmp_path) == 2, first=61)

    window = manifest(tmp_path)["windows"][0]
    assert len(window["steps"]) == 3
    assert window["asked_by"].startswith("step ")
    assert window["asked_by"].endswith("times the median of the steps before it on rank 0")


def test_without_phases_slow_steps_cannot_be_seen_and_the_settings_say_so(tmp_path, caplog):
    phases_only(tmp_path, phases=False, trigger={"slow_factor": 3})

    assert "trigger.slow_factor has no effect with chakra_profile.phases=false" in caplog.text


@pytest.mark.usefixtures("quick")
def test_a_signal_opens_a_window_and_is_given_back(tmp_path):
    with capture(phases_only(tmp_path, trigger={"signal": "SIGUSR2"})) as session:
        train_on(session, 0, 3)
        os.kill(os.getpid(), signal.SIGUSR2)
        train_until(session, lambda: num_whole(tmp_path) == 2, first=3)

    assert signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL
    assert manifest(tmp_path)["windows"][0]["asked_by"] == "asked for by SIGUSR2 on rank 0"


def test_a_signal_that_is_handled_in_c_is_refused_and_stays_so(tmp_path, caplog):
    # Python believes it to be free; given back as that, it would end the training that wants its stacks shown.
    dump, chosen = tmp_path / "dump", phases_only(tmp_path / "traces", trigger={"signal": "SIGUSR2"})
    try:
        with dump.open("w") as file:
            faulthandler.register(signal.SIGUSR2, file)
            with capture(chosen):
                pass
            os.kill(os.getpid(), signal.SIGUSR2)
            faulthandler.unregister(signal.SIGUSR2)
            with capture(chosen):
                faulthandler.register(signal.SIGUSR2, file)
            os.kill(os.getpid(), signal.SIGUSR2)
    finally:
        faulthandler.unregister(signal.SIGUSR2)
        signal.signal(signal.SIGUSR2, signal.SIG_DFL)

    assert dump.read_text().count("Current thread") == 2
    assert caplog.text.count("code that is not Python's handles it") == 1


@pytest.mark.parametrize("theirs", [lambda *_: None, signal.SIG_IGN])
def test_a_signal_that_somebody_has_is_refused_and_stays_his(tmp_path, caplog, theirs):
    before = signal.signal(signal.SIGUSR1, theirs)
    try:
        with capture(settings(tmp_path, trigger={"signal": "SIGUSR1"})) as session:
            train_on(session, 0, 5)
        assert signal.getsignal(signal.SIGUSR1) is theirs
    finally:
        signal.signal(signal.SIGUSR1, before)

    assert "chakra_profile.trigger.signal is SIGUSR1" in caplog.text
    assert "not taken away" in manifest(tmp_path)["faults"][0]
    check_pair(tmp_path, [2, 3])


def test_a_thread_that_trains_gets_no_signal_and_says_so(tmp_path, caplog):
    def job():
        with capture(phases_only(tmp_path, trigger={"signal": "SIGUSR1"})) as session:
            train_on(session, 0, 2)

    thread = threading.Thread(target=job)
    thread.start()
    thread.join()

    assert "a thread that may not take signals" in caplog.text
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL


def test_a_forked_child_has_neither_the_signal_nor_the_thread(tmp_path):
    # The default action of SIGUSR2 ends a process: so it must end the child, that of the loader's workers for one.
    run_script(
        tmp_path,
        """
        with capture(settings(folder / "t", None, None, trigger={"signal": "SIGUSR2"})) as session:
            train(session, 3)
            child = os.fork()
            if not child:
                os.kill(os.getpid(), signal.SIGUSR2)
                time.sleep(5)
                os._exit(1)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGUSR2
            train(session, 6, first=3)
        """,
    )


@pytest.mark.usefixtures("quick")
def test_training_that_ends_before_the_announced_steps_answers_so(tmp_path):
    with capture(phases_only(tmp_path)) as session:
        train_on(session, 0, 3)
        ask(tmp_path)
        wait_for(lambda: answer(tmp_path).get("state") == "seen")

    assert (answer(tmp_path)["state"], answer(tmp_path)["why"]) == ("refused", "training ended")
    assert manifest(tmp_path)["reason"] == "no window"


def test_what_the_thread_finds_while_the_session_looks_ahead_is_told_with_the_next_step(tmp_path, monkeypatch):
    told = []

    class JustFound(trigger.Trigger):
        @property
        def next_step(self):
            wanted = super().next_step
            self._wake()
            return wanted

        def attend(self, step, free_from):
            told.append(step)
            return super().attend(step, free_from)

    monkeypatch.setattr("chakra_capture.recording.session.Trigger", JustFound)
    with capture(settings(tmp_path, 50, 50)) as session:
        train_on(session, 0, 3)

    assert told == [0, 1, 2]


def test_no_thread_runs_where_nothing_opens_windows(tmp_path):
    with capture(settings(tmp_path, trigger={"file": False})) as session:
        names = [thread.name for thread in threading.enumerate()]
        train_on(session, 0, 5)

    assert "chakra-capture-trigger" not in names
    check_pair(tmp_path, [2, 3])


def test_the_thread_ends_with_the_session(tmp_path):
    with capture(settings(tmp_path)) as session:
        assert "chakra-capture-trigger" in [thread.name for thread in threading.enumerate()]
        train_on(session, 0, 5)

    assert "chakra-capture-trigger" not in [thread.name for thread in threading.enumerate()]


def test_after_a_fault_no_window_is_opened_any_more(tmp_path):
    with capture(settings(tmp_path)) as session:
        with profile(activities=[ProfilerActivity.CPU]):
            train_on(session, 0, 5)
        assert "chakra-capture-trigger" not in [thread.name for thread in threading.enumerate()]

    assert "profiler" in manifest(tmp_path)["faults"][0]


# What is in the request's place, and what is said of it; None: it is not said, for it may still be written.
STRANGE = {
    "link": "Too many levels of symbolic links",
    "folder": "it is no request",
    "pipe": "it is no request",
    "large": "it is no request",
    "text": "not written by `chakra-capture trigger`",
    "deep": "not written by `chakra-capture trigger`",
    "list": "not written by `chakra-capture trigger`",
    "path as id": "not written by `chakra-capture trigger`",
    "true steps": "not written by `chakra-capture trigger`",
    "many steps": "a window of 51 steps is asked for, and chakra_profile.max_window_steps is 50",
    "no steps": "a window of 0 steps is asked for",
    "empty": None,
}


@pytest.mark.parametrize("kind", STRANGE)
def test_what_is_no_request_opens_no_window(tmp_path, caplog, kind):
    paths = RunPaths(tmp_path, "0")
    paths.run_dir.mkdir()
    path = paths.trigger_request
    good = {"steps": 2, "id": "ab"}
    if kind == "link":
        (tmp_path / "secret").write_text(json.dumps(good))
        path.symlink_to(tmp_path / "secret")
    elif kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        contents = {
            "large": json.dumps(good) + " " * 5000,
            "text": "yes",
            "deep": "[" * 4000,
            "list": "[1]",
            "path as id": json.dumps(good | {"id": "../x"}),
            "true steps": json.dumps(good | {"steps": True}),
            "many steps": json.dumps(good | {"steps": 51}),
            "no steps": json.dumps(good | {"steps": 0}),
            "empty": "",
        }
        path.write_text(contents[kind])
    file = RequestFile(paths, 50)

    assert [file.take(), file.take()] == [None, None]

    said = [record.getMessage() for record in caplog.records]
    assert len(said) == (STRANGE[kind] is not None)
    assert STRANGE[kind] is None or STRANGE[kind] in said[0]


@pytest.mark.parametrize("what", ["folder", "answer"])
def test_an_answer_that_cannot_be_written_is_none(tmp_path, what):
    paths = RunPaths(tmp_path, "0")
    if what == "folder":
        paths.run_dir.touch()  # as good as gone
    else:
        paths.trigger_answer.mkdir(parents=True)
        ask(tmp_path, steps=51)

    file = RequestFile(paths, 50)
    file.answer(Request(2, "why", "ab"), "seen")

    assert file.take() is None
    assert not paths.trigger_request.exists()


def test_a_request_of_another_user_is_ignored_and_stays(tmp_path, caplog, monkeypatch):
    # Another user is faked by who we say we are: a test that runs as root could change the owner, others not.
    paths = RunPaths(tmp_path, "0")
    paths.run_dir.mkdir()
    ask(tmp_path)
    me = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: me + 1)

    file = RequestFile(paths, 50)

    assert [file.take(), file.take()] == [None, None]
    assert paths.trigger_request.exists()
    assert len(caplog.records) == 1
    assert "it belongs to user" in caplog.text


def median(values):
    ordered = sorted(values)
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2


@given(st.lists(st.integers(1, 10**6), max_size=400), st.floats(1.01, 20))
def test_a_step_is_slow_beside_the_median_of_up_to_256_before_it(times, factor):
    slow_steps, before = SlowSteps(factor), []
    for step, ns in enumerate(times):
        is_slow = len(before) >= 20 and ns > factor * median(before[-256:])
        assert (slow_steps.add(step, ns) is not None) == is_slow
        before = [] if is_slow else [*before, ns]


# Each rank hears of the announcement at some time, or never; then it comes to the first step, or has passed it.
RANKS = st.lists(st.sampled_from(["accepts", "passed", "never hears"]), min_size=1, max_size=5)


@given(RANKS, st.randoms(use_true_random=False))
def test_all_ranks_hear_the_same_verdict_whatever_comes_first(kinds, random):
    store = dist.HashStore()
    ranks = [Meeting("run", len(kinds), lambda: store) for _ in kinds]
    ranks[0].announce(Announcement(0, 7, 8, "why"))
    todo = [
        [("accept",), ("decide",)] if k == "accepts" else [("refuse", "passed")] for k in kinds if k != "never hears"
    ]
    heard = [rank for rank, kind in zip(ranks, kinds, strict=True) if kind != "never hears"]
    num_accepted, verdicts, expected = 0, [], None
    while any(todo):
        rank = random.choice([at for at, left in enumerate(todo) if left])
        what, *why = todo[rank].pop(0)
        assert heard[rank].announced(0) == Announcement(0, 7, 8, "why")
        if what == "accept":
            heard[rank].accept(0)
            num_accepted += 1
            continue
        if expected is None:
            expected = what == "decide" and num_accepted == len(kinds)
        verdicts.append(heard[rank].decide(0) if what == "decide" else heard[rank].refuse(0, *why))

    assert {verdict is None for verdict in verdicts} <= {expected}
    assert (ranks[0].verdict(0) is not None) == bool(verdicts)


def test_a_wish_of_another_rank_is_heard_once(tmp_path):
    store = dist.FileStore(str(tmp_path / "store"), 1)
    ranks = [Meeting("run", 2, lambda: store) for _ in range(2)]

    assert ranks[0].asked() is None
    ranks[1].ask("slow")
    ranks[1].ask("slower")
    assert [ranks[0].asked(), ranks[0].asked()] == ["slow", None]
    ranks[1].ask("again")
    assert ranks[0].asked() == "again"


WINDOWS = st.lists(st.tuples(st.integers(0, 60), st.integers(1, 5), st.integers(0, 2)), max_size=4)


@given(WINDOWS, st.integers(0, 80), st.integers(1, 6))
def test_a_window_on_demand_shares_no_step_with_a_planned_one(tmp_path_factory, spans, step, num_steps):
    windows = [
        WindowConfig(start_step=first, end_step=first + length + warmup - 1, warmup_steps=warmup, active_steps=2)
        for first, length, warmup in spans
    ]
    with contextlib.suppress(SettingsError):
        chosen = settings(tmp_path_factory.getbasetemp(), windows=windows) if windows else None
        plan = StepPlan(chosen.step_windows if chosen else ())
        taken = {s for cycle in plan.cycles for s in range(cycle.prepare_step, cycle.last_step + 1)}

        first = plan.free_from(step, num_steps)

        # By trying one after the other.
        assert first == next(s for s in range(step, 200) if not taken & set(range(s, s + num_steps)))
        added = plan.with_window(WindowConfig(start_step=first, end_step=first + num_steps - 1), "asked")
        assert [c.steps for c in added.cycles if c.asked_by == "asked"] == [range(first, first + num_steps)]
        assert [c.steps for c in added.cycles if c.asked_by is None] == [c.steps for c in plan.cycles]
