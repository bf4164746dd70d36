"""Trainings with one thing wrong each, on one rank or on two with gloo, forked from one process that has imported all.

What is wrong are naps, so that it is known to whom and where the time goes. Each scenario has a folder of its own.
"""

import os
import socket
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
import torch._dynamo  # an optimizer would import it in every child
import torch.distributed as dist
from monai.engines import SupervisedEvaluator
from monai.handlers import ValidationHandler
from phases.monai_runs import CPU, sized
from phases.monai_runs import trainer as monai_trainer
from recording.recorded import settings
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from chakra_capture import ChakraProfileConfig, capture
from chakra_capture.integrations.lightning import ChakraProfileCallback
from chakra_capture.integrations.monai import ChakraProfileHandler
from integrations.leaving import fork
from integrations.models import trainer as lightning_trainer

# What forward and backward take each where nothing is wrong, and what is wrong takes.
BASE, FAULT = 0.012, 0.04
# Rules that name a rank need 10 steps, and the first one does not count.
STEPS = 14
BETWEEN = ("validation", "checkpoint", "callbacks")


@dataclass(frozen=True)
class Plain:
    """A loop with phases, and what takes longer in it.

    Attributes:
        naps: seconds more in each step, by phase; ``rest`` is in no phase, ``other`` neither and between two steps.
        rank: on which rank; None: on all.
        has_buffers: DistributedDataParallel broadcasts them in forward, where a rank then waits for the other one.
        growth: seconds by which backward gets longer from step to step.
        leak: bytes that are kept of each step.
        window: first and last step to be recorded, if any.
    """

    naps: dict[str, float] = field(default_factory=dict)
    rank: int | None = None
    has_buffers: bool = False
    num_steps: int = STEPS
    base: float = BASE
    growth: float = 0.0
    leak: int = 0
    window: tuple[int | None, int | None] = (None, None)

    def __call__(self, folder: Path, rank: int) -> None:
        mine = self.naps if self.rank in (None, rank) else {}
        network = Napping(self.base + mine.get("forward", 0.0), has_buffers=self.has_buffers)
        model = DistributedDataParallel(network) if dist.is_initialized() else network
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        kept = []
        with capture(settings(folder, *self.window)) as session:
            for step in range(self.num_steps):
                network.backward_s = self.base + mine.get("backward", 0.0) + step * self.growth
                with session.step(step):
                    with session.phase("input_wait"):
                        time.sleep(mine.get("input_wait", 0.0))
                        batch = torch.ones(2, 4)
                    with session.phase("forward"):
                        out = model(batch)
                        kept.append(b"\1" * self.leak)  # takes long on a busy machine: not where time is looked at
                    time.sleep(mine.get("rest", 0.0))
                    with session.phase("backward"):
                        out.sum().backward()
                    with session.phase("optimizer"):
                        optimizer.step()
                        optimizer.zero_grad()
                for name in BETWEEN:
                    with session.phase(name) if name in mine else nullcontext():
                        time.sleep(mine.get(name, 0.0))
                time.sleep(mine.get("other", 0.0))


class Napping(torch.nn.Module):
    """A network whose forward and backward take a known time."""

    def __init__(self, nap: float = BASE, *, has_buffers: bool = False) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, 1))
        if has_buffers:
            self.layers.append(torch.nn.BatchNorm1d(1))
        self.forward_s = self.backward_s = nap

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        time.sleep(self.forward_s)
        out = self.layers(inputs.reshape(-1, 4))
        if out.requires_grad:
            out.register_hook(lambda _: time.sleep(self.backward_s))
        return out


def monai(chosen: ChakraProfileConfig, rank: int, *, slow_rank: int | None = None, validates: bool = False) -> None:
    """A ``SupervisedTrainer`` whose loader, or whose validation, is slow."""
    network: Any = Napping()
    if dist.is_initialized():
        network = DistributedDataParallel(network)
    handlers: list[Any] = [ChakraProfileHandler(chosen)]
    if validates:
        evaluator = SupervisedEvaluator(device=CPU, val_data_loader=sized(2, FAULT / 2), network=network)
        handlers.append(ValidationHandler(1, evaluator, epoch_level=False))
    # A batch is two items.
    batches = sized(2 * STEPS, FAULT / 2 if rank == slow_rank else 0.0)
    monai_trainer(*handlers, loader=batches, network=network, decollate=False).run()


