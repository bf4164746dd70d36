"""The summary at the end of a training: by a process of its own, which never fails the training."""

import json
import logging
import sys
from pathlib import Path

import pytest

from chakra_capture import capture
from chakra_capture.layout import RunPaths
from chakra_capture.recording import summary_process
from chakra_capture.recording.manifest import Reason
from chakra_capture.recording.rank import RankInfo
from chakra_capture.recording.summary_process import OFF_VARIABLE, write_summary
from recording.loops import train
from recording.recorded import files, settings


@pytest.fixture
def summaries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(OFF_VARIABLE, "0")


def phases_only(folder: Path):
    return settings(folder, None, None, phases=True)


def final(folder: Path) -> dict:
    return json.loads((folder / "0_run" / "final_summary.json").read_text())


def test_training_ends_with_its_summary_and_without_the_libraries_that_make_it(tmp_path, summaries):
    loaded = {name for name in ("polars", "msgspec") if name in sys.modules}
    with capture(phases_only(tmp_path)) as session:
        train(session, 5)
    found = final(tmp_path)
    assert found["step_time"]["metadata"]["training_total_steps"] == 5
    assert found["chakra_capture"]["failed"] is None
    assert {name for name in ("polars", "msgspec") if name in sys.modules} == loaded


def test_training_that_fails_has_a_summary_that_says_so(tmp_path, summaries):
    def job() -> None:
        with capture(phases_only(tmp_path)) as session:
            train(session, 3)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        job()
    assert final(tmp_path)["chakra_capture"]["failed"] == "rank 0: ZeroDivisionError"
    assert final(tmp_path)["run_context"]["run"]["status"] == "failed"


def test_window_is_not_merged_in_the_job(tmp_path, summaries):
    with capture(settings(tmp_path, 1, 2)) as session:
        train(session, 4)
    assert final(tmp_path)["step_time"]["metadata"]["training_total_steps"] == 4
    assert not [name for name in files(tmp_path) if "_merged" in name]


@pytest.mark.parametrize(("rank", "reason", "variable"), [(1, None, "0"), (0, Reason.terminated, "0"), (0, None, "1")])
def test_no_summary_on_other_ranks_after_sigterm_or_where_it_is_off(tmp_path, monkeypatch, rank, reason, variable):
    monkeypatch.setenv(OFF_VARIABLE, variable)
    session = capture(phases_only(tmp_path), rank=RankInfo(rank=rank, world_size=1))
    with session:
        train(session, 2)
        if reason is not None:
            session.close(reason)
    assert not [name for name in files(tmp_path) if "final_summary" in name]


def test_process_that_hangs_is_ended_and_said(tmp_path, summaries, caplog, monkeypatch):
    slow = tmp_path / "slow"
    slow.write_text("#!/bin/sh\nexec sleep 60\n")
    slow.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(slow))
    with caplog.at_level(logging.WARNING):
        write_summary(RunPaths(tmp_path, "0"), limit_s=0.2)
    assert "was not written: it took longer than 0 s" in caplog.text


@pytest.mark.parametrize("executable", ["/nowhere/python", "/bin/false"])
def test_process_that_does_not_start_or_fails_is_said(tmp_path, summaries, caplog, monkeypatch, executable):
    monkeypatch.setattr(sys, "executable", executable)
    with caplog.at_level(logging.WARNING):
        with capture(phases_only(tmp_path)) as session:
            train(session, 2)
    assert [record.message.split(":")[0] for record in caplog.records if record.name == summary_process.__name__] == [
        f"{tmp_path / '0_run' / 'final_summary.json'} was not written"
    ]
    assert (tmp_path / "0_phases" / "rank-0.jsonl").exists()


def test_files_of_the_folder_a_job_was_started_in_are_no_modules(tmp_path, summaries, monkeypatch):
    (tmp_path / "polars.py").write_text("raise SystemExit(9)")
    monkeypatch.chdir(tmp_path)
    with capture(phases_only(tmp_path)) as session:
        train(session, 2)
    assert final(tmp_path)["schema_version"] == 1.9
