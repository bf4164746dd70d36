"""Jobs that Hydra starts through submitit: each recorded by itself, and preempted and requeued as without us."""

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from commands import run
from preempted_job import AT_STEP, PREEMPTED
from recording.recorded import check_pair, manifest, read, steps

TESTS = Path(__file__).parent
COMMANDS = re.findall(r"^\| `python (configs/[^`]+)` \|", (TESTS.parent / "configs" / "README.md").read_text(), re.M)
WIDTHS = (16, 32, 64, 128)


def documented(part: str) -> list[str]:
    """The arguments of the one documented command that has this in it."""
    (command,) = [command for command in COMMANDS if part in command]
    return shlex.split(command)[1:]


def environment() -> dict[str, str]:
    left_out = ("SLURM_", "SUBMITIT_", "TORCHELASTIC_")
    return {k: v for k, v in os.environ.items() if not k.startswith(left_out)} | {"OMP_NUM_THREADS": "1"}


def preempt(folder: Path, sweep: "subprocess.Popen[str]") -> None:
    """Do what submitit's controller does when the time of a job runs out."""
    while sweep.poll() is None:
        for mark in folder.glob("**/waiting"):
            os.kill(int(mark.read_text()), signal.SIGUSR2)
            return
        time.sleep(0.05)


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The documented sweep, with a longer window and one of its jobs preempted in it."""
    folder = tmp_path_factory.mktemp("sweep")
    command = [sys.executable, str(TESTS / "preempted_job.py"), *documented("submitit_local")]
    started = subprocess.Popen(
        [*command, "chakra_profile.end_step=4"],
        cwd=folder,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    preempt(folder, started)
    out, _ = started.communicate(timeout=240)
    assert started.returncode == 0, out
    return next(folder.glob("multirun/*/*"))


def test_sweep_of_four_jobs_is_four_whole_runs_that_merge(sweep):
    for number, width in enumerate(WIDTHS):
        traces = sweep / str(number) / "traces"
        last = "0.1" if width == PREEMPTED else "0"
        check_pair(traces, [2, 3, 4], job=last)
        assert manifest(traces, job=last)["complete"]
        done = run("merge", traces, "--job", last, "--strict", "--json")
        assert done.code == 0, done.err
        assert (traces / f"{last}_merged" / "rank=0" / "nodes.parquet").exists()
        assert (sweep / str(number) / ".hydra" / "overrides.yaml").read_text().startswith(f"- hidden={width}")
    assert len({read(file)["run_id"] for file in sweep.glob("*/traces/*_run/rank-0.json")}) == len(WIDTHS) + 1


def test_preempted_job_is_requeued_by_submitit_and_its_window_is_kept(sweep):
    job = sweep / str(WIDTHS.index(PREEMPTED))
    (log,) = [text for file in sweep.glob(".submitit/*/*_0_log.out") if "Caught signal" in (text := file.read_text())]
    assert "Caught signal SIGUSR2" in log
    assert "Requeued job" in log
    assert (job / "handlers").read_text() == "0 SignalHandler.checkpoint_and_try_requeue"

    said = manifest(job / "traces")
    assert (said["complete"], said["reason"], said["detail"]) == (False, "exception", "SystemExit")
    for part in ("chakra", "kineto"):
        assert steps(job / "traces" / f"0_{part}" / "rank-0.json") == [2, AT_STEP]
    assert not list(job.rglob("*.part"))
    done = run("merge", job / "traces", "--job", "0", "--json")
    assert done.code == 0, done.err
