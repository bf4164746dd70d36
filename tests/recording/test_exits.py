"""Every way out of the window: what was recorded is kept, whole and marked, and the process ends as it would have."""

import os
import signal
import threading
import time

import pytest
from commands import process

from chakra_capture import capture
from recording.loops import train, work
from recording.recorded import check_pair, files, manifest, settings
from recording.scripts import run_script, start_script

IN_STEP_3 = """
session = capture(settings(folder, 1, 9))
session.open()
train(session, 3)
session.start_step(3)
work()
"""


def check_cut_in_step_3(trace_dir, reason):
    check_pair(trace_dir, [1, 2, 3])
    said = manifest(trace_dir)
    record = said["windows"][0]
    assert (said["complete"], said["reason"], record["reason"]) == (False, reason, reason)
    assert (record["steps"], record["partial_step"]) == ([1, 2], 3)


def test_sigterm_with_nobody_to_handle_it_ends_the_process_with_whole_files(tmp_path):
    run_script(tmp_path, IN_STEP_3 + "os.kill(os.getpid(), 15)\nprint('alive', file=sys.stderr)", returncode=-15)

    check_cut_in_step_3(tmp_path, "SIGTERM")


def test_sigterm_ends_a_process_that_hangs_in_c_code_and_leaves_files_to_salvage(tmp_path):
    # Without us the signal would end it at once; a handler in Python does not get to run.
    run_script(
        tmp_path,
        IN_STEP_3
        + """
from datetime import timedelta
from chakra_capture.recording import termination
termination._LIMIT_S = 0.5
threading.Timer(0.5, os.kill, (os.getpid(), 15)).start()
torch.distributed.HashStore().wait(["never"], timedelta(seconds=100))
""",
        returncode=-15,
    )

    assert files(tmp_path / "0_chakra") == ["rank-0.json.part"]
    said = manifest(tmp_path)
    assert (said["reason"], said["windows"][0]["steps"], said["windows"][0]["partial_step"]) == ("SIGTERM", [1, 2], 3)


