"""Real runs on GPUs whose traces name no process group: what was measured on their raw times, in microseconds."""

import json
from pathlib import Path

import polars as pl
import pytest
from handed import DATA, require

from chakra_capture.merge.many.run import merge_run
from chakra_capture.merge.report import MergeOptions
from chakra_capture.trace.discovery import find_run


def merged(path: Path, out: Path) -> pl.DataFrame:
    assert [report.error for report in merge_run(find_run(path), out, MergeOptions(), workers=1)] == [None] * 4
    return pl.read_parquet(out / "collectives.parquet")


def test_ranks_of_an_old_schema_are_matched_and_what_they_wait_is_told_from_what_they_transfer(tmp_path: Path) -> None:
    table = merged(require(DATA / "pairs" / "dlrm_8gpu_by_order"), tmp_path)
    kernels = table.filter(pl.col("num_found") == 4, pl.col("wait_ns").is_not_null())
    by_operation = kernels.group_by("collective_id", maintain_order=True).agg("rank", "transfer_ns", "end_ns")
    assert by_operation.height == 8
    for ends in by_operation["end_ns"]:
        assert max(ends) - min(ends) <= 7_000
    for at, expected in ((0, [519, 519, 518, 519]), (7, [883, 880, 885, 879])):
        transfer = [ns / 1000 for ns in by_operation["transfer_ns"][at]]
        assert transfer == pytest.approx(expected, rel=0.01)
    written = json.loads((tmp_path / "alignment.json").read_text())
    assert any("matched as those of one group" in note for note in written["notes"])
    assert any("whose members no trace states" in note for note in written["notes"])
    assert written["missing_ranks"] == [4, 5, 6, 7]


def test_of_samples_that_do_not_belong_together_nothing_is_said(tmp_path: Path) -> None:
    for rank in (0, 1):
        device = require(DATA / "device_only" / f"hta_sampled_two_ranks_{rank}.json.gz")
        folder = tmp_path / "run" / "0_kineto"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"rank-{rank}.json.gz").symlink_to(device)
    out = tmp_path / "out"
    assert [r.error for r in merge_run(find_run(tmp_path / "run"), out, MergeOptions(), workers=1)] == [None, None]
    table = pl.read_parquet(out / "collectives.parquet")
    assert table.filter(pl.col("num_found") == 2).height > 0
    assert table["wait_ns"].null_count() == table["last_rank"].null_count() == table.height
    written = json.loads((out / "alignment.json").read_text())
    assert [clock["comparable"] for clock in written["clocks"].values()] == [False, False]
    # The first operations of the two files, as both state their sizes.
    assert written["groups"][0]["first_mismatch"] == (
        "process group of unknown name: operation 0 is all_to_all of 3072 B of int64 on rank 0, "
        "all_to_all of 339738624 B of uint8 on rank 1"
    )
