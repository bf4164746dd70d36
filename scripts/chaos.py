"""Many short trainings with a fault and a way out each, every one with and without a recording: nothing may differ.

    chaos.py [--runs 300] [--seed N] [--jobs 2] [--frameworks ...] [--only FRAMEWORK/EXIT/FAULT/OPTION+OPTION]

Every training is a process of its own (chaos_job.py). Checked of each: it ends as the same training without a
recording does (exit status, weights, random state before every batch), in time; every file under a final name is whole
and valid, host and device file hold the same steps; after a kill what is left are .part files. Prints a table
framework x (exit | fault) of runs, the seed, and how to repeat each run that failed. Exit status: 1 if any did.
"""

import argparse
import concurrent.futures
import itertools
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

JOB = Path(__file__).with_name("chaos_job.py")
FRAMEWORKS = ("plain", "fabric", "lightning", "pytorch_lightning", "ignite", "monai", "huggingface")
EXITS = ("end", "second_fit", "exception", "interrupt", "sigterm", "sigkill", "sys_exit", "os_exit")
FAULTS = ("none", "folder_gone", "disk_full", "stolen", "symlink", "observer", "gc", "fork")
HARMLESS = ("none", "gc", "fork")  # the window is recorded all the same
OPTIONS = ("accumulation", "validation", "workers", "threads", "compile", "checkpointing", "bf16")
TIMEOUT_S = 240
STEP = re.compile(r"ProfilerStep#(\d+)")


@dataclass(frozen=True)
class Run:
    """One training; ``at`` is the batch before which the fault and the exit come."""

    framework: str
    exit: str
    fault: str
    options: tuple[str, ...]
    at: int

    @property
    def name(self) -> str:
        return f"{self.framework}/{self.exit}/{self.fault}/{'+'.join(self.options)}@{self.at}"

    def command(self, folder: Path, *, recording: bool) -> list[str]:
        given = ["--framework", self.framework, "--exit", self.exit, "--fault", self.fault, "--at", str(self.at)]
        given += ["--trace-dir", str(folder / "traces"), "--options", *self.options]
        return [sys.executable, str(JOB), *given, *([] if recording else ["--without"])]


@dataclass(frozen=True)
class Outcome:
    code: int | None
    said: list[str]
    errors: str


def parse_run(text: str) -> Run:
    names, _, at = text.partition("@")
    framework, way_out, fault, options = names.split("/")
    return Run(framework, way_out, fault, tuple(filter(None, options.split("+"))), int(at or 6))


def runs(number: int, frameworks: list[str], seed: int) -> list[Run]:
    """Every framework with every exit and with every fault, then at random."""
    chance = random.Random(seed)

    def one(framework: str, way_out: str, fault: str) -> Run:
        options = tuple(sorted(chance.sample(OPTIONS, chance.choice((0, 1, 1, 2)))))
        return Run(framework, way_out, fault, options, chance.randrange(3, 11))

    pairs = [one(f, e, "none") for f, e in itertools.product(frameworks, EXITS)]
    pairs += [one(f, "end", x) for f, x in itertools.product(frameworks, FAULTS[1:])]
    while len(pairs) < number:
        pairs.append(one(chance.choice(frameworks), chance.choice(EXITS), chance.choice(FAULTS)))
    return pairs


def train(run: Run, folder: Path, *, recording: bool) -> Outcome:
    folder.mkdir()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
    command = run.command(folder, recording=recording)
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=TIMEOUT_S, env=environment, cwd=folder, check=False
        )
    except subprocess.TimeoutExpired as error:
        return Outcome(None, [], str(error.stderr or "")[-2000:])
    said = [line for line in done.stdout.splitlines() if line.startswith(("batch ", "end "))]
    return Outcome(done.returncode, said, done.stderr[-3000:])


