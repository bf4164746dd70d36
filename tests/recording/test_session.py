"""Sessions in plain loops on the real profiler: the right steps in both files, whatever happens."""

import copy
import logging
import pickle
import subprocess
import sys
import textwrap

import pytest
import torch
import warm
from torch.profiler import record_function

from chakra_capture import ChakraProfileConfig, capture
from chakra_capture.annotations import VALIDATION, parse_step
from chakra_capture.errors import RecordingError, SettingsError
from chakra_capture.recording.rank import RankInfo
from recording.loops import micro_batches, train, work
from recording.recorded import check_pair, entries, files, manifest, names, read, settings, steps, traces


@pytest.fixture
def log(caplog):
    caplog.set_level(logging.INFO, logger="chakra_capture")
    return caplog


def messages(log, level):
    return [record.getMessage() for record in log.records if record.levelno == level]


def test_nemos_sample_records_every_step_of_the_window(tmp_path, log):
    with capture(settings(tmp_path, 5, 10, warmup_steps=0, active_steps=1)) as session:
        train(session, 14)

    check_pair(tmp_path, [5, 6, 7, 8, 9, 10])
    assert messages(log, logging.INFO) == [
        "====== Start chakra profiling from global_step 5 ======",
        "====== End chakra profiling at global_step 11 ======",
    ]
    assert files(tmp_path) == [
        "0_chakra/rank-0.json",
        "0_kineto/rank-0.json",
        "0_phases/rank-0.jsonl",
        "0_run/rank-0.json",
        "0_run/run.json",
    ]
    said = manifest(tmp_path)
    assert (said["complete"], said["reason"], said["windows"][0]["steps"]) == (True, "complete", [5, 6, 7, 8, 9, 10])
    assert said["run_id"] == read(tmp_path / "0_run/run.json")["run_id"]


def test_warm_up_steps_are_inside_the_window_and_not_recorded(tmp_path):
    with capture(settings(tmp_path, 2, 4, warmup_steps=1, active_steps=2)) as session:
        train(session, 8)

    check_pair(tmp_path, [3, 4])


def test_window_of_nothing_but_warm_up_is_refused_before_training(tmp_path):
    with pytest.raises(SettingsError, match="warmup_steps is 1 but the window"):
        settings(tmp_path, 2, 2, warmup_steps=1)


def test_each_cycle_has_its_own_file_pair_and_the_last_one_is_clipped(tmp_path):
    with capture(settings(tmp_path, 1, 5, warmup_steps=1, active_steps=2)) as session:
        train(session, 8)

    check_pair(tmp_path, [2, 3])
    check_pair(tmp_path, [5], cycle=1)
    windows = manifest(tmp_path)["windows"]
    assert [(w["cycle"], w["steps"], w["reason"]) for w in windows] == [(0, [2, 3], "complete"), (1, [5], "complete")]
    # The second cycle began at once, so the first one's observer had to be waited for.
    assert windows[0]["slept_ns"] > 0


def test_a_step_holds_all_its_micro_batches_and_a_window_is_written_once(tmp_path):
    with capture(settings(tmp_path, 2, 3)) as session:
        for step, batch in micro_batches(total=20, size=4):
            if batch == 0:
                session.start_step(step)
            with record_function(f"batch {step}.{batch}"):
                work()
            if batch == 3:
                session.end_step(step)

    check_pair(tmp_path, [2, 3])
    expected = [f"batch {step}.{batch}" for step in (2, 3) for batch in range(4)]
    for folder in ("0_chakra", "0_kineto"):
        assert names(tmp_path / folder / "rank-0.json", "batch ") == expected


def test_one_step_window_is_one_recording_of_one_step(tmp_path):
    with capture(settings(tmp_path, 2, 2)) as session:
        train(session, 6)

    check_pair(tmp_path, [2])
    assert files(tmp_path / "0_chakra") == ["rank-0.json"]


def test_training_that_ends_inside_the_window_keeps_what_it_has(tmp_path, log):
    with capture(settings(tmp_path, 6, 20)) as session:
        train(session, 8)

    check_pair(tmp_path, [6, 7])
    said = manifest(tmp_path)
    assert (said["complete"], said["reason"]) == (False, "training ended")
    assert (said["windows"][0]["start_step"], said["windows"][0]["end_step"]) == (6, 20)
    assert "====== End chakra profiling at global_step 8 ======" in messages(log, logging.INFO)


