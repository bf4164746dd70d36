"""What a merge costs: CPU time and peak memory beside json.load of the same two files and other tools, interleaved.

    bench_merge.py                                        the ResNet twin pair of the handed data, grown 1, 4, 16 times
    bench_merge.py --host H --device D --grow-with TOOL   another pair; TOOL H D FACTOR OUT_HOST OUT_DEVICE grows it
    bench_merge.py --pair 1 H D --pair 16 H16 D16         pairs grown before, plain JSON, each with its factor

The handed data is looked for in CHAKRA_CAPTURE_DATA, else ../shared/data, the tool in tools/make_big_pair.py beside it.
A tool to compare with is measured where a Python that has it is given, each in an environment of its own (both bring
a package `hta`), and its line says "not measured" otherwise:

    python3 -m venv HTA && HTA/bin/pip install traceinsight==0.6.1                --hta-python HTA/bin/python
    python3 -m venv LINK && LINK/bin/pip install mlc-chakra==1.0.0 "pandas<3"     --link-python LINK/bin/python

Every measurement is a process of its own, start-up included. A round runs each of them once; the medians of the
rounds are shown, ratios are of medians. The other tools run in the first round only: they take minutes. Sizes are
those of the plain files, for gz too. Exit status: 1 if a bar of the project is missed.
"""

import argparse
import gzip
import json
import math
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
CHILD = Path(__file__).with_name("bench_merge_child.py")
DATA = Path(os.environ.get("CHAKRA_CAPTURE_DATA", ROOT.parent / "shared" / "data"))
TWIN = DATA / "pairs" / "resnet50_ddp_twin"
SMALLEST_JUDGED = 200e6
CPU_BAR = {"native": 0.12, "msgspec": 0.3}
MEMORY_BAR = {"native": 0.6, "msgspec": 1.2}
GROWTH_BAR = 1.05
LINKING_BAR = 0.10
LINK_TOOL_BAR = 100
MARKED = re.compile(r"(<!-- bench_merge:begin[^>]*-->\n).*?(<!-- bench_merge:end -->)", re.DOTALL)
NAMES = {
    "json.load": "`json.load` of both files",
    "native": "merge, C scanner",
    "msgspec": "merge, msgspec alone",
    "hta": "HTA (traceinsight), device file alone",
    "trace_link": "chakra_trace_link (mlc-chakra)",
}


@dataclass(frozen=True)
class Pair:
    """Both files of one factor, by how they are packed; ``size`` is that of the plain ones."""

    factor: int
    size: int
    files: dict[str, tuple[Path, Path]]


@dataclass
class Series:
    """All runs of one kind of work on one pair."""

    factor: int
    size: int
    what: str
    packed: str
    cpu_s: list[float] = field(default_factory=list)
    peak_bytes: list[int] = field(default_factory=list)
    written_bytes: int = 0
    failure: str | None = None
    stages: list[dict[str, float]] = field(default_factory=list)

    @property
    def cpu(self) -> float:
        return statistics.median(self.cpu_s)

    @property
    def peak(self) -> float:
        return statistics.median(self.peak_bytes)


