"""``chakra-capture run``: the steps it finds in a script are those the script itself counts."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import warm
from commands import Outcome, run, taken_over

JOBS = Path(__file__).with_name("jobs.py")


def recorded(
    folder: Path,
    *command: object,
    is_summed_up: bool = False,
    is_started_anew: bool = False,
    modules: tuple[str, ...] = warm.TRAINING,
) -> "subprocess.CompletedProcess[str]":
    """Run a command line under ours in another folder, with a summary, which takes a process more, or without.

    The process has imported torch, unless it is to be started anew: then it is Python's own from the first line on, and
    sees torch come. What records is put in at once, or as a module comes; frameworks are imported by the script.
    """
    left_out = "CHAKRA_CAPTURE_NO_SUMMARY" if is_summed_up else ""
    environ = {name: value for name, value in os.environ.items() if name != left_out}
    ours = ["run", "--trace-dir", "traces", *map(str, command)]
    if is_started_anew:
        whole = [sys.executable, "-m", "chakra_capture", *ours]
        return subprocess.run(whole, cwd=folder, capture_output=True, text=True, timeout=240, check=False, env=environ)
    command_of_run = taken_over(folder, *ours)
    if isinstance(command_of_run, Outcome):  # refused
        refusal = command_of_run
        return subprocess.CompletedProcess(ours, refusal.code, refusal.out, refusal.err)
    return warm.run(command_of_run, cwd=folder, timeout=240, env=environ, modules=modules)


def steps_of(folder: Path, rank: int = 0) -> list[dict[str, Any]]:
    (file,) = folder.glob(f"traces/*_phases/rank-{rank}.jsonl")
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    return [line for line in lines if line["kind"] == "step"]


def as_batches(steps: list[dict[str, Any]], per_epoch: int) -> list[list[int]]:
    """Which batches each step waited for: batches come in order, and anew in each epoch."""
    found, place = [], 0
    for step in steps:
        count = step["phases"].get("input_wait", [0, 0])[1]
        found.append([(place + more) % per_epoch for more in range(count)])
        place += count
    return found


@pytest.mark.parametrize(
    "kind",
    [
        "plain",
        "scaler",
        "gan",
        "in_backward",
        "closure",
        "two_loaders",
        "left",
        "no_loader",
        "lightning",
        "huggingface",
        "monai",
        "ignite",
    ],
)
def test_steps_and_their_batches_are_those_of_the_script(tmp_path, kind):
    is_summed_up = kind in ("plain", "lightning")
    done = recorded(tmp_path, JOBS, "--", kind, is_summed_up=is_summed_up, is_started_anew=kind == "plain")
    assert done.returncode == 0, done.stderr
    by_hand = json.loads(done.stdout.splitlines()[-1])
    steps = steps_of(tmp_path)
    assert [step["step"] for step in steps] == list(range(len(by_hand)))
    found = as_batches(steps, 6)
    if kind in ("huggingface", "two_loaders"):  # one shuffles, the other gives each number twice
        found, by_hand = [[len(one) for one in each] for each in (found, by_hand)]
    assert found == by_hand
    assert steps[0].get("batch_size") == (None if kind == "no_loader" else 2)
    # Without a loader nothing says where the last step ends.
    cut = [step["step"] for step in steps if "partial" in step.get("flags", ())]
    assert cut == ([4] if kind == "no_loader" else [])
    skipped = [step["step"] for step in steps if "update_skipped" in step.get("flags", ())]
    assert skipped == ([1] if kind == "scaler" else [])
    measured = {name for step in steps[1:] for name in step["phases"]}
    assert measured >= ({"iteration"} if kind == "ignite" else {"forward", "backward", "optimizer"}), measured
    assert "chakra-capture: recorded in" in done.stderr
    assert len(list(tmp_path.glob("traces/*_run/final_summary.json"))) == is_summed_up


def test_two_runs_of_the_monai_example_and_a_comparison_of_their_summaries(tmp_path):
    example = JOBS.parents[2] / "scripts" / "examples" / "monai_dataloading_bottleneck.py"
    small = ["--data-dir", "data", "--synthetic", "--volumes", "4", "--size", "32", "32", "16", "--patch", "16",
             "--patches", "1", "--width", "2", "--epochs", "2", "--batch-size", "1"]  # fmt: skip
    for name, more in (("first", ()), ("second", ("--dataset", "cache"))):
        whole = ("--run-name", name, example, "--", *small, *more)
        done = recorded(tmp_path, *whole, is_summed_up=True, modules=warm.MONAI)
        assert done.returncode == 0, done.stderr
        assert "updates made by the trainer: 8" in done.stdout
        (file,) = tmp_path.glob(f"traces/{name}_phases/rank-0.jsonl")
        assert file.read_text().count('"kind":"step"') == 8
    first, second = (tmp_path / f"traces/{name}_run/final_summary.json" for name in ("first", "second"))
    assert run("compare", first, second).code in (0, 3)


ODD = """
import sys, threading
import torch
from torch.utils.data import DataLoader, Dataset, Subset

model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))


class Refusing(torch.optim.SGD):
    num_calls = 0

    def step(self, closure=None):
        self.num_calls += 1
        if self.num_calls % 2:
            raise RuntimeError("again")
        return super().step(closure)


class Reading(Dataset):
    def __len__(self):
        return 3

    def __getitem__(self, place):
        return sum(DataLoader(torch.ones(2, 4)))[0]


def update(optimizer, batch):
    optimizer.zero_grad()
    model(batch).mean().backward()
    try:
        optimizer.step()
    except RuntimeError:
        optimizer.step()


def train():
    threading.main_thread().join()
    optimizer, data = torch.optim.SGD(model.parameters(), lr=0.01), torch.randn(3, 4)
    for batch in DataLoader(Reading(), num_workers=1):
        update(optimizer, batch)
    refusing = Refusing(model.parameters(), lr=0.01)
    for batch in DataLoader(data):
        update(refusing, batch)
    for _ in range(2):
        rest = iter(DataLoader(data))
        following = next(rest)
        while following is not None:
            batch, following = following, next(rest, None)
            update(optimizer, batch)
        del rest
    for _ in range(4):  # each pass has a data set of its own, in the memory of one before
        for batch in DataLoader(Subset(data, range(3))):
            update(optimizer, batch)
        for batch in DataLoader(Subset(data, range(2))):
            model(batch)
    for _ in range(2):
        for batch in DataLoader(data):
            update(optimizer, batch)
        for place, batch in enumerate(DataLoader(data)):  # looks at what it trains on, and not at all of it
            model(batch)
            if place:
                break
    sys.stderr.close()


threading.Thread(target=train).start()
"""


def test_steps_of_odd_loops_in_a_thread_that_outlives_the_script(tmp_path):
    """A loader in a loader's process, an update that raises and is made again, a batch ahead, new data sets."""
    (tmp_path / "train.py").write_text(ODD)
    done = recorded(tmp_path, "train.py")
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    phases = [step["phases"] for step in steps_of(tmp_path)]  # of the only run: no process of a loader made one
    nested, refused, ahead = [1, 1, 1], [1, 1, 1], [2, 1, 1]  # the last request of a loop ahead finds nothing
    assert [each["input_wait"][1] for each in phases] == [*nested, *refused, *ahead, *ahead, *[1] * 18]
    assert [each["optimizer"][1] for each in phases] == [1, 1, 1, 2, 2, 2, *[1] * 24]
    assert all("forward" in each for each in phases[1:])