def test_exception_inside_the_window_propagates_unchanged_and_marks_the_partial_step(tmp_path):
    error = RuntimeError("training failed")

    def fail_in_step_3():
        with capture(settings(tmp_path, 2, 5)) as session:
            for step in range(8):
                with session.step(step):
                    work()
                    if step == 3:
                        raise error

    with pytest.raises(RuntimeError) as caught:
        fail_in_step_3()
    assert caught.value is error
    check_pair(tmp_path, [2, 3])
    said = manifest(tmp_path)
    assert (said["complete"], said["reason"], said["detail"]) == (False, "exception", "RuntimeError")
    assert (said["windows"][0]["steps"], said["windows"][0]["partial_step"]) == ([2], 3)


def test_keyboard_interrupt_closes_the_files(tmp_path):
    def interrupt():
        with capture(settings(tmp_path, 1, 5)) as session:
            train(session, 3)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupt()
    check_pair(tmp_path, [1, 2])
    assert manifest(tmp_path)["detail"] == "KeyboardInterrupt"


def test_window_that_is_never_reached_is_said_once(tmp_path, log):
    with capture(settings(tmp_path, 100, 102)) as session:
        train(session, 3)

    assert messages(log, logging.WARNING) == [
        "The profiling window 100..102 was never reached; nothing was recorded. Set chakra_profile.start_step and "
        "end_step to steps that training reaches."
    ]
    assert (manifest(tmp_path)["complete"], manifest(tmp_path)["reason"]) == (False, "window never reached")
    assert files(tmp_path) == ["0_phases/rank-0.jsonl", "0_run/rank-0.json", "0_run/run.json"]


def test_resume_past_the_window_is_said_at_the_first_step(tmp_path, log):
    with capture(settings(tmp_path, 5, 10)) as session:
        session.start_step(12)
        assert "already past at global_step 12" in messages(log, logging.WARNING)[0]
        session.end_step(12)
        train(session, 15, first=13)

    assert len(messages(log, logging.WARNING)) == 1
    assert manifest(tmp_path)["reason"] == "window already past"


def test_resume_inside_the_window_records_the_rest(tmp_path):
    with capture(settings(tmp_path, 5, 10)) as session:
        train(session, 14, first=8)

    check_pair(tmp_path, [8, 9, 10])
    said = manifest(tmp_path)
    assert (said["complete"], said["reason"]) == (False, "resumed inside the window")
    assert (said["windows"][0]["start_step"], said["windows"][0]["end_step"]) == (5, 10)


def test_second_loop_in_the_process_is_a_new_window_of_the_same_run(tmp_path):
    chosen = settings(tmp_path, 2, 3)
    for _ in range(2):
        with capture(chosen) as session:
            train(session, 6)

    check_pair(tmp_path, [2, 3])
    check_pair(tmp_path, [2, 3], cycle=1)
    said = manifest(tmp_path)
    assert [w["host_trace"] for w in said["windows"]] == ["0_chakra/rank-0.json", "0_chakra/rank-0.cycle-1.json"]
    assert said["complete"]


def test_two_windows_are_two_file_pairs(tmp_path):
    with capture(
        ChakraProfileConfig(
            enabled=True,
            trace_dir=str(tmp_path),
            windows=[{"start_step": 1, "end_step": 2}, {"start_step": 5, "end_step": 5}],
        )
    ) as session:
        train(session, 8)

    check_pair(tmp_path, [1, 2])
    check_pair(tmp_path, [5], cycle=1)


def test_steps_told_twice_or_without_an_end_do_no_harm(tmp_path):
    with capture(settings(tmp_path, 1, 4)) as session:
        for step in range(7):
            session.start_step(step)
            session.start_step(step)
            work()
            if step != 2:
                session.end_step(step)
                session.end_step(step)

    check_pair(tmp_path, [1, 2, 3, 4])
    record = manifest(tmp_path)["windows"][0]
    assert (record["steps"], record["aborted_steps"], record["reason"]) == ([1, 3, 4], [2], "steps skipped")


