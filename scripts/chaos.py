"""Many short trainings with a fault and a way out each, every one with and without a recording: nothing may differ.

    chaos.py [--runs 300] [--seed N] [--jobs 2] [--frameworks ...] [--only FRAMEWORK/EXIT/FAULT/OPTION+OPTION@BATCH ...]

Every training is a process of its own (chaos_job.py). Checked of each: it ends as the same training without a
recording does (exit status; weights, optimizer state and random state before every batch; what dynamo counted), in
time; every file under a final name is whole and valid, host and device file hold the same steps; after a kill what is
left are .part files. Prints tables framework x exit, fault and option of the number of runs, the seed, and the name of
each run that failed, by which it can be repeated. Exit status: 1 if any did.
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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

JOB = Path(__file__).with_name("chaos_job.py")
HANG = Path(__file__).resolve().parents[1] / "tests/recording/hang.c"
FRAMEWORKS = ("plain", "fabric", "lightning", "pytorch_lightning", "ignite", "monai", "huggingface")
EXITS = (
    "end", "second_fit", "exception", "out_of_memory", "interrupt", "sigterm", "sigkill", "sys_exit", "os_exit",
)  # fmt: skip
FAULTS = (
    "none", "folder_gone", "disk_full", "hung", "symlink", "stolen", "profiler", "observer", "op_error", "gc", "fork",
)  # fmt: skip
OPTIONS = (
    "accumulation", "validation", "workers", "threads", "compile", "checkpointing", "fsdp2", "bf16", "lbfgs",
)  # fmt: skip
HARMLESS = ("none", "op_error", "gc", "fork")  # the window is recorded all the same
KEEPS_PARTS = ("disk_full", "hung", "symlink")
NO_CLOSURE = "the trainer calls step() without the closure that LBFGS needs"
ILLEGAL = {("monai", "lbfgs"): NO_CLOSURE, ("huggingface", "lbfgs"): NO_CLOSURE}
RUNS_PER_PROCESS = 16
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

    @property
    def reaches_the_window(self) -> bool:
        """Say whether the way out comes when step 2 has begun; LBFGS computes a batch up to three times."""
        first = 9 if "lbfgs" in self.options else 5 if "accumulation" in self.options else 3
        return self.at >= first or self.exit in ("end", "second_fit")

    def task(self, folder: Path, *, records: bool) -> dict[str, Any]:
        folder.mkdir(parents=True)
        return {**asdict(self), "folder": str(folder), "records": records}


@dataclass(frozen=True)
class Outcome:
    code: int | None
    said: list[str]
    errors: str

    @classmethod
    def of(cls, folder: Path, code: int | None) -> "Outcome":
        lines = (folder / "stdout").read_text().splitlines()
        said = [line for line in lines if line.startswith(("batch ", "end "))]
        return cls(code, said, (folder / "stderr").read_text(errors="replace")[-3000:])


def parse_run(text: str) -> Run:
    names, _, at = text.partition("@")
    framework, way_out, fault, options = names.split("/")
    return Run(framework, way_out, fault, tuple(filter(None, options.split("+"))), int(at or 6))


def runs(number: int, frameworks: list[str], seed: int) -> list[Run]:
    """Every framework with every exit, fault and option, then at random."""
    chance = random.Random(seed)

    def one(framework: str, way_out: str, fault: str, *options: str) -> Run:
        legal = [option for option in OPTIONS if (framework, option) not in ILLEGAL]
        chosen = {*options, *chance.sample(legal, chance.choice((0, 1, 1, 2)))}
        return Run(framework, way_out, fault, tuple(sorted(chosen)), chance.randrange(3, 11))

    planned = [one(f, e, "none") for f, e in itertools.product(frameworks, EXITS)]
    planned += [one(f, "end", x) for f, x in itertools.product(frameworks, FAULTS[1:])]
    wanted = (pair for pair in itertools.product(frameworks, OPTIONS) if pair not in ILLEGAL)
    planned += [one(f, chance.choice(EXITS), "none", option) for f, option in wanted]
    while len(planned) < number:
        planned.append(one(chance.choice(frameworks), chance.choice(EXITS), chance.choice(FAULTS)))
    return planned


def groups(planned: list[Run]) -> list[list[Run]]:
    """What one process starts: runs of one framework; those with a file system that hangs need a library loaded."""

    def kind(run: Run) -> tuple[str, bool]:
        return run.framework, run.fault == "hung"

    found = list[list[Run]]()
    for _, alike in itertools.groupby(sorted(planned, key=kind), kind):
        rest = list(alike)
        found += [rest[n : n + RUNS_PER_PROCESS] for n in range(0, len(rest), RUNS_PER_PROCESS)]
    return sorted(found, key=len, reverse=True)


def train(group: list[Run], folder: Path) -> list[Outcome]:
    """Train each run without and with a recording."""
    own = {"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0", "GLOO_SOCKET_IFNAME": "lo"}
    if group[0].fault == "hung":
        own["LD_PRELOAD"] = str(folder / "hang.so")
        build = ["cc", "-shared", "-fPIC", "-O1", "-o", own["LD_PRELOAD"], str(HANG), "-ldl"]
        subprocess.run(build, check=True)
    tasks = [
        run.task(folder / str(number) / name, records=name == "with")
        for number, run in enumerate(group)
        for name in ("without", "with")
    ]
    command = [sys.executable, str(JOB), group[0].framework]
    done = subprocess.run(
        command, input=json.dumps(tasks), capture_output=True, text=True, env={**os.environ, **own}, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{command} ended with {done.returncode}: {done.stderr}")
    codes = json.loads(done.stdout.splitlines()[-1])
    return [Outcome.of(Path(task["folder"]), code) for task, code in zip(tasks, codes, strict=True)]


def faults_of(run: Run, folder: Path, bare: Outcome, ours: Outcome) -> list[str]:
    """What is wrong with a run; empty if nothing."""
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
    if run.fault in HARMLESS and run.reaches_the_window and not killed and not any(steps.values()):
        found.append("nothing was recorded")
    parts = [path.name for path in (folder / "with").rglob("*.part")]
    if parts and not killed and run.fault not in KEEPS_PARTS:
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


def check(group: list[Run]) -> list[tuple[Run, list[str]]]:
    found = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        outcomes = train(group, folder)
        for number, (run, bare, ours) in enumerate(zip(group, outcomes[::2], outcomes[1::2], strict=True)):
            found.append((run, faults_of(run, folder / str(number), bare, ours)))
    return found


def show(counts: "Counter[tuple[str, str]]", columns: tuple[str, ...], frameworks: list[str]) -> None:
    """Print a table of numbers of runs; "-" is what a framework cannot do."""
    print(f"{'':18}" + "".join(f"{name:>15}" for name in columns))
    for framework in frameworks:
        cells = ("-" if (framework, name) in ILLEGAL else counts[framework, name] for name in columns)
        print(f"{framework:18}" + "".join(f"{cell:>15}" for cell in cells))


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
    failed, counts = [], Counter[tuple[str, str]]()
    with concurrent.futures.ThreadPoolExecutor(given.jobs) as pool:
        for done in concurrent.futures.as_completed(pool.submit(check, group) for group in groups(planned)):
            for run, found in done.result():
                counts.update((run.framework, name) for name in (run.exit, run.fault, *run.options))
                failed += [run.name] if found else []
                print(f"{'FAILED' if found else 'ok':6} {run.name}", *found, sep="\n       ", flush=True)
    for columns in (EXITS, FAULTS, OPTIONS):
        show(counts, columns, [f for f in FRAMEWORKS if any(run.framework == f for run in planned)])
    for pair, reason in ILLEGAL.items():
        print(f"- {' '.join(pair)}: {reason}")
    print(f"seed {given.seed}: {len(failed)} of {len(planned)} failed", *failed)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
