"""``chakra-capture merge``: what it says and how it ends, for good input and for bad."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from builder import MAIN, TraceBuilder
from commands import Outcome, process, refused, run
from handed import CASES, require

from chakra_capture.cli.main import merge_traces


def trace(**settings: Any) -> TraceBuilder:
    """One step with an op that launches a kernel, and three more ops."""
    built = TraceBuilder(**settings).step(3, 0, 100).op("aten::mm", 10, 20).launched("gemm", 50, 30, 1, at=15)
    for number in range(3):
        built.op(f"aten::op{number}", 40 + 10 * number, 5)
    return built


def link(folder: Path, rank: int = 0) -> Any:
    return json.loads((folder / f"rank={rank}" / "link.json").read_text())


def test_merge_of_a_run_writes_beside_the_traces_and_says_what_was_linked(tmp_path: Path) -> None:
    trace().write(tmp_path)
    done = run("merge", tmp_path)
    assert (done.code, done.err) == (0, "")
    assert done.out == (
        "rank 0: 5 of 5 host ops linked, 1 of 1 device activities linked, steps 3\n"
        f"1 of 1 ranks merged into {tmp_path / '0_merged'}\n"
    )
    names = sorted(p.name for p in (tmp_path / "0_merged" / "rank=0").iterdir())
    assert names == ["communication.parquet", "edges.parquet", "link.json", "nodes.parquet", "steps.parquet"]


def test_merge_traces_is_the_same_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace().write(tmp_path)
    with pytest.raises(SystemExit) as end:
        merge_traces([str(tmp_path), "--output", str(tmp_path / "out")])
    assert end.value.code == 0
    assert "1 of 1 ranks merged" in capsys.readouterr().out


def test_json_report_holds_link_json_of_every_rank(tmp_path: Path) -> None:
    trace().write(tmp_path)
    report = json.loads(run("merge", tmp_path, "--json").out)
    assert (report["schema_version"], report["output"]) == (1, str(tmp_path / "0_merged"))
    windows = link(tmp_path / "0_merged")["windows"]
    assert report["ranks"] == [{"rank": 0, "error": None, "unchanged": False, "notes": [], "windows": windows}]


def merged_lines(done: Outcome) -> list[str]:
    """Which ranks the screen says were merged, in order."""
    return [line.split(":")[0] for line in done.out.splitlines() if line.startswith("rank ")]


def test_several_ranks_merge_in_processes_and_ranks_chooses(tmp_path: Path) -> None:
    for rank in (0, 2, 10):
        trace(pid=100 + rank, rank=rank, world_size=11).write(tmp_path, rank)
    done = run("merge", tmp_path, "--workers", 2)
    assert (done.code, done.err) == (0, "")
    assert merged_lines(done) == ["rank 0", "rank 2", "rank 10"]
    done = run("merge", tmp_path, "--ranks", 10, 0, "-o", tmp_path / "some")
    assert sorted(p.name for p in (tmp_path / "some").iterdir()) == [
        "alignment.json",
        "collectives.parquet",
        "rank=0",
        "rank=10",
    ]
    refused(run("merge", tmp_path, "--ranks", 5), "has no rank 5; it has 0, 2, 10")


def test_two_cycles_of_a_rank_are_windows_whose_joins_do_not_mix(tmp_path: Path) -> None:
    trace().write(tmp_path)
    second = TraceBuilder().step(7, 1000, 100).op("aten::mm", 1010, 20).launched("gemm", 1050, 30, 1, at=1015)
    second.write(tmp_path, cycle=1)
    assert run("merge", tmp_path).code == 0
    folder = tmp_path / "0_merged" / "rank=0"
    nodes, edges = pl.read_parquet(folder / "nodes.parquet"), pl.read_parquet(folder / "edges.parquet")
    assert nodes["node_id"].to_list() == list(range(nodes.height))
    assert nodes["window"].unique().sort().to_list() == [0, 1]
    window = dict(nodes.select("node_id", "window").iter_rows())
    for column in ("parent_id", "launch_id"):
        joined = nodes.filter(pl.col(column).is_not_null()).select("window", column)
        assert joined.height > 0
        assert all(window[other] == own for own, other in joined.iter_rows())
    assert all(window[s] == window[d] == w for s, d, w in edges.select("src", "dst", "window").iter_rows())
    assert nodes.filter(pl.col("kind") == "kernel").select("window", "step").rows() == [(0, 3), (1, 7)]
    assert pl.read_parquet(folder / "steps.parquet").select("window", "step").rows() == [(0, 3), (1, 7)]
    assert [w["window"] for w in link(tmp_path / "0_merged")["windows"]] == [0, 1]


# Refusals: each one clear sentence, exit 1, no traceback.


def test_missing_path(tmp_path: Path) -> None:
    refused(run("merge", tmp_path / "none"), "none does not exist")
    refused(run("summary", tmp_path / "none"), "none does not exist")
    refused(run("inspect", tmp_path / "none"), "none does not exist")


def test_file_where_a_folder_is_expected(tmp_path: Path) -> None:
    path = trace().write_host(tmp_path / "h.json")
    refused(run("merge", path), "is a file, but a folder was expected", "--host FILE --device FILE")


def test_folder_where_a_file_is_expected(tmp_path: Path) -> None:
    refused(run("merge", "--device", tmp_path, "-o", tmp_path / "o"), "is a folder, but one trace file was expected")
    refused(run("merge", "--host", tmp_path, "-o", tmp_path / "o"), "is a folder, but one trace file was expected")


@pytest.mark.parametrize("side", ["--host", "--device"])
def test_missing_and_empty_files(side: str, tmp_path: Path) -> None:
    refused(run("merge", side, tmp_path / "none.json", "-o", tmp_path / "o"), "none.json does not exist")
    (tmp_path / "e.json").touch()
    refused(run("merge", side, tmp_path / "e.json", "-o", tmp_path / "o"), "e.json is empty, so it holds no trace")


@pytest.mark.parametrize("text", ["{}", "[]", "3", "null", '{"a": [1]}', "not json", "\x00" * 50])
@pytest.mark.parametrize("side", ["--host", "--device"])
def test_file_that_is_no_trace(side: str, text: str, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    what = (
        "is no host trace" if side == "--host" else ("holds no work events" if text == "[]" else "is no device trace")
    )
    refused(run("merge", side, path, "-o", tmp_path / "o"), f"x.json {what}")


def test_host_and_device_swapped(tmp_path: Path) -> None:
    host, device = trace().write_host(tmp_path / "h.json"), trace().write_device(tmp_path / "d.json")
    done = run("merge", "--host", device, "--device", host, "-o", tmp_path / "o")
    refused(done, "d.json is no host trace: it has no 'nodes'", "ExecutionTraceObserver")
    refused(run("merge", "--device", host, "-o", tmp_path / "o"), "h.json is no device trace: it has no 'traceEvents'")


@pytest.mark.parametrize("side", ["chakra", "kineto"])
def test_truncated_file_merges_and_strict_refuses_it(side: str, tmp_path: Path) -> None:
    trace().write(tmp_path)
    path = tmp_path / f"0_{side}" / "rank-0.json"
    data = path.read_bytes()[:-700]
    path.write_bytes(data)
    done = run("merge", tmp_path)
    assert (done.code, done.err) == (0, "")
    assert f"truncated at byte {len(data)}" in done.out
    assert link(tmp_path / "0_merged")["windows"][0]["salvaged"] is True
    message = refused(run("merge", tmp_path, "--strict"), "rank 0 was not merged", "rank-0.json is damaged")
    assert f"truncated at byte {len(data)}" in message
    assert "Leave --strict out" in message


def test_two_processes_are_refused_by_pid(tmp_path: Path) -> None:
    trace(host_pid=4242).write(tmp_path)
    message = refused(run("merge", tmp_path), "different process: host trace of pid 4242, device trace of pid 100")
    assert "merge them all the same with --force" in message
    assert run("merge", tmp_path, "--force").code == 0
    assert link(tmp_path / "0_merged")["windows"][0]["pairing"]["forced"] is True


@pytest.mark.parametrize("host", [True, False])
def test_another_ranks_file_is_refused_by_the_rank_it_states(host: bool, tmp_path: Path) -> None:
    trace(rank=1, world_size=2).write(tmp_path)
    if not host:
        (tmp_path / "0_chakra" / "rank-0.json").unlink()
    refused(run("merge", tmp_path), "different rank: rank 0 expected, device trace of rank 1", "--force")
    done = run("merge", tmp_path, "--force")
    assert done.code == 0
    assert "different rank: rank 0 expected" in done.out


def test_rank_of_single_files_comes_from_name_then_content(tmp_path: Path) -> None:
    host, device = trace().write_host(tmp_path / "rank-0.json"), trace(rank=1).write_device(tmp_path / "d.json")
    refused(run("merge", "--host", host, "--device", device, "-o", tmp_path / "o"), "rank 0 expected")
    host.rename(tmp_path / "h.json")
    assert run("merge", "--host", tmp_path / "h.json", "--device", device, "-o", tmp_path / "o").code == 0
    assert (tmp_path / "o" / "rank=1" / "link.json").is_file()


def test_same_pid_but_other_names_is_another_program(tmp_path: Path) -> None:
    other = TraceBuilder().step(3, 0, 100)
    for number in range(4):
        other.op(f"aten::other{number}", 10 * number, 5)
    host, device = other.write_host(tmp_path / "h.json"), trace().write_device(tmp_path / "d.json")
    done = run("merge", "--host", host, "--device", device, "-o", tmp_path / "o")
    refused(done, "different program: of the record-function ids in both files only 1 of 5 have the same name")


def test_same_names_but_other_sequence_numbers_is_another_run(tmp_path: Path) -> None:
    first, second = TraceBuilder(), TraceBuilder()
    for built, shift in ((first, 0), (second, 1000)):
        for number in range(5):
            built.op("aten::mm", 10 * number, 5, **{"Sequence number": shift + number})
    host, device = first.write_host(tmp_path / "h.json"), second.write_device(tmp_path / "d.json")
    done = run("merge", "--host", host, "--device", device, "-o", tmp_path / "o")
    refused(done, "different run: 5 of 5 sequence numbers differ")


def test_no_common_id_is_another_window(tmp_path: Path) -> None:
    first, second = TraceBuilder().op("a", 1, 1), TraceBuilder(_next_id=50).op("a", 1, 1)
    host, device = first.write_host(tmp_path / "h.json"), second.write_device(tmp_path / "d.json")
    refused(run("merge", "--host", host, "--device", device, "-o", tmp_path / "o"), "different window")


def test_file_in_place_of_the_output_folder(tmp_path: Path) -> None:
    trace().write(tmp_path)
    (tmp_path / "out").write_text("mine")
    refused(run("merge", tmp_path, "-o", tmp_path / "out"), "out/rank=0 cannot be written", "-o")
    assert (tmp_path / "out").read_text() == "mine"


def test_full_disk_is_said_and_leaves_no_merged_rank(tmp_path: Path) -> None:
    trace().write(tmp_path)
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))"
    done = process("merge", tmp_path, before=limit)
    message = refused(done, "0_merged/rank=0 cannot be written")
    assert "File too large" in message
    assert list((tmp_path / "0_merged" / "rank=0").iterdir()) == []


def test_bad_rank_does_not_stop_the_others(tmp_path: Path) -> None:
    for rank in (0, 1, 2):
        trace(rank=rank, world_size=3).write(tmp_path, rank)
    (tmp_path / "0_kineto" / "rank-1.json").write_text("garbage")
    done = run("merge", tmp_path)
    refused(done, "rank 1 was not merged", "rank-1.json is no device trace")
    assert "2 of 3 ranks merged" in done.out
    assert sorted(p.parent.name for p in tmp_path.rglob("link.json")) == ["rank=0", "rank=2"]


def test_rank_merged_before_but_bad_now_is_not_left_as_merged(tmp_path: Path) -> None:
    trace().write(tmp_path)
    assert run("merge", tmp_path).code == 0
    (tmp_path / "0_kineto" / "rank-0.json").write_text("garbage")
    refused(run("merge", tmp_path), "is no device trace")
    done = run("summary", tmp_path)
    assert (done.code, done.out) == (1, "")
    first, second = done.err.splitlines()
    assert "rank 0 was not merged" in first
    assert "no rank of" in second


def test_rank_that_exists_only_as_part_files_is_salvaged_and_strict_refuses_it(tmp_path: Path) -> None:
    trace(rank=0).write(tmp_path, 0)
    trace(rank=1).write(tmp_path, 1)
    for folder in ("0_chakra", "0_kineto"):
        path = tmp_path / folder / "rank-1.json"
        path.rename(path.with_name("rank-1.json.part"))
    done = run("merge", tmp_path)
    assert (done.code, done.err) == (0, "")
    assert "note: the process ended, or still runs, before its files were whole" in done.out
    assert link(tmp_path / "0_merged", 1)["windows"][0]["salvaged"] is True
    refused(run("merge", tmp_path, "--strict"), "rank 1 was not merged", "before these files were whole")


def test_empty_run_and_merged_folder_hold_nothing_to_merge(tmp_path: Path) -> None:
    (tmp_path / "0_run").mkdir()
    refused(run("merge", tmp_path), "run 0 in", "recorded no traces", "Record it again")
    trace().write(tmp_path / "b")
    assert run("merge", tmp_path / "b").code == 0
    refused(run("merge", tmp_path / "b" / "0_merged", "-o", tmp_path / "x", "--job", "zz"), "holds no traces")


# Usage errors: exit 2.


@pytest.mark.parametrize(
    ("args", "part"),
    [
        ((), "nothing to merge"),
        (("--nonsense",), "--nonsense"),
        (("DIR", "--host", "h.json"), "not both"),
        (("--host", "h.json"), "-o OUT"),
        (("DIR", "--workers", "-1"), "-1 is negative"),
        (("DIR", "--ranks", "x"), "x"),
        (("--device", "d.json", "-o", "o", "--rank", "-2"), "-2 is negative"),
        (("DIR", "extra"), "extra"),
    ],
)
def test_wrong_usage_exits_2_with_one_line(args: tuple[str, ...], part: str, tmp_path: Path) -> None:
    done = run("merge", *[str(tmp_path) if a == "DIR" else a for a in args])
    assert done.code == 2
    assert part in done.err
    assert "--help" in done.err
    assert len(done.err.strip().splitlines()) == 1


def test_unknown_verb_and_no_verb(tmp_path: Path) -> None:
    assert run("frobnicate").code == 2
    assert run("--help").code == 0
    assert "merge" in run().out
    assert run("--version").out.strip()


# Processes that die.


def test_killed_worker_costs_no_rank_that_can_be_merged(tmp_path: Path) -> None:
    for rank in range(4):
        big = trace(rank=rank, pid=100 + rank)
        for number in range(3000):
            big.op(f"aten::more{number % 50}", 200 + number, 1, tid=MAIN)
        (tmp_path / "0_kineto").mkdir(exist_ok=True)
        big.write_device(tmp_path / "0_kineto" / f"rank-{rank}.json")
    command = [sys.executable, "-m", "chakra_capture", "merge", str(tmp_path), "--workers", "2"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as merging:
        killed = _kill_a_worker(merging.pid)
        try:
            out, err = merging.communicate(timeout=60)
        finally:
            merging.kill()
    assert killed
    assert (merging.returncode, err) == (0, "")
    assert "4 of 4 ranks merged" in out


def _kill_a_worker(parent: int) -> bool:
    """Kill the first spawned worker of ``parent``, once it runs."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        for child in Path(f"/proc/{parent}/task/{parent}/children").read_text().split():
            if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes():
                os.kill(int(child), signal.SIGKILL)
                return True
        time.sleep(0.005)
    return False


