"""Does the recording hold on a machine with CUDA? One prepared run, under 5 minutes; scripts/gpu_check.sh starts it.

    gpu_check.py FOLDER [--limit-s 270] [--cases conv-fp32 ...]

The trainings of gpu_check_job.py (conv net and transformer in several precisions, side stream, CUDA graph,
torch.compile, process group, MONAI, Lightning) are recorded in a window in their middle, merged and summed up by the
product's own commands, and held against what they say of themselves. FOLDER gets results.json, results.txt (a table),
samples.tar.gz (the small recordings, with how they were made) and log.txt. Without CUDA the same checks run on the CPU,
smaller; what only a device can show is skipped by name, with the reason.
Exit status: 0 nothing failed, 1 something did, 2 FOLDER has results already.

As long as no device was at hand the parts for CUDA have not run: their judgement is tested against made-up recordings.
"""

import argparse
import gzip
import json
import os
import re
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import polars as pl

from chakra_capture.layout import RunPaths

JOB = Path(__file__).with_name("gpu_check_job.py")
NEEDS_CUDA = "needs a CUDA device"
NO_DEVICE_ROWS = "needs a CUDA device: on the CPU no trace has device activities"
STEP_TIME_BAR = 0.02
LINK_BAR = 0.99
# Our marks and the training's own stand some Python lines apart; where the device waits for the host, that shows.
EVENT_BAR, EVENT_BAR_NS = 0.1, 100_000
COLD_STEPS = 10
# At the end of a training nothing waits for the device, so of its last steps the times there may not be known.
LAST_STEPS = 5
SAMPLE_PARTS = ("chakra", "kineto", "run")


@dataclass(frozen=True)
class Row:
    """One line of the result: ok, failed, skipped, or shown where nothing is judged."""

    case: str
    check: str
    outcome: str
    found: str


@dataclass(frozen=True)
class Recorded:
    """One training: what it says of itself, and its files."""

    case: str
    told: dict[str, Any]
    paths: RunPaths
    has_cuda: bool

    @property
    def window(self) -> list[int]:
        first, last = self.told["window"]
        return list(range(first, last + 1))

    def judged(self, check: str, is_right: bool, found: object) -> Row:
        return Row(self.case, check, "ok" if is_right else "failed", str(found))

    def shown(self, check: str, found: object) -> Row:
        return Row(self.case, check, "shown", str(found))

    def skipped(self, check: str, why: str) -> Row:
        return Row(self.case, check, "skipped", why)

    def phase_lines(self) -> list[dict[str, Any]]:
        lines = (json.loads(line) for line in self.paths.phases_file(0).read_text().splitlines())
        return [line for line in lines if line["kind"] == "step"]

    def table(self, name: str) -> pl.DataFrame:
        return pl.read_parquet(self.paths.merged_dir / "rank=0" / f"{name}.parquet")

    def link(self) -> dict[str, Any]:
        found = json.loads((self.paths.merged_dir / "rank=0" / "link.json").read_text())
        (window,) = found["windows"]
        return dict(window)


def check_files(one: Recorded) -> Iterator[Row]:
    """The window is whole, and both traces hold its steps and no other."""
    said = json.loads(one.paths.manifest(0).read_text())
    found = [step for window in said["windows"] for step in window["steps"]]
    is_whole = said["complete"] and found == one.window and not said["faults"]
    yield one.judged("window recorded", is_whole, f"steps {found}, complete {said['complete']}, {said['faults']}")
    for side, path in (
        ("host", one.paths.host_trace(0, compress=True)),
        ("device", one.paths.device_trace(0, compress=True)),
    ):
        text = gzip.decompress(path.read_bytes()).decode()
        marked = sorted({int(step) for step in re.findall(r"ProfilerStep#(\d+)", text)})
        yield one.judged(f"steps in the {side} trace", marked == one.window, f"{marked}, {path.stat().st_size} bytes")


