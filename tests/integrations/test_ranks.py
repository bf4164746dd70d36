"""Two ranks with gloo of which one has trouble: the other one's traces are whole, in every framework."""

import signal
import sys

import pytest
import warm
from recording.recorded import check_pair, files, manifest

from integrations.test_lightning_ddp import check_two_ranks, environment

FRAMEWORKS = ("plain", "lightning", "monai")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder for each framework and trouble; they share one process, for imports take longer than trainings."""
    folder = tmp_path_factory.mktemp("ranks")
    command = [sys.executable, "-m", "integrations.ranks_job", str(folder)]
    done = warm.run(command, timeout=400, env=environment())
    assert done.returncode == 0, done.stderr
    return folder


def exit_codes(folder):
    return [int(code) for code in (folder / "codes.txt").read_text().split()]


def unfinished(folder):
    return [name for name in files(folder / "t") if name.endswith(".part")]


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_ranks_that_reach_the_window_at_different_times_record_the_same_steps(trained, framework):
    folder = trained / f"{framework}-late"

    assert exit_codes(folder) == [0, 0]
    check_two_ranks(folder / "t", [2, 3, 4, 5, 6])
    first, second = (manifest(folder / "t", rank)["windows"][0]["started"]["unix_ns"] for rank in (0, 1))
    if framework != "lightning":  # whose ranks wait for each other between steps, to hear of a SIGTERM
        assert second - first > 300_000_000
    assert unfinished(folder) == []


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_rank_that_dies_in_the_window_leaves_the_survivors_traces_whole(trained, framework):
    folder = trained / f"{framework}-dies"

    assert exit_codes(folder) == [1, -signal.SIGKILL]
    check_pair(folder / "t", [2, 3, 4, 5])
    survivor = manifest(folder / "t")
    assert (survivor["complete"], survivor["reason"], survivor["detail"]) == (False, "exception", "RuntimeError")
    assert (survivor["windows"][0]["steps"], survivor["windows"][0]["partial_step"]) == ([2, 3, 4], 5)
    # Of the dead rank only what is not finished, under a name that says so.
    assert unfinished(folder) == [
        "0_chakra/rank-1.json.part",
        "0_kineto/rank-1.json.part",
        "0_phases/rank-1.jsonl.part",
    ]
    assert [name for name in files(folder / "t") if name.endswith("rank-1.json")] == []


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_rank_whose_disk_is_full_is_disarmed_alone(trained, framework):
    folder = trained / f"{framework}-full"

    assert exit_codes(folder) == [0, 0]
    check_pair(folder / "t", [2, 3, 4, 5, 6])
    assert manifest(folder / "t", 0)["complete"]
    said = manifest(folder / "t", 1)
    assert (said["complete"], said["reason"], said["run_id"]) == (False, "fault", manifest(folder / "t", 0)["run_id"])
    assert "the disk is full" in said["faults"][0]
    assert "ERROR" not in (folder / "said-0.txt").read_text()
    assert (folder / "said-1.txt").read_text().count("Recording stops on rank 1, training goes on") == 1
    assert unfinished(folder) == ["0_chakra/rank-1.json.part", "0_kineto/rank-1.json.part"]


def test_manifest_names_the_mesh_of_the_job_and_when_each_window_was(trained):
    for rank in (0, 1):
        said = manifest(trained / "plain-late/t", rank)
        (group,) = said["surroundings"]["process_groups"]
        assert group["mesh_dimensions"] == [{"name": "dp", "mesh": ["dp"]}]
        anchors = [said["opened"], said["windows"][0]["started"], said["windows"][0]["ended"], said["written"]]
        for clock in ("unix_ns", "monotonic_ns"):
            times = [anchor[clock] for anchor in anchors]
            assert times == sorted(times)
