import importlib
import json
from pathlib import Path

import pytest
from builder import TraceBuilder
from commands import refused, run
from handed import CASES, load_json, require

from chakra_capture.cli.analyze import analyze_app

NAMES = sorted(name for name in analyze_app() if not name.startswith("-"))
MODULES = {
    "device": "device", "idle": "idle", "kernels": "kernels", "operators": "operators", "launches": "launches",
    "memory": "copies", "communication": "communication", "steps": "step_tables", "phases": "phase_means",
    "input": "input_waits", "stragglers": "stragglers", "critical-path": "critical_path", "allocations": "allocations",
    "modules": "modules", "spotted": "spotted", "findings": "run_findings",
}  # fmt: skip


def small_run(folder: Path) -> Path:
    for rank in (0, 1):
        trace = TraceBuilder(rank=rank, world_size=2, pid=100 + rank).step(5, 0, 100).op("aten::mm", 5, 20)
        trace.launched("gemm", 20, 30, 1, at=10).kernel("Memcpy HtoD (Pinned -> Device)", 60, 5, 2, cat="gpu_memcpy")
        trace.write(folder, rank)
    return folder


def test_every_analysis_is_listed_with_its_module() -> None:
    assert sorted(MODULES) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_json_explains_every_column_and_has_no_other(name: str, tmp_path: Path) -> None:
    done = run("analyze", name, small_run(tmp_path), "--json")
    assert done.code == 0, done.err
    shown = json.loads(done.out)
    schema = importlib.import_module(f"chakra_capture.analysis.{MODULES[name]}").SCHEMA
    assert list(shown) == ["schema_version", "name", "columns", "rows", "notes"]
    assert (shown["schema_version"], shown["name"]) == (1, name)
    told = [{"name": column.name, "unit": column.unit, "meaning": column.meaning} for column in schema]
    assert shown["columns"] == told
    assert all(list(row) == [column.name for column in schema] for row in shown["rows"])


@pytest.mark.parametrize("name", NAMES)
def test_a_run_without_a_device_is_answered_without_zeros_for_it(name: str, tmp_path: Path) -> None:
    folder = TraceBuilder().step(1, 0, 100).op("aten::mm", 10, 20).write(tmp_path)
    done = run("analyze", name, folder, "--json")
    assert done.code == 0, done.err
    shown = json.loads(done.out)
    times = [value for row in shown["rows"] for key, value in row.items() if "device" in key and key.endswith("_ns")]
    assert set(times) <= {None}
    assert run("analyze", name, folder).code == 0


@pytest.mark.parametrize("name", NAMES)
def test_help_names_the_options_and_gives_examples(name: str) -> None:
    shown = run("analyze", name, "--help")
    assert shown.code == 0
    for text in ("--rank", "--step", "--json", f"chakra-capture analyze {name} ./traces"):
        assert text in shown.out
    assert f"analyze {name}" in run("analyze", "--help").out


def test_limit_says_how_many_rows_are_left_out(tmp_path: Path) -> None:
    folder = small_run(tmp_path)
    shown = json.loads(run("analyze", "device", folder, "--json", "--limit", "3").out)
    assert (len(shown["rows"]), shown["notes"]) == (3, ["1 row more than --limit"])
    assert "... and 1 row more" in run("analyze", "device", folder, "--limit", "3").out


def test_ranks_are_chosen_as_ranges(tmp_path: Path) -> None:
    shown = json.loads(run("analyze", "device", small_run(tmp_path), "--rank", "1", "--json").out)
    assert {row["rank"] for row in shown["rows"]} == {1}


def test_what_is_not_there_is_refused_in_one_sentence(tmp_path: Path) -> None:
    folder = small_run(tmp_path)
    refused(run("analyze", "device", folder, "--rank", "7"), "no merged rank 7", "0-1")
    refused(run("analyze", "device", folder, "--step", "9"), "no step 9")
    refused(run("analyze", "device", tmp_path / "nowhere"), "does not exist")
    assert run("analyze", "device", folder, "--rank", "x").code == 2
    assert run("analyze", "nonsense", folder).code == 2
    assert run("analyze", "device").code == 2


CASES_OF_DEVICE = (
    "010-sub-microsecond-kernels", "011-events-without-args", "013-negative-and-zero-dur",
    "014-duration-overflows-next-slice", "016-duplicate-launch-correlation", "017-cuda-graph-one-launch-many-kernels",
    "018-launch-outside-window", "019-hip-launch-names", "021-gpu-user-annotations", "022-cuda-sync-not-compute",
    "024-no-profilerstep",
)  # fmt: skip


@pytest.mark.parametrize("case", CASES_OF_DEVICE)
def test_busy_and_idle_time_of_handed_cases(case: str, tmp_path: Path) -> None:
    folder = require(CASES / case)
    expected = load_json(folder / "expect.json")
    assert run("merge", "--device", folder / "rank-0.json", "-o", tmp_path).code == 0
    rows = json.loads(run("analyze", "device", tmp_path, "--json").out)["rows"]
    whole = [row for row in rows if row["step"] is None]
    busy = expected.get("gpu_busy_us", expected.get("gpu_busy_us_clipped"))
    assert sum(row["busy_ns"] for row in whole) == 1000 * busy
    if "gpu_idle_in_step_us" in expected:
        (step,) = [row for row in rows if row["step"] is not None]
        assert (step["span_ns"], step["idle_ns"]) == (
            1000 * expected["step_us"], 1000 * expected["gpu_idle_in_step_us"],
        )  # fmt: skip
    kinds = json.loads(run("analyze", "kernels", tmp_path, "--json").out)["rows"]
    count = sum(row["count"] for row in kinds if row["kind"] == "kernel")
    assert count == expected.get("kernels", count)


def test_communication_kernels_of_every_name_are_communication(tmp_path: Path) -> None:
    folder = require(CASES / "023-communication-kernel-names")
    assert run("merge", "--device", folder / "rank-0.json", "-o", tmp_path).code == 0
    (row,) = [r for r in json.loads(run("analyze", "device", tmp_path, "--json").out)["rows"] if r["step"] is None]
    assert row["communication_ns"] == 1000 * load_json(folder / "expect.json")["comm_time_us"]
