"""Does a test fail for every fault that somebody could make? Plants them one by one and sees.

    planted_faults.py                 20 faults of the merge (planted_faults.toml), at least one per rule
    planted_faults.py --seed 7        another choice among those of one rule
    planted_faults.py --all           every fault
    planted_faults.py --only TEXT ..  those whose rule or description holds one of the texts
    planted_faults.py --faults scripts/phase_faults_monai.toml --all       another list

Each fault is planted in a copy of its own, where the tests that the list names run until the first failure, the
quickest files first; nothing is changed here. Where the list says so (by_rule), only the tests whose names begin with
the first word of the rule run: ``M3 ...`` must be noticed by a ``test_M3_...``.
Exit status: 0 all were noticed, 1 some survived (they are listed), 2 the script itself could not work: a pattern no
longer stands in the source exactly once, the tests fail without a fault, or a fault breaks even the import.
"""

import argparse
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from check_skips import allowed_reasons, unexpected_skips

ROOT = Path(__file__).resolve().parent.parent
FAULTS = Path(__file__).with_suffix(".toml")
# What the tests need; environments, caches and outputs stay behind, compiled parts come along.
COPIED = (
    "chakra_capture",
    "hydra_plugins",
    "tests",
    "traces",
    "configs",
    "scripts",
    "pyproject.toml",
    "README.md",
    "LICENSE",
)
IMPORT_CHECK = "import chakra_capture.merge.rank as m, sys; sys.stdout.write(m.__file__)"
TIMEOUT = 900


class SetupError(Exception):
    """The script cannot tell anything."""


@dataclass(frozen=True)
class Edit:
    """One replacement in a file below chakra_capture/."""

    file: str
    old: str
    new: str


@dataclass(frozen=True)
class Fault:
    """A small change of the source that makes one rule wrong."""

    rule: str
    what: str
    edits: tuple[Edit, ...]


@dataclass(frozen=True)
class FaultList:
    """What one file plants, and the tests that are to notice."""

    faults: list[Fault]
    tests: list[str]
    by_rule: bool


@dataclass(frozen=True)
class Outcome:
    """The test that failed, None if all passed; and the test files, the quickest first."""

    fault: Fault | None
    killed_by: str | None
    seconds: float
    files: list[str]


def read_faults(path: Path) -> FaultList:
    content = tomllib.loads(path.read_text())
    faults = [Fault(f["rule"], f["what"], tuple(Edit(**edit) for edit in f["edit"])) for f in content["fault"]]
    return FaultList(faults, content["tests"], content.get("by_rule", False))


def check_patterns(faults: list[Fault], package: Path) -> None:
    """Every pattern stands in its file exactly once, so that it plants what it says."""
    stale = []
    for fault in faults:
        for edit in fault.edits:
            path = package / edit.file
            count = path.read_text().count(edit.old) if path.is_file() else 0
            if count != 1:
                stale.append(f"{fault.rule}: {fault.what}\n    {edit.file} has {count} times: {edit.old!r}")
    if stale:
        raise SetupError("patterns that do not stand in the source exactly once:\n" + "\n".join(stale))


def choose(faults: list[Fault], count: int, seed: int) -> list[Fault]:
    """One fault of each rule, then others up to ``count``, in the order of the file."""
    shuffled = random.Random(seed).sample(faults, len(faults))
    first = {fault.rule: fault for fault in reversed(shuffled)}
    chosen = list(first.values())
    others = [fault for fault in shuffled if fault not in chosen]
    chosen += others[: max(0, count - len(chosen))]
    return sorted(chosen, key=faults.index)


