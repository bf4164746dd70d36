"""One id and one set of folders per run, whatever lies in trace_dir."""

import errno
import json
import logging
import os
import threading

import pytest
import torch

from chakra_capture import ChakraProfileConfig, capture
from chakra_capture.config import IfExists
from chakra_capture.errors import RecordingError, SettingsError
from chakra_capture.layout import RunPaths
from chakra_capture.recording import agreement, registry
from chakra_capture.recording.agreement import agree
from chakra_capture.recording.launch import launch_id, own_run_id
from chakra_capture.recording.rank import RankInfo
from chakra_capture.recording.run import job_name
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
    (tmp_path / "0_kineto/rank-0.json.part.tmp").write_text("{")  # of a process that was killed while Kineto wrote
    (tmp_path / "0_chakra/notes.txt").write_text("mine")
    record(settings(tmp_path, 1, 1, if_exists="overwrite"))

    assert manifest(tmp_path)["run_id"] != old
    assert manifest(tmp_path)["complete"]
    assert files(tmp_path) == [
        "0_chakra/notes.txt",
        "0_chakra/rank-0.json",
        "0_kineto/rank-0.json",
        "0_phases/rank-0.jsonl",
        "0_run/rank-0.json",
        "0_run/run.json",
    ]
    assert steps(tmp_path / "0_chakra/rank-0.json") == [1]


def test_phases_that_a_killed_run_left_keep_its_names(tmp_path):
    (tmp_path / "0_phases").mkdir()
    (tmp_path / "0_phases/rank-0.jsonl.part").write_text("{}\n")
    record(settings(tmp_path, 1, 1))
    assert steps(tmp_path / "0.1_chakra/rank-0.json") == [1]
    assert (tmp_path / "0_phases/rank-0.jsonl.part").read_text() == "{}\n"


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


@pytest.mark.parametrize(
    ("job", "count"),
    [("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"), ("SLURM_JOB_ID", "SLURM_RESTART_COUNT")],
)
def test_restart_and_requeue_leave_both_runs_whole(tmp_path, monkeypatch, job, count):
    monkeypatch.setenv(job, "job")
    monkeypatch.setenv("SLURM_STEP_ID", "0")
    for number in ("0", "1"):
        monkeypatch.setenv(count, number)
        for rank in (0, 1):
            record(settings(tmp_path, 1, 1), rank=RankInfo(rank, 2))

    for name in ("job", "job.1"):
        traces = [tmp_path / f"{name}_{kind}/rank-{rank}.json" for kind in ("chakra", "kineto") for rank in (0, 1)]
        assert [steps(trace) for trace in traces] == [[1]] * 4
        ids = {manifest(tmp_path, rank, name)["run_id"] for rank in (0, 1)}
        assert ids == {read(tmp_path / f"{name}_run/run.json")["run_id"]}
        assert all(manifest(tmp_path, rank, name)["complete"] for rank in (0, 1))


def test_second_start_is_told_apart_where_a_rank_recorded_nothing_the_first_time(tmp_path, monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "node")
    monkeypatch.setenv("MASTER_PORT", "29400")
    for changes in ({"ranks": [0]}, {}):
        for rank in (0, 1):
            record(settings(tmp_path, 1, 1, **changes), rank=RankInfo(rank, 2))

    assert files(tmp_path / "0_chakra") == ["rank-0.json"]
    assert files(tmp_path / "0.1_chakra") == ["rank-0.json", "rank-1.json"]


def test_ranks_of_one_torchrun_name_their_launcher(monkeypatch):
    environ = {"TORCHELASTIC_RUN_ID": "job", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    name = own_run_id(RankInfo(0, 2), environ)

    assert name.startswith(f"job-{os.getppid()}-")
    assert own_run_id(RankInfo(1, 2), environ) == name
    assert own_run_id(RankInfo(1, 2), {**environ, "LOCAL_WORLD_SIZE": "1"}) == "job"


def test_overwrite_removes_merged_tables_and_resources_of_ranks_that_are_gone(tmp_path):
    for name in ("0_merged/rank=0", "0_merged/rank=3", "0_merged/mine", "0_chakra/rank-3_resources"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "file").write_text("old")
    (tmp_path / "0_chakra/rank-3.json").write_text("{}")
    record(settings(tmp_path, 1, 1, if_exists="overwrite"))

    assert files(tmp_path / "0_merged") == ["mine/file"]
    assert files(tmp_path / "0_chakra") == ["rank-0.json"]


def test_file_system_without_hard_links_is_enough(tmp_path, monkeypatch, caplog):
    def refuse(*_arguments, **_options):
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    for _ in range(2):
        record(settings(tmp_path, 1, 1))

    assert manifest(tmp_path)["complete"]
    assert manifest(tmp_path, job="0.1")["complete"]


AGREE = {"environ": {}, "if_exists": IfExists.new, "number": 0}


def test_ranks_with_different_folders_use_that_of_rank_0(tmp_path, caplog):
    store = torch.distributed.HashStore()
    first, paths = agree(store, RunPaths(tmp_path / "a", "0"), RankInfo(0, 2), **AGREE)
    second = agree(store, RunPaths(tmp_path / "b", "0"), RankInfo(1, 2), **AGREE)

    assert second == (first, paths)
    assert [r.getMessage() for r in caplog.records] == [
        f"chakra_profile.trace_dir is {tmp_path}/b on rank 1 but {tmp_path}/a on rank 0; all ranks of a run write to "
        "one folder, so rank 0's is used."
    ]


def test_answer_of_an_earlier_attempt_is_not_taken(tmp_path):
    store = torch.distributed.HashStore()
    old = {"run_id": "old", "trace_dir": str(tmp_path), "job": "0", "decided": 1.0, "refused": None}
    store.set("chakra_capture//0", json.dumps(old))
    deciding = threading.Timer(0.4, agree, (store, RunPaths(tmp_path, "0"), RankInfo(0, 2)), AGREE)
    deciding.start()
    run_id, _ = agree(store, RunPaths(tmp_path, "0"), RankInfo(1, 2), **AGREE)
    deciding.join()

    assert run_id == read(tmp_path / "0_run/run.json")["run_id"] != "old"


def test_rank_0_that_does_not_record_does_not_hold_the_others_long(tmp_path, monkeypatch):
    monkeypatch.setattr(agreement, "_WAIT_S", 0.3)
    with pytest.raises(RecordingError, match="rank 0 did not name the run"):
        agree(torch.distributed.HashStore(), RunPaths(tmp_path, "0"), RankInfo(1, 2), **AGREE)