@pytest.mark.parametrize(
    ("ending", "code"), [("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL), ("os._exit(3)", 3)]
)
def test_files_of_a_process_that_is_gone_at_once_are_salvaged_by_merge(tmp_path, ending, code):
    # Long enough for the observer to have written what it holds back, and for step 2 to be whole on the disk.
    wait = """
for _ in range(99):
    work()
part = folder / "0_chakra/rank-0.json.part"
while len(part.read_text().partition('"ProfilerStep#2"')[2]) < 5_000:
    time.sleep(0.01)
"""
    run_script(tmp_path, IN_STEP_3 + wait + ending, returncode=code)

    assert files(tmp_path / "0_chakra") == ["rank-0.json.part"]
    assert not (tmp_path / "0_run/rank-0.json").exists()
    assert "no manifest, unfinished files, not merged" in process("inspect", tmp_path).out
    done = process("merge", tmp_path)
    assert (done.code, done.err) == (0, "")
    assert "steps 1-2, salvaged" in done.out
    assert (tmp_path / "0_merged/rank=0/nodes.parquet").exists()
    told = process("summary", tmp_path)
    assert (told.code, told.err) == (0, "")
    assert "the process ended, or still runs, before its files were whole" in told.out
    assert process("merge", tmp_path, "--strict").code == 1


@pytest.mark.parametrize(
    ("ending", "code", "reason"),
    [
        ("sys.exit(7)", 7, "process exit"),
        ("with session:\n    sys.exit(7)", 7, "exception"),
    ],
)
def test_exit_in_the_middle_of_a_step(tmp_path, ending, code, reason):
    run_script(tmp_path, IN_STEP_3 + ending, returncode=code)

    check_cut_in_step_3(tmp_path, reason)


CHILDREN = """
import multiprocessing

def rank(name):
    session = capture(settings(folder / name, 1, 9))
    session.open()
    train(session, 3)
    session.start_step(3)
    work()
    if name.endswith("exit"):
        sys.exit(3)
    if name.endswith("raise"):
        raise ValueError
    if name.endswith("leave"):
        os._exit(4)
    if name.endswith("term"):
        os.kill(os.getpid(), 15)

if __name__ == "__main__":
    started = {}
    for method in sys.argv[1:]:
        context = multiprocessing.get_context(method)
        for ending in ("return", "exit", "raise", "leave", "term"):
            name = f"{method}-{ending}"
            started[name] = context.Process(target=rank, args=(name,))
            started[name].start()
    for name, child in started.items():
        child.join()
        print(name, child.exitcode)
"""
EXIT_CODES = {"return": 0, "exit": 3, "raise": 1, "leave": 4, "term": -15}


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_ranks_that_multiprocessing_started_keep_their_window_however_they_end(tmp_path, method):
    # They leave by os._exit, which runs no exit handlers.
    with start_script(tmp_path, CHILDREN, method) as running:
        output, said = running.communicate(timeout=240)

    assert output.split() == [word for end, code in EXIT_CODES.items() for word in (f"{method}-{end}", str(code))], said
    for ending in ("return", "exit", "raise"):
        check_cut_in_step_3(tmp_path / f"{method}-{ending}", "process exit")
    check_cut_in_step_3(tmp_path / f"{method}-term", "SIGTERM")
    assert files(tmp_path / f"{method}-leave/0_chakra") == ["rank-0.json.part"]


@pytest.fixture
def handled():
    """A handler of the job's own, and the times it was called."""
    calls = []
    before = signal.signal(signal.SIGTERM, lambda *arguments: calls.append(arguments))
    yield calls
    signal.signal(signal.SIGTERM, before)


def test_handler_of_the_job_is_called_when_the_files_are_whole_and_training_goes_on(tmp_path):
    found = []
    before = signal.signal(signal.SIGTERM, lambda *_: found.append(files(tmp_path)))
    own = signal.getsignal(signal.SIGTERM)
    try:
        with capture(settings(tmp_path, 1, 9)) as session:
            train(session, 3)
            with session.step(3):
                work()
                os.kill(os.getpid(), signal.SIGTERM)
                work()
            assert signal.getsignal(signal.SIGTERM) is own
            train(session, 6, first=4)
    finally:
        signal.signal(signal.SIGTERM, before)

    assert [names[:2] for names in found] == [["0_chakra/rank-0.json", "0_kineto/rank-0.json"]]
    check_cut_in_step_3(tmp_path, "SIGTERM")


def test_exception_of_the_jobs_handler_goes_through(tmp_path):
    class Preempted(Exception):
        pass

    def preempt(*_):
        raise Preempted

    def run():
        with capture(settings(tmp_path, 1, 9)) as session:
            train(session, 3)
            with session.step(3):
                work()
                os.kill(os.getpid(), signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, preempt)
    try:
        with pytest.raises(Preempted):
            run()
    finally:
        signal.signal(signal.SIGTERM, before)

    check_cut_in_step_3(tmp_path, "SIGTERM")


def test_handler_that_wraps_ours_decides_whether_the_process_ends(tmp_path):
    with capture(settings(tmp_path, 1, 9)) as session:
        ours = signal.getsignal(signal.SIGTERM)
        calls = []

        def wrapping(number, frame):
            calls.append(number)
            ours(number, frame)

        signal.signal(signal.SIGTERM, wrapping)
        train(session, 3)
        with session.step(3):
            work()
            os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        # What was put in place over ours is not ours to take away.
        assert signal.getsignal(signal.SIGTERM) is wrapping
    signal.signal(signal.SIGTERM, signal.SIG_DFL)

    assert calls == [15, 15]
    check_cut_in_step_3(tmp_path, "SIGTERM")


def test_sigterm_before_and_after_the_window(tmp_path, handled):
    for first, last in ((5, 9), (1, 1)):
        with capture(settings(tmp_path / str(first), first, last)) as session:
            train(session, 3)
            os.kill(os.getpid(), signal.SIGTERM)
            train(session, 12, first=3)

    assert len(handled) == 2
    assert manifest(tmp_path / "5")["reason"] == "SIGTERM"
    assert manifest(tmp_path / "1")["reason"] == "complete"


def test_sigterm_ends_the_phases_of_a_session_without_a_window(tmp_path, handled):
    with capture(settings(tmp_path, None, None)) as session:
        train(session, 3)
        os.kill(os.getpid(), signal.SIGTERM)
        assert files(tmp_path) == ["0_phases/rank-0.jsonl", "0_run/rank-0.json", "0_run/run.json"]
        train(session, 6, first=3)

    assert len(handled) == 1
    assert manifest(tmp_path)["reason"] == "no window"
    assert '"step":2,' in (tmp_path / "0_phases/rank-0.jsonl").read_text()


def test_ignored_sigterm_stays_ignored(tmp_path):
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with capture(settings(tmp_path, 1, 2)) as session:
            train(session, 2)
            os.kill(os.getpid(), signal.SIGTERM)
            train(session, 4, first=2)
    finally:
        signal.signal(signal.SIGTERM, before)

    check_pair(tmp_path, [1, 2])
    assert manifest(tmp_path)["complete"]


def test_session_of_another_thread_installs_no_handler(tmp_path):
    seen = []

    def loop():
        with capture(settings(tmp_path, 1, 2)) as session:
            train(session, 2)
            seen.append(signal.getsignal(signal.SIGTERM))
            train(session, 4, first=2)

    thread = threading.Thread(target=loop)
    thread.start()
    thread.join()

    assert seen == [signal.SIG_DFL]
    check_pair(tmp_path, [1, 2])


def test_sigterm_asks_the_thread_that_records_to_finish(tmp_path, handled):
    started = threading.Event()

    def loop():
        for step in range(10**6):
            with session.step(step):
                work()
            if step == 3:
                started.set()
            if not session.is_open:
                return

    with capture(settings(tmp_path, 1, 49)) as session:
        thread = threading.Thread(target=loop)
        thread.start()
        started.wait()
        os.kill(os.getpid(), signal.SIGTERM)
        thread.join()

    assert len(handled) == 1
    said = manifest(tmp_path)
    assert said["reason"] == "SIGTERM"
    check_pair(tmp_path, said["windows"][0]["steps"])


def test_forked_child_has_the_handler_from_before(tmp_path):
    with capture(settings(tmp_path, 1, 2)) as session:
        train(session, 2)
        child = os.fork()
        if child == 0:
            is_default = signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
            is_unblocked = signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, [])
            os._exit(0 if is_default and is_unblocked and signal.set_wakeup_fd(-1) == -1 else 1)
        assert os.waitpid(child, 0)[1] == 0
        child = os.fork()
        if child == 0:
            time.sleep(60)
            os._exit(0)
        os.kill(child, signal.SIGTERM)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -15
        train(session, 4, first=2)

    check_pair(tmp_path, [1, 2])


def test_wakeup_descriptor_of_an_event_loop_stays_in_place(tmp_path):
    read, write = os.pipe()
    os.set_blocking(write, False)
    signal.set_wakeup_fd(write)
    try:
        with capture(settings(tmp_path, 1, 1)) as session:
            train(session, 3)
            assert signal.set_wakeup_fd(write) == write
    finally:
        assert signal.set_wakeup_fd(-1) == write
        os.close(read)
        os.close(write)
