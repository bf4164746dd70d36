"""CUDA out of memory in the window: the window is kept, and what the memory held is written. There is no GPU here."""

import logging
import pickle

import pytest
import torch

from chakra_capture import capture
from recording.loops import train, work
from recording.recorded import check_pair, files, manifest, settings

CONTENT = {"segments": [], "device_traces": [[{"action": "oom"}]]}


@pytest.fixture
def cuda(monkeypatch):
    """Stand-ins for what torch does on a device; the calls that switch its history."""
    calls = []
    state = {"is_on": False}

    def record(enabled="all", **options):
        calls.append(enabled)
        state["is_on"] = enabled is not None

    answers = {"is_available": True, "is_initialized": True, "is_current_stream_capturing": False, "device_count": 0}
    for name, value in {**answers, "synchronize": None}.items():
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    monkeypatch.setattr(torch._C, "_cuda_isHistoryEnabled", lambda: state["is_on"], raising=False)
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", record)
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: CONTENT)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    return state, calls


def run_out_of_memory(session, *, cause=None):
    with session:
        train(session, 3)
        with session.step(3):
            work()
            raise torch.OutOfMemoryError("CUDA out of memory.") from cause


def test_out_of_memory_in_the_window_keeps_it_and_writes_a_snapshot(tmp_path, cuda):
    with pytest.raises(torch.OutOfMemoryError):
        run_out_of_memory(capture(settings(tmp_path, 1, 9, memory_snapshot=True)))

    check_pair(tmp_path, [1, 2, 3])
    said = manifest(tmp_path)
    record = said["windows"][0]
    assert (said["reason"], said["detail"], record["partial_step"]) == ("exception", "OutOfMemoryError", 3)
    assert record["memory_snapshot"] == "0_run/rank-0.memory.pickle"
    assert pickle.loads((tmp_path / record["memory_snapshot"]).read_bytes()) == CONTENT
    assert cuda[1] == ["all", None]


def test_out_of_memory_that_the_loop_survives_is_written_too_and_the_window_goes_on(tmp_path, cuda):
    with capture(settings(tmp_path, 1, 3, memory_snapshot=True)) as session:
        for step in range(5):
            for attempt in range(2):
                try:
                    with session.step(step):
                        work()
                        if step == 2 and attempt == 0:
                            raise torch.OutOfMemoryError
                    break
                except torch.OutOfMemoryError:
                    pass

    assert manifest(tmp_path)["complete"]
    assert "0_run/rank-0.memory.pickle" in files(tmp_path)


def test_error_that_came_of_it_counts_and_another_one_does_not(tmp_path, cuda):
    def fail(session, error):
        with session:
            train(session, 2)
            raise error

    wrapped = RuntimeError("step failed")
    wrapped.__cause__ = torch.OutOfMemoryError()
    for name, error in (("a", wrapped), ("b", RuntimeError("other"))):
        with pytest.raises(RuntimeError):
            fail(capture(settings(tmp_path / name, 1, 9, memory_snapshot=True)), error)

    assert "0_run/rank-0.memory.pickle" in files(tmp_path / "a")
    assert "0_run/rank-0.memory.pickle" not in files(tmp_path / "b")


def test_history_that_the_job_keeps_itself_is_left_alone(tmp_path, cuda):
    state, calls = cuda
    state["is_on"] = True
    with pytest.raises(torch.OutOfMemoryError):
        run_out_of_memory(capture(settings(tmp_path, 1, 9, memory_snapshot=True)))

    assert calls == []
    assert "0_run/rank-0.memory.pickle" in files(tmp_path)


def test_snapshot_that_cannot_be_written_costs_nothing_else(tmp_path, cuda, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pickle, "dump", full)
    with pytest.raises(torch.OutOfMemoryError):
        run_out_of_memory(capture(settings(tmp_path, 1, 9, memory_snapshot=True)))

    check_pair(tmp_path, [1, 2, 3])
    said = manifest(tmp_path)
    assert (said["reason"], said["windows"][0]["memory_snapshot"]) == ("exception", None)
    assert "rank-0.memory.pickle is lost: " in said["faults"][0]
    assert "cannot be written: No space left" in said["faults"][0]
    assert not [name for name in files(tmp_path) if ".pickle" in name]


def test_off_by_default_and_without_a_device_said(tmp_path, caplog):
    with pytest.raises(torch.OutOfMemoryError):
        run_out_of_memory(capture(settings(tmp_path / "off", 1, 9)))
    assert caplog.records == []
    with capture(settings(tmp_path / "on", 1, 1, memory_snapshot=True)) as session:
        train(session, 3)

    assert [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING] == [
        "chakra_profile.memory_snapshot has no effect: no CUDA device is in use in this process. Set it to false, or "
        "record after the model is on its device."
    ]
    assert manifest(tmp_path / "on")["complete"]
