"""The phases of a session's steps, read back from the file in plain Python."""

import itertools
import json
import logging
import os
import shutil
import sys
import tempfile
import textwrap
import time
from collections import deque
from pathlib import Path
from typing import Any

import pytest
import warm
from hypothesis import given
from hypothesis import strategies as st

from chakra_capture import capture
from chakra_capture.recording.manifest import Manifest
from chakra_capture.recording.phase_file import INTERVAL_NS
from chakra_capture.recording.step_phases import StepPhases
from recording.loops import Clock, work
from recording.recorded import check_pair, entries, files, manifest, settings

PHASES = "0_phases/rank-0.jsonl"


def lines(trace_dir: Path, kind: str | None = None) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (trace_dir / PHASES).read_text().splitlines()]
    return [line for line in found if kind in (None, line["kind"])]


def phases_only(folder: Path, **changes: Any):
    return settings(folder, None, None, **changes)


class SlowDevice:
    """Answers about a mark only once it has been asked so often for any."""

    def __init__(self, after: int) -> None:
        self.num_marks, self.num_asked, self.after = 0, 0, after
        self.free: deque[int] = deque()

    def mark(self) -> int:
        self.num_marks += 1
        return self.num_marks

    def has_passed(self, mark: int) -> bool:
        self.num_asked += 1
        return self.num_asked > self.after

    def elapsed_ns(self, first: int, last: int) -> int:
        return 100 * (last - first)

    def memory(self) -> None:
        return None

    def release(self, mark: int) -> None:
        self.free.append(mark)


def recorder(folder: Path, **more: Any) -> StepPhases:
    who = Manifest(run_id="r", job="0", rank=0, world_size=1, settings={}, versions={})
    return StepPhases(folder / PHASES, who, clock=Clock(), **more)


def time_forwards(phases: StepPhases, num_steps: int) -> None:
    for step in range(num_steps):
        phases.start_step(step)
        phases.begin("forward")
        phases.end("forward")
        phases.end_step()
        assert len(phases._pending) <= 64
    phases.close()


def test_every_step_has_a_line_with_its_phases_and_the_time_before_it(tmp_path):
    with capture(phases_only(tmp_path)) as session:
        with session.phase("checkpoint"):
            pass
        for step, _ in session.steps(range(3), first_step=7):
            with session.phase("forward"), session.phase("h2d"):
                work()
            if step == 8:
                session.end_step(step)
                session.start_validation()
                session.end_validation()
    assert [line["kind"] for line in lines(tmp_path)] == ["open", "step", "step", "step", "close"]
    steps = lines(tmp_path, "step")
    assert [line["step"] for line in steps] == [7, 8, 9]
    for line in steps:
        assert {name: calls for name, (_, calls) in line["phases"].items()} == {"input_wait": 1, "forward": 1, "h2d": 1}
        assert [name for name, _, _ in line["spans"]] == ["input_wait", "h2d", "forward"]
        assert all(0 <= begin <= end <= line["ns"] for _, begin, end in line["spans"])
        assert 0 < sum(ns for ns, _ in line["phases"].values()) <= line["ns"]
    assert [[*line["gap"]["phases"]] for line in steps] == [["checkpoint"], [], ["validation"]]
    for before, after in itertools.pairwise(steps):
        assert before["begin_ns"] + before["ns"] + after["gap"]["ns"] == after["begin_ns"]
    assert [line.get("flags") for line in steps] == [["first"], None, None]
    opened, closed = lines(tmp_path)[0], lines(tmp_path)[-1]
    assert (opened["run_id"], opened["rank"], opened["world_size"]) == (manifest(tmp_path)["run_id"], 0, 1)
    assert opened["monotonic_ns"] < steps[0]["begin_ns"] < closed["monotonic_ns"]
    assert opened["unix_ns"] < closed["unix_ns"]
    assert closed["gap"]["phases"] == {"input_wait": [closed["gap"]["phases"]["input_wait"][0], 1]}


def test_recorded_steps_are_flagged_and_their_phases_are_in_both_traces(tmp_path):
    with capture(settings(tmp_path, 1, 2)) as session:
        for _ in session.steps(range(4)):
            with session.phase("forward"):
                work()
    check_pair(tmp_path, [1, 2])
    assert [line.get("flags", []) for line in lines(tmp_path, "step")] == [["first"], ["profiled"], ["profiled"], []]
    assert [line["event"] for line in lines(tmp_path, "anchor")] == ["window_start", "window_end"]
    for folder in ("0_chakra", "0_kineto"):
        named = [e["name"] for e in entries(tmp_path / folder / "rank-0.json") if e.get("cat") != "gpu_user_annotation"]
        assert (named.count("forward"), named.count("input_wait")) == (2, 2)


