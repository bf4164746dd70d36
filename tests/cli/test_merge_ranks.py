"""``chakra-capture merge`` on runs of many ranks: what is refused, left out, merged again and said of it."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from commands import Outcome, run
from handed import CASES, require
from ranks import copy_rank, device, host, manifest, write_rank, write_run

TABLES = ("nodes", "edges", "steps", "communication")


def written(folder: Path) -> dict[int, int]:
    """When link.json of each merged rank was written."""
    links = (folder / "0_merged").glob("rank=*/link.json")
    return {int(link.parent.name.removeprefix("rank=")): link.stat().st_mtime_ns for link in links}


def last(done: Outcome) -> str:
    """How many ranks merged, and what is said with it."""
    (line,) = [line for line in done.out.splitlines() if "ranks merged into" in line]
    return line


def report(*args: Any) -> Any:
    return json.loads(run("merge", *args, "--workers", 1, "--json").out)


def test_fault_run_names_what_is_not_of_the_run_and_a_second_call_merges_only_what_was_repaired(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", 8)
    whole = shutil.copytree(folder, tmp_path / "whole")
    text = device(folder, 1).read_bytes()
    device(folder, 1).write_bytes(text[: len(text) * 2 // 3])
    device(folder, 2).unlink()
    write_rank(folder, 4, world_size=8, run_id="bbbb", pid=555)
    copy_rank(folder, 5, 6)

    done = run("merge", folder, "--workers", 2)
    assert done.code == 1
    assert [line.split(":")[1] for line in done.err.splitlines()] == [
        " rank 4 was not merged",
        " rank 6 was not merged",
    ]
    assert "of another run: its manifest states run bbbb" in done.err
    assert "device trace of rank 5, of which it is a copy" in done.err
    heads = {line[5]: line for line in done.out.splitlines() if line.startswith("rank ")}
    assert [rank for rank, line in heads.items() if line.endswith("salvaged")] == ["1"]
    assert [rank for rank, line in heads.items() if "host trace alone" in line] == ["2"]
    assert list(heads) == ["0", "1", "2", "3", "5", "7"]
    assert last(done) == f"6 of 8 ranks merged into {folder / '0_merged'}"
    before = written(folder)
    assert sorted(before) == [0, 1, 2, 3, 5, 7]

    for rank in (1, 2, 4, 6):
        for side in (host, device, manifest):
            shutil.copy(side(whole, rank), side(folder, rank))
    done = run("merge", folder, "--workers", 2)
    assert (done.code, done.err) == (0, "")
    assert last(done) == f"8 of 8 ranks merged into {folder / '0_merged'} (4 merged before, unchanged)"
    after = written(folder)
    assert sorted(after) == list(range(8))
    assert sorted(rank for rank in before if after[rank] == before[rank]) == [0, 3, 5, 7]


def test_forced_ranks_merge_and_link_json_says_so(tmp_path: Path) -> None:
    folder = write_run(tmp_path, 3)
    write_rank(folder, 1, world_size=3, run_id="bbbb")
    assert run("merge", folder, "--workers", 1, "--force").code == 0
    link = json.loads((folder / "0_merged" / "rank=1" / "link.json").read_text())
    fault = "of another run: its manifest states run bbbb, those of other ranks aaaa"
    assert link["made_from"]["fault"] == fault
    assert f"merged by force: {fault}" in link["windows"][0]["notes"]
    # Without force it is refused as before, and its tables do not count any more.
    ranks = report(folder)["ranks"]
    assert [bool(rank["error"]) for rank in ranks] == [False, True, False]
    assert sorted(written(folder)) == [0, 2]


def touch(folder: Path) -> tuple[Any, ...]:
    path = host(folder, 1)
    os.utime(path, ns=(1, path.stat().st_mtime_ns + 1000))
    return ()


def lose_a_table(folder: Path) -> tuple[Any, ...]:
    (folder / "0_merged" / "rank=1" / "edges.parquet").unlink()
    return ()


def cut_a_table(folder: Path) -> tuple[Any, ...]:
    path = folder / "0_merged" / "rank=1" / "nodes.parquet"
    path.write_bytes(path.read_bytes()[:-1])
    return ()


def add_phases(folder: Path) -> tuple[Any, ...]:
    (folder / "0_phases").mkdir()
    (folder / "0_phases" / "rank-1.jsonl").write_text("")
    return ()


def add_notes_of_collectives(folder: Path) -> tuple[Any, ...]:
    (folder / "0_run").mkdir(exist_ok=True)
    (folder / "0_run" / "rank-1.collectives.json").write_text('{"schema_version": 1, "operations": []}')
    return ()


def change_cut_steps(folder: Path) -> tuple[Any, ...]:
    content = json.loads(manifest(folder, 1).read_text())
    content["windows"][0]["aborted_steps"] = [2]
    manifest(folder, 1).write_text(json.dumps(content))
    return ()


def merged_by_another_version(folder: Path) -> tuple[Any, ...]:
    path = folder / "0_merged" / "rank=1" / "link.json"
    link = json.loads(path.read_text())
    link["made_from"]["version"] = "0.0.0"
    path.write_text(json.dumps(link))
    return ()


def damage_link(folder: Path) -> tuple[Any, ...]:
    (folder / "0_merged" / "rank=1" / "link.json").write_text('{"made_from": 3')
    return ()


@pytest.mark.parametrize(
    ("change", "again"),
    [
        (lambda _: (), []),
        (lambda _: ("--memory-budget", "1MB"), []),
        (lambda _: ("--again",), [0, 1]),
        (lambda _: ("--strict",), [0, 1]),
        (lambda _: ("--force",), [0, 1]),
        (touch, [1]),
        (lose_a_table, [1]),
        (cut_a_table, [1]),
        (add_phases, [1]),
        (add_notes_of_collectives, [1]),
        (change_cut_steps, [1]),
        (merged_by_another_version, [1]),
        (damage_link, [1]),
    ],
)
def test_rank_is_merged_again_exactly_when_something_that_decides_its_tables_has_changed(
    change: Callable[[Path], tuple[Any, ...]], again: list[int], two_merged: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(two_merged, folder)  # times are kept
    options = change(folder)
    said = report(folder, *options)
    assert [rank["rank"] for rank in said["ranks"] if not rank["unchanged"]] == again
    assert all(rank["windows"] for rank in said["ranks"])
    assert [rank["unchanged"] for rank in report(folder, *[o for o in options if o != "--again"])["ranks"]] == [
        True
    ] * 2


@pytest.fixture(scope="module")
def two_merged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_run(tmp_path_factory.mktemp("two"), 2)
    assert run("merge", folder, "--workers", 1).code == 0
    return folder


def test_leftovers_of_a_killed_merge_do_no_harm_and_go_when_nobody_writes_them_any_more(
    two_merged: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(two_merged, folder)
    rank = folder / "0_merged" / "rank=1"
    (rank / "link.json").unlink()
    (rank / "nodes.parquet").unlink()
    old, fresh = rank / "nodes.parquet.0f.part", rank / "edges.parquet.1f.part"
    for part in (old, fresh):
        part.write_bytes(b"PAR1")
    os.utime(old, (0, 0))
    assert [r["unchanged"] for r in report(folder)["ranks"]] == [True, False]
    for name in TABLES:
        path = rank / f"{name}.parquet"
        assert path.read_bytes() == (two_merged / "0_merged" / "rank=1" / path.name).read_bytes()
    assert sorted(rank.glob("*.part")) == [fresh]


def test_one_rank_of_a_folder_is_merged_with_rank_and_the_whole_run_is_looked_at(tmp_path: Path) -> None:
    folder = write_run(tmp_path, 4)
    copy_rank(folder, 1, 2)
    assert run("merge", folder, "--rank", 1).code == 0
    assert run("merge", folder, "--rank", 2).code == 1
    assert run("merge", folder, "--rank", 3, "--ranks", 0).code == 0
    assert sorted(written(folder)) == [0, 1, 3]
    assert run("merge", folder, "--rank", 9).err.startswith(f"chakra-capture: {folder} has no rank 9; it has 0-3.")
    assert last(run("merge", folder, "--workers", 1)).endswith("(3 merged before, unchanged)")


def test_missing_ranks_are_said_and_no_failure(tmp_path: Path) -> None:
    folder = write_run(tmp_path, 6)
    for rank in (1, 4, 5):
        for side in (host, device):
            side(folder, rank).unlink()
    done = run("merge", folder, "--workers", 1)
    assert (done.code, done.err) == (0, "")
    assert last(done).endswith("; of a world size of 6 no trace is here of rank 1, 4-5")
    assert report(folder)["run"] == {
        "world_size": 6,
        "missing_ranks": [[1, 1], [4, 5]],
        "missing_ranks_by_content": [[1, 1], [4, 5]],
        "conflicts": [],
    }


def test_case_rank_order_and_conflict_as_expected(tmp_path: Path) -> None:
    case = require(CASES / "026-rank-order-and-conflict")
    expected = json.loads((case / "expect.json").read_text())
    said = report(case / "kineto", "-o", tmp_path)
    assert [rank["rank"] for rank in said["ranks"]] == expected["order"]
    assert [rank["rank"] for rank in said["ranks"] if rank["error"]] == [2]
    assert said["run"]["conflicts"] == expected["conflicts"]
    by_content = [n for first, last in said["run"]["missing_ranks_by_content"] for n in range(first, last + 1)]
    assert by_content == expected["missing_if_content_wins"]
    assert said["run"]["missing_ranks"] == [[3, 9]]


def test_tasks_of_an_array_and_a_last_call_give_what_one_call_gives(tmp_path: Path) -> None:
    folder = write_run(tmp_path, 3)
    shutil.copy(device(folder, 0), device(folder, 2))
    codes = [run("merge", folder, "--rank", rank).code for rank in range(3)]
    assert codes == [0, 0, 1]
    done = run("merge", folder)
    assert done.code == 1
    assert last(done) == f"2 of 3 ranks merged into {folder / '0_merged'} (2 merged before, unchanged)"
    run("merge", folder, "-o", tmp_path / "o", "--workers", 1)
    files = {path.relative_to(tmp_path / "o") for path in (tmp_path / "o").rglob("*.*")}
    assert files == {path.relative_to(folder / "0_merged") for path in (folder / "0_merged").rglob("*.*")}
    for name in files:
        assert (tmp_path / "o" / name).read_bytes() == (folder / "0_merged" / name).read_bytes()


def test_ranks_without_a_number_are_no_choice(tmp_path: Path) -> None:
    done = run("merge", write_run(tmp_path / "run", 2), "--ranks")
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("chakra-capture: --ranks names no rank. Give numbers, or leave it out for all.")


def test_a_rank_without_a_host_trace_is_said_to_have_its_device_trace_alone(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", 2)
    host(folder, 1).unlink()
    done = run("merge", folder)
    assert next(line for line in done.out.splitlines() if "device trace alone" in line).startswith("rank 1: ")
    assert done.out.count("alone") == 1
