"""The check for machines with CUDA: run on the CPU, where what needs a device is skipped by name; and its judgement.

What it asks of a device is held against a recording made by hand here, for no GPU was at hand.
"""

import importlib
import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import polars as pl
import pytest
from commands import run

from chakra_capture.layout import RunPaths

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"
ON_CPU = ["conv-fp32", "conv-bf16", "transformer-fp32", "compiled", "process-group", "monai", "lightning"]
NEED_A_DEVICE = ["transformer-amp", "side-stream", "cuda-graph"]
PARTS_OF_A_DEVICE = [
    "device activities linked", "device activities in each step", "phases by CUDA events", "sync edges"
]  # fmt: skip


def test_on_the_cpu_every_check_passes_and_what_needs_a_device_is_skipped_by_name(tmp_path):
    environ = {**os.environ, "PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = [str(SCRIPTS / "gpu_check.sh"), str(tmp_path / "out")]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "out/results.json").read_text())["rows"]
    outcomes = {(row["case"], row["check"]): (row["outcome"], row["found"]) for row in rows}
    assert {case for case, _ in outcomes} == {*ON_CPU, *NEED_A_DEVICE}
    skipped = {place for place, (outcome, _) in outcomes.items() if outcome == "skipped"}
    expected = {(case, "training") for case in NEED_A_DEVICE}
    expected |= {(case, check) for case in ON_CPU for check in PARTS_OF_A_DEVICE}
    assert skipped == expected | {("compiled", "kernels made by inductor"), ("process-group", "NCCL")}
    assert all(outcomes[place][1].startswith("needs a CUDA device") for place in skipped)
    shown = {place for place, (outcome, _) in outcomes.items() if outcome == "shown"}
    assert shown == {(case, "step time before and after") for case in ON_CPU}
    assert (tmp_path / "out/results.txt").read_text() == done.stdout

    with tarfile.open(tmp_path / "out/samples.tar.gz") as archive:
        archive.extractall(tmp_path / "samples", filter="data")
    assert sorted(path.name for path in (tmp_path / "samples").iterdir()) == sorted(ON_CPU)
    merged = run("merge", tmp_path / "samples/compiled", "--strict")
    assert merged.code == 0, merged.err

    again = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60, check=False)
    assert (again.returncode, again.stdout) == (2, "")
    assert "is there already. Name another folder." in again.stderr


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(SCRIPTS)
        yield importlib.import_module("gpu_check")


WINDOW = (60, 61)
PHASES = ("forward", "backward")
Made = dict[str, Any]


def recorded() -> Made:
    """A training of 120 steps on a device as it should be recorded: in each step of the window a graph of a kernel."""
    nodes, edges, communication = [], [], []
    for step in WINDOW:
        first = len(nodes)
        nodes += [
            {"name": "Torch-Compiled Region: 0/0", "kind": "annotation", "launch_id": None, "stream": None},
            {"name": "cudaGraphLaunch", "kind": "runtime", "launch_id": None, "stream": None},
            {"name": "triton_poi_fused_0", "kind": "kernel", "launch_id": first + 1, "stream": 7},
            {"name": "gemm", "kind": "kernel", "launch_id": first + 1, "stream": 20},
        ]
        for at in range(first, len(nodes)):
            nodes[at] |= {"node_id": at, "step": step}
        edges += [{"kind": "sync"}, {"kind": "event_wait"}]
        for name in ("all_reduce", "all_gather"):
            communication.append({"collective": name, "comm_bytes": 4, "step": step, "process_group": "0"})
    lines = [
        {
            "kind": "step", "step": step, "ns": 5_000_000, "phases": {name: [1, 1] for name in PHASES},
            "device_ns": {"(step)": 4_000_000, "forward": 1_000_000, "backward": 2_000_000},
        }
        for step in range(120)
    ]  # fmt: skip
    lines[-1]["device_ns"] = None
    return {
        "told": {
            "window": WINDOW, "phases": PHASES, "steps_ns": [5_000_000] * 120, "backend": "nccl",
            "device_ns": {"forward": [1_050_000] * 120, "backward": [2_050_000] * 120},
        },
        "lines": lines,
        "nodes": nodes,
        "edges": edges,
        "communication": communication,
        "steps": [{"num_device_activities": 2} for _ in WINDOW],
        "link": {
            "host": {"num_linked": 100, "num_with_record_function_id": 101},
            "device": {"num_launched": 4, "num_activities": 4, "num_with_parent": 4, "orphans": {}},
            "edges_backward_left_out": {},
            "clock_offset_ns": 0,
        },
    }  # fmt: skip


