"""The example configurations: every command of configs/README.md runs and leaves the files that it promises."""

import os
import re
import shlex
import sys
from pathlib import Path

import pytest
import warm
import yaml

from chakra_capture.layout import RunPaths

CONFIGS = Path(__file__).parents[1] / "configs"
COMMANDS = re.findall(r"^\| `python (configs/[^`]+)` \|", (CONFIGS / "README.md").read_text(), re.MULTILINE)


def run(command: str, folder: Path) -> str:
    script, *arguments = shlex.split(command)
    environment = {k: v for k, v in os.environ.items() if k not in ("SLURM_JOB_ID", "TORCHELASTIC_RUN_ID", "SCRATCH")}
    modules = warm.TRAINING if "plain_loop" in script else warm.LIGHTNING
    done = warm.run(
        [sys.executable, CONFIGS.parent / script, *arguments], cwd=folder, env=environment, modules=modules, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def recorded_steps(trace: Path) -> set[int]:
    return {int(step) for step in re.findall(r"ProfilerStep#(\d+)", trace.read_text())}


def promised_steps(command: str) -> set[int]:
    if "warm_window" in command:
        return {12, 13, 14}
    if "periodic_windows" in command:
        return {101, 102}
    return {5, 6, 7, 8, 9, 10} if "nemo_app" in command else {2}


@pytest.mark.parametrize("command", [command for command in COMMANDS if not re.search("slurm|submitit", command)])
def test_documented_command_records_the_promised_steps_in_both_files(command: str, tmp_path: Path) -> None:
    run(command, tmp_path)
    folders = sorted(tmp_path.glob("**/traces"))
    assert len(folders) == (2 if "--multirun" in command else 1)
    for folder in folders:
        paths = RunPaths(folder, "0")
        assert recorded_steps(paths.host_trace(0)) == promised_steps(command)
        assert recorded_steps(paths.device_trace(0)) == promised_steps(command)
        assert paths.manifest(0).exists()
        assert not list(folder.glob("**/*.part"))
        if "periodic_windows" in command:
            assert recorded_steps(paths.device_trace(0, 1)) == {201, 202}


def test_documented_slurm_command_composes(tmp_path: Path) -> None:
    (command,) = [command for command in COMMANDS if "slurm" in command]
    composed = yaml.safe_load(run(command.replace("--multirun hidden=32,64", "--cfg all"), tmp_path))
    launcher, settings = composed["hydra"]["launcher"], composed["chakra_profile"]
    assert launcher["_target_"].endswith("SlurmLauncher")
    assert (launcher["nodes"], launcher["tasks_per_node"], launcher["max_num_timeout"]) == (2, 8, 3)
    assert (settings["enabled"], settings["warmup_steps"], settings["job_id"]) == (True, 2, None)


def test_every_example_is_documented() -> None:
    text = (CONFIGS / "README.md").read_text()
    for path in [*CONFIGS.glob("*.py"), *CONFIGS.glob("*.yaml")]:
        assert path.stem in text
