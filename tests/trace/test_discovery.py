"""Which files belong together, in every layout that somebody writes."""

import gzip
import json
import os
from pathlib import Path

import pytest
from builder import TraceBuilder, write_json

from chakra_capture.errors import TraceFileError
from chakra_capture.trace.discovery import Run, find_run


def touch(folder: Path, *names: str, at: int | None = None) -> Path:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{}")
        if at is not None:
            os.utime(path, (at, at))
            os.utime(path.parent, (at, at))
    return folder


def found(run: Run) -> dict[int, list[tuple[str | None, str | None]]]:
    """Names of the host and device file of each window of each rank."""
    return {
        files.rank: [(w.host.name if w.host else None, w.device.name if w.device else None) for w in files.windows]
        for files in run.ranks
    }


def both(rank: int, job: str = "0", suffix: str = "") -> tuple[str, str]:
    return f"{job}_chakra/rank-{rank}{suffix}.json", f"{job}_kineto/rank-{rank}{suffix}.json"


def test_own_layout_pairs_by_rank_in_numerical_order(tmp_path: Path) -> None:
    run = find_run(touch(tmp_path, *both(10), *both(2), *both(0)))
    assert list(found(run)) == [0, 2, 10]
    assert found(run)[10] == [("rank-10.json", "rank-10.json")]
    assert (run.paths.job, run.merged_dir, run.other_jobs) == ("0", tmp_path / "0_merged", ())


def test_cycles_of_a_rank_are_its_windows_in_order(tmp_path: Path) -> None:
    cycles = [name for n in (10, 2, 1) for name in both(0, suffix=f".cycle-{n}")]
    run = find_run(touch(tmp_path, *cycles, *both(0)))
    assert [w.cycle for w in run.ranks[0].windows] == [0, 1, 2, 10]


def test_one_side_alone_is_a_window(tmp_path: Path) -> None:
    run = find_run(touch(tmp_path, "0_chakra/rank-0.json", "0_kineto/rank-1.json.gz"))
    assert found(run) == {0: [("rank-0.json", None)], 1: [(None, "rank-1.json.gz")]}


def test_part_file_stands_in_only_where_the_final_name_is_missing(tmp_path: Path) -> None:
    names = (*both(0), "0_chakra/rank-0.json.part", "0_chakra/rank-1.json.gz.part", "0_kineto/rank-1.json.gz")
    run = find_run(touch(tmp_path, *names))
    assert found(run) == {0: [("rank-0.json",) * 2], 1: [("rank-1.json.gz.part", "rank-1.json.gz")]}
    assert [w.unfinished for r in run.ranks for w in r.windows] == [False, True]


def test_other_files_beside_traces_are_passed_over(tmp_path: Path) -> None:
    names = ("0_chakra/rank-0.json", "0_chakra/notes.txt", "0_chakra/rank-x.json", "0_chakra/rank-1.json.bak",
             "0_chakra/rank-0_resources/kernel.py", "readme.md")  # fmt: skip
    (tmp_path / "0_chakra" / "rank-7.json").mkdir(parents=True)
    assert found(find_run(touch(tmp_path, *names))) == {0: [("rank-0.json", None)]}


def test_newest_job_is_taken_and_the_others_named(tmp_path: Path) -> None:
    touch(tmp_path, *both(0, "b"), at=1_000)
    touch(tmp_path, *both(0, "a"), at=3_000)
    touch(tmp_path, *both(0, "c.1"), at=2_000)
    run = find_run(tmp_path)
    assert (run.paths.job, run.other_jobs) == ("a", ("b", "c.1"))
    assert find_run(tmp_path, "c.1").paths.host_dir == tmp_path / "c.1_chakra"


def test_merging_a_run_does_not_make_it_the_newest(tmp_path: Path) -> None:
    touch(tmp_path, *both(0, "old"), at=1_000)
    touch(tmp_path, *both(0, "new"), at=2_000)
    touch(tmp_path, "old_merged/rank=0/link.json")
    assert find_run(tmp_path).paths.job == "new"


