"""A job that torchrun starts again after one of its ranks has left inside the window."""

from commands import process
from recording.recorded import files, manifest, steps

from integrations.test_lightning_ddp import check_two_ranks, run


def test_restart_leaves_both_runs_and_what_the_lost_rank_left_is_salvaged(tmp_path):
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node=2", "--max-restarts=1", "--rdzv-backend=c10d"]
    launcher += ["--rdzv-endpoint=127.0.0.1:0", "--rdzv-id=job", "--local-addr=127.0.0.1"]
    run([*launcher, "-m", "integrations.restart_job", str(tmp_path)])

    check_two_ranks(tmp_path, list(range(2, 41)), job="job.1")
    # Of the first attempt one rank is whole, up to the SIGTERM that torchrun sends it.
    said = manifest(tmp_path, 0, "job")
    assert (said["complete"], said["reason"]) == (False, "SIGTERM")
    assert (len(said["windows"][0]["steps"]), said["windows"][0]["partial_step"]) == (28, 30)
    assert said["run_id"] != manifest(tmp_path, 0, "job.1")["run_id"]
    for kind in ("chakra", "kineto"):
        assert steps(tmp_path / f"job_{kind}/rank-0.json") == list(range(2, 31))
        assert files(tmp_path / f"job_{kind}") == ["rank-0.json", "rank-1.json.part"]
    assert [name for name in files(tmp_path / "job_run") if "started" not in name] == [
        "rank-0.collectives.json",
        "rank-0.json",
        "run.json",
    ]

    done = process("merge", tmp_path, "--job", "job")
    assert done.code == 0, done
    assert [line.split(":")[0] for line in done.out.splitlines() if "salvaged" in line] == ["rank 1"]
    assert process("merge", tmp_path, "--job", "job", "--strict").code == 1
    told = process("summary", tmp_path, "--job", "job")
    assert told.code == 0, told
    assert "2-30 (28 of 39 asked for recorded whole, over 1 rank)" in told.out
    assert "rank 1: the process ended, or still runs, before its files were whole" in told.out
