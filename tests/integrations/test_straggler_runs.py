"""What is said of real trainings of 2 and 4 ranks in which one rank is slow in one way: its rank, phase and op.

Nothing here looks at how long something took: what is slow takes several times what a step takes without it.
"""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import warm
from commands import run

from integrations.test_lightning_ddp import environment

LOADER = "enumerate(DataLoader)#_{}DataLoaderIter.__next__"
# By scenario of the job: the rank, its phase, what makes it slow, the op and what is around it.
SLOW = {
    "slow input": (1, "input_wait", "an op", LOADER.format("SingleProcess"), None),
    "slow input from workers": (1, "input_wait", "an op", LOADER.format("MultiProcessing"), None),
    "slow input with buffers": (1, "input_wait", "an op", LOADER.format("SingleProcess"), None),
    "slow input of 3 of 4 with buffers": (3, "input_wait", "an op", LOADER.format("SingleProcess"), None),
    "slow op between phases": (1, "between phases", "an op", "aten::mm", None),
    "slow Python between phases": (1, "between phases", "in Python", None, None),
    "slow forward of 2 of 4": (2, "forward", "an op", "aten::mm", "DistributedDataParallel.forward"),
    "slow backward": (1, "backward", "an op", "aten::mm", "SlowBackwardBackward"),
}
NOBODY = ["clean", "clean, 4 with buffers", "slow input on all", "slow network of 2 of 4"]
WHERE = ("phase", "cause", "op", "call_path")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of all trainings: one process forks their ranks, for imports take longer than they do."""
    folder: Path = tmp_path_factory.mktemp("stragglers")
    command = [sys.executable, "-m", "integrations.straggler_job", str(folder)]
    done = warm.run(command, timeout=280, env=environment())
    assert done.returncode == 0, done.stderr[-4000:]
    for each in sorted(folder.iterdir()):
        assert run("merge", each, "--workers", "1").code == 0
    return folder


def analyzed(folder: Path, *arguments: str) -> dict[str, Any]:
    done = run("analyze", *arguments[:1], folder, "--json", *arguments[1:])
    assert (done.code, done.err) == (0, "")
    found: dict[str, Any] = json.loads(done.out)
    return found


@pytest.mark.parametrize("name", SLOW)
def test_slow_rank_is_named_with_its_phase_and_op_and_no_other_is(trained: Path, name: str) -> None:
    rank, *where = SLOW[name]
    said = analyzed(trained / name, "stragglers")
    assert [row["rank"] for row in said["rows"] if row["is_straggler"]] == [rank]
    row = said["rows"][rank]
    assert [row[column] for column in WHERE] == where
    assert row["own_ns"] > 2 * row["others_ns"]
    others = [[other[column] for column in WHERE] for other in said["rows"] if other is not row]
    assert others == [[None] * len(WHERE)] * (len(said["rows"]) - 1)
    (sentence,) = [note for note in said["notes"] if note.startswith(f"rank {rank} is slow")]
    assert (where[2] or where[1]) in sentence


@pytest.mark.parametrize("name", NOBODY)
def test_nobody_is_named_where_no_rank_is_slow_or_all_are(trained: Path, name: str) -> None:
    said = analyzed(trained / name, "stragglers")
    assert [row["rank"] for row in said["rows"] if row["is_straggler"]] == []
    assert [note for note in said["notes"] if note.startswith("no rank is named: ")]


def test_slow_links_of_a_rank_are_said_to_be_links_as_messages_tell_and_collectives_do_not(trained: Path) -> None:
    notes = analyzed(trained / "slow network of 2 of 4", "stragglers")["notes"]
    assert [note for note in notes if note.startswith("transfers of group 0 (4 ranks) take ")]
    assert [note[: len("the links of rank 2 are slow")] for note in notes if note.startswith("the links of")] == [
        "the links of rank 2 are slow"
    ]
    for name in ("clean", "slow backward"):
        assert not [note for note in analyzed(trained / name, "stragglers")["notes"] if "links of rank" in note]


@pytest.mark.parametrize("name", ["slow input", "slow input from workers", "slow input with buffers"])
def test_what_a_slow_loader_costs_the_other_rank_is_beside_it(trained: Path, name: str) -> None:
    rows = analyzed(trained / name, "input")["rows"]
    stalls, others = ([row for row in rows if row["rank"] == rank] for rank in (1, 0))
    # At most the difference of the two waits for input, and in most steps most of it.
    pairs = [(row["peers_wait_ns"], row["input_wait_ns"] - other["input_wait_ns"])
             for row, other in zip(stalls, others, strict=True)]  # fmt: skip
    assert all(0 <= cost <= max(excess, 0) for cost, excess in pairs)
    assert sum(cost for cost, _ in pairs) > 0.5 * sum(excess for _, excess in pairs)
    assert sum(row["peers_wait_ns"] for row in others) < 0.2 * sum(cost for cost, _ in pairs)
    assert {row["num_peers"] for row in stalls} <= {0, 1}
    assert {row["device_idle_ns"] for row in rows} == {None}  # there is no device
    (note, *_) = analyzed(trained / name, "input")["notes"]
    assert note.startswith("rank 1 waits ")


def test_all_ranks_are_asked_about_whom_one_rank_keeps_waiting(trained: Path) -> None:
    folder = trained / "slow input"
    alone = analyzed(folder, "input", "--rank", "1")["rows"]
    assert alone == [row for row in analyzed(folder, "input")["rows"] if row["rank"] == 1]


def test_summary_says_the_op_of_the_slow_rank(trained: Path) -> None:
    said = json.loads(run("summary", trained / "slow backward", "--json").out)
    late = said["stragglers"]["late_in"]["1"]
    assert (late["phase"], late["op"], late["call_path"]) == ("backward", "aten::mm", ["SlowBackwardBackward"])