# Handed cases, through the command line.


def test_case_rank_order_and_conflict(tmp_path: Path) -> None:
    folder = require(CASES / "026-rank-order-and-conflict" / "kineto")
    done = run("merge", folder, "-o", tmp_path)
    refused(done, "rank 2 was not merged", "rank-2.json is not of this rank", "device trace of rank 3")
    assert merged_lines(done) == ["rank 0", "rank 1", "rank 10"]


def test_case_same_ids_of_two_ranks(tmp_path: Path) -> None:
    folder = require(CASES / "048-rank-and-pid-mismatch")
    host, device = folder / "et-rank-0.json", folder / "kineto-rank-1.json"
    refused(run("merge", "--host", host, "--device", device, "-o", tmp_path), "pid 4242", "pid 5252")


def test_case_real_two_rank_capture(tmp_path: Path) -> None:
    folder = require(CASES / "079-real-two-rank-cpu-capture")
    for rank in (0, 1):
        pair = (
            "--host",
            folder / "et" / f"rank-{rank}.json.gz",
            "--device",
            folder / "kineto" / f"rank-{rank}.json.gz",
        )
        assert run("merge", *pair, "-o", tmp_path / "o").code == 0
        host = link(tmp_path / "o", rank)["windows"][0]["host"]
        assert (host["num_nodes"], host["num_linked"], host["pid"]) == (100, 97, 20510 + rank)
        assert host["host_only_names"] == {"## process_group:init ##": 1}
    crossed = ("--host", folder / "et" / "rank-0.json.gz", "--device", folder / "kineto" / "rank-1.json.gz")
    refused(run("merge", *crossed, "-o", tmp_path / "x"), "different process")


def test_memory_budget_takes_sizes_and_refuses_others(tmp_path: Path) -> None:
    trace().write(tmp_path)
    assert run("merge", tmp_path, "--memory-budget", "0MB").code == 0
    assert link(tmp_path / "0_merged")["windows"][0]["num_bytes_spilled"] > 0
    done = run("merge", tmp_path, "--memory-budget", "much")
    assert done.code == 2
    assert "--memory-budget 'much' is no size. Give a number of bytes, such as 500MB" in done.err