def test_the_end_of_a_window_is_no_time_of_the_training(tmp_path):
    with capture(settings(tmp_path, 1, 2)) as session:
        for _ in session.steps(range(5)):
            work()
    gaps = [line["gap"] for line in lines(tmp_path, "step")]
    took = gaps[3]["phases"]["recording"][0]  # the profiler ends, and two files are written
    assert took > 1_000_000
    assert gaps[3]["ns"] - took < took


def test_a_wall_clock_that_is_stepped_in_mid_run_changes_no_duration(tmp_path, monkeypatch):
    real, started = time.time_ns, time.monotonic_ns()
    with capture(phases_only(tmp_path)) as session:
        for step, _ in session.steps(range(4)):
            if step == 1:
                monkeypatch.setattr(time, "time_ns", lambda: real() - 3_600_000_000_000)
                monkeypatch.setattr(time, "time", lambda: real() / 1e9 - 3600)
            with session.phase("forward"):
                time.sleep(0.005)
    lasted = time.monotonic_ns() - started
    opened, steps, closed = lines(tmp_path)[0], lines(tmp_path, "step"), lines(tmp_path)[-1]
    assert closed["unix_ns"] < opened["unix_ns"]  # it was stepped
    assert all(5_000_000 <= line["phases"]["forward"][0] <= line["ns"] for line in steps)
    total = sum(line["ns"] + line["gap"]["ns"] for line in steps) + closed["gap"]["ns"]
    assert 4 * 5_000_000 <= total <= lasted


def test_a_step_that_raised_or_never_ended_is_partial(tmp_path):
    with capture(phases_only(tmp_path)) as session:
        with pytest.raises(ValueError, match="once"), session.step(0):
            raise ValueError("once")
        with session.step(0):
            pass
        session.start_step(1)
    steps = [(line["step"], line.get("flags")) for line in lines(tmp_path, "step")]
    assert steps == [(0, ["first", "partial"]), (0, None), (1, ["partial"])]


def test_a_second_fit_goes_on_in_the_file_of_the_first(tmp_path):
    for first in (0, 2):
        with capture(phases_only(tmp_path)) as session:
            for _ in session.steps(range(2), first_step=first):
                pass
    assert [line["kind"] for line in lines(tmp_path)] == ["open", "step", "step", "close"] * 2
    assert [line["step"] for line in lines(tmp_path, "step")] == [0, 1, 2, 3]


def test_of_two_sessions_at_once_the_first_is_timed_and_its_steps_stay_its_own(tmp_path, caplog):
    with capture(phases_only(tmp_path)) as outer:
        for step, _ in outer.steps(range(3)):
            with capture(phases_only(tmp_path)) as inner:
                assert (inner.times_phases, outer.times_phases) == (False, True)
                for _ in inner.steps(range(7)):
                    with inner.phase("forward"):
                        pass
            if step == 1:
                with outer.phase("backward"):
                    pass
    assert [line["kind"] for line in lines(tmp_path)] == ["open", "step", "step", "step", "close"]
    assert [{*line["phases"]} for line in lines(tmp_path, "step")] == [
        {"input_wait"}, {"input_wait", "backward"}, {"input_wait"}
    ]  # fmt: skip
    assert ["another chakra-capture session" in r.getMessage() for r in caplog.records] == [True]
    assert len(manifest(tmp_path)["faults"]) == 1
    with capture(phases_only(tmp_path)) as later:
        assert later.times_phases


def test_a_fault_closes_the_file_and_the_next_training_is_timed_again(tmp_path, caplog):
    for _ in range(2):
        with capture(phases_only(tmp_path)) as session:
            before = sorted(os.readlink(f"/proc/self/fd/{name}") for name in files_in_use())
            session.measures({1: 2})  # no name at all
            for _ in session.steps(range(2)):
                pass
        assert str(tmp_path / f"{PHASES}.part") in before
        assert not [name for name in files_in_use() if PHASES in os.readlink(f"/proc/self/fd/{name}")]
    with capture(phases_only(tmp_path)) as session:
        for _ in session.steps(range(2)):
            pass
    assert [line["kind"] for line in lines(tmp_path)][-4:] == ["open", "step", "step", "close"]
    assert len(caplog.records) == 2


