"""final_summary.json: TraceML's names and nesting, numbers by hand, written whole and beside the manifests."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from commands import Outcome, refused, run
from json_shape import shape

TRACEML = json.loads((Path(__file__).parent / "traceml_summary.json").read_text())
PARTS = {"input_wait": 30, "forward": 40, "backward": 20, "optimizer": 5}


def write(folder: Path, rank: int = 0, num: int = 20, world: int = 1, reason: str = "no window", **parts: int) -> None:
    """A rank whose steps take 100 ms each, and a run folder with its manifest."""
    phases = {name: [ms * 1_000_000, 1] for name, ms in (PARTS | parts).items()}
    lines: list[dict[str, Any]] = [
        {"kind": "open", "run_id": "r", "rank": rank, "world_size": world, "unix_ns": 10**18, "monotonic_ns": 0}
    ]
    for number in range(num):
        flags = ["first"] if number == 0 else []
        lines.append({"kind": "step", "step": number, "begin_ns": number * 10**8, "ns": 10**8, "phases": phases,
                      "flags": flags, "rss_bytes": 1000 + rank})  # fmt: skip
    lines.append({"kind": "close"})
    reason, _, detail = reason.partition(": ")
    manifest: dict[str, Any] = {"run_id": "r", "rank": rank, "world_size": world, "hostname": "node", "reason": reason,
                "detail": detail or None}  # fmt: skip
    for part, name, text in (
        ("phases", f"rank-{rank}.jsonl", "".join(json.dumps(line) + "\n" for line in lines)),
        ("run", f"rank-{rank}.json", json.dumps(manifest)),
    ):
        path = folder / f"0_{part}" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def summary(folder: Path, *options: Any) -> dict[str, Any]:
    done = run("summary", folder, *options)
    assert (done.code, done.err) == (0, "")
    return json.loads((folder / "0_run" / "final_summary.json").read_text())


def test_every_key_of_traceml_is_there_and_ours_stand_apart(tmp_path):
    write(tmp_path)
    ours, theirs = shape(summary(tmp_path)), shape(TRACEML)
    # Numbers about the machine and the launcher, which this project does not measure.
    missing = {path for path in theirs - ours if ".evidence" not in path}
    assert missing == {
        *(f".run_context.execution.{name}" for name in ("expected_nodes", "processes_per_node")),
        *(path for path in theirs if path.startswith(".system.groups.rows.0")),
    }
    more = {path for path in ours - theirs if ".evidence" not in path and not path.startswith(".chakra_capture")}
    assert more == set()
    assert {path for path in theirs - ours if path.startswith(".primary_diagnosis.evidence")} == set()


def test_numbers_of_a_rank_by_hand(tmp_path):
    write(tmp_path)
    found = summary(tmp_path)
    assert found["step_time"]["groups"]["rows"]["0"]["metrics"] == {
        "input_wait_ms": 30, "step_time_ms": 100, "traced_step_time_ms": 70, "step_time_cpu_ms": 100,
        "step_time_gpu_ms": None, "traced_step_time_cpu_ms": 70, "traced_step_time_gpu_ms": None,
        "dataloader_fetch_cpu_ms": 30, "h2d_ms": None, "compute_ms": 65, "residual_ms": 5, "forward_ms": 40,
        "backward_ms": 20, "optimizer_ms": 5,
    }  # fmt: skip
    # The first step does not count, and TraceML numbers steps from 1.
    window = found["step_time"]["global"]["window"]
    assert (window["start_step"], window["end_step"], window["steps_analyzed"]) == (2, 20, 19)
    assert (found["analysis_window"]["start_ts_s"], found["analysis_window"]["duration_s"]) == (
        pytest.approx(1e9 + 0.1),
        pytest.approx(1.9),
    )
    assert found["step_time"]["metadata"]["training_total_steps"] == 20
    assert found["primary_diagnosis"]["kind"] == found["step_time"]["diagnosis"]["kind"] == "INPUT_BOUND"
    assert found["step_time"]["issues"][0]["share_pct"] == pytest.approx(0.3)
    assert found["process"]["global"]["average"]["ram_bytes"] == 1000
    assert found["text"].splitlines()[0] == "What is wrong (from 19 steps)"


def test_ranks_side_by_side(tmp_path):
    write(tmp_path, 0, world=2, input_wait=2, backward=48)
    write(tmp_path, 1, world=2, input_wait=40, backward=10)
    found = summary(tmp_path)
    overall = found["step_time"]["global"]
    assert overall["average"]["input_wait_ms"] == 21
    # Equally near to the median: the lower value stands for it.
    assert overall["median"]["input_wait_ms"] == {"value": 2, "idx": "0"}
    assert overall["worst"]["input_wait_ms"] == {"value": 40, "idx": "1"}
    assert overall["median"]["h2d_ms"] == {"value": None, "idx": None}
    assert found["meta"] == {
        "run_name": "0", "mode": "single_node", "world_size": 2, "nodes_observed": 1, "gpus_observed": None,
    }  # fmt: skip
    first = found["primary_diagnosis"]
    assert (first["kind"], first["evidence"]["type"]) == ("INPUT_STRAGGLER", "rank_comparison")
    assert first["evidence"]["worst"] == {"rank": 1, "value_ms": 40}
    assert found["step_time"]["diagnosis"]["ranks"] == [1]


@pytest.mark.parametrize(
    ("parts", "kind", "evidence"),
    [
        ({"input_wait": 1, "forward": 69}, "COMPUTE_BOUND", "phase_share"),
        ({"input_wait": 8, "forward": 60}, "NO_CLEAR_PERFORMANCE_BOTTLENECK", "no_clear_bottleneck"),
    ],
)
def test_run_without_a_bottleneck_is_promoted_as_such(tmp_path, parts, kind, evidence):
    write(tmp_path, **parts)
    first = summary(tmp_path)["primary_diagnosis"]
    assert (first["kind"], first["severity"], first["evidence"]["type"]) == (kind, "info", evidence)


def test_too_few_steps_are_no_verdict(tmp_path):
    write(tmp_path, num=2)
    found = summary(tmp_path)
    assert found["step_time"]["diagnosis"]["kind"] == "WARMUP"
    assert found["primary_diagnosis"]["kind"] == "INSUFFICIENT_STEP_TIME_DATA"


@pytest.mark.parametrize(
    ("reason", "status", "failed"),
    [
        ("exception: ValueError", "failed", "rank 0: ValueError"),
        ("complete: ValueError", "failed", "rank 0: ValueError"),
        ("SIGTERM", "failed", "rank 0: SIGTERM"),
        ("complete", "completed", None),
        ("running", None, None),  # or killed: nothing says which
    ],
)
def test_training_that_failed_is_marked(tmp_path, reason, status, failed):
    write(tmp_path, reason=reason)
    found = summary(tmp_path)
    assert found["run_context"]["run"].get("status") == status
    assert found["chakra_capture"]["failed"] == failed


def test_compare_reads_what_summary_writes(tmp_path):
    write(tmp_path)
    summary(tmp_path)
    file = tmp_path / "0_run" / "final_summary.json"
    assert "step" in run("compare", file, file).out


def test_one_rank_alone_is_no_summary_of_the_run(tmp_path):
    write(tmp_path)
    assert run("summary", tmp_path, "--rank", "0").code == 0
    assert [path.name for path in (tmp_path / "0_run").iterdir()] == ["rank-0.json"]


def test_summary_of_an_older_run_does_not_make_it_the_newest(tmp_path):
    write(tmp_path)
    for path in [*tmp_path.glob("0_*/*"), *tmp_path.glob("0_*")]:
        os.utime(path, (1000, 1000))
    newer = tmp_path / "1_phases"
    newer.mkdir()
    (newer / "rank-0.jsonl").write_text((tmp_path / "0_phases" / "rank-0.jsonl").read_text())
    assert run("summary", tmp_path, "--job", "0").code == 0
    assert run("summary", tmp_path).out.splitlines()[0].startswith("Run 1 in")


def test_file_that_cannot_be_written_is_said_and_the_summary_is_printed(tmp_path):
    write(tmp_path)
    (tmp_path / "0_run" / "final_summary.json").mkdir()
    done: Outcome = run("summary", tmp_path)
    assert done.code == 0
    assert "What is wrong" in done.out
    assert "final_summary.json is not written" in done.err
    assert sorted(path.name for path in (tmp_path / "0_run").iterdir()) == ["final_summary.json", "rank-0.json"]


def test_phases_only_leaves_traces_and_merged_tables_alone(tmp_path):
    write(tmp_path)
    for part in ("chakra", "kineto"):
        (tmp_path / f"0_{part}").mkdir()
        (tmp_path / f"0_{part}" / "rank-0.json").write_text("no trace at all")
    done = run("summary", tmp_path, "--phases-only")
    assert (done.code, done.err) == (0, "")
    assert "Phases of 19 steps of rank 0" in done.out
    assert not (tmp_path / "0_merged").exists()


def test_phases_only_of_a_run_without_phases_is_refused(tmp_path):
    (tmp_path / "0_kineto").mkdir()
    (tmp_path / "0_kineto" / "rank-0.json").write_text("{}")
    refused(run("summary", tmp_path, "--phases-only"), "holds no phases of steps")
