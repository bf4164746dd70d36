"""The traces that this project recorded itself merge, with the steps that how.txt asked for."""

import shutil
from pathlib import Path

import polars as pl
import pytest

from chakra_capture.merge.many.run import merge_run
from chakra_capture.merge.report import MergeOptions
from chakra_capture.trace.discovery import find_run

TRACES = Path(__file__).parent.parent / "traces"


@pytest.mark.parametrize(
    ("name", "ranks", "windows"),
    [
        ("plain_loop", [0], [[2, 3]]),
        ("digits_ddp2_gloo", [0, 1], [[5, 6]]),
        ("digits_two_cycles", [0], [[5], [7]]),
    ],
)
def test_sample_merges_with_every_host_op_linked(
    name: str, ranks: list[int], windows: list[list[int]], tmp_path: Path
) -> None:
    shutil.copytree(TRACES / name, tmp_path / name)
    run = find_run(tmp_path / name)
    reports = merge_run(run, run.merged_dir, MergeOptions(strict=True), workers=1)
    assert [(report.rank, report.error) for report in reports] == [(rank, None) for rank in ranks]
    for report in reports:
        host_only = [window["host"]["host_only_names"] for window in report.windows]
        assert all(set(names) <= {"## process_group:init ##"} for names in host_only)
        steps = pl.read_parquet(run.merged_dir / f"rank={report.rank}" / "steps.parquet")
        found = [steps.filter(pl.col("window") == w)["step"].to_list() for w in range(len(windows))]
        assert found == windows