def files_in_use() -> list[str]:
    return [name for name in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{name}")]


def test_no_more_steps_are_recorded_than_asked_for(tmp_path):
    with capture(phases_only(tmp_path, max_recorded_steps=3)) as session:
        for _ in session.steps(range(9)):
            with session.phase("forward"):
                pass
    assert [line["step"] for line in lines(tmp_path, "step")] == [0, 1, 2]


def test_switched_off_there_is_no_file(tmp_path):
    with capture(settings(tmp_path, 1, 1, phases=False)) as session:
        for _ in session.steps(range(3)):
            with session.phase("forward"):
                pass
    assert not (tmp_path / "0_phases").exists()


def test_a_folder_that_vanishes_ends_the_phases_and_nothing_else(tmp_path, caplog):
    with caplog.at_level(logging.WARNING), capture(settings(tmp_path, 1, 2)) as session:
        for step, _ in session.steps(range(4)):
            if step == 1:
                shutil.rmtree(tmp_path / "0_phases")
    check_pair(tmp_path, [1, 2])
    said = [record.getMessage() for record in caplog.records]
    assert [text.partition(",")[0] for text in said] == ["Phases of steps are no longer recorded"]
    assert manifest(tmp_path)["faults"][0].startswith("phases: ")


def test_what_is_hooked_up_is_put_back_when_phases_end_and_a_failing_hook_costs_its_phase_alone(tmp_path, caplog):
    state = []

    def install(name):
        state.append(name)
        return lambda: state.remove(name)

    def fail():
        raise RuntimeError("no such attribute")

    with capture(phases_only(tmp_path, max_recorded_steps=2)) as session:
        session.time_phase("forward", lambda: install("forward"))
        session.time_phase("optimizer", fail)
        for step, _ in session.steps(range(3)):
            assert (step, state) == (step, [] if step == 2 else ["forward"])
        session.time_phase("forward", lambda: install("late"))
    assert state == []
    assert lines(tmp_path, "measures")[0]["phases"] == {
        "forward": None, "optimizer": "RuntimeError: no such attribute"
    }  # fmt: skip
    assert [r.getMessage() for r in caplog.records] == [
        "The phase optimizer is not measured, training goes on: RuntimeError: no such attribute"
    ]


def test_switching_off_in_the_middle_ends_the_phases(tmp_path, monkeypatch):
    with capture(phases_only(tmp_path)) as session:
        for step, _ in session.steps(range(4)):
            if step == 1:
                monkeypatch.setenv("CHAKRA_CAPTURE_DISABLED", "1")
        assert not session.times_phases
    assert [line["step"] for line in lines(tmp_path, "step")] == [0, 1]


def test_a_forked_child_leaves_the_file_alone(tmp_path):
    with capture(phases_only(tmp_path)) as session:
        for step, _ in session.steps(range(2)):
            if step == 0 and os.fork() == 0:
                try:
                    with session.phase("forward"):
                        session.end_step(0)
                    session.close()
                finally:
                    os._exit(0)
        os.wait()
    assert [line["kind"] for line in lines(tmp_path)] == ["open", "step", "step", "close"]


KILLED = """
    import os, sys
    from chakra_capture import capture

    session = capture({"enabled": True, "start_step": None, "trace_dir": sys.argv[1]})
    session.open()
    for step, _ in session.steps(range(10)):
        pass
    session._phases.steps.write()
    os._exit(0)
"""


def test_a_killed_process_leaves_its_lines_under_the_working_name(tmp_path):
    warm.run([sys.executable, "-c", textwrap.dedent(KILLED), tmp_path], check=True)
    assert [name for name in files(tmp_path) if "phases" in name] == [f"{PHASES}.part"]
    found = [json.loads(line) for line in (tmp_path / f"{PHASES}.part").read_text().splitlines()]
    assert [line.get("step") for line in found] == [None, *range(10)]


def test_times_of_the_device_come_when_it_has_answered_and_steps_keep_their_order(tmp_path):
    device = SlowDevice(after=3)
    time_forwards(recorder(tmp_path, device=device), 4)
    steps = lines(tmp_path, "step")
    assert [(line["step"], line["device_ns"]) for line in steps] == [
        (n, {"forward": 100, "(step)": 300}) for n in range(4)
    ]
    assert sorted(device.free) == [*range(1, device.num_marks + 1)]


def begin_with_nested_phases(phases: StepPhases) -> None:
    phases.start_step(0)  # mark 1
    phases.begin("optimizer")  # 2
    phases.begin("forward")  # 3
    phases.end("forward")  # 4
    phases.end("optimizer")  # 5


def test_times_of_the_device_are_exclusive_too_and_a_phase_it_cannot_compare_is_left_out(tmp_path):
    device = SlowDevice(after=0)
    phases = recorder(tmp_path, device=device)
    begin_with_nested_phases(phases)
    phases.end_step()  # mark 6
    device.elapsed_ns = lambda first, last: None
    phases.start_step(1)
    phases.end_step()
    phases.close()
    times = [line["device_ns"] for line in lines(tmp_path, "step")]
    assert times == [{"forward": 100, "optimizer": 200, "(step)": 500}, {}]


@pytest.mark.parametrize("unknown", [(3, 4), (2, 5)])
def test_a_phase_that_the_device_knows_in_part_has_no_time_there(tmp_path, unknown):
    device = SlowDevice(after=0)
    device.elapsed_ns = lambda first, last: None if (first, last) == unknown else 100 * (last - first)
    phases = recorder(tmp_path, device=device)
    begin_with_nested_phases(phases)
    phases.begin("backward")  # mark 6
    phases.end("backward")  # 7
    phases.end_step()  # 8
    phases.close()
    (line,) = lines(tmp_path, "step")
    known = {"backward": 100, "(step)": 700}
    assert line["device_ns"] == (known if unknown == (3, 4) else {**known, "forward": 100})


def test_what_is_measured_and_what_came_to_nothing_is_said_in_order(tmp_path):
    phases = recorder(tmp_path, device=SlowDevice(after=10**9))
    phases.measures("forward")
    phases.measures("h2d", "no device")
    for step in range(2):
        phases.start_step(step)
        phases.measures("forward")
        phases.end_step()
    phases.start_step(2)
    phases.begin("forward")
    phases.abort_step([5, 6], "zeroed")
    phases.measures("h2d")
    phases.close()
    said = [(line["kind"], line.get("step"), line.get("phases")) for line in lines(tmp_path) if line["kind"] != "step"]
    assert said[1:-1] == [
        ("measures", None, {"forward": None, "h2d": "no device"}),
        ("dropped", 2, None),
        ("measures", None, {"forward": None, "h2d": None}),
    ]
    assert [line["kind"] for line in lines(tmp_path)] == [
        "open", "measures", "step", "step", "dropped", "measures", "close"
    ]  # fmt: skip
    assert lines(tmp_path, "dropped") == [{"kind": "dropped", "step": 2, "batches": [5, 6], "why": "zeroed"}]
    assert lines(tmp_path, "close")[0]["gap"]["phases"]["forward"][1] == 1


def test_a_device_that_never_answers_costs_its_own_times_alone(tmp_path):
    device = SlowDevice(after=10**9)
    time_forwards(recorder(tmp_path, device=device), 70)
    assert [line["device_ns"] for line in lines(tmp_path, "step")] == [None] * 70
    assert sorted(device.free) == [*range(1, device.num_marks + 1)]


def test_memory_of_the_process_is_in_the_step_that_writes(tmp_path):
    clock = Clock()
    who = Manifest(run_id="r", job="0", rank=0, world_size=1, settings={}, versions={})
    phases = StepPhases(tmp_path / PHASES, who, clock=clock)
    for step in range(3):
        phases.start_step(step)
        clock.now += INTERVAL_NS * (step == 1)
        phases.end_step()
        if phases.is_due:
            phases.write()
    phases.close()
    found = [line.get("rss_bytes") for line in lines(tmp_path, "step")]
    assert found[0] is found[2] is None
    assert 10**6 < found[1] < 10**11


@given(st.text(), st.text())
def test_any_name_of_a_phase_is_read_back_as_it_was(first, second):
    with tempfile.TemporaryDirectory() as folder:
        phases = recorder(Path(folder))
        phases.start_step(0)
        for name in (first, second):
            phases.begin(name)
            phases.end(name)
        phases.end_step()
        phases.close()
        assert {*lines(Path(folder), "step")[0]["phases"]} == {first, second}


def test_a_step_without_work_belongs_to_the_time_between(tmp_path):
    phases = recorder(tmp_path)
    phases.start_step(0)
    phases.end_step()
    phases.begin("logging")
    phases.end("logging")
    phases.start_step(1)
    phases.begin("input_wait")
    phases.end("input_wait")
    phases.abort_step()
    phases.begin("logging")
    phases.end("logging")
    phases.start_step(1)
    phases.end_step()
    phases.close()
    first, second = lines(tmp_path, "step")
    assert second["gap"]["phases"] == {"logging": [2, 2], "input_wait": [1, 1]}
    assert first["begin_ns"] + first["ns"] + second["gap"]["ns"] == second["begin_ns"]
