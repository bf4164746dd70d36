"""Columns past the budget lie on disk; what is read is the same, and nothing is left behind."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builder import write_json
from handed import DATA, require
from same import differences

from chakra_capture.merge.rank import merge_rank
from chakra_capture.merge.report import MergeOptions
from chakra_capture.trace.device import read_device_trace
from chakra_capture.trace.discovery import WindowFiles
from chakra_capture.trace.host import read_host_trace
from chakra_capture.trace.native import load
from chakra_capture.trace.reading import ReadOptions
from chakra_capture.trace.scanners import ScannerKind
from chakra_capture.trace.spill import Spill

TWIN = DATA / "pairs" / "resnet50_ddp_twin"


def num_block_rows() -> int:
    library = load()
    assert library is not None
    return int(library.cc_block_rows())


def many_events(path: Path, size: int) -> Path:
    """More rows than the C core holds in one block; some quoted numbers among them, which the slow reader takes."""
    events: list[dict[str, Any]] = [
        {"ph": "X", "cat": "cpu_op", "name": f"op{i % 7}", "pid": 1, "tid": i % 3, "ts": 10 * i, "dur": 5,
         "args": {"External id": i, "Ev Idx": i, "note": i % 11}}
        for i in range(size)
    ]  # fmt: skip
    events[size // 2]["ts"] = str(events[size // 2]["ts"])
    return write_json(path, {"traceEvents": events})


@pytest.mark.parametrize("kind", list(ScannerKind))
@pytest.mark.parametrize("budget", [0, 1_000_000, 10**9])
def test_more_rows_than_a_block_read_the_same(kind: ScannerKind, budget: int, tmp_path: Path) -> None:
    path = many_events(tmp_path / "device.json", 2 * num_block_rows() + 5)
    spill = Spill(tmp_path / "spill", budget)
    spilled = read_device_trace(path, options=ReadOptions(kind, spill))
    assert differences(spilled, read_device_trace(path, scanner=kind)) == []
    assert (spill.num_bytes > 0) == (budget < 10**9)
    assert not (tmp_path / "spill").exists() or os.listdir(tmp_path / "spill") == []


def test_budget_is_shared_and_what_fits_stays_in_memory(tmp_path: Path) -> None:
    spill = Spill(tmp_path, 100)
    first, second, third = (spill.keep(np.arange(size, dtype=np.int8)) for size in (60, 60, 40))
    assert [isinstance(column, np.memmap) for column in (first, second, third)] == [False, True, False]
    assert [column.tolist() for column in (first, second, third)] == [list(range(n)) for n in (60, 60, 40)]
    assert spill.num_bytes == 60


def test_host_trace_reads_the_same(tmp_path: Path) -> None:
    path = require(TWIN / "host" / "rank-0.json.gz")
    spill = Spill(tmp_path, 0)
    assert differences(read_host_trace(path, options=ReadOptions(spill=spill)), read_host_trace(path)) == []
    assert spill.num_bytes > 0


def test_merged_tables_are_the_same_byte_for_byte(tmp_path: Path) -> None:
    files = WindowFiles(*(require(TWIN / side / "rank-0.json.gz") for side in ("host", "device")))
    reports = [
        merge_rank(0, [files], tmp_path / name, MergeOptions(force=True, memory_budget=budget))
        for name, budget in (("spilled", 100_000), ("held", None))
    ]
    for table in ("nodes", "edges", "steps"):
        assert (tmp_path / f"spilled/{table}.parquet").read_bytes() == (tmp_path / f"held/{table}.parquet").read_bytes()
    assert [report.windows[0]["num_bytes_spilled"] > 0 for report in reports] == [True, False]
    assert sorted(os.listdir(tmp_path / "spilled")) == sorted(os.listdir(tmp_path / "held"))
