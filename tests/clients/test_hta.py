"""Holistic Trace Analysis (``traceinsight``) loads what ``export perfetto --per-rank`` writes, and counts the same."""

import json
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from builder import TraceBuilder
from commands import run
from handed import DATA, require

from clients.environments import environment

# Prints, of each rank, how many rows HTA has of each category, and its breakdown of the time.
LOADED = """
import json, logging, sys
from collections import Counter
logging.disable(logging.CRITICAL)
from hta.trace_analysis import TraceAnalysis
analysis = TraceAnalysis(trace_dir=sys.argv[1])
names = analysis.t.symbol_table.get_sym_table()
found = {"counts": {}, "times": []}
for rank, rows in analysis.t.get_all_traces().items():
    found["counts"][rank] = dict(Counter(names[number] for number in rows["cat"]))
if sys.argv[2] == "times":
    found["times"] = json.loads(analysis.get_temporal_breakdown(visualize=False).to_json(orient="records"))
print(json.dumps(found))
"""
ACTIVITIES = {"kernel": "kernel", "gpu_memcpy": "memcpy", "gpu_memset": "memset"}


@pytest.fixture(scope="module")
def python() -> Path:
    return environment("hta") / "python"


def loaded(python: Path, folder: Path, what: str = "counts") -> dict[str, Any]:
    command = [str(python), "-c", LOADED, str(folder), what]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def exported(source: Path, target: Path) -> Path:
    done = run("export", "perfetto", source, "-o", target, "--per-rank")
    assert done.code == 0, done.err
    return target


def in_scope(nodes: pl.DataFrame) -> dict[str, int]:
    """Device activities of a rank that HTA keeps: of several steps not those that are launched in the last one."""
    steps = nodes.filter((pl.col("kind") == "annotation") & pl.col("name").str.starts_with("ProfilerStep#"))
    last = steps["ts_ns"].max() if steps.height > 1 else None
    calls = nodes.select(launch_id="node_id", called="ts_ns")
    rows = nodes.filter(pl.col("kind").is_in([*ACTIVITIES.values()])).join(calls, on="launch_id", how="left")
    rows = rows if last is None else rows.filter(pl.col("called") < last)
    return dict(rows["kind"].cast(pl.String).value_counts().iter_rows())


@pytest.mark.parametrize("name", ["resnet50_ddp_twin", "simple_add_by_order"])
def test_it_has_the_device_activities_of_the_tables(python, tmp_path, name):
    pair = require(DATA / "pairs" / name)
    sides = ("--host", next((pair / "host").iterdir()), "--device", next((pair / "device").iterdir()))
    assert run("merge", "--force", *sides, "-o", tmp_path / "m").code == 0
    found = loaded(python, exported(tmp_path / "m", tmp_path / "f"), "times")
    (path,) = (tmp_path / "m").glob("rank=*")
    (rank,) = found["counts"]
    assert path.name == f"rank={rank}"
    counts = found["counts"][rank]
    ours = {ACTIVITIES[cat]: count for cat, count in counts.items() if cat in ACTIVITIES}
    assert ours == in_scope(pl.read_parquet(path / "nodes.parquet"))
    (times,) = found["times"]
    said = json.loads(run("analyze", "device", tmp_path / "m", "--definitions", "hta", "--json").out)
    (row,) = said["rows"]
    assert times["kernel_time(us)"] == pytest.approx(row["kernel_time_ns"] / 1000, abs=2)
    # It rounds the start of each activity up and its end down to a whole microsecond.
    most = 2 * sum(ours.values())
    for name in ("compute_time", "non_compute_time", "idle_time"):
        assert times[f"{name}(us)"] == pytest.approx(row[f"{name}_ns"] / 1000, abs=most)


def test_it_tells_the_ranks_apart(python, tmp_path):
    for rank, count in ((0, 3), (1, 5), (12, 2)):
        built = TraceBuilder(pid=100 + rank, rank=rank, world_size=13).step(1, 0, 500)
        for number in range(count):
            built.launched(f"kernel {number}", 20 + 10 * number, 5, number + 1, at=10 * number + 2)
        built.kernel("overlaps", 22, 10, 1, stream=7)
        built.write(tmp_path / "t", rank)
    assert run("merge", tmp_path / "t").code == 0
    found = loaded(python, exported(tmp_path / "t", tmp_path / "f"))
    kernels = {int(rank): Counter(counts)["kernel"] for rank, counts in found["counts"].items()}
    assert kernels == {0: 4, 1: 6, 12: 3}
