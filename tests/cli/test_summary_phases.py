"""``summary`` of a run that recorded phases: alone, beside traces, of several ranks."""

import json
from pathlib import Path
from typing import Any

from commands import Outcome, refused, run
from recording.loops import work
from recording.recorded import settings

from chakra_capture import capture

PHASES = {"forward": [40_000, 1], "optimizer": [10_000, 1]}


def shown(done: Outcome) -> list[str]:
    assert (done.code, done.err) == (0, "")
    found = done.out.splitlines()
    assert [line for line in found[1:] if len(line) > 80] == []
    return [line.rstrip() for line in found]


def step(number: int, **changes: Any) -> dict[str, Any]:
    gap = {"ns": 20_000, "phases": {"validation": [15_000, 1]}}
    return {"kind": "step", "step": number, "begin_ns": 0, "ns": 80_000, "phases": PHASES, "gap": gap, **changes}


def write(folder: Path, *lines: dict[str, Any], rank: int = 0, suffix: str = "") -> None:
    path = folder / "0_phases" / f"rank-{rank}.jsonl{suffix}"
    path.parent.mkdir(parents=True, exist_ok=True)
    opened = {"kind": "open", "run_id": "r", "rank": rank, "world_size": 2}
    measures = {"kind": "measures", "phases": {"forward": None, "optimizer": None, "h2d": "no device to copy to"}}
    path.write_text("".join(json.dumps(line) + "\n" for line in (opened, measures, *lines)))


def test_whole_screen_of_a_run_without_traces(tmp_path):
    write(tmp_path, step(0, flags=["first"]), step(1), step(2), {"kind": "close", "gap": None})
    assert (
        "\n".join(shown(run("summary", tmp_path))).replace(str(tmp_path), "DIR").strip()
        == """\
Run 0 in DIR
Phases of 2 steps of rank 0
                       mean    median      90 %   share  steps
step
  h2d          not measured
  forward          40.00 us  40.00 us  40.00 us  40.0 %    2/2  █████
  optimizer        10.00 us  10.00 us  10.00 us  10.0 %    2/2  █
  residual         30.00 us  30.00 us  30.00 us  30.0 %    2/2  ████
between steps
  validation       15.00 us  15.00 us  15.00 us  15.0 %    2/2  ██
  other             5.00 us   5.00 us   5.00 us   5.0 %    2/2  █
a step takes 80.00 us (median 80.00 us) without what comes between its batches
65.0 % of 200.00 us of training is in named phases
10000.00 steps, 10000.00 batches per second
the first step took 80.00 us
not in these times: 1 step first of a training
h2d is not measured: no device to copy to


What is wrong (from 2 steps)
1 warn Validation takes 15.0 % of the time of training.
       Next: Validate less often, or on fewer batches."""
    )


def test_run_without_a_bottleneck_says_so_and_ends_with_what_to_do_next(tmp_path):
    parts = {"input_wait": [2_000, 1], "forward": [40_000, 1], "backward": [32_000, 1], "optimizer": [4_000, 1]}
    write(tmp_path, *(step(number, phases=parts, gap=None) for number in range(30)), {"kind": "close"})
    assert shown(run("summary", tmp_path))[-3:] == [
        "No bottleneck found (from 30 steps)",
        "       95.0 % of each step is compute, most of it in forward (0.040 ms).",
        "       Next: Make compute cheaper: mixed precision, torch.compile, bigger batch.",
    ]
    diagnosis = json.loads(run("summary", tmp_path, "--json").out)["diagnosis"]
    assert (diagnosis["verdict"], diagnosis["clock"]) == ("COMPUTE_BOUND", "cpu")
    assert diagnosis["coverage"]["h2d"] == {"ranks": "0/1", "steps": "0/30"}


def test_three_findings_are_shown_and_json_has_all(tmp_path):
    parts = {"input_wait": [300_000, 1], "forward": [100_000, 1], "backward": [100_000, 1], "optimizer": [100_000, 1]}
    gap = {"ns": 3_000_000, "phases": {name: [900_000, 1] for name in ("validation", "checkpoint", "callbacks")}}
    for rank in (0, 1):
        write(
            tmp_path, *(step(n, ns=1_000_000, phases=parts, gap=gap) for n in range(30)), {"kind": "close"}, rank=rank
        )
    lines = shown(run("summary", tmp_path))
    head = lines.index("What is wrong (from 30 steps of 2 of 2 ranks; the first 3 of 5, --json has all)")
    assert [line for line in lines[head:] if line[:1].isdigit()] == [
        "1 crit 40.0 % of each step is in no phase (0.400 ms).",
        "2 crit Training waits for its input 30.0 % of each step (0.300 ms).",
        "3 crit Validation takes 22.5 % of the time of training.",
    ]
    found = json.loads(run("summary", tmp_path, "--json", "--rank", "1").out)["diagnosis"]["findings"]
    assert [(each["kind"], each["severity"]) for each in found] == [
        ("RESIDUAL_HEAVY", "crit"),
        ("INPUT_BOUND", "crit"),
        ("VALIDATION_HEAVY", "crit"),
        ("CHECKPOINT_HEAVY", "crit"),
        ("CALLBACKS_HEAVY", "crit"),
    ]


