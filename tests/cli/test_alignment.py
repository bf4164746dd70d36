"""What the merge of several ranks says of them together, on the screen, in JSON and in the files of the run."""

import json
from pathlib import Path

import polars as pl
from builder import TraceBuilder
from commands import run

from chakra_capture.trace.schema import COLLECTIVES

KERNEL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(x)"


def reduces(rank: int, size: int, *spans: tuple[int, int], count: int = 10) -> TraceBuilder:
    """A rank of ``size`` that runs an all_reduce per span (start, duration) in microseconds."""
    builder = TraceBuilder(pid=100 + rank, rank=rank, world_size=size).step(1, 0, 10_000)
    for number, (start, duration) in enumerate(spans):
        args = {
            "Collective name": "allreduce", "dtype": "Float", "In msg nelems": count, "Out msg nelems": count,
            "Process Group Name": "0", "Process Group Ranks": json.dumps(list(range(size))), "Group size": size,
            "Seq": number + 1,
        }  # fmt: skip
        builder.op("c10d::allreduce_", start - 20, 10)
        builder.launched(KERNEL, start, duration, number + 1, at=start - 15, **args)
    return builder


def test_merge_matches_the_ranks_and_writes_tables_of_the_run(tmp_path: Path) -> None:
    reduces(0, 2, (100, 60), (500, 20)).write(tmp_path, 0)
    reduces(1, 2, (140, 20), (500, 20)).write(tmp_path, 1)
    done = run("merge", tmp_path)
    assert (done.code, done.err) == (0, "")
    assert "collectives: 2 of 2 found on all of their ranks" in done.out
    assert "clocks: 1 rank compared with rank 0, all the same" in done.out
    table = pl.read_parquet(tmp_path / "0_merged" / "collectives.parquet")
    assert table.schema == COLLECTIVES.schema
    # Ends agree, so the clocks do; rank 0 arrived 40 us before rank 1.
    first = table.filter(collective_id=0).sort("rank")
    assert first["wait_ns"].to_list() == [40_000, 0]
    assert first["transfer_ns"].to_list() == [20_000, 20_000]
    assert first["last_rank"].to_list() == [1, 1]
    alignment = json.loads((tmp_path / "0_merged" / "alignment.json").read_text())
    assert json.loads(run("merge", tmp_path, "--json").out)["alignment"] == alignment


def test_ranks_that_disagree_are_named(tmp_path: Path) -> None:
    reduces(0, 2, (100, 60)).write(tmp_path, 0)
    reduces(1, 2, (140, 20), count=11).write(tmp_path, 1)
    done = run("merge", tmp_path)
    assert (done.code, done.err) == (0, "")
    assert "collectives: 0 of 1 found on all of their ranks" in done.out
    assert "40" in done.out.split("note: process group 0")[1]
    assert "44" in done.out.split("note: process group 0")[1]


def test_tasks_of_one_rank_each_leave_the_tables_of_the_run_to_the_last(tmp_path: Path) -> None:
    for rank in range(2):
        reduces(rank, 2, (100, 20)).write(tmp_path, rank)
    first = run("merge", tmp_path, "--rank", "0")
    assert (first.code, first.err) == (0, "")
    assert "collectives: matched by the call that finds all ranks merged" in first.out
    assert not (tmp_path / "0_merged" / "collectives.parquet").exists()
    last = run("merge", tmp_path, "--rank", "1")
    assert "collectives: 1 of 1 found on all of their ranks" in last.out
    assert pl.read_parquet(tmp_path / "0_merged" / "collectives.parquet").height == 2


def test_run_of_one_rank_says_nothing_of_others(tmp_path: Path) -> None:
    TraceBuilder().step(1, 0, 50).op("a", 5, 10).write(tmp_path, 0)
    assert "collectives" not in run("merge", tmp_path).out