def test_steps_that_jump_over_the_end_of_the_window_close_it(tmp_path):
    with capture(settings(tmp_path, 1, 4)) as session:
        for step in (0, 1, 2, 9, 10):
            with session.step(step):
                work()

    check_pair(tmp_path, [1, 2])
    assert manifest(tmp_path)["reason"] == "steps skipped"


def test_our_own_annotations_cannot_break_the_files(tmp_path):
    with capture(settings(tmp_path, 1, 1)) as session:
        for step in range(3):
            with session.step(step), session.phase('for"ward\\\n\x01'):
                work()

    check_pair(tmp_path, [1])
    for folder in ("0_chakra", "0_kineto"):
        assert names(tmp_path / folder / "rank-0.json", "for_ward") == ["for_ward___"]


@pytest.mark.parametrize(
    ("name", "in_host", "in_device"),
    [
        ('only"quote', "only_quote", "only_quote"),
        ("back\\slash", "back_slash", "back/slash"),
        ("new\nline", "new_line", "newline"),
        ('{"tag": ["a\\"]}', "{_tag_: [_a__]}", "{_tag_: [_a/_]}"),
        ('x", "ctrl_deps": 3,\n', "x_, _ctrl_deps_: 3,_", "x_, _ctrl_deps_: 3,"),
        ("模型 é", "模型 é", "unknown"),
    ],
)
def test_names_that_users_give_cannot_break_the_files(tmp_path, name, in_host, in_device):
    with capture(settings(tmp_path, 1, 1)) as session:
        for step in range(3):
            with session.step(step), record_function(name):
                work()

    check_pair(tmp_path, [1])
    assert in_host in {entry["name"] for entry in entries(tmp_path / "0_chakra/rank-0.json")}
    assert in_device in {entry["name"] for entry in entries(tmp_path / "0_kineto/rank-0.json")}
    num_unsafe = (in_host != name) + ('"' in name)
    assert manifest(tmp_path)["windows"][0]["repaired_names"] == num_unsafe


def test_validation_that_is_begun_inside_a_step_and_not_ended_ends_with_it(tmp_path):
    with capture(settings(tmp_path, 1, 2, validation="exclude")) as session:
        for step in range(4):
            with session.step(step):
                session.start_validation()
                work()

    check_pair(tmp_path, [1, 2])
    events = entries(tmp_path / "0_kineto/rank-0.json")
    ends = {
        name: [e["ts"] + e["dur"] for e in events if str(e["name"]).startswith(name)]
        for name in ("ProfilerStep#", VALIDATION)
    }
    assert len(ends[VALIDATION]) == 2
    assert all(
        inner <= outer for inner, outer in zip(*map(sorted, (ends[VALIDATION], ends["ProfilerStep#"])), strict=True)
    )


def test_phase_outside_the_window_records_nothing(tmp_path):
    with capture(settings(tmp_path, 1, 1)) as session:
        with session.step(0), session.phase("forward"):
            work()
        train(session, 3, first=1)

    assert names(tmp_path / "0_chakra/rank-0.json", "forward") == []


def test_operators_lie_inside_their_step(tmp_path):
    with capture(settings(tmp_path, 1, 2)) as session:
        train(session, 4)

    events = entries(tmp_path / "0_kineto/rank-0.json")
    spans = [(e["ts"], e["ts"] + e["dur"]) for e in events if parse_step(e["name"]) is not None]
    operators = [e for e in events if e.get("cat") == "cpu_op"]
    assert operators
    assert all(any(start <= e["ts"] <= end for start, end in spans) for e in operators)


def test_compressed_traces_are_whole_and_nothing_is_left_beside_them(tmp_path):
    with capture(settings(tmp_path, 1, 2, compress=True)) as session:
        train(session, 4)

    assert files(tmp_path)[:2] == ["0_chakra/rank-0.json.gz", "0_kineto/rank-0.json.gz"]
    assert steps(tmp_path / "0_chakra/rank-0.json.gz") == [1, 2]
    assert steps(tmp_path / "0_kineto/rank-0.json.gz") == [1, 2]
    assert manifest(tmp_path)["windows"][0]["host_trace"] == "0_chakra/rank-0.json.gz"