def test_slow_rank_is_named_though_another_one_is_shown(tmp_path):
    for rank, wait in ((0, 1_000_000), (1, 31_000_000)):
        parts = {"input_wait": [wait, 1], "forward": [30_000_000, 1], "backward": [62_000_000 - wait, 1]}
        parts["optimizer"] = [5_000_000, 1]
        write(tmp_path, *(step(n, ns=100_000_000, phases=parts, gap=None) for n in range(30)), rank=rank)
    lines = shown(run("summary", tmp_path, "--rank", "0"))
    assert lines[-3:] == [
        "What is wrong (from 30 steps of 2 of 2 ranks)",
        "1 crit Rank 1 waits 31.0 ms per step for its input, the others 1.0 ms.",
        "       Next: Look at the data shard, disk and loader workers of rank 1.",
    ]


def test_run_that_only_the_profiler_saw_has_no_verdict(tmp_path):
    write(tmp_path, step(0, flags=["profiled"], gap=None))
    assert shown(run("summary", tmp_path))[-3:] == [
        "No verdict (from 0 steps)",
        "       No step was timed outside the profiler.",
        "       Next: Run more steps outside the window.",
    ]


def test_json_has_every_rank_and_null_for_what_is_not_measured(tmp_path):
    write(tmp_path, step(0), {"kind": "close"})
    write(tmp_path, step(0, phases={"forward": [60_000, 1]}), rank=1, suffix=".part")
    found = json.loads(run("summary", tmp_path, "--json").out)["phases"]
    assert {*found} == {"0", "1"}
    means = {row["phase"]: row["mean_ns"] for row in found["1"]["table"]}
    assert (means["forward"], means["optimizer"], means["h2d"]) == (60_000, 0, None)
    assert found["1"]["notes"] == [
        "the process did not finish its phases (killed, or still running); up to a second is missing"
    ]
    text = shown(run("summary", tmp_path))
    assert "Mean of each phase over 2 ranks" in text
    assert [line.split() for line in text if line.startswith("  forward")][1] == [
        "forward", "50.00", "us", "40.00", "us", "0", "60.00", "us", "1"
    ]  # fmt: skip
    only = json.loads(run("summary", tmp_path, "--json", "--rank", "1").out)["phases"]
    assert {*only} == {"1"}


def test_a_rank_that_is_not_there_is_named(tmp_path):
    write(tmp_path, step(0))
    refused(run("summary", tmp_path, "--rank", "5"), "no merged rank 5", "it has 0")


def test_names_of_phases_are_printed_as_plain_text(tmp_path):
    write(tmp_path, step(0, phases={"\x1bred[bold]": [1, 1], "x" * 100: [1, 1]}))
    assert "\x1b" not in run("summary", tmp_path).out
    assert any(line.startswith("  ") and "red[bold]" in line for line in shown(run("summary", tmp_path)))


def test_a_run_of_phases_alone_is_told_from_an_empty_one(tmp_path):
    write(tmp_path, step(0), {"kind": "close"})
    write(tmp_path, step(0), rank=3, suffix=".part")
    refused(run("merge", tmp_path), "recorded phases but no traces", "nothing to merge", "chakra-capture summary")
    assert run("inspect", tmp_path).out.splitlines()[1:] == [
        f"rank {rank}: steps not stated, no manifest, not merged, phases" for rank in (0, 3)
    ]
    rows = json.loads(run("inspect", tmp_path, "--json").out)["ranks"]
    assert [row["phases"] for row in rows] == ["rank-0.jsonl", "rank-3.jsonl.part"]


def test_a_rank_that_recorded_phases_alone_beside_one_with_traces_can_be_shown(tmp_path):
    with capture(settings(tmp_path, 1, 1)) as session:
        for _ in session.steps(range(3)):
            work()
    write(tmp_path, step(0), {"kind": "close"}, rank=1)
    found = json.loads(run("summary", tmp_path, "--json", "--rank", "1").out)
    assert ([*found["phases"]], found["ranks"]) == (["1"], [])
    refused(run("summary", tmp_path, "--rank", "5"), "no merged rank 5", "it has 0-1")


def test_a_file_that_gets_its_final_name_while_we_look_is_no_fault(tmp_path):
    write(tmp_path, step(0), {"kind": "close"})
    (tmp_path / "0_phases/rank-1.jsonl.part").symlink_to("gone")  # as one is that was listed and then renamed
    assert any("forward" in line for line in shown(run("summary", tmp_path)))


def test_steps_that_count_for_want_of_others_are_said_to_be_what_they_are(tmp_path):
    write(tmp_path, step(0, flags=["first"]), step(1, flags=["profiled"]), {"kind": "close"})
    text = " ".join(shown(run("summary", tmp_path)))
    assert "1 of these steps: under the profiler" in text
    assert "1 of these steps: first of a training" in text
