"""Trainings without a device, a window of each recorded: one thing wrong in each, or the same without it.

Most of what is wrong is a nap or work of a known kind. All ranks are forked from one process that has imported torch.
"""

import os
import socket
import sys
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # an optimizer would import it in every child
import torch.distributed as dist
from integrations.leaving import fork
from recording.recorded import settings
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset

from chakra_capture import capture

# Steps 3 to 12 are recorded; of ranks that are compared with each other 20.
FIRST, LAST, LAST_OF_MANY = 3, 12, 22
NAP = 0.02
WIDE = 384

Train = Callable[[Path, int], None]


class Items(Dataset[Any]):
    def __init__(self, nap: float) -> None:
        self.nap = nap

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self.nap)
        return torch.ones(WIDE)


class Network(torch.nn.Module):
    """Layers, with what is wrong between them."""

    def __init__(self, num_layers: int = 4, *, between: str = "", norms: int = 0) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDE, WIDE) for _ in range(num_layers))
        self.norms = torch.nn.ModuleList(torch.nn.BatchNorm1d(WIDE) for _ in range(norms))
        self.between = between

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            if self.between == "repeated":
                inputs = checkpoint(partial(long, layer), inputs, use_reentrant=False)
            elif self.between == "long":
                inputs = long(layer, inputs)
            else:
                inputs = layer(inputs)
            if self.between == "nap":
                time.sleep(NAP / len(self.layers))
            elif self.between == "dtypes":
                inputs = inputs.double().float().double().float()
        for norm in self.norms:
            inputs = inputs + 0 * norm(inputs[:2]).mean()
        return inputs.relu()


def long(layer: torch.nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    """A layer whose forward is worth to be spared."""
    inputs = layer(inputs)
    for _ in range(4):
        inputs = torch.special.erfinv(inputs.tanh() * 0.5)
    return inputs


def loop(
    folder: Path,
    rank: int,
    *,
    network: Callable[[], torch.nn.Module] = Network,
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
    nap: float = 0.0,
    batch: int = 256,
    wrapped: dict[str, Any] | None = None,
    beside: Callable[[int, int], None] = lambda rank, step: None,
    last: int = LAST,
) -> None:
    """A plain loop; ``beside`` is called in each step."""
    torch.manual_seed(0)
    model: Any = network()
    if wrapped is not None:
        model = DistributedDataParallel(model, **wrapped)
    steps = optimizer(model.parameters())
    batches = DataLoader(Items(nap), batch_size=1)
    inputs = torch.randn(batch, WIDE)
    # Phases would say some of it too: the window alone is asked here.
    with capture(settings(folder, FIRST, last, phases=False)) as session:
        fetched = iter(batches)
        for step in range(last + 2):
            with session.step(step):
                next(fetched)
                beside(rank, step)
                model(inputs).sum().backward()
                steps.step()
                steps.zero_grad()


def late(rank: int, step: int, *, who: Callable[[int], int]) -> None:
    """One rank comes late to an all_reduce, in each step: later than a busy machine makes the other one."""
    if rank == who(step):
        time.sleep(4 * NAP)
    dist.all_reduce(torch.ones(8))


def large(rank: int, step: int) -> None:
    """All_reduces of 16 MB, each waited for at once."""
    for _ in range(2):
        dist.all_reduce(torch.ones(4 << 20), async_op=True).wait()


def small(rank: int, step: int, *, count: int) -> None:
    for _ in range(count):
        dist.all_reduce(torch.ones(64))


def turn(step: int) -> int:
    """Which of two ranks is late: now this one, now the other."""
    return step % 2


DEEP = partial(loop, network=partial(Network, 60), batch=2)
ALONE: dict[str, Train] = {
    # Long steps: on a busy machine a thread that loses the core for a moment makes no gap worth a word.
    "healthy": partial(loop, batch=2048),
    "input": partial(loop, nap=NAP),
    "python": partial(loop, network=partial(Network, between="nap")),
    "optimizer": partial(DEEP, optimizer=partial(torch.optim.Adam, foreach=False)),
    "fused": partial(DEEP, optimizer=partial(torch.optim.Adam, fused=True)),
    "dtypes": partial(loop, network=partial(Network, between="dtypes")),
    "repeated": partial(loop, network=partial(Network, between="repeated")),
    "kept": partial(loop, network=partial(Network, between="long")),
}
PAIR: dict[str, Train] = {
    "buffers": partial(loop, network=partial(Network, 1, norms=60), wrapped={}, batch=8),
    "no buffers": partial(loop, network=partial(Network, 1, norms=60), wrapped={"broadcast_buffers": False}, batch=8),
    "buckets": partial(loop, network=partial(Network, 24), wrapped={}, batch=2),
    "views": partial(loop, network=partial(Network, 24), wrapped={"gradient_as_bucket_view": True}, batch=2),
    "large": partial(loop, beside=large),
    "small": partial(loop, beside=partial(small, count=40)),
    "few": partial(loop, beside=partial(small, count=4)),
    "straggler": partial(loop, beside=partial(late, who=lambda step: 1), last=LAST_OF_MANY),
    "turns": partial(loop, beside=partial(late, who=turn), last=LAST_OF_MANY),
    "peers": partial(loop, beside=partial(late, who=turn)),
}


def run(folder: Path, scenarios: dict[str, Train], rank: int) -> None:
    for name, train in scenarios.items():
        train(folder / name, rank)


def run_pair(folder: Path, rank: int) -> None:
    dist.init_process_group("gloo")
    run(folder, PAIR, rank)


def main(folder: Path) -> None:
    """Record everything."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    # Not beside each other: where the time goes is what is looked at.
    alone = fork(partial(run, folder / "alone", ALONE, 0))
    assert os.waitpid(alone, 0)[1] == 0
    ranks = [fork(partial(run_pair, folder / "pair", rank), rank, 2, port) for rank in (0, 1)]
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in ranks]
    assert not any(codes), codes


if __name__ == "__main__":
    main(Path(sys.argv[1]))