def faults_of(run: Run, folder: Path) -> list[str]:
    """What is wrong with a run; empty if nothing."""
    bare = train(run, folder / "without", recording=False)
    ours = train(run, folder / "with", recording=True)
    found = []
    if ours.code is None or bare.code is None:
        found.append(f"hangs: {'with' if ours.code is None else 'without'} a recording")
    elif ours.code != bare.code:
        found.append(f"exit status {ours.code}, without a recording {bare.code}: {ours.errors[-400:]}")
    if ours.said != bare.said:
        first = next((n for n, (a, b) in enumerate(zip(ours.said, bare.said, strict=False)) if a != b), None)
        found.append(f"another training: {len(ours.said)} and {len(bare.said)} lines, first difference at {first}")
    if "Traceback" in ours.errors and "Traceback" not in bare.errors:
        found.append(f"a traceback: {ours.errors[-400:]}")
    wrong, steps = look_at_files(folder / "with" / "traces")
    found += wrong
    killed = run.exit in ("sigkill", "os_exit")
    if run.fault in HARMLESS and not killed and not any(steps.values()):
        found.append("nothing was recorded")
    parts = [path.name for path in (folder / "with").rglob("*.part")]
    if parts and not killed and run.fault not in ("disk_full", "symlink"):
        found.append(f"left behind: {parts}")
    victim = folder / "with" / "victim"
    if run.fault == "symlink" and victim.read_text() != "keep":
        found.append("a link was followed")
    return found


def look_at_files(traces: Path) -> tuple[list[str], dict[Path, list[int]]]:
    """What is wrong with files under a final name, alone and as pairs, and the steps that each trace holds."""
    found, steps = list[str](), dict[Path, list[int]]()
    for path in sorted(traces.rglob("*.json")):
        if path.is_symlink():
            continue
        try:
            content = json.loads(path.read_bytes())
        except ValueError as error:
            found.append(f"{path.name} of {path.parent.name}: {error}")
            continue
        if "schemaVersion" in content or "nodes" in content:
            steps[path.relative_to(traces)] = step_numbers(content)
    for path, numbers in steps.items():
        kind = path.parts[0]
        twin = Path(kind.replace("_chakra", "_kineto"), *path.parts[1:])
        if "_chakra" in kind and twin in steps and steps[twin] != numbers:
            found.append(f"{path}: steps {numbers} and {steps[twin]}")
    return found, steps


def step_numbers(content: Any) -> list[int]:
    entries = content["nodes"] if "nodes" in content else content["traceEvents"]
    matches = [STEP.fullmatch(str(entry.get("name"))) for entry in entries]
    return sorted({int(match[1]) for match in matches if match})


def check(run: Run) -> tuple[Run, list[str]]:
    with tempfile.TemporaryDirectory() as folder:
        return run, faults_of(run, Path(folder))


def show(counts: "Counter[tuple[str, str]]", frameworks: list[str], columns: tuple[str, ...]) -> None:
    print(f"{'':18}" + "".join(f"{name:>14}" for name in columns))
    for framework in frameworks:
        print(f"{framework:18}" + "".join(f"{counts[framework, name]:14}" for name in columns))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=300)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--frameworks", nargs="+", choices=FRAMEWORKS, default=list(FRAMEWORKS))
    parser.add_argument("--only", nargs="+", help="runs by name, as they are printed")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    planned = [parse_run(text) for text in given.only or ()] or runs(given.runs, given.frameworks, given.seed)
    print(f"seed {given.seed}, {len(planned)} runs", flush=True)
    failed, exits, faults, options = 0, Counter[Any](), Counter[Any](), Counter[Any]()
    with concurrent.futures.ThreadPoolExecutor(given.jobs) as pool:
        for run, found in pool.map(check, planned):
            exits[run.framework, run.exit] += 1
            faults[run.framework, run.fault] += 1
            options.update((run.framework, option) for option in run.options)
            failed += bool(found)
            print(f"{'FAILED' if found else 'ok':6} {run.name}", *found, sep="\n       ", flush=True)
    for counts, columns in ((exits, EXITS), (faults, FAULTS), (options, OPTIONS)):
        show(counts, given.frameworks, columns)
    print(f"{failed} of {len(planned)} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
