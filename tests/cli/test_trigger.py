"""``chakra-capture trigger``: asking a job that runs, and what is said where none answers."""

import json
import os
import threading
import time
from contextlib import contextmanager

import pytest
from commands import refused, run
from recording.loops import work
from recording.recorded import check_pair, settings

from chakra_capture import capture
from chakra_capture.layout import RunPaths
from chakra_capture.recording import trigger


@contextmanager
def training(folder, monkeypatch, **changes):
    """A job in another thread of this process, until the block ends."""
    monkeypatch.setattr(trigger, "INTERVAL_S", 0.02)
    is_over, begun = threading.Event(), threading.Event()

    def job():
        with capture(settings(folder, None, None, **changes)) as session:
            step = 0
            while not is_over.is_set():
                with session.step(step):
                    work()
                    time.sleep(0.002)
                step += 1
                begun.set()

    thread = threading.Thread(target=job)
    thread.start()
    try:
        assert begun.wait(30)
        yield
    finally:
        is_over.set()
        thread.join()


def asked(folder):
    """A run that nobody records to any more, as ``kill -9`` leaves it."""
    paths = RunPaths(folder, "0")
    paths.run_dir.mkdir(parents=True)
    paths.claim.write_text('{"run_id": "a"}')
    return paths


def test_a_running_job_records_the_steps_that_the_command_names(tmp_path, monkeypatch):
    with training(tmp_path, monkeypatch):
        done = run("trigger", tmp_path, "--steps", 2, "--json")
        again = run("trigger", tmp_path, "--steps", 1, "--job", "0")

    said = json.loads(done.out)
    assert (done.code, said["state"], said["num_ranks"], said["schema_version"]) == (0, "recording", 1, 1)
    assert said["last_step"] == said["first_step"] + 1
    check_pair(tmp_path, [said["first_step"], said["last_step"]])
    assert again.code == 0
    assert "Job 0 is recording steps " in again.out
    assert f"on 1 rank. Then: chakra-capture merge {tmp_path} --job 0" in again.out
    assert run("merge", tmp_path, "--json").code == 0


def test_a_window_on_demand_is_merged_while_the_job_goes_on(tmp_path, monkeypatch):
    with training(tmp_path, monkeypatch):
        first = json.loads(run("trigger", tmp_path, "--json").out)["first_step"]
        device = RunPaths(tmp_path, "0").device_trace(0)
        end = time.monotonic() + 30
        while not device.exists():
            assert time.monotonic() < end
            time.sleep(0.02)
        merged = run("merge", tmp_path, "--json")
        asked = run("query", tmp_path, "select step from steps order by step", "--json")

    assert merged.code == 0, merged
    assert [row["step"] for row in json.loads(asked.out)["rows"]] == [first, first + 1, first + 2]


def test_a_window_longer_than_the_job_allows_is_refused(tmp_path, monkeypatch):
    with training(tmp_path, monkeypatch, max_window_steps=5):
        done = run("trigger", tmp_path, "--steps", 6)

    refused(done, "job 0 records nothing", "chakra_profile.max_window_steps is 5")


def test_a_job_without_a_trigger_by_file_does_not_answer_and_the_request_is_withdrawn(tmp_path, monkeypatch):
    with training(tmp_path, monkeypatch, trigger={"file": False}):
        done = run("trigger", tmp_path, "--timeout", 0.3)

    refused(done, "has not taken the request in 0.3 s", "trigger.file is off")
    assert not RunPaths(tmp_path, "0").trigger_request.exists()


def test_training_that_has_ended_is_not_asked(tmp_path):
    with capture(settings(tmp_path)) as session, session.step(0):
        work()

    refused(run("trigger", tmp_path), "job 0", "has ended its training")
    assert not RunPaths(tmp_path, "0").trigger_request.exists()


def test_a_request_that_waits_already_is_not_overwritten(tmp_path):
    paths = asked(tmp_path)
    paths.trigger_request.write_text("theirs")

    refused(run("trigger", tmp_path), "trigger.json is there already")
    assert paths.trigger_request.read_text() == "theirs"


def test_a_request_that_was_taken_is_not_said_to_be_withdrawn_and_that_of_somebody_else_stays(tmp_path):
    request = asked(tmp_path).trigger_request

    def take():
        while not request.exists() or not request.read_text():
            time.sleep(0.01)
        request.write_text('{"steps": 1, "id": "theirs"}')

    job = threading.Thread(target=take)
    job.start()
    refused(run("trigger", tmp_path, "--timeout", 0.3), "has taken the request and not answered in 0.3 s")
    job.join()

    assert "theirs" in request.read_text()


def test_the_job_of_another_user_is_not_asked(tmp_path, monkeypatch):
    asked(tmp_path)
    me = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: me + 1)

    refused(run("trigger", tmp_path), f"belongs to user {me}", f"user {me + 1}")


def test_a_folder_without_a_run_and_a_job_that_is_not_there_are_named(tmp_path):
    refused(run("trigger", tmp_path / "missing"), "does not exist")
    refused(run("trigger", tmp_path), "holds no traces")
    asked(tmp_path)
    refused(run("trigger", tmp_path, "--job", "9"), "no run of job '9'")


@pytest.mark.parametrize("answer", ["", "[]", "[" * 3000, '{"id": 1}', '{"id": "x", "state": "recording"}', "{}"])
def test_answers_that_are_none_are_passed_over(tmp_path, monkeypatch, answer):
    paths = asked(tmp_path)
    monkeypatch.setattr(os, "urandom", lambda _: b"")  # the id is empty then
    paths.trigger_answer.write_text(answer.replace('"x"', '""'))

    refused(run("trigger", tmp_path, "--timeout", 0.15), "has not taken the request")


@pytest.mark.parametrize("wrong", [("--steps", 0), ("--timeout", 0), ("--timeout", 1e9)])
def test_wrong_usage(tmp_path, wrong):
    assert run("trigger", tmp_path, *wrong).code == 2


def test_help_says_what_is_needed_and_what_may_be_set():
    text = " ".join(run("trigger", "--help").out.split())

    for part in (
        "trigger.slow_factor",
        "trigger.signal",
        "trigger.max",
        "Exit status",
        "--steps",
        "while the job goes on",
    ):
        assert part in text
