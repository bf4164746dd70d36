"""What timing the phases costs per step: tiny trainings with and without it, in turn; ours, and TraceML's beside it.

    bench_phases.py                          ours alone
    bench_phases.py --traceml PYTHON         and traceml-ai 0.5.0 of that environment, on the same trainings
    bench_phases.py --cases plain monai --rounds 9 --steps 400

Ours runs with and without in blocks that alternate in one process. TraceML cannot be switched off in a process, so it
has processes in turn: `traceml run`, and the same with `--disable-traceml`, between the blocks of ours. Of a block, or
a process, count the tenth percentile and the median of the CPU time that the loop's thread takes from one step to the
next (TraceML's other threads are not counted); a cost is the median over the rounds of the difference between
neighbours. The tenth percentile is that of a quiet machine.
Exit status: 0 our cost at the tenth percentile is within the bars, 1 it is not, 2 a training does not run.
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
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset
from traceml_run import traceml_command

BARS_US = {"plain": 30, "monai": 50, "lightning": 50}
COLD_STEPS = 30
Times = list[int]


def data(num_steps: int) -> DataLoader:
    return DataLoader(TensorDataset(torch.randn(num_steps, 4)))


def plain(tool: str, num_steps: int, folder: Path) -> Times:
    network = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01)
    loader: Any = data(num_steps)
    times: Times = []
    if tool == "none":
        for (batch,) in loader:
            network(batch).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            times.append(time.thread_time_ns())
    elif tool == "ours":
        from chakra_capture import ChakraProfileConfig, phases

        phases.init(ChakraProfileConfig(enabled=True, start_step=None, trace_dir=str(folder)))
        wrap_loss, forward = phases.wrap_backward, phases.wrap_forward(network)
        optimizer = phases.wrap_optimizer(optimizer)
        for (batch,) in phases.wrap_dataloader(loader):
            wrap_loss(forward(batch).sum()).backward()
            optimizer.step()
            optimizer.zero_grad()
            times.append(time.thread_time_ns())
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
            times.append(time.thread_time_ns())
    return times


def monai(tool: str, num_steps: int, folder: Path) -> Times:
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
    times: Times = []
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: times.append(time.thread_time_ns()))
    trainer.run()
    return times


def lightning(tool: str, num_steps: int, folder: Path) -> Times:
    import pytorch_lightning as pl

    times: Times = []

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
            times.append(time.thread_time_ns())

    callbacks: list[Any] = []
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
    return times


CASES: dict[str, Callable[[str, int, Path], Times]] = {"plain": plain, "monai": monai, "lightning": lightning}


def percentiles_us(times: Times) -> tuple[float, float]:
    """Tenth percentile and median of the time from one step to the next."""
    steps = sorted(later - earlier for earlier, later in zip(times[COLD_STEPS:], times[COLD_STEPS + 1 :], strict=False))
    return steps[len(steps) // 10] / 1e3, statistics.median(steps) / 1e3


def our_block(case: str, tool: str, num_steps: int) -> tuple[float, float]:
    from chakra_capture.recording import registry

    with tempfile.TemporaryDirectory() as name:
        found = percentiles_us(CASES[case](tool, num_steps, Path(name)))
    registry.forget_runs()
    return found


def their_process(case: str, tool: str, num_steps: int, python: Path) -> tuple[float, float]:
    with tempfile.TemporaryDirectory() as name:
        out = Path(name) / "times.json"
        off = ["--disable-traceml"] if tool == "none" else []
        command = traceml_command(python, name, "run", *off)
        command += [str(Path(__file__).resolve()), "--args", "--job", case, tool, str(num_steps), str(out)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600, cwd=name)
        if done.returncode or not out.exists():
            print(f"{' '.join(command)} ends with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
            sys.exit(2)
        return percentiles_us(json.loads(out.read_text()))


def row(case: str, whose: str, pairs: list[tuple[tuple[float, float], tuple[float, float]]]) -> tuple[str, float]:
    """A line of the table, and the cost at the tenth percentile."""
    p10 = statistics.median(on[0] - off[0] for off, on in pairs)
    middle = statistics.median(on[1] - off[1] for off, on in pairs)
    bare = [statistics.median(off[which] for off, _ in pairs) for which in (0, 1)]
    spread = [on[0] - off[0] for off, on in pairs]
    text = (
        f"| {case} | {whose} | {bare[0]:.0f} | {bare[1]:.0f} | {p10:+.1f} | {min(spread):+.1f} to {max(spread):+.1f} "
    )
    return f"{text}| {middle:+.1f} | {BARS_US[case] if whose == 'ours' else ''} |", p10


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traceml", type=Path, metavar="PYTHON", help="python of an environment with traceml-ai 0.5.0")
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--rounds", type=int, default=15, help="of ours")
    parser.add_argument("--processes", type=int, default=3, help="rounds of theirs")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--job", nargs=4, metavar=("CASE", "TOOL", "STEPS", "OUT"), help="one training, for a process")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if options.job:
        case, tool, steps, out = options.job
        Path(out).write_text(json.dumps(CASES[case](tool, int(steps), Path())))
        return 0
    warnings.filterwarnings("ignore")
    for name in ("pytorch_lightning", "lightning", "ignite"):
        logging.getLogger(name).setLevel(logging.ERROR)
    head = ["training", "tool", "bare p10, us", "bare median, us", "cost at p10, us", "its range", "at the median, us"]
    print(f"| {' | '.join([*head, 'bar, us'])} |\n{'|---' * (len(head) + 1)}|")
    is_over = False
    for case in options.cases:
        our_block(case, "none", options.steps)
        our_block(case, "ours", options.steps)
        mine: list[Any] = []
        other: list[Any] = []
        for number in range(options.rounds):
            mine.append((our_block(case, "none", options.steps), our_block(case, "ours", options.steps)))
            if options.traceml and number % max(1, options.rounds // options.processes) == 0:
                python = options.traceml.absolute()
                off, on = (their_process(case, tool, 3 * options.steps, python) for tool in ("none", "theirs"))
                other.append((off, on))
        text, p10 = row(case, "ours", mine)
        is_over = is_over or p10 > BARS_US[case]
        print(text, flush=True)
        if other:
            print(row(case, "TraceML", other)[0], flush=True)
    return int(is_over)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
