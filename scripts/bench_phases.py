"""What timing the phases costs per step: tiny trainings with and without it, in turn; ours, and TraceML's beside it.

    bench_phases.py                          ours alone
    bench_phases.py --traceml PYTHON         and traceml-ai 0.5.0 of that environment, on the same trainings
    bench_phases.py --cases plain monai --rounds 9 --steps 1000

Ours runs with and without in two threads of one process that take turns of TURN steps, so that a machine that is busy
is busy for both. TraceML cannot be switched off in a process, so it has processes in turn: `traceml run`, and the same
with `--disable-traceml`. What counts is the CPU time that the loop's thread takes for a turn, divided by its steps: so
what is done once in many steps, as to sum up, is in it. (TraceML's other threads are not counted.) A cost is that of
turns with less that of turns without: at the tenth percentile, which is that of a quiet machine, and at the median.
A framework's training without runs twice: bare, and with an empty callback, or handlers that do nothing, in our place.
The bar is on our own code beyond an empty callback of the same framework. A user pays what the framework takes to call
one, too, and because of us: that is in the cost over the bare training, which stands beside it.
Exit status: 0 our cost over an empty callback at the tenth percentile is within the bars, 1 it is not, 2 a training
does not run.
"""

import argparse
import json
import logging
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Semaphore
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset
from traceml_run import traceml_command

BARS_US = {"plain": 30, "monai": 50, "lightning": 50}
# Steps of one turn: enough that notes are summed up in each.
TURN = 50
COLD_TURNS = 2


class Steps:
    """Told by a training where each of its steps ends.

    Args:
        mine, other: who has the turn, if two trainings take turns.
    """

    def __init__(self, mine: Semaphore | None = None, other: Semaphore | None = None) -> None:
        self._mine, self._other = mine, other
        self._left, self._begin_ns = TURN, 0
        self.turns_ns: list[int] = []

    def end(self) -> None:
        """A step is over."""
        self._left -= 1
        if not self._left:
            self.turns_ns.append(time.thread_time_ns() - self._begin_ns)
            if self._mine is not None and self._other is not None:
                self._other.release()
                self._mine.acquire()
            self._left, self._begin_ns = TURN, time.thread_time_ns()

    @property
    def steps_us(self) -> list[float]:
        """CPU time per step, of each turn."""
        return [turn / TURN / 1e3 for turn in self.turns_ns[COLD_TURNS:]]


def data(num_steps: int) -> DataLoader:
    return DataLoader(TensorDataset(torch.randn(num_steps, 4)))


def plain(tool: str, num_steps: int, folder: Path, steps: Steps) -> None:
    network = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01)
    loader: Any = data(num_steps)
    if tool in ("none", "empty"):
        for (batch,) in loader:
            network(batch).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            steps.end()
    elif tool == "ours":
        from chakra_capture import ChakraProfileConfig, phases

        phases.init(ChakraProfileConfig(enabled=True, start_step=None, trace_dir=str(folder)))
        wrap_loss, forward = phases.wrap_backward, phases.wrap_forward(network)
        optimizer = phases.wrap_optimizer(optimizer)
        for (batch,) in phases.wrap_dataloader(loader):
            wrap_loss(forward(batch).sum()).backward()
            optimizer.step()
            optimizer.zero_grad()
            steps.end()
        phases.close()
    else:
        import traceml_ai

        traceml_ai.init(mode="manual")
        wrap_loss, forward = traceml_ai.wrap_backward, traceml_ai.wrap_forward(network)
        optimizer = traceml_ai.wrap_optimizer(optimizer)
        for (batch,) in traceml_ai.wrap_dataloader_fetch(loader):
            with traceml_ai.trace_step(network):
                wrap_loss(forward(batch).sum()).backward()
                optimizer.step()
                optimizer.zero_grad()
            steps.end()


class Empty:
    """A handler that does nothing where a step begins and ends."""

    def attach(self, engine: Any) -> None:
        from ignite.engine import Events

        for event in (Events.ITERATION_STARTED, Events.ITERATION_COMPLETED):
            engine.add_event_handler(event, self.nothing)

    def nothing(self) -> None:
        """Do nothing."""


def monai(tool: str, num_steps: int, folder: Path, steps: Steps) -> None:
    from ignite.engine import Events
    from monai.engines import SupervisedTrainer

    handlers: list[Any] = []
    if tool == "ours":
        from chakra_capture import ChakraProfileConfig
        from chakra_capture.integrations.monai import ChakraProfileHandler

        handlers = [ChakraProfileHandler(ChakraProfileConfig(enabled=True, start_step=None, trace_dir=str(folder)))]
    elif tool == "theirs":
        from traceml_ai.integrations import monai as adapter

        adapter.init()
        handlers = [adapter.TraceMLHandler()]
    elif tool == "empty":
        handlers = [Empty()]
    network = torch.nn.Linear(4, 1)
    trainer = SupervisedTrainer(
        device=torch.device("cpu"),
        max_epochs=1,
        train_data_loader=data(num_steps),
        prepare_batch=lambda batch, *_, **__: (batch[0], batch[0]),
        network=network,
        optimizer=torch.optim.SGD(network.parameters(), lr=0.01),
        loss_function=lambda outputs, *_: outputs.sum(),
        train_handlers=handlers,
        decollate=False,
    )
    trainer.add_event_handler(Events.ITERATION_COMPLETED, steps.end)
    trainer.run()


