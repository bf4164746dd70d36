"""What the recording costs a training: inside its window, after it, and switched off.

    bench_window.py [--rounds 15] [--models tiny small] [--json]

Every training is a process of its own: 60 steps, a window of 30, 60 steps more. Four kinds take turns, so that a busy
machine meets all of them: without us, with our session switched off, with a recorded window, and with torch's profiler
and observer alone in its place (same options). Printed are medians over the rounds of ratios within one round, of CPU
time per step (the median of a process's steps). Exit status 1 above a bar.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from chakra_capture import ChakraProfileConfig, capture

BEFORE, INSIDE, AFTER = range(60), range(60, 90), range(90, 150)
KINDS = ("without", "disabled", "recorded", "bare")
MODELS: dict[str, Callable[[], tuple[torch.nn.Module, torch.Tensor]]] = {
    "tiny": lambda: (torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(12))), torch.randn(8, 32)),
    "small": lambda: (
        torch.nn.TransformerEncoder(
            torch.nn.TransformerEncoderLayer(128, 4, 256, batch_first=True), 2, enable_nested_tensor=False
        ),
        torch.randn(8, 64, 128),
    ),
}
# What is compared, in one round, and the most that it may be.
RATIOS = {
    "inside the window: recorded / bare profiler and observer": ("recorded.inside", "bare.inside", 1.02),
    "after the window / before it, less that without us": ("recorded.after/before", "without.after/before", 1.02),
    "switched off / without us": ("disabled.all", "without.all", 1.02),
}


@contextmanager
def bare_window(folder: str) -> Iterator[None]:
    """Torch's profiler and observer as a recording uses them."""
    from torch._C._profiler import _ExperimentalConfig
    from torch.profiler import ExecutionTraceObserver, profile

    observer = ExecutionTraceObserver().register_callback(f"{folder}/bare.json")
    config = _ExperimentalConfig(profile_all_threads=True, enable_cuda_sync_events=True)
    bare = profile(record_shapes=True, execution_trace_observer=observer, experimental_config=config)
    bare.prepare_trace()
    bare.start_trace()
    try:
        yield
    finally:
        bare.stop_trace()
        time.sleep(0.25)  # the observer may still be inside a callback
        observer.unregister_callback()


def train(kind: str, model: str, folder: str) -> dict[str, float]:
    """One training; CPU ns per step before, inside and after the window."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    network, batch = MODELS[model]()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01)
    spent: list[int] = []

    def work() -> None:
        optimizer.zero_grad()
        network(batch).sum().backward()
        optimizer.step()

    def steps(numbers: range, bracket: Callable[[int], object]) -> None:
        for number in numbers:
            start = time.process_time_ns()
            with bracket(number):  # type: ignore[attr-defined]
                work()
            spent.append(time.process_time_ns() - start)

    if kind in ("disabled", "recorded"):
        chosen = {"start_step": INSIDE[0] - 1, "end_step": INSIDE[-1] + 1, "trace_dir": folder}
        with capture(ChakraProfileConfig(enabled=kind == "recorded", **chosen)) as session:
            steps(range(AFTER[-1] + 1), session.step)
    else:

        @contextmanager
        def nothing(number: int) -> Iterator[None]:
            yield

        @contextmanager
        def marked(number: int) -> Iterator[None]:
            with torch.profiler.record_function(f"ProfilerStep#{number}"):
                yield

        steps(BEFORE, nothing)
        if kind == "bare":
            with bare_window(folder):
                steps(INSIDE, marked)
        else:
            steps(INSIDE, nothing)
        steps(AFTER, nothing)
    # The first steps, and those beside the window's ends, do what happens once.
    before, inside, after = (
        statistics.median(spent[part.start + skip : part.stop - 2])
        for part, skip in ((BEFORE, 20), (INSIDE, 2), (AFTER, 2))
    )
    whole = statistics.median([*spent[BEFORE.start + 20 : BEFORE.stop - 2], *spent[AFTER.start + 2 :]])
    return {"inside": inside, "after/before": after / before, "all": whole}


def one_round(model: str, number: int) -> dict[str, float]:
    """Every kind once, each going first in turn."""
    found = {}
    first = number % len(KINDS)
    for kind in (*KINDS[first:], *KINDS[:first]):
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, __file__, "--child", kind, model, folder]
            said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        found |= {f"{kind}.{name}": value for name, value in json.loads(said.splitlines()[-1]).items()}
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        print(json.dumps(train(*given.child)))
        return 0
    rows = []
    for model in given.models:
        rounds = [one_round(model, number) for number in range(given.rounds)]
        for what, (ours, other, bar) in RATIOS.items():
            ratios = sorted(each[ours] / each[other] for each in rounds)
            quarter = len(ratios) // 4
            row = {"model": model, "what": what, "ratio": statistics.median(ratios), "bar": bar}
            rows.append({**row, "low": ratios[quarter], "high": ratios[-1 - quarter]})
    if given.json:
        print(json.dumps({"rounds": given.rounds, "rows": rows}))
    else:
        for row in rows:
            print(
                f"{row['model']:6} {row['what']:60} {row['ratio']:.3f} (half of the rounds within {row['low']:.3f} - "
                f"{row['high']:.3f}; bar {row['bar']})"
            )
    return int(any(row["ratio"] > row["bar"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