def judged(script: ModuleType, folder: Path, case: str, made: Made) -> dict[str, str]:
    """What the checks say of it."""
    paths = RunPaths(folder, case)
    merged = paths.merged_dir / "rank=0"
    merged.mkdir(parents=True)
    paths.phases_dir.mkdir()
    paths.phases_file(0).write_text("\n".join(json.dumps(line) for line in made["lines"]))
    for name in ("nodes", "edges", "steps", "communication"):
        pl.DataFrame(made[name]).write_parquet(merged / f"{name}.parquet")
    (merged / "link.json").write_text(json.dumps({"windows": [made["link"]]}))
    one = script.Recorded(case, made["told"], paths, has_cuda=True)
    rows = [script.check_step_time(one)]
    for check in (script.check_links, script.check_phases, script.check_edges, script.check_contents):
        rows += check(one)
    return {row.check: row.outcome for row in rows}


@pytest.mark.parametrize("case", ["conv-fp32", "side-stream", "cuda-graph", "compiled", "process-group"])
def test_recording_of_a_device_as_it_should_be_passes(script, tmp_path, case):
    found = judged(script, tmp_path, case, recorded())
    shown = {"device activities with a parent", "edges backward, clock offset", "NCCL"}
    assert {check for check, outcome in found.items() if outcome != "ok"} == shown & {*found}
    assert {"sync edges", "forward by CUDA events", "device activities linked"} <= {*found}


def slower_after(made: Made) -> None:
    made["told"]["steps_ns"][80:] = [5_150_000] * 40


def orphans(made: Made) -> None:
    made["link"]["device"]["num_launched"] = 3


def idle_step(made: Made) -> None:
    made["steps"][1]["num_device_activities"] = 0


def other_time_on_the_device(made: Made) -> None:
    made["told"]["device_ns"]["backward"] = [2_300_000] * 120


def step_not_timed_on_the_device(made: Made) -> None:
    made["lines"][100]["device_ns"] = None


def phase_missing(made: Made) -> None:
    del made["lines"][100]["phases"]["forward"]


def no_waits(made: Made) -> None:
    made["edges"] = [{"kind": "launch"}]


def one_stream(made: Made) -> None:
    for node in made["nodes"]:
        node["stream"] = 7


def kernels_of_another_launch(made: Made) -> None:
    for node in made["nodes"]:
        node["launch_id"] = None if node["launch_id"] is None else 0


def nothing_compiled(made: Made) -> None:
    made["nodes"] = [node for node in made["nodes"] if not node["name"].startswith(("Torch-", "triton_"))]


def step_without_a_collective(made: Made) -> None:
    made["communication"] = made["communication"][2:]


@pytest.mark.parametrize(
    ("change", "case", "checks"),
    [
        (slower_after, "conv-fp32", {"step time before and after"}),
        (orphans, "conv-fp32", {"device activities linked"}),
        (idle_step, "conv-fp32", {"device activities in each step"}),
        (other_time_on_the_device, "conv-fp32", {"backward by CUDA events"}),
        (step_not_timed_on_the_device, "conv-fp32", {"forward by CUDA events", "backward by CUDA events"}),
        (phase_missing, "conv-fp32", {"phases of every step"}),
        (no_waits, "side-stream", {"sync edges", "waits between streams"}),
        (one_stream, "side-stream", {"waits between streams"}),
        (kernels_of_another_launch, "cuda-graph", {"kernels of the graph in each step"}),
        (nothing_compiled, "compiled", {"compiled region in each step", "kernels made by inductor"}),
        (step_without_a_collective, "process-group", {"collectives in each step"}),
    ],
)
def test_fault_of_a_recording_on_a_device_is_named(
    script: ModuleType, tmp_path: Path, change: Callable[[Made], None], case: str, checks: set[str]
) -> None:
    made = recorded()
    change(made)
    found = judged(script, tmp_path, case, made)
    assert {check for check, outcome in found.items() if outcome == "failed"} == checks
