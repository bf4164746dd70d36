"""Do the annotations in the device trace and the spans in the file of phases agree?

    phase_agreement.py [--steps 50]

Records so many steps of a plain loop, reads both files with the plain json module, and compares the begin and the end
of every phase. The file of phases counts on the monotonic clock, the trace on that of the day: the difference between
the two is taken from the anchors at the window's start and end.
Exit status: 0 95 of 100 boundaries differ by 20 us at most, 1 they do not.
"""

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from chakra_capture import ChakraProfileConfig, phases

BAR_NS = 20_000
PHASES = ("input_wait", "forward", "backward", "optimizer")


def record(folder: Path, num_steps: int) -> None:
    first = 3
    chosen = ChakraProfileConfig(
        enabled=True,
        start_step=first,
        end_step=first + num_steps - 1,
        max_window_steps=num_steps,
        trace_dir=str(folder),
    )
    phases.init(chosen)
    network = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    forward = phases.wrap_forward(network)
    optimizer = phases.wrap_optimizer(torch.optim.SGD(network.parameters(), lr=0.01))
    for batch in phases.wrap_dataloader([torch.ones(16, 64)] * (num_steps + 5)):
        phases.wrap_backward(forward(batch).sum()).backward()
        optimizer.step()
    phases.close()


def annotations(folder: Path) -> dict[str, list[tuple[float, float]]]:
    """Begin and end of each annotation that bears the name of a phase, Unix ns."""
    (file,) = folder.glob("*_kineto/rank-0.json")
    content = json.loads(file.read_text())
    base = content["baseTimeNanoseconds"]
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in PHASES}
    for event in content["traceEvents"]:
        if event.get("ph") == "X" and event["name"] in found and event["cat"] == "user_annotation":
            begin = base + event["ts"] * 1e3
            found[event["name"]].append((begin, begin + event["dur"] * 1e3))
    return {name: sorted(times) for name, times in found.items()}


def spans(folder: Path) -> tuple[dict[str, list[tuple[int, int]]], list[int]]:
    """Begin and end of each phase of the recorded steps, monotonic ns; and the offset of the clocks at each anchor."""
    (file,) = folder.glob("*_phases/rank-0.jsonl")
    lines: list[dict[str, Any]] = [json.loads(line) for line in file.read_text().splitlines()]
    found: dict[str, list[tuple[int, int]]] = {name: [] for name in PHASES}
    for line in lines:
        if line["kind"] == "step" and "profiled" in line.get("flags", ()):
            for name, begin, end in line["spans"]:
                found[name].append((line["begin_ns"] + begin, line["begin_ns"] + end))
    return found, [line["unix_ns"] - line["monotonic_ns"] for line in lines if line["kind"] == "anchor"]


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=50)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        record(Path(name), options.steps)
        annotated, (timed, offsets) = annotations(Path(name)), spans(Path(name))
    offset = round(statistics.mean(offsets))
    print(f"offset of the clocks {offset} ns, {max(offsets) - min(offsets)} ns more or less between the window's ends")
    worst = 0.0
    for name in PHASES:
        assert len(annotated[name]) == len(timed[name]) == options.steps, name
        for at, word in enumerate(("begin", "end")):
            pairs = zip(annotated[name], timed[name], strict=True)
            off = sorted(there[at] - here[at] - offset for there, here in pairs)
            p95 = sorted(map(abs, off))[int(0.95 * len(off))]
            worst = max(worst, p95)
            print(f"{name:>10} {word:5}: median {statistics.median(off) / 1e3:+6.1f} us, p95 {p95 / 1e3:5.1f} us")
    print(f"p95 at most {worst / 1e3:.1f} us, the bar is {BAR_NS / 1e3:.0f} us")
    return int(worst > BAR_NS)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