@dataclass(frozen=True)
class Bar:
    """One promise and what was measured of it."""

    what: str
    bar: str
    measured: str
    is_held: bool


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--host", type=Path, default=TWIN / "host" / "rank-0.json.gz")
    parser.add_argument("--device", type=Path, default=TWIN / "device" / "rank-0.json.gz")
    parser.add_argument("--grow-with", type=Path, default=DATA.parent / "tools" / "make_big_pair.py", metavar="TOOL")
    parser.add_argument("--factors", nargs="+", type=int, default=[1, 4, 16])
    parser.add_argument("--pair", nargs=3, action="append", default=[], metavar=("FACTOR", "HOST", "DEVICE"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--hta-python", type=Path)
    parser.add_argument("--link-python", type=Path)
    parser.add_argument("--peer-factors", nargs="*", type=int, help="factors for the other tools; default all")
    parser.add_argument("--timeout", type=float, default=1800, help="seconds after which one process is given up")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every number there, too")
    parser.add_argument(
        "--into", type=Path, metavar="FILE", help="put the tables between this file's bench_merge marks"
    )
    options = parser.parse_args(arguments)
    wanted = [path for _, *paths in options.pair for path in map(Path, paths)]
    wanted = wanted or [options.host, options.device, options.grow_with]
    wanted += [path for path in (options.hta_python, options.link_python, options.into) if path]
    if missing := [path for path in wanted if not path.is_file()]:
        parser.error(f"{missing[0]} is not here. What to give instead:\n{__doc__}")
    return options


def prepare(options: argparse.Namespace, folder: Path) -> list[Pair]:
    """The pairs in order of their size, each plain and as gz."""
    plain = {int(factor): (Path(host), Path(device)) for factor, host, device in options.pair}
    if not plain:
        for factor in options.factors:
            say(f"growing the pair {factor} times")
            plain[factor] = (folder / f"host-{factor}.json", folder / f"device-{factor}.json")
            command = [sys.executable, options.grow_with, options.host, options.device, str(factor), *plain[factor]]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    pairs = []
    for factor, files in sorted(plain.items()):
        say(f"packing the pair of factor {factor}")
        size = sum(path.stat().st_size for path in files)
        packed = (gz(files[0], folder / f"host-{factor}.json.gz"), gz(files[1], folder / f"device-{factor}.json.gz"))
        pairs.append(Pair(factor, size, {"plain": files, "gz": packed}))
    return pairs


def gz(path: Path, target: Path) -> Path:
    with path.open("rb") as source, gzip.open(target, "wb", compresslevel=6) as packed:
        shutil.copyfileobj(source, packed, 1 << 20)
    return target


def work_of(pair: Pair, options: argparse.Namespace, *, is_first: bool) -> Iterator[tuple[str, str, Path]]:
    """What one round runs on a pair: the work, how the files are packed, and the Python to run it with."""
    own = Path(sys.executable)
    yield "json.load", "plain", own
    for packed in ("plain", "gz"):
        yield "native", packed, own
        yield "msgspec", packed, own
    yield "stages", "plain", own
    if is_first and (options.peer_factors is None or pair.factor in options.peer_factors):
        for what, python in (("hta", options.hta_python), ("trace_link", options.link_python)):
            if python is not None:
                yield what, "plain", python


def measure_all(pairs: list[Pair], options: argparse.Namespace, folder: Path) -> list[Series]:
    found: dict[tuple[int, str, str], Series] = {}
    for number in range(options.rounds):
        for pair in pairs:
            for what, packed, python in work_of(pair, options, is_first=number == 0):
                say(f"round {number + 1} of {options.rounds}, factor {pair.factor}: {what}, {packed}")
                new = Series(pair.factor, pair.size, what, packed)
                series = found.setdefault((pair.factor, what, packed), new)
                measure(series, [python, CHILD, what, *pair.files[packed]], folder / "out", options.timeout)
    return list(found.values())


def measure(series: Series, command: list[str | Path], out: Path, timeout: float) -> None:
    """Run one process and add what it cost, its own children included."""
    with tempfile.TemporaryFile() as said, tempfile.TemporaryFile() as errors:
        process = subprocess.Popen([*command, out], stdout=said, stderr=errors, env=with_byte_code())
        watch = threading.Timer(timeout, process.kill)
        watch.start()
        # The kernel's own account. A new process begins with the peak of the one that started it, so this one
        # must stay small: it loads no trace and no table library.
        _, status, usage = os.wait4(process.pid, 0)
        watch.cancel()
        process.returncode = os.waitstatus_to_exitcode(status)
        lines, trouble = (text(stream).strip().splitlines() for stream in (said, errors))
    if process.returncode:
        series.failure = f"exit {process.returncode}: {(trouble or lines or ['it said nothing'])[-1]}"
        if series.what not in ("hta", "trace_link"):
            raise SystemExit(f"{series.what}, {series.packed}: {series.failure}")
    else:
        series.cpu_s.append(usage.ru_utime + usage.ru_stime)
        series.peak_bytes.append(usage.ru_maxrss * 1024)
        series.written_bytes = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
        if "stages" in (result := json.loads(lines[-1])):
            series.stages.append(result["stages"])
    shutil.rmtree(out, ignore_errors=True)


def with_byte_code() -> dict[str, str]:
    """The environment for a child: as where the package is installed, its byte code is kept from the first run on."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


def text(stream: Any) -> str:
    stream.seek(0)
    return str(stream.read().decode("utf-8", "replace"))


def stage_seconds(series: Series) -> dict[str, float]:
    """Median CPU seconds of each stage; leaving the process counts as start-up."""
    seconds = {stage: statistics.median(run[stage] for run in series.stages) for stage in series.stages[0]}
    left = [cpu - sum(run.values()) for cpu, run in zip(series.cpu_s, series.stages, strict=True)]
    return {**seconds, "start-up": seconds["start-up"] + max(0.0, statistics.median(left))}


def exponent(sizes: list[float], values: list[float]) -> float:
    """Slope of log(value) over log(size), least squares."""
    x, y = [math.log(size) for size in sizes], [math.log(value) for value in values]
    return statistics.linear_regression(x, y).slope


@dataclass(frozen=True)
class Growth:
    """Exponents of one kind of work: time, then memory.

    Attributes:
        fitted: over all factors; start-up makes it smaller than the work itself grows.
        last: between the two largest, where start-up weighs least.
        increments: of the last two increments, from which start-up cancels; noise weighs most here.
    """

    what: str
    packed: str
    factors: list[int]
    fitted: tuple[float, float]
    last: tuple[float, float]
    increments: tuple[float, float] | None


def growths(found: list[Series]) -> list[Growth]:
    grown = []
    for what, packed in dict.fromkeys((s.what, s.packed) for s in found if s.what != "stages"):
        points = [s for s in found if (s.what, s.packed) == (what, packed) and s.cpu_s]
        if len(points) < 2:
            continue
        sizes, columns = [float(p.size) for p in points], ([p.cpu for p in points], [p.peak for p in points])
        fitted, last = ([exponent(sizes[n:], column[n:]) for column in columns] for n in (0, -2))
        steps = [[b - a for a, b in pairwise(column[-3:])] for column in (sizes, *columns)]
        known = len(points) > 2 and all(step > 0 for column in steps for step in column)
        increments = (exponent(steps[0], steps[1]), exponent(steps[0], steps[2])) if known else None
        factors = [p.factor for p in points]
        grown.append(Growth(what, packed, factors, (fitted[0], fitted[1]), (last[0], last[1]), increments))
    return grown


def bars(found: list[Series], grown: list[Growth]) -> list[Bar]:
    """The project's bars that this run can judge; those on cost need a pair of 200 MB."""
    own = [g for g in grown if g.what in CPU_BAR]
    judged = [at_most(f"growth of time, {g.what}, {g.packed}, two largest", g.last[0], GROWTH_BAR) for g in own]
    judged += [at_most(f"growth of memory, {g.what}, {g.packed}, two largest", g.last[1], GROWTH_BAR) for g in own]
    largest = {(s.what, s.packed): s for s in found if s.factor == max(s.factor for s in found)}
    shares = stage_seconds(largest["stages", "plain"])
    judged.append(at_most("share of linking", shares["linking"] / sum(shares.values()), LINKING_BAR))
    base = largest["json.load", "plain"]
    if base.size < SMALLEST_JUDGED:
        return judged
    for (what, packed), series in largest.items():
        if what in CPU_BAR:
            judged.append(at_most(f"CPU of {what}, {packed} / json.load", series.cpu / base.cpu, CPU_BAR[what]))
            judged.append(at_most(f"peak of {what}, {packed} / files", series.peak / series.size, MEMORY_BAR[what]))
    link = largest.get(("trace_link", "plain"))
    if link is not None and link.cpu_s:
        times = link.cpu / largest["native", "plain"].cpu
        is_held = times >= LINK_TOOL_BAR
        judged.append(Bar("CPU of chakra_trace_link / native", f">= {LINK_TOOL_BAR}", f"{times:.0f}", is_held))
    return judged


def at_most(what: str, measured: float, bar: float) -> Bar:
    return Bar(what, f"<= {bar:g}", f"{measured:.3f}", measured <= bar)


def machine() -> str:
    info = Path("/proc/cpuinfo")
    models = [line.split(":", 1)[1] for line in info.read_text().splitlines() if line.startswith("model name")]
    model = " ".join(models[0].split()) if models else platform.machine()
    return f"{os.cpu_count()} cores, {model}, Python {platform.python_version()}"


def cost_lines(found: list[Series]) -> Iterator[str]:
    base = {s.factor: s.cpu for s in found if s.what == "json.load"}
    yield "| pair | what | CPU s | x `json.load` | peak MB | x both files | written MB |"
    yield "|---|---|---|---|---|---|---|"
    for s in found:
        if s.what == "stages":
            continue
        name = f"{s.factor} x, {s.size / 1e6:.0f} MB | {NAMES[s.what]}{', gz' if s.packed == 'gz' else ''}"
        if s.failure:
            yield f"| {name} | not measured: {s.failure} |  |  |  |  |"
            continue
        yield (
            f"| {name} | {s.cpu:.2f} | {s.cpu / base[s.factor]:.3f} | {s.peak / 1e6:.0f} | {s.peak / s.size:.2f} "
            f"| {s.written_bytes / 1e6:.1f} |"
        )


def growth_lines(grown: list[Growth]) -> Iterator[str]:
    """Time / memory in each cell."""
    yield "| growth exponent, time / memory | over factors | fitted | the two largest | less start-up |"
    yield "|---|---|---|---|---|"
    for g in grown:
        name = f"{NAMES[g.what]}{', gz' if g.packed == 'gz' else ''}"
        cells = [f"{two[0]:.2f} / {two[1]:.2f}" if two else "-" for two in (g.fitted, g.last, g.increments)]
        yield f"| {name} | {', '.join(map(str, g.factors))} | {' | '.join(cells)} |"


def stage_lines(found: list[Series]) -> Iterator[str]:
    """Share of each stage of a merge by the C scanner, one column per factor."""
    staged = {s.factor: stage_seconds(s) for s in found if s.what == "stages"}
    yield "| stage (C scanner, plain) | " + " | ".join(f"{factor} x" for factor in staged) + " |"
    yield "|---" * (len(staged) + 1) + "|"
    for stage in next(iter(staged.values())):
        shares = [f"{seconds[stage] / sum(seconds.values()):.1%}" for seconds in staged.values()]
        yield f"| {stage} | {' | '.join(shares)} |"


def not_measured(options: argparse.Namespace) -> Iterator[str]:
    for name, python, flag in (
        (NAMES["hta"], options.hta_python, "--hta-python"),
        (NAMES["trace_link"], options.link_python, "--link-python"),
    ):
        if python is None:
            yield f"not measured: {name} ({flag} was not given)"


def say(progress: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {progress}", file=sys.stderr, flush=True)


def main(arguments: list[str]) -> int:
    options = parse(arguments)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        pairs = prepare(options, folder)
        found = sorted(measure_all(pairs, options, folder), key=lambda series: series.factor)
    grown = growths(found)
    judged = bars(found, grown)
    header = f"{time.strftime('%Y-%m-%d')}, {machine()}; medians of {options.rounds} interleaved rounds."
    blocks = [
        [header],
        *([line] for line in not_measured(options)),
        cost_lines(found),
        growth_lines(grown),
        stage_lines(found),
    ]
    tables = "\n\n".join("\n".join(block) for block in blocks)
    print(tables, end="\n\n")
    for bar in judged:
        print(f"{'held  ' if bar.is_held else 'MISSED'} {bar.what}: {bar.measured} ({bar.bar})")
    if options.into:
        options.into.write_text(MARKED.sub(lambda match: f"{match[1]}{tables}\n{match[2]}", options.into.read_text()))
    if options.json:
        options.json.write_text(json.dumps(as_json(header, found, grown, judged), indent=1) + "\n")
    return 0 if all(bar.is_held for bar in judged) else 1


def as_json(header: str, found: list[Series], grown: list[Growth], judged: list[Bar]) -> dict[str, Any]:
    return {
        "schema_version": 1,
        "measured": header,
        "runs": [asdict(series) for series in found],
        "growth": [asdict(growth) for growth in grown],
        "stages": {s.factor: stage_seconds(s) for s in found if s.what == "stages"},
        "bars": [asdict(bar) for bar in judged],
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
