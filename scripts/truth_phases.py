"""Do the phases say what is true? Trainings made of sleeps, timed by us and by TraceML, against the sleeps' own clock.

    truth_phases.py                                       ours alone
    truth_phases.py --traceml PYTHON                      and traceml-ai 0.5.0 of that environment, on the same script
    truth_phases.py --cases plain monai                   some of the trainings of truth_job.py
    truth_phases.py --traceml PYTHON --into README.md     and put the table there

Each training sleeps in its dataset, forward, backward, optimizer and loss, notes by its own clock how long each of them
took, and is run once by each tool. What a tool says of a step less what the training says is its error. Steps are
counted, and the first two are left out of the means. The residual of a framework holds work of its own, which the
training cannot see: it is shown and not judged.
Exit status: 0 every mean is within the bar and every step is there, 1 something is not, 2 a training does not run.
"""

import argparse
import json
import re
import sqlite3
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from traceml_run import traceml_command
from truth_job import CASES

JOB = Path(__file__).with_name("truth_job.py")
BAR_NS = 1_000_000
COLD_STEPS = 2
PHASES = ("input_wait", "forward", "backward", "optimizer", "residual")
THEIR_NAMES = {
    "input_wait": "dataloader_next",
    "forward": "forward_time",
    "backward": "backward_time",
    "optimizer": "optimizer_step",
}
Step = dict[str, float]


@dataclass(frozen=True)
class Run:
    """One training: what the sleeps took, and what the tool says, by step."""

    truth: list[Step]
    said: list[Step]
    gaps: list[float]
    said_gaps: list[float]
    overshoot_ns: float


def run(command: list[str], folder: Path) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=600)
    if done.returncode:
        print(f"{' '.join(command)} ends with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
        sys.exit(2)


def ours(case: str, folder: Path) -> Run:
    out = folder / "truth.json"
    run([sys.executable, str(JOB), case, "ours", str(out)], folder)
    (file,) = folder.glob("chakra_traces/*_phases/rank-0.jsonl")
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    steps = [line for line in lines if line["kind"] == "step" and "partial" not in line.get("flags", ())]
    assert [step["step"] for step in steps] == list(range(len(steps))), "step numbers have holes"
    said = []
    for step in steps:
        found = {name: ns for name, (ns, _) in step["phases"].items()}
        rest = step["ns"] - sum(found.values())
        said.append({**{name: found[name] for name in PHASES if name in found}, "residual": rest})
    truth = json.loads(out.read_text())
    gaps = [line["gap"]["ns"] for line in steps[1:]]
    return Run(truth["updates"], said, truth["gaps"], gaps, truth["overshoot_ns"])


def theirs(case: str, folder: Path, python: Path) -> Run:
    out = folder / "truth.json"
    command = traceml_command(python, "logs", "truth")
    run([*command, str(JOB), "--args", case, "theirs", str(out)], folder)
    with sqlite3.connect(folder / "logs/truth/aggregator/telemetry") as database:
        rows = database.execute("SELECT step, events_json FROM step_time_samples ORDER BY step").fetchall()
    assert [number for number, _ in rows] == list(range(1, len(rows) + 1)), "their step numbers have holes"
    said = []
    for _, text in rows:
        events = json.loads(text)
        found = {
            name: events[f"_traceml_internal:{theirs}"]["cpu"]["duration_ms"] * 1e6
            for name, theirs in THEIR_NAMES.items()
            if f"_traceml_internal:{theirs}" in events
        }
        traced = events["_traceml_internal:step_time"]["cpu"]["duration_ms"] * 1e6
        said.append({**found, "residual": traced - sum(ns for name, ns in found.items() if name != "input_wait")})
    truth = json.loads(out.read_text())
    return Run(truth["updates"], said, [], [], truth["overshoot_ns"])


def errors(run: Run, phase: str) -> list[float]:
    pairs = list(zip(run.truth, run.said, strict=False))[COLD_STEPS:]
    return [said[phase] - truth.get(phase, 0) for truth, said in pairs if phase in said]


def cell(found: list[float]) -> str:
    if not found:
        return "not said | "
    return f"{statistics.mean(found) / 1e6:+.3f} | {statistics.median(found) / 1e6:+.3f}"


def judge(case: str, tool: str, run: Run) -> list[str]:
    """What is wrong with a run."""
    found = []
    if len(run.said) != len(run.truth):
        found.append(f"{case}: {len(run.truth)} updates, but {tool} have {len(run.said)} steps")
    for phase in PHASES:
        off = errors(run, phase)
        if not off:
            found.append(f"{case}: {tool} say nothing of {phase}")
        elif abs(statistics.mean(off)) > BAR_NS and (phase != "residual" or case == "plain"):
            found.append(f"{case}: {phase} of {tool} is {statistics.mean(off) / 1e6:+.3f} ms from the truth")
    return found


def rows(case: str, mine: Run, other: Run | None) -> list[str]:
    made = []
    for phase in PHASES:
        per_step = [truth.get(phase, 0) for truth in mine.truth[COLD_STEPS:]]
        made.append(
            f"| {case} | {phase} | {statistics.mean(per_step) / 1e6:.3f} | "
            f"{cell(errors(mine, phase))} | {cell(errors(other, phase)) if other else 'not run | '} |"
        )
    if len(mine.gaps) == len(mine.said) == len(mine.said_gaps) + 1:
        off = [said - true for said, true in zip(mine.said_gaps, mine.gaps, strict=False)][COLD_STEPS:]
        mean = statistics.mean(mine.gaps[COLD_STEPS:]) / 1e6
        made.append(f"| {case} | between steps | {mean:.3f} | {cell(off)} | not measured | |")
    return made


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traceml", type=Path, metavar="PYTHON", help="python of an environment with traceml-ai 0.5.0")
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--into", type=Path, metavar="FILE", help="replace the table in this file")
    options = parser.parse_args(arguments)
    wrong: list[str] = []
    counts, table = [], []
    for case in options.cases:
        with tempfile.TemporaryDirectory() as mine, tempfile.TemporaryDirectory() as other:
            first = ours(case, Path(mine))
            second = theirs(case, Path(other), options.traceml.absolute()) if options.traceml else None
        wrong += judge(case, "ours", first)
        if second is not None:
            wrong += judge(case, "theirs", second)
        counts.append(
            f"{case}: {len(first.truth)} updates, {len(first.said)} steps of ours, "
            f"{len(second.said) if second else 'none'} of TraceML's (a sleep is {first.overshoot_ns / 1e6:.2f} ms late)"
        )
        made = rows(case, first, second)
        print("\n".join([counts[-1], *made]), flush=True)
        table += made
    columns = ["training", "phase", "truth, mean ms"]
    columns += [f"{tool} - truth, {kind}" for tool in ("ours", "TraceML") for kind in ("mean ms", "median ms")]
    head = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    text = "\n".join([*head, *table, "", f"Steps: {'; '.join(counts)}."])
    if options.into:
        content = options.into.read_text()
        block = re.compile(r"(<!-- truth_phases:begin [^>]*-->\n)(.*?)(<!-- truth_phases:end -->)", re.DOTALL)
        options.into.write_text(block.sub(lambda match: f"{match[1]}{text}\n{match[3]}", content))
    print("\n".join(wrong) or f"all means within {BAR_NS / 1e6:.0f} ms of the truth, all steps there")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
