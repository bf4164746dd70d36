"""Sessions in loops that number, retry or end their steps unusually, and what the manifest says meanwhile."""

import logging
import time

import pytest
import torch

from chakra_capture import ChakraProfileConfig, capture
from recording.loops import train, work
from recording.recorded import check_pair, manifest, settings, steps, traces


@pytest.fixture
def log(caplog):
    caplog.set_level(logging.INFO, logger="chakra_capture")
    return caplog


def messages(log, level):
    return [record.getMessage() for record in log.records if record.levelno == level]


def test_step_numbers_that_start_anew_end_the_recording(tmp_path, log):
    with capture(settings(tmp_path, 1, 5)) as session:
        for _ in range(3):
            train(session, 4)

    check_pair(tmp_path, [1, 2, 3])
    said = manifest(tmp_path)
    assert (said["complete"], said["reason"]) == (False, "step numbers went back")
    (warning,) = messages(log, logging.WARNING)
    assert warning.startswith("Step 0 begins after step 3 inside the profiling window 1..5, so the recording ends here")


def test_step_numbers_that_start_anew_in_the_warm_up_end_it(tmp_path, log):
    with capture(settings(tmp_path, 1, 5, warmup_steps=4)) as session:
        for _ in range(3):
            train(session, 3)

    assert traces(tmp_path) == []
    assert manifest(tmp_path)["reason"] == "step numbers went back"
    assert len(messages(log, logging.WARNING)) == 2


def test_step_that_fails_for_ever_does_not_record_for_ever(tmp_path):
    with capture(settings(tmp_path, 1, 2)) as session:
        for _ in range(20):
            try:
                with session.step(1):
                    work()
                    raise RuntimeError
            except RuntimeError:
                pass

    record = manifest(tmp_path)["windows"][0]
    assert (record["steps"], record["partial_step"], record["aborted_steps"]) == ([], 1, [1] * 3)
    assert manifest(tmp_path)["reason"] == "step numbers went back"


def test_step_tried_again_after_a_failure_counts_once_and_the_failure_is_named(tmp_path):
    with capture(settings(tmp_path, 1, 3)) as session:
        for step in range(5):
            for attempt in range(2):
                try:
                    with session.step(step):
                        work()
                        if step == 2 and attempt == 0:
                            raise RuntimeError
                    break
                except RuntimeError:
                    pass

    assert steps(tmp_path / "0_kineto/rank-0.json") == [1, 2, 2, 3]
    record = manifest(tmp_path)["windows"][0]
    assert (record["steps"], record["aborted_steps"], record["partial_step"]) == ([1, 2, 3], [2], None)


def test_session_used_twice_is_two_windows_of_one_run(tmp_path):
    session = capture(settings(tmp_path, 1, 2))
    for _ in range(2):
        with session:
            train(session, 4)

    check_pair(tmp_path, [1, 2])
    check_pair(tmp_path, [1, 2], cycle=1)
    assert manifest(tmp_path)["complete"]


def test_steps_may_be_numbers_of_numpy(tmp_path):
    numpy = pytest.importorskip("numpy")
    with capture(settings(tmp_path, 1, 2)) as session:
        for step in numpy.arange(4):
            with session.step(step):
                work()

    check_pair(tmp_path, [1, 2])
    assert manifest(tmp_path)["windows"][0]["steps"] == [1, 2]


def test_manifest_is_not_complete_before_the_plan_is_done(tmp_path):
    windows = [{"start_step": 1, "end_step": 1}, {"start_step": 9, "end_step": 9}]
    with capture(ChakraProfileConfig(enabled=True, trace_dir=str(tmp_path), windows=windows)) as session:
        train(session, 2)
        time.sleep(0.3)
        train(session, 9, first=2)
        assert (manifest(tmp_path)["complete"], manifest(tmp_path)["reason"]) == (False, "running")
        train(session, 10, first=9)
        time.sleep(0.3)
        train(session, 11, first=10)
        assert (manifest(tmp_path)["complete"], manifest(tmp_path)["reason"]) == (True, "complete")


def test_manifest_of_a_resumed_window_is_not_complete_before_the_end_either(tmp_path):
    with capture(settings(tmp_path, 5, 8)) as session:
        train(session, 9, first=7)
        time.sleep(0.3)
        train(session, 10, first=9)
        assert (manifest(tmp_path)["complete"], manifest(tmp_path)["reason"]) == (False, "resumed inside the window")


def test_training_that_ends_while_warming_up_says_what_happened(tmp_path, log):
    with capture(settings(tmp_path, 2, 6, warmup_steps=3)) as session:
        train(session, 4)

    assert messages(log, logging.INFO) == ["====== Start chakra profiling from global_step 2 ======"]
    assert messages(log, logging.WARNING) == [
        "Training left the profiling window 2..6 while it was warming up; nothing was recorded."
    ]


def test_refused_recording_does_not_say_that_it_starts(tmp_path, log):
    with torch.profiler.profile(), capture(settings(tmp_path, 1, 1)) as session:
        train(session, 3)

    assert messages(log, logging.INFO) == []