@contextmanager
def planted(fault: Fault | None) -> Iterator[Path]:
    """A copy of the project with the fault in it."""
    with tempfile.TemporaryDirectory() as name:
        copy = Path(name).resolve()
        for item in COPIED:
            source = ROOT / item
            if source.is_dir():
                shutil.copytree(source, copy / item, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy2(source, copy / item)
        for edit in fault.edits if fault else ():
            path = copy / "chakra_capture" / edit.file
            path.write_text(path.read_text().replace(edit.old, edit.new))
        if fault and any(edit.file.endswith(".c") for edit in fault.edits):
            build(copy)
        check_import(copy)
        yield copy


def build(copy: Path) -> None:
    """Compile the C parts of a copy in place; they are optional to a build, so it alone does not say."""
    before = list((copy / "chakra_capture").rglob("*.so"))
    for library in before:
        library.unlink()
    command = [sys.executable, "-c", "import setuptools; setuptools.setup()", "build_ext", "--inplace", "--force"]
    done = subprocess.run(command, cwd=copy, capture_output=True, text=True, check=False)
    if done.returncode or not before or not all(library.exists() for library in before):
        raise SetupError(f"the C parts of a copy do not build:\n{done.stdout}{done.stderr}")


def environment(copy: Path) -> dict[str, str]:
    """Everything that a test starts, wherever it starts it, imports the copy and not what is installed."""
    data = os.environ.get("CHAKRA_CAPTURE_DATA", str(ROOT.parent / "shared" / "data"))
    return {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1", "CHAKRA_CAPTURE_DATA": data}


def check_import(copy: Path) -> None:
    for folder in (copy, Path("/")):
        command = [sys.executable, "-c", IMPORT_CHECK]
        done = subprocess.run(command, cwd=folder, env=environment(copy), capture_output=True, text=True, check=False)
        if not done.stdout.startswith(str(copy / "chakra_capture")):
            raise SetupError(f"the copy is not what is imported, but {done.stdout or done.stderr}")


def run_tests(fault: Fault | None, files: list[str], workers: int, *, by_rule: bool = False) -> Outcome:
    """Run the tests on a copy until one fails."""
    start = time.monotonic()
    with planted(fault) as copy:
        command = [sys.executable, "-m", "pytest", *files, "-x", "-q", "-p", "no:cacheprovider", "--hypothesis-seed=0"]
        command += ["--junitxml=times.xml"]
        if by_rule and fault is not None:
            command += ["-k", f"test_{fault.rule.split()[0]}_"]
        if workers > 1:
            command += ["-n", str(workers), "--dist", "loadfile"]
        try:
            done = subprocess.run(
                command, cwd=copy, env=environment(copy), capture_output=True, text=True, check=False, timeout=TIMEOUT
            )
        except subprocess.TimeoutExpired:
            return Outcome(fault, f"no end within {TIMEOUT} s", time.monotonic() - start, files)
        seconds = seconds_per_file(copy / "times.xml")
    failed = re.findall(r"^(?:FAILED|ERROR) (tests/\S+?::.+?)(?: - .*)?$", done.stdout, re.MULTILINE)
    if done.returncode and not failed:
        raise SetupError(f"pytest failed, but no test did:\n{done.stdout[-3000:]}{done.stderr[-1000:]}")
    if fault is None and (skips := unexpected_skips(done.stdout, allowed_reasons(ROOT / "tests/allowed_skips.txt"))):
        raise SetupError("tests are skipped, so they can notice nothing:\n" + "\n".join(skips))
    quickest_first = sorted(seconds, key=lambda file: seconds[file])
    return Outcome(fault, failed[0] if failed else None, time.monotonic() - start, quickest_first)


def seconds_per_file(report: Path) -> dict[str, float]:
    """Time of each test file that a run came to."""
    seconds: dict[str, float] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        file = f"{case.attrib['classname'].replace('.', '/')}.py"
        seconds[file] = seconds.get(file, 0.0) + float(case.attrib["time"])
    return seconds


def run_all(faults: list[Fault], files: list[str], *, jobs: int, workers: int, by_rule: bool) -> list[Outcome]:
    """Plant each fault; ``jobs`` at once."""
    survivors = []
    with ThreadPoolExecutor(jobs) as pool:
        for outcome in pool.map(lambda fault: run_tests(fault, files, workers, by_rule=by_rule), faults):
            assert outcome.fault is not None
            word = "killed  " if outcome.killed_by else "SURVIVED"
            print(f"{word} {outcome.fault.rule}: {outcome.fault.what}", flush=True)
            print(f"         {outcome.killed_by or 'no test failed'} ({outcome.seconds:.0f} s)", flush=True)
            if not outcome.killed_by:
                survivors.append(outcome)
    return survivors


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=Path, default=FAULTS, help="the list (default planted_faults.toml)")
    parser.add_argument("--count", type=int, default=20, help="how many; at least one per rule (default 20)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--only", nargs="+", metavar="TEXT")
    parser.add_argument("--jobs", type=int, default=1, help="copies tested at once")
    parser.add_argument("--workers", type=int, default=1, help="pytest workers in each copy")
    parser.add_argument("--list", action="store_true", help="check the patterns, name the faults chosen, and stop")
    options = parser.parse_args(arguments)
    listed = read_faults(options.faults)
    faults = listed.faults
    chosen = faults if options.all else choose(faults, options.count, options.seed)
    if options.only:
        chosen = [fault for fault in faults if any(t in f"{fault.rule}: {fault.what}" for t in options.only)]
    try:
        check_patterns(faults, ROOT / "chakra_capture")
        if options.list:
            print("\n".join(f"{fault.rule}: {fault.what}" for fault in chosen))
            return 0
        sound = run_tests(None, listed.tests, options.workers)
        if sound.killed_by:
            raise SetupError(f"{sound.killed_by} fails without any fault")
        print(f"without a fault all tests pass ({sound.seconds:.0f} s)", flush=True)
        survivors = run_all(chosen, sound.files, jobs=options.jobs, workers=options.workers, by_rule=listed.by_rule)
    except SetupError as error:
        print(error, file=sys.stderr)
        return 2
    rules = len({fault.rule for fault in chosen})
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} faults of {rules} rules were noticed, seed {options.seed}")
    for outcome in survivors:
        assert outcome.fault is not None
        print(f"survived: {outcome.fault.rule}: {outcome.fault.what}")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
