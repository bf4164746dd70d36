"""Benchmark of merging: CPU time and peak memory against json.load of the same two files, interleaved.

Factors grow the ResNet twin pair. The pair and the tool that grows it are handed data: CHAKRA_CAPTURE_DATA, else
../shared/data, and tools/make_big_pair.py beside it. Every measurement is a process of its own; medians are shown,
ratios are of medians.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DATA = Path(os.environ.get("CHAKRA_CAPTURE_DATA", ROOT.parent / "shared" / "data"))
PAIR = DATA / "pairs" / "resnet50_ddp_twin"

WORK = {
    "json.load": """
import json
for name in (host, device):
    with open(name, "rb") as file:
        json.load(file)
""",
    "native": "merge(ScannerKind.NATIVE)",
    "msgspec": "merge(ScannerKind.MSGSPEC)",
}
CHILD = """
import json, resource, sys
host, device, out, kind = sys.argv[1:5]
if kind != "json.load":
    from pathlib import Path
    from chakra_capture.merge.rank import MergeOptions, merge_rank
    from chakra_capture.trace.discovery import WindowFiles
    from chakra_capture.trace.reading import ScannerKind

    def merge(scanner):
        options = MergeOptions(force=True, scanner=scanner)
        merge_rank(0, [WindowFiles(Path(host), Path(device))], Path(out), options)
{work}
usage = resource.getrusage(resource.RUSAGE_SELF)
print(json.dumps([usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024]))
"""


def grown(factor: int, folder: Path) -> tuple[Path, Path]:
    """The twin pair grown by a factor."""
    host, device = folder / f"host-{factor}.json", folder / f"device-{factor}.json"
    tool = DATA.parent / "tools" / "make_big_pair.py"
    files = [PAIR / side / "rank-0.json.gz" for side in ("host", "device")]
    command = [sys.executable, tool, *files, str(factor), host, device]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return host, device


def measure(kind: str, host: Path, device: Path, folder: Path) -> tuple[float, int]:
    """CPU seconds, start-up included, and peak resident bytes of one process."""
    code = CHILD.format(work=WORK[kind])
    arguments = [sys.executable, "-c", code, host, device, folder / "out", kind]
    cpu, rss = json.loads(subprocess.run(arguments, check=True, capture_output=True, text=True).stdout)
    return cpu, rss


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("factors", nargs="*", type=int, default=[1, 4, 16])
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args(arguments)
    if not PAIR.is_dir():
        print(f"{PAIR} is not here; set CHAKRA_CAPTURE_DATA to the folder with the handed traces.", file=sys.stderr)
        return 1
    print("factor   files       what   cpu s  x json.load  peak MB  x files")
    totals: dict[str, list[tuple[int, float, int]]] = {kind: [] for kind in WORK}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for factor in options.factors:
            host, device = grown(factor, folder)
            size = host.stat().st_size + device.stat().st_size
            runs: dict[str, list[tuple[float, int]]] = {kind: [] for kind in WORK}
            for _ in range(options.repeats):
                for kind in WORK:
                    runs[kind].append(measure(kind, host, device, folder))
            base = statistics.median(cpu for cpu, _ in runs["json.load"])
            for kind, values in runs.items():
                cpu, rss = (statistics.median(column) for column in zip(*values, strict=True))
                totals[kind].append((size, cpu, int(rss)))
                print(
                    f"{factor:6d} {size / 1e6:5.0f} MB {kind:>10} {cpu:7.2f} {cpu / base:12.3f} {rss / 1e6:8.0f}"
                    f" {rss / size:8.2f}"
                )
    for kind, points in totals.items():
        if len(points) > 1:
            print(f"{kind}: growth exponent of time {exponent(points, 1):.2f}, of memory {exponent(points, 2):.2f}")
    return 0


def exponent(points: list[tuple[int, float, int]], column: int) -> float:
    """Slope of log(value) over log(size) between the two largest sizes."""
    (size, *_), (larger, *_) = points[-2], points[-1]
    return math.log(points[-1][column] / points[-2][column]) / math.log(larger / size)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