def lightning(tool: str, num_steps: int, folder: Path, steps: Steps) -> None:
    import pytorch_lightning as pl

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return self.layer(inputs)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return self(batch[0]).sum()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.01)

        def on_train_batch_end(self, *_: Any) -> None:
            steps.end()

    callbacks: list[Any] = [pl.Callback()] if tool == "empty" else []
    if tool == "ours":
        from chakra_capture import ChakraProfileConfig
        from chakra_capture.integrations.lightning import ChakraProfileCallback

        callbacks = [ChakraProfileCallback(ChakraProfileConfig(enabled=True, start_step=None, trace_dir=str(folder)))]
    elif tool == "theirs":
        from traceml_ai.integrations import lightning as adapter

        adapter.init()
        callbacks = [adapter.TraceMLCallback()]
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    pl.Trainer(accelerator="cpu", max_epochs=1, callbacks=callbacks, **quiet).fit(Module(), data(num_steps))


CASES: dict[str, Callable[[str, int, Path, Steps], None]] = {"plain": plain, "monai": monai, "lightning": lightning}
Pairs = list[tuple[list[float], list[float]]]


def in_turns(case: str, tools: tuple[str, str], num_steps: int) -> tuple[list[float], list[float]]:
    """CPU time per step of two trainings that take turns."""
    from chakra_capture.recording import registry

    batons = Semaphore(1), Semaphore(0)
    steps = Steps(batons[0], batons[1]), Steps(batons[1], batons[0])

    def train(which: int, folder: str) -> None:
        torch.set_num_threads(1)  # of this thread
        batons[which].acquire()
        try:
            CASES[case](tools[which], num_steps, Path(folder), steps[which])
        finally:
            batons[1 - which].release()

    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(2) as threads:
        for training in [threads.submit(train, which, folder) for which in (0, 1)]:
            training.result()
    registry.forget_runs()
    return steps[0].steps_us, steps[1].steps_us


def their_process(case: str, tool: str, num_steps: int, python: Path) -> list[float]:
    """CPU time per step of a training under TraceML."""
    with tempfile.TemporaryDirectory() as name:
        out = Path(name) / "times.json"
        off = ["--disable-traceml"] if tool == "none" else []
        command = traceml_command(python, name, "run", *off)
        command += [str(Path(__file__).resolve()), "--args", "--job", case, tool, str(num_steps), str(out)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600, cwd=name)
        if done.returncode or not out.exists():
            print(f"{' '.join(command)} ends with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
            sys.exit(2)
        found: list[float] = json.loads(out.read_text())
        return found


def tenth(values: list[float]) -> float:
    return sorted(values)[len(values) // 10]


def row(case: str, whose: str, pairs: Pairs) -> tuple[str, float]:
    """A line of the table, and the cost at the tenth percentile."""
    off, on = ([value for pair in pairs for value in pair[which]] for which in (0, 1))
    cost, middle = tenth(on) - tenth(off), statistics.median(on) - statistics.median(off)
    each = [tenth(with_it) - tenth(without) for without, with_it in pairs]
    text = (
        f"| {case} | {whose} | {tenth(off):.0f} | {statistics.median(off):.0f} | {cost:+.1f} ({cost / tenth(off):.1%}) "
    )
    bar = BARS_US[case] if whose == OURS else ""
    return f"{text}| {min(each):+.1f} to {max(each):+.1f} | {middle:+.1f} | {bar} |", cost


OURS = "ours over an empty callback"


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traceml", type=Path, metavar="PYTHON", help="python of an environment with traceml-ai 0.5.0")
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument(
        "--rounds", type=int, default=5, help="of ours, each of three trainings, or two of a plain loop"
    )
    parser.add_argument("--processes", type=int, default=3, help="rounds of theirs")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--job", nargs=4, metavar=("CASE", "TOOL", "STEPS", "OUT"), help="one training, for a process")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    for name in ("pytorch_lightning", "lightning", "ignite"):
        logging.getLogger(name).setLevel(logging.ERROR)
    if options.job:
        case, tool, num_steps, out = options.job
        steps = Steps()
        CASES[case](tool, int(num_steps), Path(), steps)
        Path(out).write_text(json.dumps(steps.steps_us))
        return 0
    head = [
        "training",
        "cost of",
        "p10 without, us",
        "median without, us",
        "cost at p10, us",
        "its range",
        "at the median",
    ]
    print(f"| {' | '.join([*head, 'bar, us'])} |\n{'|---' * (len(head) + 1)}|")
    is_over = False
    for case in options.cases:
        kinds = {OURS: ("empty", "ours")} if case == "plain" else {OURS: ("empty", "ours"), "ours": ("none", "ours")}
        found: dict[str, Pairs] = {whose: [] for whose in (*kinds, "TraceML")}
        for number in range(options.rounds):
            for whose, tools in kinds.items():
                found[whose].append(in_turns(case, tools, options.steps))
            if options.traceml and number < options.processes:
                python = options.traceml.absolute()
                off, on = (their_process(case, tool, options.steps, python) for tool in ("none", "theirs"))
                found["TraceML"].append((off, on))
        for whose, pairs in found.items():
            if pairs:
                text, cost = row(case, whose, pairs)
                is_over = is_over or (whose == OURS and cost > BARS_US[case])
                print(text, flush=True)
    return int(is_over)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
