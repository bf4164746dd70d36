"""Ranks held against each other before anything is merged: whose files they are, and which are missing."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from builder import TraceBuilder, write_json
from ranks import copy_rank, device, host, manifest, write_rank, write_run

from chakra_capture.merge.many.roster import Roster, check_ranks
from chakra_capture.trace.discovery import find_run

TRACES = Path(__file__).resolve().parents[3] / "traces"


def roster(folder: Path) -> Roster:
    return check_ranks(find_run(folder))


def edit(path: Path, **values: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path, 4)


@pytest.mark.parametrize("name", ["plain_loop", "digits_ddp2_gloo", "digits_two_cycles"])
def test_own_recordings_have_no_fault(name: str) -> None:
    found = roster(TRACES / name)
    assert (found.faults, found.missing, found.conflicts) == ({}, (), ())
    assert found.world_size == (2 if "ddp2" in name else 1)


def test_whole_run_has_no_fault(run: Path) -> None:
    assert roster(run) == Roster(world_size=4)


def from_another_run(folder: Path) -> None:
    write_rank(folder, 2, world_size=4, run_id="bbbb", pid=555)


def traces_of_another_process(folder: Path) -> None:
    kept = manifest(folder, 2).read_text()
    write_rank(folder, 2, world_size=4, pid=555)
    manifest(folder, 2).write_text(kept)


def recorded_at_another_time(folder: Path) -> None:
    for path in (host(folder, 2), device(folder, 2)):
        text = path.read_text()
        moved = text.replace('"start_ts": 2201108', '"start_ts": 1101108')
        moved = moved.replace('"baseTimeNanoseconds": 17', '"baseTimeNanoseconds": 16')
        assert moved != text
        path.write_text(moved)


def of_another_world(folder: Path) -> None:
    write_rank(folder, 2, world_size=8)


def manifest_of_another_rank(folder: Path) -> None:
    shutil.copy(manifest(folder, 1), manifest(folder, 2))


def copy_of_its_neighbour(folder: Path) -> None:
    copy_rank(folder, 1, 2)


def beyond_the_world(folder: Path, rank: int = 9) -> None:
    for side in (host, device, manifest):
        os.rename(side(folder, 2), side(folder, rank))
        path = side(folder, rank)
        path.write_text(path.read_text().replace('"rank": 2, "world_size": 4', f'"rank": {rank}'))
    edit(manifest(folder, rank), rank=rank, world_size=None)


def just_beyond_the_world(folder: Path) -> None:
    beyond_the_world(folder, 4)


@pytest.mark.parametrize(
    ("fault", "rank", "said"),
    [
        (from_another_run, 2, "of another run: its manifest states run bbbb, those of other ranks aaaa"),
        (
            traces_of_another_process,
            2,
            "of another run: its manifest states pid 70002, its host trace pid 555",
        ),
        (
            recorded_at_another_time,
            2,
            "of another run: its host trace was not recorded when its manifest says",
        ),
        (of_another_world, 2, "of another run: it states world size 8, other ranks 4"),
        (
            manifest_of_another_rank,
            2,
            "different rank: its manifest is that of rank 1",
        ),
        (
            copy_of_its_neighbour,
            2,
            "different rank: rank 2 expected, device trace of rank 1, of which it is a copy",
        ),
        (beyond_the_world, 9, "not of this run: it is rank 9 of a world size of 4"),
        (just_beyond_the_world, 4, "not of this run: it is rank 4 of a world size of 4"),
    ],
)
def test_the_one_rank_that_is_not_of_the_run_is_named(
    fault: Callable[[Path], None], rank: int, said: str, run: Path
) -> None:
    fault(run)
    found = roster(run)
    assert found.faults == {rank: said}
    assert found.world_size == 4


def test_host_trace_that_begins_with_a_long_warm_up_is_of_its_window(run: Path) -> None:
    content = json.loads(manifest(run, 2).read_text())
    minute = 60 * 10**9
    for moment in (content["windows"][0]["started"], content["windows"][0]["ended"], content["written"]):
        moment["monotonic_ns"] += 30 * minute
        moment["unix_ns"] += 30 * minute
    manifest(run, 2).write_text(json.dumps(content))
    assert roster(run).faults == {}


def test_copy_without_a_stated_rank_is_the_one_that_its_manifest_does_not_know(tmp_path: Path) -> None:
    for rank in range(2):
        TraceBuilder(pid=100 + rank).op(f"aten::op{rank}", 1, 1).write(tmp_path, rank)
        write_json(tmp_path / "0_run" / f"rank-{rank}.json", {"pid": 100 + rank, "rank": rank, "run_id": "a"})
    copy_rank(tmp_path, 0, 1)
    assert roster(tmp_path).faults == {1: "different rank: its recording is rank 0's"}


@pytest.mark.parametrize("sides", [("chakra",), ("kineto",), ("chakra", "kineto")])
def test_same_recording_of_two_ranks_of_which_nothing_says_whose_it_is_is_nobodys(
    sides: tuple[str, ...], tmp_path: Path
) -> None:
    for rank in range(3):
        TraceBuilder(pid=100 + rank).op("aten::op", 1, 1).write(tmp_path, rank)
    for other in {"chakra", "kineto"} - set(sides):
        shutil.rmtree(tmp_path / f"0_{other}")
    copy_rank(tmp_path, 0, 2, sides=sides)
    assert roster(tmp_path).faults == {
        0: "different rank: its recording is that of rank 2; nothing says whose it is",
        2: "different rank: its recording is that of rank 0; nothing says whose it is",
    }


def test_copied_host_trace_beside_no_device_trace_is_told_from_its_owner(run: Path) -> None:
    copy_rank(run, 1, 2, sides=("chakra",))
    for path in (device(run, 2), manifest(run, 2)):
        path.unlink()
    assert roster(run).faults == {2: "different rank: its recording is rank 1's"}


def test_equal_host_traces_beside_device_traces_that_differ_are_left_to_pairing(tmp_path: Path) -> None:
    for rank in range(2):
        TraceBuilder(rank=rank).op("aten::op", 1, 1).write(tmp_path, rank)
    assert roster(tmp_path).faults == {}


def test_two_runs_as_often_stated_as_each_other_are_both_refused_unless_the_folder_is_claimed(tmp_path: Path) -> None:
    for rank in range(4):
        write_rank(tmp_path, rank, world_size=4, run_id="aaaa" if rank < 2 else "bbbb")
    assert list(roster(tmp_path).faults) == [0, 1, 2, 3]
    (tmp_path / "0_run" / "run.json").write_text('{"run_id": "bbbb"}')
    assert list(roster(tmp_path).faults) == [0, 1]


def test_two_world_sizes_as_often_stated_as_each_other_are_both_refused(tmp_path: Path) -> None:
    for rank in range(2):
        TraceBuilder(rank=rank, world_size=2 + rank).op(f"op{rank}", 1, 1).write(tmp_path, rank)
    found = roster(tmp_path)
    assert list(found.faults) == [0, 1]
    assert (found.world_size, found.missing) == (None, ())


def test_missing_ranks_are_those_asked_to_record_of_which_no_trace_is_here(run: Path) -> None:
    for rank in (1, 2):
        host(run, rank).unlink()
        device(run, rank).unlink()
    assert roster(run).missing == ((1, 2),)
    content = json.loads(manifest(run, 0).read_text())
    for rank in (0, 3):
        edit(manifest(run, rank), settings=content["settings"] | {"ranks": [0, 2]})
    assert roster(run).missing == ((2, 2),)


def test_absurd_world_size_costs_nothing(tmp_path: Path) -> None:
    TraceBuilder(rank=5, world_size=999_999_999).op("a", 1, 1).write_device(tmp_path / "rank-5.json")
    assert roster(tmp_path).missing == ((0, 4), (6, 999_999_998))


@pytest.mark.parametrize("text", ["", "[]", '{"run_id": 3}', '{"settings": 1}', '{"windows": [{"started": 5}]}'])
def test_manifest_and_claim_that_cannot_be_read_state_nothing(text: str, run: Path) -> None:
    manifest(run, 1).write_text(text)
    (run / "0_run" / "run.json").write_text(text)
    assert roster(run).faults == {}


@pytest.mark.parametrize("data", [b"", b"\x1f\x8b", b"\xff" * 1000, b'{"distributedInfo": {"rank": "x"}}'])
def test_trace_whose_beginning_cannot_be_read_states_nothing(data: bytes, run: Path) -> None:
    device(run, 1).write_bytes(data)
    host(run, 2).write_bytes(data)
    assert roster(run).faults == {}
