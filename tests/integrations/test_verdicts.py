"""What is said of real trainings with one thing wrong each: the right verdict, the right rank, and nobody else."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import warm
from commands import run

from integrations.test_lightning_ddp import environment

# By scenario of the job: the verdict, its phase, and the ranks that are named.
PAIR = {
    "slow input of rank 1": ("INPUT_STRAGGLER", "input_wait", [1]),
    "slow input of rank 1 with buffers": ("INPUT_STRAGGLER", "input_wait", [1]),
    "slow input of rank 1, MONAI": ("INPUT_STRAGGLER", "input_wait", [1]),
    "slow input of rank 1 with buffers, Lightning": ("INPUT_STRAGGLER", "input_wait", [1]),
    "slow forward of rank 1 with buffers": ("COMPUTE_STRAGGLER", "forward", [1]),
    "slow backward of rank 1": ("COMPUTE_STRAGGLER", "backward", [1]),
    "slow rest": ("RESIDUAL_HEAVY", "residual", []),
    "slow validation": ("VALIDATION_HEAVY", "validation", []),
    "slow checkpoint of rank 0": ("CHECKPOINT_HEAVY", "checkpoint", [0]),
    "slow checkpoint of rank 0 with buffers": ("CHECKPOINT_HEAVY", "checkpoint", [0]),
}
ALONE = {
    "slow input": ("INPUT_BOUND", "input", [0]),
    "slow rest": ("RESIDUAL_HEAVY", "residual", []),
    "slow checkpoint": ("CHECKPOINT_HEAVY", "checkpoint", []),
    "slow callbacks": ("CALLBACKS_HEAVY", "callbacks", []),
    "slow callbacks, Lightning": ("CALLBACKS_HEAVY", "callbacks", []),
    "slow validation, MONAI": ("VALIDATION_HEAVY", "validation", []),
    "slow loop": ("BETWEEN_STEPS_HEAVY", "between_other", []),
    "slower and slower": ("STEPS_SLOW_DOWN", "backward", []),
    "memory leak": ("CREEP_CONFIRMED", "memory", [0]),
}
FAULTS = [("pair", name, said) for name, said in PAIR.items()] + [("alone", name, said) for name, said in ALONE.items()]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder of all trainings; they share one process, for imports take longer than they do."""
    folder = tmp_path_factory.mktemp("verdicts")
    command = [sys.executable, "-m", "integrations.verdicts_job", str(folder)]
    done = warm.run(command, timeout=200, env=environment())
    assert done.returncode == 0, done.stderr[-4000:]
    return folder


def diagnosis(folder: Path) -> dict[str, Any]:
    """What ``summary`` says of a run, on the terminal of a program and in its file alike."""
    if (folder / "0_kineto").is_dir():
        assert run("merge", folder, "--workers", "1").code == 0
    done = run("summary", folder, "--json")
    assert (done.code, done.err) == (0, "")
    said = json.loads(done.out)["diagnosis"]
    assert final(folder)["chakra_capture"]["diagnosis"] == said
    return said


def final(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "0_run" / "final_summary.json").read_text())


def problems(said: dict[str, Any]) -> list[dict[str, Any]]:
    return [finding for finding in said["findings"] if finding["severity"] != "info"]


@pytest.mark.parametrize(("kind", "name", "expected"), FAULTS, ids=[name for _, name, _ in FAULTS])
def test_what_is_wrong_is_the_verdict_and_the_rank_that_is_slow_is_named_and_no_other(trained, kind, name, expected):
    said = diagnosis(trained / kind / name)
    verdict, *others = problems(said)
    assert (said["verdict"], verdict["phase"], verdict["ranks"]) == expected
    assert verdict["kind"] == said["verdict"]
    assert [text[-1] for text in (verdict["summary"], verdict["action"])] == [".", "."]
    assert f"Next: {verdict['action'][:40]}" in final(trained / kind / name)["text"]
    accused = [finding for finding in others if finding["kind"].endswith("STRAGGLER")]
    assert {rank for finding in accused for rank in finding["ranks"]} <= {*expected[2]}


def test_work_of_one_rank_in_no_phase_names_nobody_but_the_wait_of_the_others_does(trained):
    said = diagnosis(trained / "pair" / "slow rest of rank 1")
    found = {finding["kind"]: finding["ranks"] for finding in problems(said)}
    assert (found["RESIDUAL_HEAVY"], found["STRAGGLER"]) == ([], [1])


@pytest.mark.parametrize("kind", ["alone", "pair"])
def test_healthy_run_says_so(trained, kind):
    said = diagnosis(trained / kind / "healthy")
    assert (problems(said), said["verdict"]) == ([], "COMPUTE_BOUND")
    assert final(trained / kind / "healthy")["text"].startswith("No bottleneck found (from 25 steps")


def test_time_that_a_rank_waits_for_the_other_one_in_backward_is_none_of_its_own(trained):
    folder = trained / "pair" / "slow backward of rank 1"
    said = json.loads(run("summary", folder, "--json").out)
    means = [
        next(row["mean_ns"] for row in said["phases"][str(rank)]["table"] if row["phase"] == "backward")
        for rank in (0, 1)
    ]
    late = said["stragglers"]["late_in"]["1"]
    # One rank naps 12 ms in backward and waits there, the other one naps 92 ms.
    assert min(means) > 24_000_000
    assert (late["phase"], late["own_ns"] > 80_000_000) == ("backward", True)
    assert late["own_ns"] - late["others_ns"] > 40_000_000
