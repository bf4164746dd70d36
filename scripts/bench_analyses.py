"""What each analysis takes on a large run: seconds and peak memory, and how both grow with the run.

    python scripts/bench_analyses.py                    the ResNet twin pair of the handed data, grown 1, 16, 38 times
    python scripts/bench_analyses.py --factors 1 4
    python scripts/bench_analyses.py --run PATH         a run that is merged already, alone

The handed data is looked for in CHAKRA_CAPTURE_DATA, else ../shared/data, what grows it beside it. Every analysis is
the command itself (analyze NAME RUN --json), in a process of its own that has done one of another run before, so that
only reading, analysing and printing is timed; "all" does them one after the other. "report" is the page of the run,
without its replay. Runs take turns. Peak memory is that
of the process. Exit status: 0 every bar met, 1 one missed.
"""

import argparse
import contextlib
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

from chakra_capture.cli.analyze import analyze_app
from chakra_capture.cli.main import main as chakra_capture

DATA = Path(os.environ.get("CHAKRA_CAPTURE_DATA", Path(__file__).resolve().parents[2] / "shared" / "data"))
TWIN = DATA / "pairs" / "resnet50_ddp_twin"
GROW = DATA.parent / "tools" / "make_big_pair.py"
REPORT = "report"
NAMES = [name for name in analyze_app() if not name.startswith("-")]
# Of a run of a million rows.
ONE_BAR_S, ALL_BAR_S, PEAK_BAR_MB = 1.0, 5.0, 1000.0


def analyse(name: str, run: Path) -> None:
    """Ask one question, the answer goes nowhere."""
    with Path(os.devnull).open("w") as nowhere, contextlib.redirect_stdout(nowhere):
        try:
            if name == REPORT:
                with tempfile.TemporaryDirectory() as folder:
                    chakra_capture([name, str(run), "-o", f"{folder}/report.html", "--no-replay"])
            else:
                chakra_capture(["analyze", name, str(run), "--json"])
        except SystemExit as ended:
            if ended.code:
                raise


def timed(names: list[str], small: Path, run: Path) -> None:
    """Print seconds and peak memory of some analyses of a run, one after the other."""
    for name in names:
        analyse(name, small)
    begin = time.perf_counter()
    for name in names:
        analyse(name, run)
    seconds = time.perf_counter() - begin
    peak = re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())
    assert peak is not None
    print(json.dumps({"s": seconds, "peak_mb": int(peak[1]) * 1024 / 1e6}))


def measured(what: str, small: Path, run: Path) -> dict[str, float]:
    """Do one analysis, or all, in a process of its own."""
    call = [sys.executable, __file__, "--do", what, str(small), str(run)]
    done = subprocess.run(call, check=True, capture_output=True, text=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def prepared(factor: int, folder: Path) -> Path:
    """The twin pair grown and merged."""
    files = [next((TWIN / side).iterdir()) for side in ("host", "device")]
    grown = [folder / f"{side}.json" for side in ("host", "device")]
    subprocess.run([sys.executable, GROW, *files, str(factor), *grown], check=True, stdout=subprocess.DEVNULL)
    merged = folder / f"merged-{factor}"
    call = [sys.executable, "-m", "chakra_capture", "merge", "--host", grown[0], "--device", grown[1], "-o", merged]
    subprocess.run([*map(str, call), "--force"], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    for path in grown:
        path.unlink()
    return merged


def rows_of(run: Path) -> int:
    """Rows of nodes in all ranks of a merged run."""
    import polars as pl

    files = [*run.glob("rank=*/nodes.parquet")]
    return sum(int(pl.scan_parquet(file).select(pl.len()).collect().item()) for file in files)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--factors", nargs="+", type=int, default=[1, 16, 38])
    parser.add_argument("--run", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--do", nargs=3, metavar=("WHAT", "SMALL", "RUN"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.do:
        what, small, run = options.do
        timed(NAMES if what == "all" else [what], Path(small), Path(run))
        return 0
    if options.run is not None:
        return report(options.rounds, {1: options.run}, options.run)
    if not TWIN.is_dir() or not GROW.is_file():
        parser.error(f"{TWIN} or {GROW} is not here; set CHAKRA_CAPTURE_DATA to the folder of the handed data")
    folder = Path(tempfile.mkdtemp(prefix="bench_analyses-"))
    try:
        return report(options.rounds, {one: prepared(one, folder) for one in options.factors}, prepared(1, folder))
    finally:
        shutil.rmtree(folder)


def report(rounds: int, runs: dict[int, Path], small: Path) -> int:
    """Measure, print a table and say which bars the largest run meets."""
    found: dict[tuple[str, int], list[dict[str, float]]] = {}
    for _ in range(rounds):
        for what in [*NAMES, "all", REPORT]:
            for factor, run in runs.items():
                found.setdefault((what, factor), []).append(measured(what, small, run))
    sizes = {factor: rows_of(run) for factor, run in runs.items()}
    print("rows of nodes: " + ", ".join(f"{factor} x {size:,}" for factor, size in sizes.items()))
    print(f"{'analysis':15}" + "".join(f"{f'{factor} x, s':>10}{'MB':>7}" for factor in runs))
    missed, largest = [], max(runs)
    for what in [*NAMES, "all", REPORT]:
        cells = ""
        for factor in runs:
            seconds, peak = (statistics.median(one[key] for one in found[what, factor]) for key in ("s", "peak_mb"))
            cells += f"{seconds:10.2f}{peak:7.0f}"
            if factor == largest:
                missed += [what] * (
                    seconds > (ALL_BAR_S if what in ("all", REPORT) else ONE_BAR_S) or peak > PEAK_BAR_MB
                )
        print(f"{what:15}{cells}")
    for small_factor, large in pairwise(runs):
        times = [statistics.median(one["s"] for one in found["all", factor]) for factor in (small_factor, large)]
        print(f"all, from {small_factor} to {large} times as large: {times[1] / times[0]:.1f} times as long")
    bars = f"{ONE_BAR_S} s each, {ALL_BAR_S} s all and the report, {PEAK_BAR_MB:.0f} MB"
    print(f"bars of the largest ({bars}): {'missed by ' + ', '.join(missed) if missed else 'met'}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
