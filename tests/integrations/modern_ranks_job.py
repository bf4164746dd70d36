"""One of two ranks with gloo: trains in several ways, each without us and with us, and compares every bit."""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from recording.recorded import settings
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from chakra_capture import capture
from integrations.training_kinds import Trainee, make_network, state, train, trainee


def ddp() -> Trainee:
    return trainee(DistributedDataParallel(make_network()))


def compiled_ddp() -> Trainee:
    network = DistributedDataParallel(make_network())
    return trainee(network, torch.compile(network, backend="eager"))


def fsdp2(is_compiled: bool) -> Trainee:
    network = make_network()
    for block in network:
        if is_compiled:
            block.compile(backend="eager")
        fully_shard(block)
    return trainee(fully_shard(network))


def zero() -> Trainee:
    network = DistributedDataParallel(make_network())
    optimizer = ZeroRedundancyOptimizer(network.parameters(), torch.optim.AdamW, lr=0.01)

    def update(inputs: torch.Tensor) -> None:
        network(inputs).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return Trainee(network, update, [optimizer.optim])


KINDS: dict[str, Callable[[], Trainee]] = {
    "ddp": ddp,
    "compiled_ddp": compiled_ddp,
    "fsdp2": partial(fsdp2, False),
    "compiled_fsdp2": partial(fsdp2, True),
    "zero": zero,
}


def outcome(make: Callable[[], Trainee], chosen: object) -> tuple[Any, dict[str, int]]:
    """What a training leaves, and how often its graphs broke."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with capture(chosen) as session:
        made = make()
        torch.manual_seed(dist.get_rank())
        train(made, session)
    counted = torch._dynamo.utils.counters
    return state(made), {**counted["graph_break"], **counted["stats"]}


def main(trace_dir: str) -> None:
    dist.init_process_group("gloo")
    for name, make in KINDS.items():
        bare = outcome(make, {"enabled": False})
        ours = outcome(make, settings(Path(trace_dir) / name, 2, 4))
        assert ours == bare, name
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