def check_command(one: Recorded, verb: str, *options: str) -> Row:
    command = [sys.executable, "-m", "chakra_capture", verb, str(one.paths.trace_dir), "--job", one.case, *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    said = done.stderr.strip().splitlines()
    return one.judged(
        verb, done.returncode == 0, f"exit status {done.returncode}" + "".join(f", {s}" for s in said[-1:])
    )


def check_links(one: Recorded) -> Iterator[Row]:
    """Host ops are joined with the CPU ops of the device trace, and device activities with their launch."""
    link = one.link()
    yield one.judged("host ops linked", *_rate(link["host"]["num_linked"], link["host"]["num_with_record_function_id"]))
    device = link["device"]
    if not one.has_cuda:
        yield one.skipped("device activities linked", NO_DEVICE_ROWS)
        yield one.skipped("device activities in each step", NO_DEVICE_ROWS)
        return
    yield one.judged("device activities linked", *_rate(device["num_launched"], device["num_activities"]))
    orphans = {cause: number for cause, number in device["orphans"].items() if number}
    yield one.shown("device activities with a parent", f"{device['num_with_parent']} of them; orphans {orphans}")
    yield one.shown("edges backward, clock offset", f"{link['edges_backward_left_out']}, {link['clock_offset_ns']} ns")
    numbers = one.table("steps")["num_device_activities"].to_list()
    yield one.judged("device activities in each step", all(numbers), numbers)


def _rate(part: int, whole: int) -> tuple[bool, str]:
    return whole > 0 and part >= LINK_BAR * whole, f"{part} of {whole}"


def check_phases(one: Recorded) -> Iterator[Row]:
    """Every phase is in every step; on the device it takes as long as the training's own CUDA events say."""
    steps = [line for line in one.phase_lines() if "partial" not in line.get("flags", ())]
    missing = {name: num for name in one.told["phases"] if (num := sum(name not in s["phases"] for s in steps))}
    yield one.judged("phases of every step", bool(steps) and not missing, f"{len(steps)} steps, missing {missing}")
    if not one.has_cuda:
        yield one.skipped("phases by CUDA events", f"{NEEDS_CUDA}: the CPU has no CUDA events")
        return
    usual = range(COLD_STEPS, max((step["step"] for step in steps), default=0) + 1 - LAST_STEPS)
    counted = [step for step in steps if step["step"] in usual and step["step"] not in one.window]
    with_device = [step for step in counted if step.get("device_ns")]
    if not one.told["device_ns"]:
        on_device = sorted({name for step in with_device for name in step["device_ns"]})
        is_whole = bool(counted) and len(with_device) == len(counted) and {"forward", "backward"} <= {*on_device}
        yield one.judged(
            "phases by CUDA events", is_whole, f"in {len(with_device)} of {len(counted)} steps: {on_device}"
        )
        return
    for name, own in one.told["device_ns"].items():
        theirs = [own[step["step"]] for step in counted]
        ours = [step["device_ns"].get(name) for step in with_device]
        yield one.judged(f"{name} by CUDA events", *_agree(ours, theirs))


def _agree(ours: Sequence[int | None], theirs: Sequence[int]) -> tuple[bool, str]:
    if not ours or len(ours) != len(theirs) or None in ours:
        return False, f"measured in {sum(value is not None for value in ours)} of {len(theirs)} steps"
    mine, other = (statistics.median(value for value in values if value is not None) for values in (ours, theirs))
    is_near = abs(mine - other) <= max(EVENT_BAR * other, EVENT_BAR_NS)
    return is_near, f"{mine / 1e3:.0f} us, by the training's own events {other / 1e3:.0f} us (medians)"


def check_edges(one: Recorded) -> Iterator[Row]:
    """Every step waits for the loss, so its thread waits for the device; streams wait for each other where they do."""
    if not one.has_cuda:
        yield one.skipped("sync edges", NO_DEVICE_ROWS)
        return
    kinds = dict(one.table("edges").group_by("kind").len().iter_rows())
    yield one.judged("sync edges", kinds.get("sync", 0) >= len(one.window), kinds.get("sync", 0))
    if one.case == "side-stream":
        streams = one.table("nodes").filter(pl.col("kind") == "kernel")["stream"].n_unique()
        num = kinds.get("event_wait", 0)
        yield one.judged("waits between streams", num >= len(one.window) and streams > 1, f"{num}, {streams} streams")


def check_contents(one: Recorded) -> Iterator[Row]:
    """What is in the window, where a case is about that."""
    nodes = one.table("nodes")
    if one.case == "cuda-graph":
        launches = nodes.filter(pl.col("kind") == "runtime", pl.col("name").str.contains("GraphLaunch"))
        kernels = nodes.filter(pl.col("kind") == "kernel", pl.col("launch_id").is_in(launches["node_id"].implode()))
        steps = sorted(kernels["step"].drop_nulls().unique().to_list())
        yield one.judged("kernels of the graph in each step", steps == one.window, f"{kernels.height}, steps {steps}")
    if one.case == "compiled":
        regions = nodes.filter(pl.col("name").str.starts_with("Torch-Compiled Region"))
        steps = sorted(regions["step"].drop_nulls().unique().to_list())
        yield one.judged("compiled region in each step", steps == one.window, f"steps {steps}")
        why = one.told.get("no_inductor")
        if why is not None:
            yield one.skipped("kernels made by inductor", why)
        else:
            num = nodes.filter(pl.col("kind") == "kernel", pl.col("name").str.starts_with("triton_")).height
            yield one.judged("kernels made by inductor", num > 0, num)
    if one.case == "process-group":
        rows = one.table("communication")
        found = sorted(rows["collective"].drop_nulls().unique().to_list())
        reduced = rows.filter(pl.col("collective") == "all_reduce", pl.col("comm_bytes") > 0)
        is_whole = {"all_reduce", "all_gather"} <= {*found} and set(reduced["step"]) == {*one.window}
        # Of one process gloo's traces do not name the group.
        is_whole &= one.told["backend"] == "gloo" or rows["process_group"].null_count() == 0
        yield one.judged("collectives in each step", is_whole, f"{rows.height}: {found}")
        if one.told["backend"] == "nccl":
            yield one.shown("NCCL", f"{nodes.filter(pl.col('name').str.contains('(?i)nccl')).height} rows name it")
        else:
            yield one.skipped("NCCL", f"{NEEDS_CUDA}: here the group is of {one.told['backend']}")


def check_step_time(one: Recorded) -> Row:
    """A step takes as long after the window as before it."""
    own = one.told["steps_ns"] or [line["ns"] for line in sorted(one.phase_lines(), key=lambda line: line["step"])]
    cold = COLD_STEPS if one.has_cuda else 1
    first, last = one.told["window"]
    before, after = (statistics.median(part) for part in (own[cold:first], own[last + 1 + cold :]))
    found = f"{before / 1e6:.3f} ms before, {after / 1e6:.3f} ms after ({after / before - 1:+.1%})"
    if not one.has_cuda:
        return one.shown("step time before and after", f"{found}; judged on CUDA alone")
    return one.judged("step time before and after", abs(after / before - 1) <= STEP_TIME_BAR, found)


def check_merged(one: Recorded) -> list[Row]:
    """Merge one recording, and hold it against what the training says of itself."""
    rows: list[Row] = []
    try:
        rows += check_files(one)
        rows.append(check_command(one, "merge", "--strict"))
        rows.append(check_command(one, "summary", "--json"))
        for check in (check_links, check_phases, check_edges, check_contents):
            rows += check(one)
        rows.append(check_step_time(one))
    except (OSError, ValueError, KeyError, IndexError, pl.exceptions.PolarsError, subprocess.TimeoutExpired) as fault:
        rows.append(one.judged("its files can be read", False, f"{type(fault).__name__}: {fault}"))
    return rows


def check(case: str, folder: Path, has_cuda: bool) -> list[Row]:
    told = json.loads((folder / "told" / f"{case}.json").read_text())
    if told["outcome"] != "ran":
        return [Row(case, "training", told["outcome"], told["why"])]
    one = Recorded(case, told, RunPaths(folder, case), has_cuda)
    return [Row(case, "training", "ok", f"{told['seconds']} s"), *check_merged(one)]


def train(folder: Path, log: Path, limit_s: float, cases: Sequence[str]) -> dict[str, Any]:
    """Run the trainings; what machine it was."""
    root = Path(__file__).resolve().parent.parent
    environ = {**os.environ, "CHAKRA_CAPTURE_NO_SUMMARY": "1", "PYTHONUNBUFFERED": "1"}
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(root), environ.get("PYTHONPATH", "")]))
    with log.open("w") as output:
        command = [sys.executable, str(JOB), str(folder), str(limit_s), *cases]
        done = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, env=environ, check=False)
    machine = folder / "machine.json"
    if not machine.exists():
        sys.exit(f"{JOB.name} ended with {done.returncode} before it had run its trainings; {log} says why.")
    return dict(json.loads(machine.read_text()))


