"""What many ranks cost: two workers against one, the driver's memory, and the cost of a rank as ranks grow in number.

    python scripts/bench_ranks.py                            64 ranks of 5 MB; 100 and 1000 tiny ones, local and on Dask
    python scripts/bench_ranks.py --ranks 16 --tiny 50 200   smaller

Runs the whole command line on ranks that scripts/make_ranks.py writes; every process has one polars thread. Rounds are
interleaved and medians shown. The driver's memory is its own, not that of its workers. Needs the extra `cluster` and
about 1 GB of disk. Run it on a quiet machine: the load before each part is printed. Exit status: 1 if a bar is missed.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parent
SPEED_UP_BAR = 1.8
GROWTH_BAR = 0.2
MEMORY_BAR = 1.2


@dataclass(frozen=True)
class Cost:
    """One run of the command line: seconds on the clock, peak memory of the driver."""

    seconds: float
    peak_bytes: int


def merge(folder: Path, *options: str) -> Cost:
    """Merge a run anew; its tables are removed afterwards."""
    out = folder / "out"
    command = [sys.executable, "-m", "chakra_capture", "merge", str(folder), "-o", str(out), *options]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    begin = time.perf_counter()
    peak = 0
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(command, stdout=said, stderr=said, env={**environment, "POLARS_MAX_THREADS": "1"})
        while process.poll() is None:
            peak = max(peak, peak_memory(process.pid))
            time.sleep(0.02)
        seconds = time.perf_counter() - begin
        if process.returncode:
            said.seek(0)
            raise SystemExit(f"{' '.join(command)} ended with {process.returncode}: {said.read()[-2000:]}")
    shutil.rmtree(out)
    return Cost(seconds, peak)


def peak_memory(pid: int) -> int:
    """What the kernel says; 0 of a process that has just ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), 0)


def make(out: Path, ranks: int, *options: str) -> Path:
    say(f"writing {ranks} ranks")
    command = [sys.executable, SCRIPTS / "make_ranks.py", out, "--ranks", str(ranks), *options]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return out


@contextmanager
def cluster(folder: Path) -> Iterator[str]:
    """A scheduler and two workers with one thread each."""
    file = folder / "scheduler.json"
    python = [sys.executable, "-m"]
    scheduler = [*python, "distributed.cli.dask_scheduler", "--host", "127.0.0.1", "--port", "0", "--no-dashboard"]
    workers = [*python, "distributed.cli.dask_worker", "--nworkers", "2", "--nthreads", "1", "--no-dashboard"]
    with (folder / "cluster.log").open("w") as log:
        first = subprocess.Popen([*scheduler, "--scheduler-file", str(file)], stdout=log, stderr=log, cwd=folder)
        while not (file.exists() and file.read_text()):
            time.sleep(0.1)
        second = subprocess.Popen([*workers, "--scheduler-file", str(file)], stdout=log, stderr=log, cwd=folder)
        try:
            yield json.loads(file.read_text())["address"]
        finally:
            for process in (second, first):
                process.terminate()
                process.wait()


def side_by_side(folder: Path, ranks: int, rounds: int) -> Iterator[tuple[str, bool]]:
    run = make(folder / "large", ranks, "--size", "5")
    few = make(folder / "few", 8, "--size", "5")
    say_load()
    costs: dict[str, list[Cost]] = {}
    for number in range(rounds):
        for name, path, workers in (("one", run, "1"), ("two", run, "2"), ("few", few, "2")):
            costs.setdefault(name, []).append(merge(path, "--workers", workers))
            say(f"round {number + 1}, {name}: {costs[name][-1].seconds:.1f} s")
    one, two = (statistics.median(c.seconds for c in costs[name]) for name in ("one", "two"))
    yield (
        f"{ranks} ranks of 5 MB: 1 worker {one:.1f} s, 2 workers {two:.1f} s, {one / two:.2f} x (bar {SPEED_UP_BAR})",
        one / two >= SPEED_UP_BAR,
    )
    small, large = (statistics.median(c.peak_bytes for c in costs[name]) for name in ("few", "two"))
    yield (
        f"driver's peak memory: 8 ranks {small / 1e6:.0f} MB, {ranks} ranks {large / 1e6:.0f} MB, "
        f"{large / small:.2f} x (bar {MEMORY_BAR})",
        large / small <= MEMORY_BAR,
    )
    shutil.rmtree(run)


def many(folder: Path, counts: list[int], rounds: int) -> Iterator[tuple[str, bool]]:
    runs = {count: make(folder / f"tiny{count}", count, "--tiny") for count in counts}
    with cluster(folder) as address:
        say_load()
        ways = {"local, 2 workers": ("--workers", "2"), "Dask, 2 workers": ("--cluster", address)}
        merge(runs[counts[0]], "--cluster", address)  # the workers import polars once
        costs: dict[tuple[str, int], list[Cost]] = {}
        for number in range(rounds):
            for way, options in ways.items():
                for count, run in runs.items():
                    costs.setdefault((way, count), []).append(merge(run, *options))
                    say(f"round {number + 1}, {way}, {count} ranks: {costs[way, count][-1].seconds:.1f} s")
    for way in ways:
        seconds = {c: statistics.median(cost.seconds for cost in costs[way, c]) for c in counts}
        each = {c: seconds[c] / c for c in counts}
        more = (seconds[counts[-1]] - seconds[counts[0]]) / max(1, counts[-1] - counts[0])
        peaks = {c: statistics.median(cost.peak_bytes for cost in costs[way, c]) for c in counts}
        change = each[counts[-1]] / each[counts[0]] - 1
        shown = ", ".join(f"{c} ranks {each[c] * 1000:.1f} ms each, driver {peaks[c] / 1e6:.0f} MB" for c in counts)
        shown += f"; {seconds[counts[0]] - more * counts[0]:.1f} s to start and end, {more * 1000:.1f} ms for each rank"
        yield f"{way}: {shown}; {change:+.0%} (bar {GROWTH_BAR:.0%})", change <= GROWTH_BAR


def say(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


def say_load() -> None:
    print(f"load before: {os.getloadavg()[0]:.2f} on {os.cpu_count()} cores", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=64, help="ranks of 5 MB; 0 leaves that part out")
    parser.add_argument("--tiny", type=int, nargs="*", default=[100, 1000], help="numbers of tiny ranks, ascending")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    is_held = True
    with tempfile.TemporaryDirectory() as name:
        parts = [side_by_side(Path(name), options.ranks, options.rounds)] if options.ranks else []
        parts += [many(Path(name), options.tiny, options.rounds)] if options.tiny else []
        for part in parts:
            for line, held in part:
                print(f"{'held  ' if held else 'MISSED'} {line}", flush=True)
                is_held &= held
    return 0 if is_held else 1


if __name__ == "__main__":
    sys.exit(main())
