"""What the recording costs a training: inside its window, after it, and switched off.

    bench_window.py [--rounds 12] [--models tiny small] [--json]

Recorded windows and those of torch's profiler and observer alone (same options) take turns in one process, and so do
blocks of steps without us and with our session switched off; steps after a window against those before it are of
processes of their own, with a window and without, in turn. Of each block counts the CPU time that a fifth of its steps
stay below: the speed of a machine changes, and what disturbs a step is not ours. Printed are medians of ratios. Exit
status 1 above the bar.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from chakra_capture import ChakraProfileConfig, capture

INSIDE, BLOCK = range(10, 50), range(200)
MODELS: dict[str, Callable[[], tuple[torch.nn.Module, torch.Tensor]]] = {
    "tiny": lambda: (torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(12))), torch.randn(8, 32)),
    "small": lambda: (
        torch.nn.TransformerEncoder(
            torch.nn.TransformerEncoderLayer(128, 4, 256, batch_first=True), 2, enable_nested_tensor=False
        ),
        torch.randn(8, 64, 128),
    ),
}
BAR = 1.02


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


class Training:
    """A network that trains on one thread, with the CPU time of every step."""

    def __init__(self, model: str) -> None:
        torch.manual_seed(0)
        torch.set_num_threads(1)
        self._network, self._batch = MODELS[model]()
        self._optimizer = torch.optim.SGD(self._network.parameters(), lr=0.01)

    def steps(self, numbers: range, bracket: Callable[[int], AbstractContextManager[object]]) -> list[int]:
        """CPU ns of each step."""
        spent = []
        for number in numbers:
            start = time.process_time_ns()
            with bracket(number):
                self._optimizer.zero_grad()
                self._network(self._batch).sum().backward()
                self._optimizer.step()
            spent.append(time.process_time_ns() - start)
        return spent


@contextmanager
def marked(number: int) -> Iterator[None]:
    """The annotation that a recorded step has, too."""
    with torch.profiler.record_function(f"ProfilerStep#{number}"):
        yield


def settings(folder: str, window: range, *, is_on: bool = True) -> ChakraProfileConfig:
    """A window of these steps."""
    return ChakraProfileConfig(enabled=is_on, start_step=window[0], end_step=window[-1], trace_dir=folder)


def recorded_window(training: Training, folder: str) -> float:
    """A step inside a window of ours."""
    with capture(settings(folder, INSIDE)) as session:
        return usual(training.steps(range(INSIDE.stop), session.step)[INSIDE.start :])


def bare(training: Training, folder: str) -> float:
    """A step inside a window of torch's own."""
    training.steps(range(INSIDE.start), nullcontext)
    with bare_window(folder):
        return usual(training.steps(INSIDE, marked))


def usual(spent: list[int]) -> float:
    """A step that nothing disturbed; the first ones and the last do what happens once."""
    return statistics.quantiles(spent[3:-2], n=5)[0]


def inside(model: str, pairs: int, folder: str) -> list[float]:
    """Recorded over bare, window by window in turn."""
    training = Training(model)
    recorded_window(training, folder), bare(training, folder)
    ratios = []
    for number in range(pairs):
        kinds = (recorded_window, bare) if number % 2 else (bare, recorded_window)
        found = {kind: kind(training, folder) for kind in kinds}
        ratios.append(found[recorded_window] / found[bare])
    return ratios


def disabled(model: str, pairs: int, folder: str) -> list[float]:
    """Switched off over without us, block by block in turn."""
    training = Training(model)
    training.steps(BLOCK, nullcontext)
    ratios = []
    with capture(settings(folder, INSIDE, is_on=False)) as session:
        for number in range(pairs):
            brackets = (session.step, nullcontext) if number % 2 else (nullcontext, session.step)
            found = [usual(training.steps(BLOCK, bracket)) for bracket in brackets]
            ratios.append(found[0] / found[1] if number % 2 else found[1] / found[0])
    return ratios


def after(model: str, kind: str, folder: str) -> float:
    """Steps after a window over those before it; ``without``: with no window between them."""
    training = Training(model)
    training.steps(BLOCK, nullcontext)
    if kind == "without":
        before, _, later = (usual(training.steps(part, nullcontext)) for part in (BLOCK, INSIDE, BLOCK))
        return later / before
    begin = BLOCK.stop
    with capture(settings(folder, range(begin, begin + len(INSIDE)))) as session:
        spent = training.steps(range(begin + len(INSIDE) + len(BLOCK)), session.step)
    return usual(spent[-len(BLOCK) :]) / usual(spent[:begin])


def child(*arguments: str) -> object:
    """What a process of this script prints."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--child", *arguments, folder]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return json.loads(said.splitlines()[-1])


def ratios_of(model: str, rounds: int) -> dict[str, list[float]]:
    """All ratios of a model, by what they say."""
    afterwards = []
    for number in range(rounds):
        kinds = ("recorded", "without") if number % 2 else ("without", "recorded")
        found = {kind: child("after", model, kind) for kind in kinds}
        afterwards.append(found["recorded"] / found["without"])  # type: ignore[operator]
    return {
        "inside the window: recorded / bare profiler and observer": child("inside", model, str(rounds)),
        "after the window / before it, less that without us": afterwards,
        "switched off / without us": child("disabled", model, str(rounds)),
    }  # type: ignore[return-value]


PAIRED = {"inside": inside, "disabled": disabled}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        what, model, how, folder = given.child
        print(json.dumps(after(model, how, folder) if what == "after" else PAIRED[what](model, int(how), folder)))
        return 0
    rows = []
    for model in given.models:
        for what, ratios in ratios_of(model, given.rounds).items():
            ratios.sort()
            quarter = len(ratios) // 4
            row = {"model": model, "what": what, "ratio": statistics.median(ratios), "bar": BAR}
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
