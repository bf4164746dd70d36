"""What a machine can get wrong: one message that says what to do, this rank disarmed, training untouched."""

import gc
import logging
import os
import resource
import shutil
import signal
import sys
import textwrap
import threading
import time
import weakref

import pytest
import torch
import warm
from torch.profiler import ExecutionTraceObserver, ProfilerActivity, profile

from chakra_capture import capture
from recording.loops import train, work
from recording.recorded import files, manifest, read, settings, steps, traces


@pytest.fixture
def errors(caplog):
    def found():
        return [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR]

    return found


def run_session(chosen, num_steps=5):
    with capture(chosen) as session:
        train(session, num_steps)


def test_file_in_place_of_trace_dir_is_named_and_training_goes_on(tmp_path, errors, caplog):
    (tmp_path / "traces").write_text("a file")
    run_session(settings(tmp_path / "traces", 1, 2))

    (message,) = errors()
    assert message.startswith(f"Recording stops on rank 0, training goes on: {tmp_path}/traces/0_run cannot be")
    assert "chakra_profile.trace_dir" in message
    # A fault that explains itself has no traceback, unless somebody debugs.
    assert caplog.records[0].exc_info is None
    assert files(tmp_path) == ["traces"]


def test_folder_that_cannot_be_made_is_named(errors):
    # Not a permission: tests may run as root.
    run_session(settings("/proc/self/traces", 1, 2))

    (message,) = errors()
    assert "/proc/self/traces/0_run cannot be created" in message
    assert "set chakra_profile.trace_dir to another folder" in message


def test_folder_that_vanishes_before_the_window_stops_the_recording_only(tmp_path, errors):
    with capture(settings(tmp_path / "t", 2, 3)) as session:
        train(session, 1)
        shutil.rmtree(tmp_path / "t")
        (tmp_path / "t").write_text("in the way")
        train(session, 5, first=1)

    (message,) = errors()
    assert f"{tmp_path}/t/0_chakra cannot be created" in message


def test_folder_that_vanishes_in_the_window_is_not_called_a_full_disk(tmp_path, errors):
    with capture(settings(tmp_path / "t", 1, 3)) as session:
        train(session, 2)
        shutil.rmtree(tmp_path / "t")
        train(session, 6, first=2)

    (message,) = errors()
    assert "rank-0.json.part is gone: the file or its folder was removed" in message
    assert "disk" not in message


def test_name_that_another_process_is_writing_is_left_alone(tmp_path, errors):
    with capture(settings(tmp_path, 1, 2)) as session:
        (tmp_path / "0_chakra").mkdir()
        (tmp_path / "0_chakra/rank-0.json.part").write_text("theirs")
        train(session, 4)

    assert "rank-0.json.part exists already" in errors()[0]
    assert (tmp_path / "0_chakra/rank-0.json.part").read_text() == "theirs"
    said = manifest(tmp_path)
    assert (said["complete"], said["reason"], len(said["faults"])) == (False, "fault", 1)


@pytest.mark.parametrize(
    ("name", "is_lost"),
    [
        ("0_chakra/rank-0.json.part", True),
        ("0_kineto/rank-0.json.part", True),
        ("0_kineto/rank-0.json.part.tmp", True),  # Kineto's own
        ("0_chakra/rank-0.json", False),
        ("0_kineto/rank-0.json", False),
        ("0_run/rank-0.json", False),
    ],
)
def test_symlink_at_the_target_is_not_followed(tmp_path, errors, name, is_lost):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    with capture(settings(tmp_path / "t", 1, 2)) as session:
        (tmp_path / "t" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "t" / name).symlink_to(victim)
        train(session, 4)

    assert victim.read_text() == "precious"
    assert len(errors()) == is_lost
    assert manifest(tmp_path / "t")["complete"] is not is_lost
    if is_lost:
        assert name in errors()[0]
    else:  # A name that is ours is taken, not written through.
        assert not (tmp_path / "t" / name).is_symlink()


def test_observer_of_somebody_else_is_refused_and_its_file_stays_whole(tmp_path, errors):
    other = ExecutionTraceObserver()
    other.register_callback(str(tmp_path / "other.json"))
    other.start()
    run_session(settings(tmp_path / "t", 1, 2))
    work()
    other.stop()
    other.unregister_callback()

    assert "an ExecutionTraceObserver is registered in this process already" in errors()[0]
    assert "aten::mm" in {node["name"] for node in read(tmp_path / "other.json")["nodes"]}
    assert manifest(tmp_path / "t")["reason"] == "fault"
    assert traces(tmp_path / "t") == []

    run_session(settings(tmp_path / "u", 1, 2))
    assert steps(tmp_path / "u/0_chakra/rank-0.json") == [1, 2]