class Module(pl.LightningModule):
    """The same network for Lightning."""

    def __init__(self) -> None:
        super().__init__()
        self.network = Napping(has_buffers=True)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.network(batch[0]).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Slow(pl.Callback):
    def on_train_batch_end(self, *_: Any) -> None:
        time.sleep(FAULT)


def lightning(chosen: ChakraProfileConfig, rank: int, *, slow_rank: int | None = None, calls: bool = False) -> None:
    """A trainer whose loader, or whose callback, is slow."""
    many = {"strategy": "ddp", "devices": 2, "use_distributed_sampler": False} if dist.is_initialized() else {}
    batches = DataLoader(Items(FAULT / 2 if rank == slow_rank else 0.0), batch_size=2)
    lightning_trainer(ChakraProfileCallback(chosen), *[Slow()] * calls, **many).fit(Module(), batches)


class Items(Dataset):
    def __init__(self, nap: float) -> None:
        self.nap = nap

    def __len__(self) -> int:
        return 2 * STEPS

    def __getitem__(self, index: int) -> Any:
        time.sleep(self.nap)
        return (torch.randn(4),)


def phases_of(train: Callable[..., None], **chosen: Any) -> Callable[[Path, int], None]:
    return lambda folder, rank: train(settings(folder, None, None), rank, **chosen)


Scenarios = dict[str, Callable[[Path, int], None]]
PAIR: Scenarios = {
    "healthy": Plain(num_steps=26, base=0.05),
    "slow input of rank 1": Plain({"input_wait": FAULT}, 1),
    "slow input of rank 1 with buffers": Plain({"input_wait": FAULT}, 1, has_buffers=True),
    "slow forward of rank 1 with buffers": Plain({"forward": FAULT}, 1, has_buffers=True),
    # Of few steps chance may explain it: then a rank must be the latest one in all of them.
    "slow backward of rank 1": Plain({"backward": 2 * FAULT}, 1, num_steps=24, window=(3, 22)),
    "slow rest": Plain({"rest": FAULT}),
    "slow rest of rank 1": Plain({"rest": FAULT}, 1),
    "slow validation": Plain({"validation": FAULT}),
    "slow checkpoint of rank 0": Plain({"checkpoint": FAULT}, 0),
    "slow checkpoint of rank 0 with buffers": Plain({"checkpoint": FAULT}, 0, has_buffers=True),
    "slow input of rank 1, MONAI": phases_of(monai, slow_rank=1),
    "slow input of rank 1 with buffers, Lightning": phases_of(lightning, slow_rank=1),
}
ALONE: Scenarios = {
    "healthy": Plain(num_steps=26, base=0.05),
    "slow input": Plain({"input_wait": FAULT}),
    "slow rest": Plain({"rest": FAULT}),
    "slow checkpoint": Plain({"checkpoint": FAULT}),
    "slow callbacks": Plain({"callbacks": FAULT}),
    "slow loop": Plain({"other": FAULT}),
    "slow validation, MONAI": phases_of(monai, validates=True),
    "slow callbacks, Lightning": phases_of(lightning, calls=True),
    # 100 steps show a trend.
    "slower and slower": Plain(num_steps=105, base=0.006, growth=0.00015),
}
# Memory is read once a second, and 20 values are needed; a growth of 1 GiB is called a leak.
LEAKING: Scenarios = {"memory leak": Plain(num_steps=230, base=0.05, leak=7 << 20)}


def run(folder: Path, scenarios: Scenarios, rank: int = 0) -> None:
    for name, train in scenarios.items():
        train(folder / name, rank)


def run_pair(folder: Path, rank: int) -> None:
    dist.init_process_group("gloo")
    run(folder, PAIR, rank)


def main(folder: Path) -> None:
    """Train everything, side by side: most of it is naps."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    children = [fork(partial(run, folder / "alone", LEAKING))]
    ranks = [fork(partial(run_pair, folder / "pair", rank), rank, 2, port) for rank in (0, 1)]
    children += [*ranks, fork(partial(run, folder / "alone", ALONE))]
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    assert not any(codes), codes


if __name__ == "__main__":
    main(Path(sys.argv[1]))