def test_unknown_job_is_refused_with_the_ones_there_are(tmp_path: Path) -> None:
    touch(tmp_path, *both(0, "b"), *both(0, "a"))
    with pytest.raises(TraceFileError, match=r"has no run of job 'z'; it has a, b. Give one with --job"):
        find_run(tmp_path, "z")


@pytest.mark.parametrize("folder", ["7_chakra", "7_kineto", "7_merged", "7_run"])
def test_one_folder_of_a_run_stands_for_the_run(folder: str, tmp_path: Path) -> None:
    touch(tmp_path, *both(0, "7"), "7_merged/rank=0/link.json", "7_run/rank-0.json")
    touch(tmp_path, *both(0, "8"))
    run = find_run(tmp_path / folder)
    assert (run.paths.job, list(found(run))) == ("7", [0])


def test_one_folder_of_a_run_named_relatively(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    touch(tmp_path, *both(0, "7"))
    monkeypatch.chdir(tmp_path / "7_chakra")
    assert list(found(find_run(Path()))) == [0]


def test_trace_dir_whose_own_name_looks_like_a_run_folder(tmp_path: Path) -> None:
    touch(tmp_path / "my_run", *both(0, "7"))
    assert find_run(tmp_path / "my_run").paths.job == "7"


def test_nemo_layout(tmp_path: Path) -> None:
    names = [f"job_4711_{part}/rank-{rank}.json" for part in ("chakra", "kineto") for rank in (0, 1)]
    run = find_run(touch(tmp_path, *names))
    assert (run.paths.job, list(found(run))) == ("job_4711", [0, 1])


@pytest.mark.parametrize(
    "names",
    [
        ("host/rank-3.json.gz", "device/rank-3.json"),
        ("host/3.json", "device/rank_3.json"),
        ("host/host.3.json", "device/device.3.json"),
        ("host.3.json", "device.3.json"),
        ("host_3.json", "device_3.json.gz"),
    ],
)
def test_host_and_device_files_of_others(names: tuple[str, str], tmp_path: Path) -> None:
    run = find_run(touch(tmp_path, *names))
    assert found(run) == {3: [(Path(names[0]).name, Path(names[1]).name)]}


def test_host_folder_alone_and_device_folder_alone(tmp_path: Path) -> None:
    assert found(find_run(touch(tmp_path / "a", "host/rank-0.json"))) == {0: [("rank-0.json", None)]}
    assert found(find_run(touch(tmp_path / "b", "device/rank-0.json"))) == {0: [(None, "rank-0.json")]}


def test_numbered_files_without_a_side_are_device_traces_in_numerical_order(tmp_path: Path) -> None:
    run = find_run(touch(tmp_path, *[f"rank-{n}.json" for n in (10, 0, 2)]))
    assert found(run) == {n: [(None, f"rank-{n}.json")] for n in (0, 2, 10)}
    assert list(found(run)) == [0, 2, 10]


def test_torch_traces_are_numbered_by_the_rank_they_state(tmp_path: Path) -> None:
    for name, rank in (("b_1.100.pt.trace.json", 0), ("a_2.100.pt.trace.json.gz", 1), ("b_1.200.pt.trace.json", 0)):
        TraceBuilder(rank=rank).op("a", 1, 1).write_device(tmp_path / name)
    assert found(find_run(tmp_path)) == {
        0: [(None, "b_1.100.pt.trace.json"), (None, "b_1.200.pt.trace.json")],
        1: [(None, "a_2.100.pt.trace.json.gz")],
    }


def test_torch_trace_that_states_its_rank_after_the_events(tmp_path: Path) -> None:
    for rank in (3, 4):
        content = TraceBuilder().op("x" * 2_000_000, 1, 1).device_dict() | {"distributedInfo": {"rank": rank}}
        write_json(tmp_path / f"{rank}.pt.trace.json.gz", content)
    assert list(found(find_run(tmp_path))) == [3, 4]


def test_single_torch_trace_without_a_rank_is_rank_0(tmp_path: Path) -> None:
    TraceBuilder().op("a", 1, 1).write_device(tmp_path / "host_1.2.pt.trace.json")
    assert list(found(find_run(tmp_path))) == [0]


def test_several_torch_traces_without_a_rank_are_refused(tmp_path: Path) -> None:
    for name in ("a.pt.trace.json", "b.pt.trace.json"):
        TraceBuilder().op("a", 1, 1).write_device(tmp_path / name)
    with pytest.raises(TraceFileError, match="does not state its rank, and the folder holds traces of 2 processes"):
        find_run(tmp_path)


def test_torch_traces_of_one_process_are_its_windows_in_order_of_time(tmp_path: Path) -> None:
    for time in (200, 1000):
        TraceBuilder().op("a", 1, 1).write_device(tmp_path / f"host_77.{time}.pt.trace.json")
    (rank,) = find_run(tmp_path).ranks
    assert [window.device.name for window in rank.windows if window.device] == [
        "host_77.200.pt.trace.json",
        "host_77.1000.pt.trace.json",
    ]


def test_run_that_recorded_nothing_says_why_and_names_the_others(tmp_path: Path) -> None:
    TraceBuilder().op("a", 1, 1).write(tmp_path)
    write_json(tmp_path / "0.1_run" / "rank-0.json", {"complete": False, "reason": "window never reached"})
    run = find_run(tmp_path, "0.1")
    assert run.ranks == ()
    assert run.why_empty == (
        f"run 0.1 in {tmp_path} recorded no traces (window never reached). Other runs here: 0; choose one with --job."
    )


def test_torch_traces_are_found_without_decoding_them(tmp_path: Path) -> None:
    text = json.dumps(TraceBuilder(rank=5).op("a", 1, 1).device_dict())
    (tmp_path / "a.pt.trace.json.gz").write_bytes(gzip.compress(text[:-20].encode())[:-9])
    assert list(found(find_run(tmp_path))) == [5]


def test_merged_folder_is_a_run_of_its_own(tmp_path: Path) -> None:
    touch(tmp_path, "rank=10/link.json", "rank=2/link.json", "rank=3/nodes.parquet")
    run = find_run(tmp_path)
    assert run.ranks == ()
    assert list(run.merged_ranks) == [2, 10]  # rank 3 is not complete: link.json is written last


def test_merged_folder_lies_alone_under_its_own_name(tmp_path: Path) -> None:
    touch(tmp_path, "0_merged/rank=1/link.json", "other_kineto/rank-0.json")
    run = find_run(tmp_path / "0_merged")
    assert (run.ranks, list(run.merged_ranks), run.merged_dir) == ((), [1], tmp_path / "0_merged")


def test_missing_path_file_and_empty_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceFileError, match="does not exist"):
        find_run(tmp_path / "none")
    file = touch(tmp_path / "f", "x.json") / "x.json"
    with pytest.raises(TraceFileError, match="is a file, but a folder was expected"):
        find_run(file)
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(TraceFileError, match="holds no traces: expected <job>_chakra"):
        find_run(empty)


def test_run_folders_without_a_trace_are_a_run_without_ranks(tmp_path: Path) -> None:
    assert found(find_run(touch(tmp_path, "0_run/rank-0.json"))) == {}


@pytest.mark.parametrize("text", ["", "[]", "{", '{"windows": 3}'])
def test_unreadable_manifest_is_as_none(text: str, tmp_path: Path) -> None:
    run = find_run(touch(tmp_path, *both(0), "0_run/rank-0.json"))
    assert list(run.manifests) == [0]
    (tmp_path / "0_run" / "rank-0.json").write_text(text)
    assert run.manifests == {}