def test_profiler_of_somebody_else_is_refused_and_goes_on(tmp_path, errors):
    with profile(activities=[ProfilerActivity.CPU]) as other:
        run_session(settings(tmp_path / "t", 1, 2))
    other.export_chrome_trace(str(tmp_path / "other.json"))

    assert "another torch profiler is running in this process" in errors()[0]
    assert "aten::mm" in {event["name"] for event in read(tmp_path / "other.json")["traceEvents"]}


def test_session_that_was_stolen_loses_the_device_trace_and_nothing_else(tmp_path, errors):
    with capture(settings(tmp_path, 1, 3)) as session:
        train(session, 2)
        session.start_step(2)
        with profile(activities=[ProfilerActivity.CPU]):
            work()
        session.end_step(2)
        train(session, 5, first=3)

    assert "was started or stopped inside the window and ended ours" in errors()[0]
    assert steps(tmp_path / "0_chakra/rank-0.json") == [1, 2, 3]
    record = manifest(tmp_path)["windows"][0]
    assert (record["device_trace"], record["reason"]) == (None, "fault")
    # Torch notices the loss of the session only when a new one begins.
    torch.autograd._disable_profiler() if torch.autograd._profiler_enabled() else None


def test_observer_from_the_environment_is_refused(tmp_path, errors, monkeypatch):
    monkeypatch.setenv("ENABLE_PYTORCH_EXECUTION_TRACE", "1")
    run_session(settings(tmp_path, 1, 2))

    assert "Unset the variable to record with chakra-capture" in errors()[0]


def test_kineto_on_demand_is_refused(tmp_path, errors, monkeypatch):
    monkeypatch.setenv("KINETO_USE_DAEMON", "1")
    run_session(settings(tmp_path, 1, 2))

    assert "KINETO_USE_DAEMON is set, so a daemon may start Kineto in this process at any moment" in errors()[0]
    assert manifest(tmp_path)["reason"] == "fault"


def test_second_session_inside_a_window_is_refused_and_the_first_is_whole(tmp_path, errors):
    with capture(settings(tmp_path / "a", 1, 3)) as outer:
        train(outer, 2)
        with capture(settings(tmp_path / "b", 0, 1)) as inner:
            inner.start_step(0)
            inner.end_step(0)
        train(outer, 5, first=2)

    assert "another chakra-capture session of this process is recording" in errors()[0]
    assert steps(tmp_path / "a/0_chakra/rank-0.json") == [1, 2, 3]


def test_session_closed_from_another_thread_keeps_the_host_trace(tmp_path):
    script = f"""
        import sys, threading
        sys.path.insert(0, {str(__file__).rsplit("/recording/", 1)[0]!r})
        from chakra_capture import capture
        from recording.loops import train
        from recording.recorded import settings
        from pathlib import Path
        session = capture(settings(Path({str(tmp_path)!r}), 1, 9))
        session.open()
        train(session, 4)
        closer = threading.Thread(target=session.close)
        closer.start()
        closer.join()
        import os
        os._exit(0)
    """
    done = warm.run([sys.executable, "-c", textwrap.dedent(script)])

    assert done.returncode == 0, done.stderr
    assert steps(tmp_path / "0_chakra/rank-0.json") == [1, 2, 3]
    assert "from another thread" in manifest(tmp_path)["faults"][0]


@pytest.mark.parametrize("limit", [1000, 40_000])
def test_full_disk_leaves_part_files_and_says_so(tmp_path, limit):
    # A limit on the size of a file stands in for a full disk: writes past it fail the same way.
    script = f"""
        import resource, sys, logging
        sys.path.insert(0, {str(__file__).rsplit("/recording/", 1)[0]!r})
        logging.basicConfig(format="%(levelname)s %(message)s")
        from chakra_capture import capture
        from recording.loops import train
        from recording.recorded import settings
        from pathlib import Path
        with capture(settings(Path({str(tmp_path)!r}), 1, 4)) as session:
            train(session, 1)
            limits = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, limits[1]))
            train(session, 6, first=1)
            session.close()
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    """
    done = warm.run([sys.executable, "-c", textwrap.dedent(script)])

    assert done.returncode == 0, done.stderr
    assert done.stderr.count("ERROR Recording stops on rank 0") == 1
    assert "rank-0.json.part is not whole: its end is missing" in done.stderr
    assert "free space or set chakra_profile.trace_dir" in done.stderr
    assert not (tmp_path / "0_chakra/rank-0.json").exists()
    assert "0_chakra/rank-0.json.part" in files(tmp_path)
    assert not [name for name in files(tmp_path) if name.endswith(".tmp")]
    if limit > 5000:  # else the manifest does not fit either
        assert manifest(tmp_path)["reason"] == "fault"