def test_profiler_options_reach_the_trace(tmp_path):
    with capture(settings(tmp_path, 1, 1, with_stack=True, profile_memory=True, record_shapes=False)) as session:
        train(session, 3)

    content = read(tmp_path / "0_kineto/rank-0.json")
    assert (content["with_stack"], content["profile_memory"]) == (1, 1)
    assert "record_shapes" not in content
    assert any(e.get("cat") == "python_function" for e in content["traceEvents"])


def test_only_chosen_ranks_record_the_window_and_all_their_phases(tmp_path):
    for rank in (0, 1):
        with capture(settings(tmp_path, 1, 1, ranks=[1]), rank=RankInfo(rank, 2)) as session:
            train(session, 3)

    # Each rank leaves a mark of its start, which a second start of the same command finds.
    assert [name for name in files(tmp_path) if "run.json" not in name] == [
        "0_chakra/rank-1.json",
        "0_kineto/rank-1.json",
        "0_phases/rank-0.jsonl",
        "0_phases/rank-1.jsonl",
        "0_run/.rank-0.started",
        "0_run/.rank-1.started",
        "0_run/rank-1.json",
    ]


def test_disabled_settings_do_nothing(tmp_path):
    with capture({"enabled": False, "trace_dir": str(tmp_path)}) as session:
        assert not session.is_open
        train(session, 4)
        assert session.phase("forward") is not None

    assert files(tmp_path) == []


def test_environment_variable_turns_everything_off(tmp_path, monkeypatch):
    chosen = settings(tmp_path, 1, 1)
    monkeypatch.setenv("CHAKRA_CAPTURE_DISABLED", "1")
    with capture(chosen) as session:
        train(session, 3)

    assert files(tmp_path) == []


def averaged(session):
    module = torch.nn.Linear(1, 1)
    module.session = session
    return torch.optim.swa_utils.AveragedModel(module).module.session


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda s: pickle.loads(pickle.dumps(s)), averaged])
def test_copy_of_a_session_is_inert_and_leaves_the_recording_alone(tmp_path, duplicate):
    with capture(settings(tmp_path, 1, 2)) as session:
        for step in range(4):
            with session.step(step):
                work()
                if step == 1:
                    other = duplicate(session)
                    other.start_step(1)
                    other.end_step(1)
                    other.close()
                    del other

    check_pair(tmp_path, [1, 2])


def test_loop_without_lightning_is_told_that_it_has_no_logger(tmp_path, log, monkeypatch):
    monkeypatch.delitem(sys.modules, "chakra_capture.integrations.lightning", raising=False)
    with capture(settings(tmp_path, 1, 1, log_to_logger=True)) as session:
        train(session, 3)

    assert messages(log, logging.WARNING) == [
        "chakra_profile.log_to_logger has no effect here: it knows the loggers of a Lightning Trainer alone. The same "
        "numbers stand in final_summary.json."
    ]


def test_training_that_ends_while_warming_up_leaves_nothing_and_the_next_recording_is_whole(tmp_path):
    with capture(settings(tmp_path, 2, 6, warmup_steps=3)) as session:
        train(session, 4)
    assert traces(tmp_path) == []
    assert manifest(tmp_path)["reason"] == "training ended"

    with capture(settings(tmp_path, 1, 2)) as session:
        train(session, 4)
    check_pair(tmp_path, [1, 2], cycle=1)