def keep_samples(folder: Path, out: Path, cases: Sequence[str], machine: dict[str, Any]) -> None:
    """The recordings as they are, without what merge made of them."""
    with tarfile.open(out, "w:gz") as archive, tempfile.TemporaryDirectory() as notes:
        for case in cases:
            for part in SAMPLE_PARTS:
                if (source := folder / f"{case}_{part}").exists():
                    archive.add(source, f"{case}/{case}_{part}")
            how = Path(notes, "how.txt")
            how.write_text(f"scripts/gpu_check.sh FOLDER --cases {case}\nrecorded on {json.dumps(machine)}\n")
            archive.add(how, f"{case}/how.txt")


def as_text(rows: Sequence[Row], machine: dict[str, Any], seconds: float) -> str:
    heads = Row("case", "check", "outcome", "found, or why not")
    widths = [max(len(getattr(row, name)) for row in (heads, *rows)) for name in ("case", "check", "outcome")]
    lines = [
        "  ".join([row.case.ljust(widths[0]), row.check.ljust(widths[1]), row.outcome.ljust(widths[2]), row.found])
        for row in (heads, *rows)
    ]
    counts = {kind: sum(row.outcome == kind for row in rows) for kind in ("ok", "failed", "skipped", "shown")}
    totals = ", ".join(f"{number} {kind}" for kind, number in counts.items())
    return "\n".join([json.dumps(machine), *lines, f"{totals}; {seconds:.0f} s", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--limit-s", type=float, default=270.0, help="trainings that have not begun by then are skipped"
    )
    parser.add_argument("--cases", nargs="*", default=[], help="some of the trainings; all if left out")
    chosen = parser.parse_args()
    out, began = chosen.folder, time.monotonic()
    if (out / "results.json").exists():
        print(f"{out / 'results.json'} is there already. Name another folder.", file=sys.stderr)
        sys.exit(2)
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as runs:
        folder = Path(runs)
        machine = train(folder, out / "log.txt", chosen.limit_s - 30, chosen.cases)
        cases = sorted((path.stem for path in (folder / "told").iterdir()), key=lambda case: _began(folder, case))
        # What merges loads every core, so no training is running by now.
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            found = pool.map(partial(check, folder=folder, has_cuda=machine["has_cuda"]), cases)
            rows = [row for each in found for row in each]
        ran = [row.case for row in rows if (row.check, row.outcome) == ("training", "ok")]
        keep_samples(folder, out / "samples.tar.gz", ran, machine)
    text = as_text(rows, machine, time.monotonic() - began)
    results = {"schema_version": 1, "machine": machine, "rows": [asdict(row) for row in rows]}
    (out / "results.json").write_text(json.dumps(results, indent=1))
    (out / "results.txt").write_text(text)
    print(text, end="")
    sys.exit(any(row.outcome == "failed" for row in rows))


def _began(folder: Path, case: str) -> int:
    return (folder / "told" / f"{case}.json").stat().st_mtime_ns


if __name__ == "__main__":
    main()
