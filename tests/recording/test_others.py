"""Profilers, observers, forks and threads of others, at any moment: nobody crashes, and the record is true."""

import pytest

from recording.recorded import check_pair, files, manifest, steps
from recording.scripts import run_script

TAKEN = "another torch profiler was started or stopped inside the window and ended ours"
SECOND = "Another ExecutionTraceObserver asks to write"


def test_profiler_that_starts_in_the_window_and_outlives_it_keeps_its_trace(tmp_path):
    said = run_script(
        tmp_path,
        """
        with capture(settings(folder, 2, 4)) as session:
            for step in range(10):
                if step == 6:
                    theirs.stop()
                    export(theirs)
                session.start_step(step)
                if step == 3:
                    theirs = profile(activities=[ProfilerActivity.CPU])
                    theirs.start()
                work()
                session.end_step(step)
        """,
    )

    assert said.count(TAKEN) == 1
    assert steps(tmp_path / "0_chakra/rank-0.json") == [2, 3, 4]
    assert (manifest(tmp_path)["reason"], manifest(tmp_path)["windows"][0]["device_trace"]) == ("fault", None)


def test_profiler_whose_schedule_warms_up_in_the_window_keeps_its_trace(tmp_path):
    said = run_script(
        tmp_path,
        """
        plan = schedule(wait=3, warmup=3, active=2, repeat=1)
        with capture(settings(folder, 2, 4)) as session, profile(schedule=plan, on_trace_ready=export) as theirs:
            for step in range(10):
                with session.step(step):
                    work()
                theirs.step()
        """,
    )

    assert said.count(TAKEN) == 1
    assert "theirs" in files(tmp_path)
    assert manifest(tmp_path)["windows"][0]["device_trace"] is None


def test_profiler_that_warms_up_before_the_window_is_left_alone(tmp_path):
    said = run_script(
        tmp_path,
        """
        plan = schedule(wait=1, warmup=3, active=2, repeat=1)
        with capture(settings(folder, 3, 3)) as session, profile(schedule=plan, on_trace_ready=export) as theirs:
            for step in range(8):
                with session.step(step):
                    work()
                theirs.step()
        """,
    )

    assert "another torch profiler is running in this process" in said
    assert "theirs" in files(tmp_path)
    assert [name for name in files(tmp_path) if "0_kineto" in name or "0_chakra" in name] == []


def test_profiler_that_runs_while_ours_warms_up_costs_nothing(tmp_path):
    run_script(
        tmp_path,
        """
        with capture(settings(folder, 1, 6, warmup_steps=3)) as session:
            for step in range(9):
                if step == 2:
                    theirs = profile()
                    theirs.start()
                with session.step(step):
                    work()
                if step == 2:
                    theirs.stop()
                    export(theirs)
        """,
    )

    check_pair(tmp_path, [4])
    assert manifest(tmp_path)["complete"]


@pytest.mark.parametrize(("first", "last"), [(3, 4), (4, 7)])
def test_observer_that_others_register_while_ours_is_registers_nothing(tmp_path, first, last):
    # Step 4 is after the window, in which the observer waits to be closed.
    said = run_script(
        tmp_path,
        f"""
        with capture(settings(folder, 2, 3)) as session:
            for step in range(10):
                with session.step(step):
                    if step == {first}:
                        theirs = ExecutionTraceObserver().register_callback(str(folder / "theirs.json"))
                        theirs.start()
                    work()
                    if step == {last}:
                        theirs.stop()
                        theirs.unregister_callback()
        theirs = ExecutionTraceObserver().register_callback(str(folder / "later.json"))
        theirs.start()
        work()
        theirs.stop()
        theirs.unregister_callback()
        assert read(folder / "later.json")["nodes"]
        """,
    )

    assert said.count(SECOND) == 1
    check_pair(tmp_path, [2, 3])
    assert manifest(tmp_path)["complete"]


def test_observer_that_was_ended_behind_our_back_is_let_go(tmp_path):
    said = run_script(
        tmp_path,
        """
        from torch._C._profiler import _remove_execution_trace_observer
        with capture(settings(folder, 2, 4)) as session:
            for step in range(8):
                with session.step(step):
                    work()
                if step == 3:
                    torch._C._profiler._disable_execution_trace_observer()
                    time.sleep(0.3)
                    _remove_execution_trace_observer()
        """,
    )

    assert said.count("rank-0.json ends early: another ExecutionTraceObserver of this process ended ours") == 1
    assert steps(tmp_path / "0_chakra/rank-0.json") == [2, 3]
    assert steps(tmp_path / "0_kineto/rank-0.json") == [2, 3, 4]
    assert manifest(tmp_path)["reason"] == "fault"


def test_child_forked_in_the_window_collects_nothing_and_can_profile(tmp_path):
    run_script(
        tmp_path,
        """
        def memory():
            return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

        with capture(settings(folder, 1, 2)) as session:
            for step in range(4):
                with session.step(step):
                    work()
                    if step == 1:
                        child = os.fork()
                        if child == 0:
                            before, one = memory(), torch.ones(2)
                            for _ in range(30_000):
                                one.add(1)
                            grown = memory() - before
                            with profile(activities=[ProfilerActivity.CPU]) as theirs:
                                work()
                            export(theirs)
                            os._exit(0 if grown < 8 << 20 else 3)
                        assert os.waitpid(child, 0)[1] == 0
        """,
    )

    check_pair(tmp_path, [1, 2])


def test_session_closed_from_another_thread_leaves_the_profiler_free(tmp_path):
    run_script(
        tmp_path,
        """
        session = capture(settings(folder, 1, 9))
        session.open()
        trainer = threading.Thread(target=train, args=(session, 4))
        trainer.start()
        trainer.join()
        session.close()
        assert not autograd._is_profiler_enabled and registry.is_idle()
        with profile() as theirs:
            work()
        export(theirs)
        with capture(settings(folder, 1, 1)) as session:
            train(session, 3)
        """,
    )

    assert "from another thread" in manifest(tmp_path)["faults"][0]
    assert steps(tmp_path / "0_kineto/rank-0.cycle-1.json") == [1]


@pytest.mark.parametrize(("pause", "device_steps"), [(0.01, True), (9, False)])
def test_exit_while_a_daemon_thread_trains_ends_the_recording(tmp_path, pause, device_steps):
    # A thread that does not come back in time loses its device trace, not its process.
    run_script(
        tmp_path,
        f"""
        reached = threading.Event()

        def loop():
            with capture(settings(folder, 1, 49)) as session:
                for step in range(10**6):
                    with session.step(step):
                        work()
                        if step == 5:
                            reached.set()
                        time.sleep({pause} if step > 4 else 0)

        threading.Thread(target=loop, daemon=True).start()
        reached.wait()
        """,
    )

    said = manifest(tmp_path)
    assert said["windows"][0]["steps"][:4] == [1, 2, 3, 4]
    assert (said["windows"][0]["device_trace"] is not None) == device_steps
    assert said["reason"] == ("process exit" if device_steps else "fault")
