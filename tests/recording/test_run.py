"""One id and one set of folders per run, whatever lies in trace_dir."""

import logging

import pytest

from chakra_capture import ChakraProfileConfig, capture
from chakra_capture.errors import SettingsError
from chakra_capture.recording import registry
from chakra_capture.recording.rank import RankInfo
from chakra_capture.recording.run import job_name, launch_id, open_run
from recording.loops import train
from recording.recorded import files, manifest, read, settings, steps


def record(chosen, rank=None):
    """Record as a process of its own would: without memory of the runs before."""
    registry.forget_runs()
    with capture(chosen, rank=rank) as session:
        train(session, 3)


@pytest.mark.parametrize(
    ("job_id", "environ", "expected"),
    [
        (None, {}, "0"),
        ("mine", {"SLURM_JOB_ID": "7"}, "mine"),
        (None, {"SLURM_JOB_ID": "7", "TORCHELASTIC_RUN_ID": "e"}, "7"),
        (None, {"TORCHELASTIC_RUN_ID": "e"}, "e"),
        (None, {"TORCHELASTIC_RUN_ID": "none"}, "0"),
        (None, {"TORCHELASTIC_RUN_ID": "a/b c"}, "a_b_c"),
    ],
)
def test_job_is_named_by_setting_then_slurm_then_torchrun(job_id, environ, expected):
    assert job_name(ChakraProfileConfig(job_id=job_id), environ) == expected


def test_launch_id_tells_restarts_apart():
    environ = {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1", "MASTER_ADDR": "host", "MASTER_PORT": "29500"}

    assert launch_id(environ, with_address=False) == "7-1"
    assert launch_id(environ, with_address=True) == "7-1-host-29500"


def test_second_run_takes_the_next_names_and_says_so_once(tmp_path, caplog):
    for _ in range(3):
        record(settings(tmp_path, 1, 1))

    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert warnings == [
        f"{tmp_path}/0_chakra already holds another run; this one is written to {tmp_path}/0.{n}_chakra and its "
        "siblings."
        for n in (1, 2)
    ]
    ids = {manifest(tmp_path, job=job)["run_id"] for job in ("0", "0.1", "0.2")}
    assert len(ids) == 3
    assert all(steps(tmp_path / f"{job}_kineto/rank-0.json") == [1] for job in ("0", "0.1", "0.2"))


def test_folder_of_nemo_counts_as_another_run(tmp_path):
    (tmp_path / "0_kineto").mkdir()
    (tmp_path / "0_kineto/rank-3.json").write_text("{}")
    record(settings(tmp_path, 1, 1))

    assert (tmp_path / "0.1_chakra/rank-0.json").exists()
    assert not (tmp_path / "0_chakra").exists()
    assert read(tmp_path / "0_kineto/rank-3.json") == {}


def test_unfinished_files_of_a_killed_run_count_as_another_run(tmp_path):
    (tmp_path / "0_chakra").mkdir()
    (tmp_path / "0_chakra/rank-0.json.part").write_text("{")
    record(settings(tmp_path, 1, 1))

    assert (tmp_path / "0.1_chakra/rank-0.json").exists()


def test_empty_folders_are_used(tmp_path):
    (tmp_path / "0_chakra").mkdir()
    (tmp_path / "0_run").mkdir()
    record(settings(tmp_path, 1, 1))

    assert (tmp_path / "0_chakra/rank-0.json").exists()


def test_overwrite_replaces_the_old_files_of_the_rank_and_of_ranks_that_are_gone(tmp_path):
    record(settings(tmp_path, 1, 2, warmup_steps=0))
    old = manifest(tmp_path)["run_id"]
    (tmp_path / "0_kineto/rank-7.json").write_text("{}")
    (tmp_path / "0_chakra/rank-0.cycle-1.json").write_text("{}")
    (tmp_path / "0_chakra/notes.txt").write_text("mine")
    record(settings(tmp_path, 1, 1, if_exists="overwrite"))

    assert manifest(tmp_path)["run_id"] != old
    assert files(tmp_path) == [
        "0_chakra/notes.txt",
        "0_chakra/rank-0.json",
        "0_kineto/rank-0.json",
        "0_run/rank-0.json",
        "0_run/run.json",
    ]
    assert steps(tmp_path / "0_chakra/rank-0.json") == [1]


def test_error_refuses_before_training(tmp_path):
    record(settings(tmp_path, 1, 1))
    with pytest.raises(SettingsError, match=r"already holds another run and .*if_exists is 'error'"):
        record(settings(tmp_path, 1, 1, if_exists="error"))


def test_ranks_without_a_process_group_share_the_launchers_id(tmp_path, monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "node")
    monkeypatch.setenv("MASTER_PORT", "29400")
    for rank in (1, 0):
        record(settings(tmp_path, 1, 1), rank=RankInfo(rank, 2))

    assert files(tmp_path / "0_chakra") == ["rank-0.json", "rank-1.json"]
    assert manifest(tmp_path, 0)["run_id"] == manifest(tmp_path, 1)["run_id"] == "node-29400"

    # The same command again has the same launcher's id; its ranks find their own files and move on together.
    for rank in (0, 1):
        record(settings(tmp_path, 1, 1), rank=RankInfo(rank, 2))
    assert files(tmp_path / "0.1_chakra") == ["rank-0.json", "rank-1.json"]


def test_restart_of_the_launcher_is_another_run(tmp_path):
    first = {"TORCHELASTIC_RUN_ID": "job", "TORCHELASTIC_RESTART_COUNT": "0"}
    again = {"TORCHELASTIC_RUN_ID": "job", "TORCHELASTIC_RESTART_COUNT": "1"}
    chosen = settings(tmp_path, 1, 1)
    jobs = [open_run(chosen, RankInfo(rank, 2), environ).paths.job for environ in (first, again) for rank in (0, 1)]

    assert jobs == ["job", "job", "job.1", "job.1"]
