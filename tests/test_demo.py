"""The main job, as a user runs it: real Lightning DDP on two gloo processes, recorded, merged, summarised."""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import warm

ROOT = Path(__file__).parent.parent
WINDOW = list(range(5, 11))
CLI = str(Path(sysconfig.get_path("scripts")) / "chakra-capture")
STEP_NAME = re.compile(r"ProfilerStep#(\d+)")


def run(*command: str | Path, cwd: Path = ROOT, timeout: int = 300) -> "subprocess.CompletedProcess[str]":
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout,
    )


def steps_in(path: Path, key: str) -> list[int]:
    """Step numbers of the ProfilerStep rows of a trace, read with the plain json module."""
    rows = json.loads(path.read_text())[key]
    return sorted(int(match[1]) for row in rows if (match := STEP_NAME.fullmatch(str(row.get("name", "")))))


def record_function_ids(path: Path, key: str) -> dict[int, str]:
    """Record-function id -> name of every row of a trace that has one."""
    found = {}
    for row in json.loads(path.read_text())[key]:
        attrs = {a["name"]: a["value"] for a in row.get("attrs", ())}
        number = attrs.get("rf_id") or (row.get("args") or {}).get("Record function id")
        if number:
            found[int(number)] = row["name"]
    return found


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("demo")
    first = run(sys.executable, "scripts/demo.py", folder)
    second = run(sys.executable, "scripts/demo.py", folder, "trainer.max_epochs=1")
    return {"traces": folder / "traces", "first": first, "second": second}


def test_demo_ends_well_and_says_where_its_outputs_are(demo: dict[str, Any]) -> None:
    first = demo["first"]
    assert first.returncode == 0, first.stdout + first.stderr
    assert f"Traces, manifests and merged tables: {demo['traces']}" in first.stdout
    assert "2 of 2 ranks merged" in first.stdout
    assert "Steps      5-10 (12 of 12 asked for recorded whole, over 2 ranks)" in first.stdout


def test_the_network_learns(demo: dict[str, Any]) -> None:
    found = re.search(r"(\d+) steps on 2 processes, validation accuracy ([\d.]+)", demo["first"].stdout)
    assert found
    assert int(found[1]) > 20
    assert float(found[2]) > 0.9


@pytest.mark.parametrize("job", ["0", "0.1"])
@pytest.mark.parametrize("rank", [0, 1])
def test_both_runs_are_complete_on_every_rank(demo: dict[str, Any], job: str, rank: int) -> None:
    traces = demo["traces"]
    assert demo["second"].returncode == 0, demo["second"].stderr
    host, device = traces / f"{job}_chakra" / f"rank-{rank}.json", traces / f"{job}_kineto" / f"rank-{rank}.json"
    assert steps_in(host, "nodes") == WINDOW
    assert steps_in(device, "traceEvents") == WINDOW
    manifest = json.loads((traces / f"{job}_run" / f"rank-{rank}.json").read_text())
    assert manifest["complete"] is True
    assert [window["steps"] for window in manifest["windows"]] == [WINDOW]
    merged = pl.read_parquet(traces / f"{job}_merged" / f"rank={rank}" / "steps.parquet")
    assert merged["step"].to_list() == WINDOW


def test_the_two_runs_have_different_run_ids(demo: dict[str, Any]) -> None:
    ids = {
        json.loads((demo["traces"] / f"{job}_run" / f"rank-{rank}.json").read_text())["run_id"]
        for job in ("0", "0.1")
        for rank in (0, 1)
    }
    assert len(ids) == 2
    assert not list(demo["traces"].rglob("*.part"))


@pytest.mark.parametrize("rank", [0, 1])
def test_record_function_ids_are_equal_on_both_sides(demo: dict[str, Any], rank: int) -> None:
    traces = demo["traces"]
    host = record_function_ids(traces / "0_chakra" / f"rank-{rank}.json", "nodes")
    device = record_function_ids(traces / "0_kineto" / f"rank-{rank}.json", "traceEvents")
    only_host = {number: name for number, name in host.items() if number not in device}
    assert set(only_host.values()) == {"## process_group:init ##"}
    assert len(only_host) == 1
    assert {number: name for number, name in host.items() if number in device} == device


def test_summary_of_both_runs_as_json(demo: dict[str, Any]) -> None:
    newest = json.loads(run(CLI, "summary", demo["traces"], "--json").stdout)
    older = json.loads(run(CLI, "summary", demo["traces"], "--job", "0", "--json").stdout)
    assert any("others here: 0 " in note for note in newest["notes"])
    for summary in (newest, older):
        assert summary["world_size"] == 2
        assert [rank["steps"] for rank in summary["ranks"]] == [WINDOW, WINDOW]
        assert all(rank["device"] is None for rank in summary["ranks"])  # not measured, never 0


KILL_RANK_1_IN_STEP_8 = """
plain_step = Digits.training_step

def step_or_die(self, batch, batch_idx):
    if self.trainer.global_rank == 1 and self.trainer.global_step == 8:
        import os, signal
        os.kill(os.getpid(), signal.SIGKILL)
    return plain_step(self, batch, batch_idx)

Digits.training_step = step_or_die

# Every 5 s Lightning looks for dead children, and kills rank 0 by SIGKILL too if there is one; a busy machine may not
# have finished its recording by then.
from lightning_fabric.strategies.launchers import subprocess_script

subprocess_script._ChildProcessObserver.__init__.__defaults__ = (600,)

"""


def test_a_killed_rank_leaves_the_other_one_mergeable(tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    source = (ROOT / "scripts" / "train_digits.py").read_text()
    script = tmp_path / "scripts" / "train_digits.py"
    script.write_text(
        source.replace('if __name__ == "__main__":', KILL_RANK_1_IN_STEP_8 + 'if __name__ == "__main__":')
    )
    traces = tmp_path / "traces"
    settings = {"enabled": "true", "start_step": 5, "end_step": 10, "trace_dir": traces}
    # Rank 0; it starts the other one by Python.
    command = [sys.executable, script, *[f"chakra_profile.{k}={v}" for k, v in settings.items()]]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    trained = warm.run(command, cwd=tmp_path, timeout=240, env=environ, modules=warm.LIGHTNING)
    # The job dies as it does without us, of the error of the lost peer, by no signal.
    assert trained.returncode > 0, trained.stderr
    merged = run(CLI, "merge", traces, "--json")
    report = {rank["rank"]: rank for rank in json.loads(merged.stdout)["ranks"]}
    assert report[0]["error"] is None
    # What the killed rank left is read as far as it is whole, and said to be so.
    assert merged.returncode == 0
    assert report[1]["windows"][0]["salvaged"] is True
    recorded = pl.read_parquet(traces / "0_merged" / "rank=0" / "steps.parquet")
    assert recorded.select("step", "partial").rows() == [(5, False), (6, False), (7, False), (8, True)]
    manifest = json.loads((traces / "0_run" / "rank-0.json").read_text())
    assert manifest["complete"] is False
    assert manifest["reason"] == "exception"
    assert manifest["windows"][0]["steps"] == [5, 6, 7]
    assert manifest["windows"][0]["partial_step"] == 8
    assert not (traces / "0_run" / "rank-1.json").exists()
    assert not (traces / "0_chakra" / "rank-1.json").exists()
    summary = run(CLI, "summary", traces)
    assert summary.returncode == 0, summary.stderr
    assert "rank 0: recording is incomplete" in " ".join(summary.stdout.split())