def test_disabled_session_imports_no_torch():
    script = """
        import sys
        from chakra_capture import capture
        with capture({"enabled": False}) as session:
            with session.step(2), session.phase("forward"):
                pass
        print([name for name in sys.modules if name.split(".")[0] in ("torch", "omegaconf", "pytorch_lightning")])
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=60)

    assert done.stdout.strip() == "[]", done.stderr


def test_fault_is_raised_when_asked_for(tmp_path):
    (tmp_path / "taken").write_text("a file")
    with pytest.raises(RecordingError, match="cannot be"):
        with capture(settings(tmp_path / "taken", 1, 1, on_fault="raise")):
            pass


def test_interpreter_exit_inside_the_window_leaves_whole_files_and_exit_code_zero(tmp_path):
    script = f"""
        import sys
        sys.path.insert(0, {str(__file__).rsplit("/recording/", 1)[0]!r})
        from chakra_capture import capture
        from recording.loops import work
        from recording.recorded import settings
        from pathlib import Path
        session = capture(settings(Path({str(tmp_path)!r}), 1, 9))
        session.open()
        for step in range(4):
            session.start_step(step)
            work()
            if step < 3:
                session.end_step(step)
    """
    done = warm.run([sys.executable, "-c", textwrap.dedent(script)])

    assert done.returncode == 0, done.stderr
    check_pair(tmp_path, [1, 2, 3])
    said = manifest(tmp_path)
    assert (said["reason"], said["windows"][0]["partial_step"]) == ("process exit", 3)


def test_forked_data_loader_workers_inside_the_window_do_not_touch_the_files(tmp_path):
    data = torch.utils.data.TensorDataset(torch.arange(8.0).reshape(8, 1))
    with capture(settings(tmp_path, 1, 2)) as session:
        for step in range(4):
            with session.step(step):
                loader = torch.utils.data.DataLoader(data, batch_size=4, num_workers=1, multiprocessing_context="fork")
                for (batch,) in loader:
                    batch.sum()

    check_pair(tmp_path, [1, 2])


def test_forked_child_that_goes_on_computing_does_not_touch_the_files(tmp_path):
    script = f"""
        import os, sys
        sys.path.insert(0, {str(__file__).rsplit("/recording/", 1)[0]!r})
        from chakra_capture import capture
        from recording.loops import work
        from recording.recorded import settings
        from pathlib import Path
        with capture(settings(Path({str(tmp_path)!r}), 1, 3)) as session:
            for step in range(5):
                with session.step(step):
                    for _ in range(20):
                        work()
                    child = 0
                    if step == 2:
                        child = os.fork()
                        if child == 0:
                            for _ in range(200):
                                work()
                            session.end_step(step)
                            session.close()
                            # Any other exit hangs in Kineto's destructor after a fork (torch 2.13, without us too).
                            os._exit(0)
                        assert os.waitpid(child, 0)[1] == 0
    """
    done = warm.run([sys.executable, "-c", textwrap.dedent(script)])

    assert done.returncode == 0, done.stderr
    check_pair(tmp_path, [1, 2, 3])
    assert manifest(tmp_path)["complete"]


def test_steps_numbers_the_batches_and_takes_the_fetch_into_the_step(tmp_path):
    def loader():
        for number in range(5):
            with record_function("fetch"):
                work()
            yield number

    seen = []
    with capture(settings(tmp_path, 1, 2)) as session:
        for step, batch in session.steps(loader()):
            work()
            seen.append((step, batch))

    assert seen == [(0, 0), (1, 1), (2, 2), (3, 3), (4, 4)]
    check_pair(tmp_path, [1, 2])
    events = entries(tmp_path / "0_kineto/rank-0.json")
    bounds = {e["name"]: (e["ts"], e["ts"] + e["dur"]) for e in events if str(e["name"]).startswith("ProfilerStep#")}
    fetches = [e["ts"] for e in events if e["name"] == "fetch"]
    inside = [[low <= at < high for at in fetches].count(True) for low, high in bounds.values()]
    assert inside == [1, 1]


def test_steps_that_run_out_of_batches_count_no_step(tmp_path):
    with capture(settings(tmp_path, 1, 4)) as session:
        for _ in session.steps([0, 1, 2]):
            work()

    said = manifest(tmp_path)
    assert (said["complete"], said["windows"][0]["steps"]) == (False, [1, 2])


def test_loop_left_by_break_leaves_its_last_step_cut_short(tmp_path):
    with capture(settings(tmp_path, 1, 4)) as session:
        for step, _ in session.steps(range(10), first_step=1):
            work()
            if step == 3:
                break

    record = manifest(tmp_path)["windows"][0]
    assert (record["steps"], record["partial_step"]) == ([1, 2], 3)


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"ranks": [7]}, "ranks is [7] but the job has 1 rank(s)"),
    ],
)
def test_settings_that_record_nothing_or_less_say_so(tmp_path, log, changes, part):
    with capture({"enabled": True, "trace_dir": str(tmp_path), **changes}) as session:
        train(session, 1)

    assert [part in message for message in messages(log, logging.WARNING)].count(True) == 1
