"""Ranks with gloo that train in parallel in five ways, and write down what each must communicate by its shapes.

Usage: python -m export.parallel_job FOLDER. It records runs of 2 and 4 ranks, and one of 2 of which the second
records another step.
"""

import json
import os
import sys
import traceback
import warnings
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from chakra_capture import ChakraProfileConfig, capture

FLOAT, MICRO_BATCHES, WIDTH = 4, 3, 24
STEPS = (1, 2)


class Expected:
    """Collectives by group in order, and sends and receives by (source, destination, tag), with bytes.

    Bytes are what a simulator takes: of all_gather a rank's share, of reduce_scatter and all_to_all its whole input.
    """

    def __init__(self) -> None:
        self.collectives: dict[str, list[tuple[str, int]]] = {}
        self.transfers: list[tuple[str, int, int, int, int]] = []

    def collective(self, members, kind, size) -> None:
        self.collectives.setdefault(",".join(map(str, members)), []).append((kind, size))


class Job:
    """Models and groups of one rank."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size, self.world = rank, size, [*range(size)]
        torch.manual_seed(0)
        self.replicated = DistributedDataParallel(nn.Linear(20, 10))
        for _ in range(3):  # torch settles on its buckets
            self.replicated(torch.randn(8, 20)).sum().backward()
        self.sharded = fully_shard(nn.Linear(16, 12 * size))
        self.mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("row", "column"))
        self.stage = nn.Linear(WIDTH, WIDTH)

    def step(self, expected: Expected) -> None:
        self.data_parallel(expected)
        self.fully_sharded(expected)
        self.sub_groups(expected)
        self.pipeline(expected)
        self.experts(expected)

    def data_parallel(self, expected: Expected) -> None:
        self.replicated(torch.randn(8, 20)).sum().backward()
        expected.collective(self.world, "ALL_REDUCE", (20 * 10 + 10) * FLOAT)

    def fully_sharded(self, expected: Expected) -> None:
        whole = 12 * self.size * (16 + 1) * FLOAT
        self.sharded(torch.randn(4, 16)).sum().backward()
        expected.collective(self.world, "ALL_GATHER", whole // self.size)
        expected.collective(self.world, "REDUCE_SCATTER", whole)

    def sub_groups(self, expected: Expected) -> None:
        """Two groups at work at once: one of a row, one of a column."""
        place = divmod(self.rank, 2)
        row, column = ([2 * place[0], 2 * place[0] + 1], [*range(place[1], self.size, 2)])
        handles = [dist.all_reduce(torch.ones(50 + place[0]), group=self.mesh.get_group("column"), async_op=True)]
        expected.collective(row, "ALL_REDUCE", (50 + place[0]) * FLOAT)
        if len(column) > 1:
            handles.append(dist.all_reduce(torch.ones(70), group=self.mesh.get_group("row"), async_op=True))
            expected.collective(column, "ALL_REDUCE", 70 * FLOAT)
        for handle in handles:
            handle.wait()

    def pipeline(self, expected: Expected) -> None:
        """Each rank is a stage; activations go forward, gradients back, with the micro-batch as tag."""
        before, after, size = self.rank - 1, self.rank + 1, 2 * WIDTH * FLOAT
        outputs = []
        for number in range(MICRO_BATCHES):
            x = torch.randn(2, WIDTH)
            if before >= 0:
                dist.recv(x, before, tag=number)
                expected.transfers.append(("RECV", before, self.rank, number, size))
            outputs.append(self.stage(x.requires_grad_()))
            if after < self.size:
                dist.send(outputs[-1].detach(), after, tag=number)
                expected.transfers.append(("SEND", self.rank, after, number, size))
        for number, output in enumerate(outputs):
            gradient, tag = torch.ones_like(output), 10 + number
            if after < self.size:
                dist.recv(gradient, after, tag=tag)
                expected.transfers.append(("RECV", after, self.rank, tag, size))
            output.backward(gradient)
            if before >= 0:
                dist.send(gradient, before, tag=tag)
                expected.transfers.append(("SEND", self.rank, before, tag, size))

    def experts(self, expected: Expected) -> None:
        dist.all_to_all_single(torch.zeros(6 * self.size), torch.ones(6 * self.size))
        expected.collective(self.world, "ALL_TO_ALL", 6 * self.size * FLOAT)


def job(folder: Path, rank: int, size: int, steps: tuple[int, int]) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    limit = timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size, timeout=limit)
    made, expected = Job(rank, size), Expected()
    settings = ChakraProfileConfig(
        enabled=True, start_step=steps[0], end_step=steps[1], trace_dir=str(folder / "t"), job_id="0"
    )
    with capture(settings) as session:
        for g in range(STEPS[1] + 1):
            with session.step(g):
                made.step(expected if steps[0] <= g <= steps[1] else Expected())
    said = {"collectives": expected.collectives, "transfers": expected.transfers}
    (folder / f"expected-{rank}.json").write_text(json.dumps(said))
    dist.destroy_process_group()


def run(folder: Path, size: int, steps: dict[int, tuple[int, int]]) -> None:
    """Record a run; ``steps`` are those of ranks that record others than the rest."""
    folder.mkdir(parents=True)
    children = []
    for rank in range(size):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                job(folder, rank, size, steps.get(rank, STEPS))
                code = 0
            except BaseException:
                traceback.print_exc()
                raise
            finally:
                os._exit(code)
        children.append(child)
    failed = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    assert not any(failed), failed


def main(folder: Path) -> None:
    run(folder / "two", 2, {})
    run(folder / "four", 4, {})
    run(folder / "other-step", 2, {0: (1, 1), 1: (2, 2)})


if __name__ == "__main__":
    main(Path(sys.argv[1]))
