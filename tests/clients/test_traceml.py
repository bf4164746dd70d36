"""TraceML 0.5 reads our final_summary.json, we read its, and on one script both have the same keys."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from commands import run
from json_shape import shape

from clients.environments import environment

SCRIPT = Path(__file__).with_name("training.py")


def call(*command: object, cwd: Path) -> str:
    done = subprocess.run([*map(str, command)], cwd=cwd, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def traceml() -> Path:
    return environment("traceml") / "traceml"


@pytest.fixture(scope="module")
def files(traceml, tmp_path_factory) -> dict[str, Path]:
    """What each tool wrote of the same training."""
    folder = tmp_path_factory.mktemp("both")
    call(sys.executable, SCRIPT, "chakra_capture.integrations.monai", cwd=folder)
    assert run("summary", folder / "chakra_traces").code == 0
    options = ("--mode", "summary", "--logs-dir", "logs", "--run-name", "theirs")
    call(traceml, "run", *options, SCRIPT, "--args", "traceml_ai.integrations.monai", cwd=folder)
    return {
        "ours": folder / "chakra_traces" / "0_run" / "final_summary.json",
        "theirs": folder / "logs" / "theirs" / "final_summary.json",
    }


@pytest.fixture(scope="module")
def found(files) -> dict[str, dict[str, Any]]:
    return {tool: json.loads(path.read_text()) for tool, path in files.items()}


def test_both_have_the_same_keys_of_one_training(found):
    # A list may be empty: of time in no phase ours names no rank.
    ours, theirs = ({path.removesuffix("[]") for path in shape(found[tool])} for tool in ("ours", "theirs"))
    # Of a verdict the evidence is of its kind, which two runs of milliseconds need not share.
    theirs = {path for path in theirs if ".evidence." not in path}
    assert {path for path in theirs - ours if not path.startswith(".system.groups.rows.0")} == {
        ".run_context.execution.expected_nodes",
        ".run_context.execution.processes_per_node",
    }
    assert {
        path for path in ours - theirs if ".evidence." not in path and not path.startswith(".chakra_capture")
    } == set()


def test_both_count_the_same_steps_and_measure_the_same(found):
    assert {tool: one["step_time"]["metadata"]["training_total_steps"] for tool, one in found.items()} == {
        "ours": 30,
        "theirs": 30,
    }
    measured = {
        tool: {name for name, value in one["step_time"]["global"]["average"].items() if value is not None}
        for tool, one in found.items()
    }
    assert measured["ours"] == measured["theirs"]


def test_theirs_views_ours(traceml, files, found, tmp_path):
    assert call(traceml, "view", files["ours"], cwd=tmp_path).strip() == found["ours"]["text"].strip()
    drawn = call(traceml, "view", "--re-render", files["ours"], cwd=tmp_path)
    assert "step" in drawn.lower()
    call(traceml, "view", files["ours"], "--html", tmp_path / "view.html", cwd=tmp_path)
    assert "<html" in (tmp_path / "view.html").read_text().lower()


@pytest.mark.parametrize("order", [("ours", "theirs"), ("theirs", "ours"), ("ours", "ours")])
def test_theirs_compares_with_ours(traceml, files, found, tmp_path, order):
    left, right = order
    call(traceml, "compare", files[left], files[right], "--output", tmp_path / "said", cwd=tmp_path)
    step = json.loads((tmp_path / "said.json").read_text())["sections"]["step_time"]
    assert step["available"]
    for name in ("step_time_ms", "input_ms", "compute_ms", "forward_ms", "backward_ms", "optimizer_ms", "residual_ms"):
        written = {"input_ms": "input_wait_ms"}.get(name, name)
        averages = {tool: one["step_time"]["global"]["average"][written] for tool, one in found.items()}
        side = step["metrics"][name]
        assert (side["lhs"], side["rhs"]) == pytest.approx((averages[left], averages[right])), name


@pytest.mark.parametrize("order", [("ours", "theirs"), ("theirs", "ours")])
def test_ours_compares_with_theirs(files, found, order):
    left, right = order
    done = run("compare", files[left], files[right], "--json")
    assert done.err == ""
    said = json.loads(done.out)
    assert said["verdict"] in ("same", "different", "inconclusive")