def test_disk_that_is_full_when_a_whole_trace_gets_its_name_is_said_without_a_traceback(tmp_path, errors, caplog):
    handler, limits = signal.signal(signal.SIGXFSZ, signal.SIG_IGN), resource.getrlimit(resource.RLIMIT_FSIZE)
    with capture(settings(tmp_path, 1, 1)) as session:
        train(session, 2)
        time.sleep(0.3)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
        train(session, 4, first=2)
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    signal.signal(signal.SIGXFSZ, handler)

    (message,) = errors()
    assert "cannot be written: File too large" in message
    assert "Free space, change the permissions or set chakra_profile.trace_dir" in message
    assert [record.exc_info for record in caplog.records if record.levelno == logging.ERROR] == [None]
    # The device trace was whole already, the end of the host trace was not written.
    assert traces(tmp_path) == [
        "0_chakra/rank-0.json.part",
        "0_kineto/rank-0.json.part",
    ]
    assert steps(tmp_path / "0_kineto/rank-0.json.part") == [1]


def never():
    raise AssertionError("the device must not be synchronized now")


@pytest.mark.parametrize("warmup_steps", [0, 2])
def test_window_that_begins_while_a_graph_is_captured_is_refused(tmp_path, errors, monkeypatch, warmup_steps):
    with capture(settings(tmp_path, 1, 4, warmup_steps=warmup_steps, active_steps=2)) as session:
        num_before = 1 + warmup_steps
        train(session, num_before)
        monkeypatch.setattr(torch.cuda, "synchronize", never)
        for name in ("is_available", "is_initialized", "is_current_stream_capturing"):
            monkeypatch.setattr(torch.cuda, name, lambda: True)
        with session.step(num_before):
            pass
        monkeypatch.undo()
        train(session, 6, first=num_before + 1)

    (message,) = errors()
    assert "a CUDA graph is being captured where the recording would begin" in message
    assert manifest(tmp_path)["reason"] == "fault"


@pytest.mark.parametrize("fault", ["at open", "in the window", "at the end"])
def test_fault_of_ours_keeps_nothing_of_training_alive(tmp_path, errors, fault):
    class Batch:
        """What a loop holds: workers of a loader, memory of a device."""

    def loop():
        batch = Batch()
        if fault == "at open":
            (tmp_path / "t").write_text("in the way")
        with capture(settings(tmp_path / "t", 2, 3)) as session:
            train(session, 1)
            if fault == "in the window":
                shutil.rmtree(tmp_path / "t")
                (tmp_path / "t").write_text("in the way")
            train(session, 4, first=1)
            if fault == "at the end":
                shutil.rmtree(tmp_path / "t")
        return weakref.ref(batch)

    gc.disable()
    try:
        assert loop()() is None
    finally:
        gc.enable()
    assert len(errors()) == 1


@pytest.mark.parametrize(
    ("umask", "expected", "changes"),
    [(0o027, "0o640", {}), (0o022, "0o640", {"compress": True}), (0o077, "0o600", {"replay_data": True})],
)
def test_modes_of_files_follow_the_umask(tmp_path, umask, expected, changes):
    before = os.umask(umask)
    try:
        run_session(settings(tmp_path, 1, 2, **changes))
    finally:
        os.umask(before)

    assert len(files(tmp_path)) >= 4
    assert {oct((tmp_path / name).stat().st_mode & 0o777) for name in files(tmp_path)} == {expected}


def test_busy_threads_at_both_ends_of_the_window_do_no_harm(tmp_path):
    stop = threading.Event()

    def busy():
        while not stop.is_set():
            torch.ones(8, 8).sum()

    threads = [threading.Thread(target=busy) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        run_session(settings(tmp_path, 2, 3), num_steps=6)
    finally:
        stop.set()
        for thread in threads:
            thread.join()

    assert steps(tmp_path / "0_chakra/rank-0.json") == [2, 3]
    assert steps(tmp_path / "0_kineto/rank-0.json") == [2, 3]
