"""What writing Chakra traces costs: beside a plain loop over protobuf messages, and as the trace grows.

    python scripts/bench_et.py                   the ResNet twin pair of the handed data, grown 1, 4, 16 times
    python scripts/bench_et.py --factors 1 4     two sizes of it

The handed data is looked for in CHAKRA_CAPTURE_DATA, else ../shared/data, what grows it beside it. Every measurement
is a process of its own, and the rounds take turns; medians of CPU time are shown. `loop` makes, fills and serializes a
message for each of the same nodes, which it has in memory as plain values before the clock starts; `writing` turns
columns into the same file; `export` is the whole command, start-up and reading of the tables included. Exit status: 1
if a bar of the project is missed.
"""

import argparse
import json
import math
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DATA = Path(os.environ.get("CHAKRA_CAPTURE_DATA", ROOT.parent / "shared" / "data"))
TWIN = DATA / "pairs" / "resnet50_ddp_twin"
GROW = DATA.parent / "tools" / "make_big_pair.py"
SPEED_BAR, GROWTH_BAR = 10, 1.05


def loop(merged: Path, profile: str, out: Path) -> None:
    """Write the nodes of an export once more, one message after the other."""
    from google.protobuf.internal.encoder import _VarintBytes  # type: ignore[attr-defined]

    from chakra_capture.export.et_reader import EtFile
    from chakra_capture.export.et_schema import message

    subprocess.run(command(merged, profile, out), check=True, stdout=subprocess.DEVNULL)
    with EtFile(out / "chakra.0.et") as file:
        nodes = [
            (n.node_id, n.name, n.type, n.data_deps, n.ctrl_deps, n.start_us, n.duration_us,
             [(a.name, a.kind, a.value) for a in n.attributes])
            for n in file.nodes()
        ]  # fmt: skip
    make = message("Node")
    begin = time.process_time()
    with (out / "loop.et").open("wb") as written:
        for number, name, kind, data, ctrl, start, duration, attributes in nodes:
            node = make(id=number, name=name, type=kind, start_time_micros=start, duration_micros=duration)
            node.data_deps.extend(data)
            node.ctrl_deps.extend(ctrl)
            for key, field, value in attributes:
                setattr(node.attr.add(name=key), field, value)
            record = node.SerializeToString()
            written.write(_VarintBytes(len(record)))
            written.write(record)
    answer(time.process_time() - begin, len(nodes))


def writing(merged: Path, profile: str, out: Path) -> None:
    """Turn the nodes of a rank into a file, from when they are known."""
    from chakra_capture.export.making import rank as module
    from chakra_capture.export.making.encode import encoded

    class Written(Exception):
        pass

    def timed(content):  # type: ignore[no-untyped-def]
        begin = time.process_time()
        with (out / "writing.et").open("wb") as file:
            for data in encoded(content):
                file.write(data)
        answer(time.process_time() - begin, len(content))
        raise Written

    module.encoded = timed
    sys.argv = [str(one) for one in command(merged, profile, out)[2:]]
    from chakra_capture.cli.main import main

    with suppress(Written):
        main()


def export(merged: Path, profile: str, out: Path) -> None:
    """The whole command, in a process of its own."""
    subprocess.run(command(merged, profile, out), check=True, stdout=subprocess.DEVNULL)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    answer(used.ru_utime + used.ru_stime, 0, used.ru_maxrss)


def command(merged: Path, profile: str, out: Path) -> list[str | Path]:
    """The command line that exports a merged folder."""
    return [sys.executable, "-m", "chakra_capture", "export", "et", merged, "-o", out, "--profile", profile]


def answer(seconds: float, nodes: int, peak_kb: int = 0) -> None:
    print(json.dumps({"s": seconds, "nodes": nodes, "peak_mb": peak_kb / 1e3}))


WORK = {"loop": loop, "writing": writing, "export": export}


def measured(what: str, merged: Path, profile: str) -> dict[str, float]:
    """Do one thing in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        call = [sys.executable, __file__, "--do", what, merged, profile, folder]
        done = subprocess.run(list(map(str, call)), check=True, capture_output=True, text=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def prepared(factor: int, folder: Path) -> Path:
    """The twin pair grown and merged."""
    files = [next((TWIN / side).iterdir()) for side in ("host", "device")]
    # Of a file with a number in its name the rank is that number.
    grown = [folder / f"{side}.json" for side in ("host", "device")]
    subprocess.run([sys.executable, GROW, *files, str(factor), *grown], check=True, stdout=subprocess.DEVNULL)
    merged = folder / f"merged-{factor}"
    call = [sys.executable, "-m", "chakra_capture", "merge", "--host", grown[0], "--device", grown[1], "-o", merged]
    subprocess.run([*map(str, call), "--force"], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    for path in grown:
        path.unlink()
    return merged


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--factors", nargs="+", type=int, default=[1, 4, 16])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--do", nargs=4, metavar=("WHAT", "MERGED", "PROFILE", "OUT"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.do:
        what, merged, profile, out = options.do
        WORK[what](Path(merged), profile, Path(out))
        return 0
    if not TWIN.is_dir() or not GROW.is_file():
        parser.error(f"{TWIN} or {GROW} is not here; set CHAKRA_CAPTURE_DATA to the folder of the handed data")
    folder = Path(tempfile.mkdtemp(prefix="bench_et-"))
    try:
        return report(options, {factor: prepared(factor, folder) for factor in options.factors})
    finally:
        shutil.rmtree(folder)


def report(options: argparse.Namespace, runs: dict[int, Path]) -> int:
    """Measure, print a table and say which bars are met."""
    is_met = True
    for profile in ("astra", "full"):
        found: dict[tuple[int, str], list[dict[str, float]]] = {}
        for _ in range(options.rounds):
            for factor, merged in runs.items():
                for what in WORK:
                    found.setdefault((factor, what), []).append(measured(what, merged, profile))
        median = {key: statistics.median(one["s"] for one in several) for key, several in found.items()}
        print(f"\nprofile {profile}\nfactor    nodes   loop s   writing s   loop / writing   export s   peak MB")
        for factor in runs:
            nodes = found[factor, "loop"][0]["nodes"]
            peak = statistics.median(one["peak_mb"] for one in found[factor, "export"])
            ratio = median[factor, "loop"] / median[factor, "writing"]
            is_met &= ratio >= SPEED_BAR
            print(
                f"{factor:6} {nodes:8,.0f} {median[factor, 'loop']:8.2f} {median[factor, 'writing']:11.3f} "
                f"{ratio:16.1f} {median[factor, 'export']:10.2f} {peak:9.0f}"
            )
        for small, large in pairwise(runs):
            for what in ("writing", "export"):
                exponent = math.log(median[large, what] / median[small, what]) / math.log(large / small)
                is_met &= exponent <= GROWTH_BAR
                print(f"  growth of {what} from {small} to {large} times: exponent {exponent:.2f}")
    print(f"bars (writing {SPEED_BAR} x a loop, exponent {GROWTH_BAR}): {'met' if is_met else 'missed'}")
    return 0 if is_met else 1


if __name__ == "__main__":
    sys.exit(main())
