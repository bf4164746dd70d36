"""Trainings of 2 and 4 ranks with gloo in which one rank is slow in one way, and some in which none is.

Usage: python -m integrations.straggler_job FOLDER. What paces a step are naps: of equal length on a busy machine, too.
"""

import os
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # an optimizer would import it in every child
import torch.distributed as dist
from recording.recorded import settings
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from chakra_capture import capture
from integrations.leaving import leave_after
from integrations.slow_network import LIMIT, Addresses, Network

# What each of forward and backward takes anyway; what is slow takes at least so much more, and so many times as long as
# steps take on this machine without it, which may be busy; what a piece of data takes through a slow network.
BASE, FAULT, TIMES, MOST, DELAY = 0.006, 0.05, 2.5, 0.4, 0.006
FIRST, LAST = 3, 18
LIMIT_S = 150


@dataclass(frozen=True, kw_only=True)
class Training:
    """A loop with what is slow in it.

    Attributes:
        slow: ``input``, ``outside`` (an op between the phases), ``python`` (there, too), ``forward`` or ``backward``.
        ranks: on which ranks.
        size: ranks there are.
        workers: of the loader.
        has_buffers: DistributedDataParallel broadcasts them in forward, where ranks wait for each other.
        late_link: rank whose connections take longer.
        sends: each rank sends something to each other one, beside the gradients.
    """

    slow: str | None = None
    ranks: tuple[int, ...] = (1,)
    size: int = 2
    workers: int = 0
    has_buffers: bool = False
    late_link: int | None = None
    sends: bool = False

    def run(self, folder: Path, rank: int) -> None:
        fault = Fault(self.slow if rank in self.ranks else None)
        model = DistributedDataParallel(Model(fault, has_buffers=self.has_buffers))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        # A worker is ahead by what a step takes.
        items = Items(fault, 2 if self.workers else 1)
        loader = DataLoader(items, batch_size=2, num_workers=self.workers, prefetch_factor=1 if self.workers else None)
        took = []
        with capture(settings(folder, FIRST, LAST, phases=False)) as session:
            batches = iter(loader)
            for number in range(LAST + 2):
                if number == FIRST - 1:  # what was fetched ahead is used up in the recorded steps
                    fault.begin(max(took[1:]))
                start = time.perf_counter()
                with session.step(number):
                    self.step(session, batches, model, optimizer, fault)
                took.append(time.perf_counter() - start)

    def step(
        self, session: Any, batches: Iterator[torch.Tensor], model: torch.nn.Module, optimizer: Any, fault: "Fault"
    ) -> None:
        phase: Callable[[str], AbstractContextManager[None]] = session.phase
        with phase("input_wait"):
            batch = next(batches)
        multiply(fault.seconds("outside"))
        count(fault.seconds("python"))
        with phase("forward"):
            out = model(batch).sum()
        with phase("backward"):
            out.backward()
        with phase("optimizer"):
            optimizer.step()
            optimizer.zero_grad()
        if self.sends:
            exchange()


class Fault:
    """What takes longer on this rank, and how long from when it has begun; workers of the loader see that, too."""

    def __init__(self, where: str | None) -> None:
        self.where, self._seconds = where, torch.zeros(1).share_memory_()

    def begin(self, usual_s: float) -> None:
        usual = torch.tensor(usual_s)
        dist.all_reduce(usual, dist.ReduceOp.MAX)  # of ranks that are slow alike each takes as long
        self._seconds.fill_(min(MOST, max(FAULT, TIMES * usual.item())))

    def seconds(self, where: str) -> float:
        return self._seconds.item() if self.where == where else 0.0


class Items(Dataset):
    """Items of which two make a batch."""

    def __init__(self, fault: Fault, times: int) -> None:
        self.fault, self.times = fault, times

    def __len__(self) -> int:
        return 2 * (LAST + 4)

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self.times * self.fault.seconds("input") / 2)
        return torch.ones(4)


class Model(torch.nn.Module):
    def __init__(self, fault: Fault, *, has_buffers: bool) -> None:
        super().__init__()
        self.fault = fault
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
        if has_buffers:
            self.layers.append(torch.nn.BatchNorm1d(2))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        time.sleep(BASE)
        multiply(self.fault.seconds("forward"))
        return SlowBackward.apply(self.layers(inputs), self.fault.seconds("backward"))


class SlowBackward(torch.autograd.Function):
    """Passes everything on, and multiplies in backward."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        return inputs.view_as(inputs)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        time.sleep(BASE)
        multiply(ctx.seconds)
        return gradient, None


def multiply(seconds: float) -> None:
    """Compute in ``aten::mm`` for so long."""
    if not seconds:
        return
    end = time.perf_counter() + seconds
    with torch.no_grad():
        square = torch.ones(384, 384)
        while time.perf_counter() < end:
            torch.mm(square, square)


def count(seconds: float) -> None:
    """Compute in Python for so long."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def exchange() -> None:
    """Two ranks after the other, a message between each pair."""
    rank = dist.get_rank()
    for low in range(dist.get_world_size()):
        for high in range(low + 1, dist.get_world_size()):
            if rank == low:
                dist.send(torch.ones(64), high, tag=low)
            elif rank == high:
                dist.recv(torch.zeros(64), low, tag=low)


SCENARIOS = {
    "clean": Training(),
    "clean, 4 with buffers": Training(size=4, has_buffers=True),
    "slow input": Training(slow="input"),
    "slow input from workers": Training(slow="input", workers=1),
    "slow input with buffers": Training(slow="input", has_buffers=True),
    "slow input of 3 of 4 with buffers": Training(slow="input", has_buffers=True, size=4, ranks=(3,)),
    "slow input on all": Training(slow="input", ranks=(0, 1)),
    "slow op between phases": Training(slow="outside"),
    "slow Python between phases": Training(slow="python"),
    "slow forward of 2 of 4": Training(slow="forward", size=4, ranks=(2,)),
    "slow backward": Training(slow="backward"),
    "slow network of 2 of 4": Training(late_link=2, size=4, sends=True),
}


def run(folder: Path, scenario: Training) -> None:
    """Run the ranks of one training, and its network, to their end."""
    folder.mkdir(parents=True)
    network = Network(folder, scenario.size, scenario.late_link, DELAY) if scenario.late_link is not None else None
    carrier = fork(network.carry) if network is not None else None
    ranks = [fork(partial(run_rank, folder, scenario, rank, network)) for rank in range(scenario.size)]
    failed = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in ranks]
    if carrier is not None:
        os.kill(carrier, signal.SIGKILL)
        os.waitpid(carrier, 0)
    assert not any(failed), (folder, failed)


def run_rank(folder: Path, scenario: Training, rank: int, network: Network | None) -> None:
    size = scenario.size
    store = dist.FileStore(str(folder / "store"), size) if network is None else Addresses(network, rank, size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=LIMIT)
    scenario.run(folder, rank)
    dist.barrier()


def fork(job: Callable[[], object]) -> int:
    child = os.fork()
    if child:
        return child
    signal.alarm(LIMIT_S)
    return leave_after(job)


def main(folder: Path, names: list[str]) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for name, scenario in SCENARIOS.items():
        if not names or name in names:
            run(folder / name, scenario)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
