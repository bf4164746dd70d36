"""``summary`` of a run that recorded phases: alone, beside traces, of several ranks."""

import json
from pathlib import Path
from typing import Any

from commands import Outcome, refused, run

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
not in these times: 1 step first of a training
h2d is not measured: no device to copy to"""
    )


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
