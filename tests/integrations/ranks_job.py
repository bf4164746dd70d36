"""Trainings on two ranks with gloo, forked from one process that has imported the frameworks once.

Each framework trains three times: the second rank is late to the window, dies in it, or has a full disk.
"""

import logging
import os
import resource
import signal
import socket
import sys
import time
import warnings
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import monai.engines
import torch
import torch.distributed as dist
from recording.recorded import settings
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader, TensorDataset

from chakra_capture import ChakraProfileConfig, capture
from chakra_capture.integrations.lightning import ChakraProfileCallback
from chakra_capture.integrations.monai import ChakraProfileHandler
from integrations.leaving import leave_after
from integrations.models import Model, loader, trainer

NUM_STEPS = 9
LIMIT_S = 90


def trouble(kind: str) -> None:
    """Let something befall this process after an update: before step 2, where the window begins, or in step 4."""
    num_updates = count(1)

    def after_update(*_: Any) -> None:
        number = next(num_updates)
        if kind == "late" and number == 2:
            time.sleep(2)  # a first start of the profiler, on the other rank, may take a second of it
        if kind == "full" and number == 2:
            # A limit on the size of a file stands in for a full disk: writes past it fail the same way.
            resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, resource.RLIM_INFINITY))
        if kind == "dies" and number == 5:
            os.kill(os.getpid(), signal.SIGKILL)

    register_optimizer_step_post_hook(after_update)


def rows() -> DataLoader:
    return DataLoader(TensorDataset(torch.zeros(NUM_STEPS, 4)))


def plain(chosen: ChakraProfileConfig) -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    network = DistributedDataParallel(torch.nn.Linear(4, 1), device_mesh=mesh)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01)
    with capture(chosen) as session:
        for _, (batch,) in session.steps(rows()):
            network(batch).sum().backward()
            optimizer.step()


def lightning(chosen: ChakraProfileConfig) -> None:
    trainer(ChakraProfileCallback(chosen), strategy="ddp", devices=2).fit(Model(), loader(2 * NUM_STEPS))


def monai_trainer(chosen: ChakraProfileConfig) -> None:
    dist.init_process_group("gloo")
    network = DistributedDataParallel(torch.nn.Linear(4, 1))

    trainer = monai.engines.SupervisedTrainer(
        device="cpu",
        max_epochs=1,
        train_data_loader=rows(),
        network=network,
        optimizer=torch.optim.SGD(network.parameters(), lr=0.01),
        loss_function=torch.nn.MSELoss(),
        prepare_batch=lambda batch, *_, **__: (batch[0], torch.zeros(1, 1)),
        decollate=False,
        train_handlers=[ChakraProfileHandler(chosen)],
    )
    trainer.run()


JOBS = {"plain": plain, "lightning": lightning, "monai": monai_trainer}


def fork_rank(rank: int, port: int, folder: Path, job: Callable[[], None], kind: str) -> int:
    """Start one rank and return its process id; what it says goes into a file. Trouble befalls the second."""
    child = os.fork()
    if child:
        return child
    signal.alarm(LIMIT_S)
    place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "NODE_RANK": "0"}
    os.environ.update(place, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.dup2(os.open(folder / f"said-{rank}.txt", os.O_CREAT | os.O_WRONLY), 2)

    def with_trouble() -> None:
        if rank == 1:
            trouble(kind)
        job()

    return leave_after(with_trouble)


def main(folder: Path) -> None:
    """Train everything, each in a folder of its own, with the exit codes of its ranks."""
    warnings.simplefilter("ignore")
    logging.basicConfig(format="%(levelname)s %(message)s", level=logging.WARNING)
    torch.set_num_threads(1)
    for framework, train in JOBS.items():
        for kind in ("late", "dies", "full"):
            place = folder / f"{framework}-{kind}"
            place.mkdir()
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                port = probe.getsockname()[1]

            chosen = settings(place / "t", 2, 6)
            ranks = [fork_rank(rank, port, place, partial(train, chosen), kind) for rank in (0, 1)]
            codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in ranks]
            (place / "codes.txt").write_text(f"{codes[0]} {codes[1]}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
