"""Ranks with gloo that communicate in every way there is, and write down what each of them really sends and gets.

Usage: python -m integrations.communication_job FOLDER WORLD_SIZE [LATE_MS]; with LATE_MS the last rank sleeps before
one all_reduce of each step.
"""

import json
import os
import pickle
import sys
import time
import traceback
import warnings
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from chakra_capture import ChakraProfileConfig, capture
from integrations.communication_variants import Variants

STEPS = (2, 3)


class Truth:
    """What this rank communicates, in order: ``[collective, group, bytes in, bytes out, root, peer, tag]``."""

    def __init__(self) -> None:
        self.rows: list[list[object]] = []

    def note(self, collective, group, put, got, *, root=None, peer=None, tag=None):
        self.rows.append([collective, group.group_name, put, got, root, peer, tag])


def nbytes(*tensors):
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def models(mesh):
    torch.manual_seed(0)
    replicated = DistributedDataParallel(nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.Linear(64, 4)))
    sharded = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8))
    fully_shard(sharded)
    parallel = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8))
    parallelize_module(parallel, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return replicated, sharded, parallel


def train(truth, world, replicated, sharded, parallel, tensor_group):
    """One step of each kind of parallelism; bytes by the size of parameters, buffers and activations."""
    x = torch.randn(16, 32)
    buffers = [buffer for buffer in replicated.buffers() if buffer.is_floating_point()]
    counters = [buffer for buffer in replicated.buffers() if not buffer.is_floating_point()]
    for some in (buffers, counters):
        truth.note("broadcast", world, nbytes(*some), nbytes(*some), root=0)
    replicated(x).sum().backward()
    gradients = nbytes(*replicated.parameters())
    truth.note("all_reduce", world, gradients, gradients)
    whole = sum(parameter.numel() * 4 for parameter in sharded.parameters())
    truth.note("all_gather", world, whole // world.size(), whole)
    sharded(x).sum().backward()
    truth.note("reduce_scatter", world, whole, whole // world.size())
    y = parallel(x)
    truth.note("all_reduce", tensor_group, 16 * 8 * 4, 16 * 8 * 4)
    y.sum().backward()


def collectives(truth, world, pair, rank, size):
    t = torch.ones
    dist.all_reduce(t(101))
    truth.note("all_reduce", world, 404, 404)
    if rank in (0, 1):
        dist.all_reduce(t(7, dtype=torch.bfloat16), group=pair)
        truth.note("all_reduce", pair, 14, 14)
    dist.broadcast(t(11), src=1)
    truth.note("broadcast", world, 44, 44, root=1)
    dist.reduce(t(13, dtype=torch.float64), dst=0)
    truth.note("reduce", world, 104, 104, root=0)
    dist.all_gather([torch.zeros(5) for _ in range(size)], t(5))
    truth.note("all_gather", world, 20, 20 * size)
    dist.all_gather_into_tensor(torch.zeros(6 * size), t(6))
    truth.note("all_gather", world, 24, 24 * size)
    dist.reduce_scatter_tensor(torch.zeros(3), t(3 * size))
    truth.note("reduce_scatter", world, 12 * size, 12)
    dist.gather(t(9), [torch.zeros(9) for _ in range(size)] if rank == 0 else None, dst=0)
    truth.note("gather", world, 36, 36 * size if rank == 0 else 0, root=0)
    dist.scatter(torch.zeros(4), [t(4) for _ in range(size)] if rank == 0 else None, src=0)
    truth.note("scatter", world, 16 * size if rank == 0 else 0, 16, root=0)
    dist.all_to_all_single(torch.zeros(8 * size), t(8 * size))
    truth.note("all_to_all", world, 32 * size, 32 * size)
    splits = [1 + other for other in range(size)]  # rank r gets r + 1 from each
    dist.all_to_all_single(torch.zeros((rank + 1) * size), t(sum(splits)), [rank + 1] * size, splits)
    truth.note("all_to_all", world, 4 * sum(splits), 4 * (rank + 1) * size)
    dist.barrier()
    truth.note("barrier", world, 0, 0)
    handle = dist.all_reduce(t(1000), async_op=True)
    handle.wait()
    truth.note("all_reduce", world, 4000, 4000)


def objects(truth, world, rank, size):
    """Objects travel as their length, then as bytes padded to the longest."""
    gathered = [None] * size
    dist.all_gather_object(gathered, {"rank": rank, "text": "a" * 10 * rank})
    longest = max(len(pickle.dumps({"rank": r, "text": "a" * 10 * r})) for r in range(size))
    truth.note("all_gather", world, 8, 8 * size)
    truth.note("all_gather", world, longest, longest * size)
    dist.broadcast_object_list([("from", 0)], src=0)
    truth.note("broadcast", world, 8, 8, root=0)
    length = len(pickle.dumps(("from", 0)))
    truth.note("broadcast", world, length, length, root=0)


def point_to_point(truth, world, pair, rank, size):
    if rank == 0:
        dist.send(torch.ones(17), 1)
        truth.note("send", world, 68, 0, peer=1, tag=0)
    if rank == 1:
        dist.recv(torch.zeros(17), 0)
        truth.note("recv", world, 0, 68, peer=0, tag=0)
    dist.barrier()
    truth.note("barrier", world, 0, 0)
    if rank == 1:
        dist.send(torch.ones(3), 0, group=pair, tag=5)
        truth.note("send", pair, 12, 0, peer=0, tag=5)
    if rank == 0:
        dist.recv(torch.zeros(3), 1, group=pair, tag=5)
        truth.note("recv", pair, 0, 12, peer=1, tag=5)
    dist.barrier()
    truth.note("barrier", world, 0, 0)
    after, before = (rank + 1) % size, (rank - 1) % size
    ring = [dist.P2POp(dist.isend, torch.ones(19), after), dist.P2POp(dist.irecv, torch.zeros(19), before)]
    for request in dist.batch_isend_irecv(ring):
        request.wait()
    truth.note("send", world, 76, 0, peer=after, tag=0)
    truth.note("recv", world, 0, 76, peer=before, tag=0)
    dist.barrier()
    truth.note("barrier", world, 0, 0)


def job(folder: Path, rank: int, size: int, late_ms: float) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    limit = timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size, timeout=limit)
    world = dist.group.WORLD
    mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("dp", "tp"))
    pair = dist.new_group([0, 1], group_desc="the pair")
    replicated, sharded, parallel = models(mesh)
    variants = Variants(size)
    settings = ChakraProfileConfig(
        enabled=True, start_step=STEPS[0], end_step=STEPS[1], trace_dir=str(folder / "t"), job_id="0"
    )
    truths = {}
    with capture(settings) as session:
        for g in range(STEPS[1] + 1):
            truth = truths[g] = Truth()
            with session.step(g):
                train(truth, world, replicated, sharded, parallel, mesh.get_group("tp"))
                if late_ms and rank == size - 1:
                    time.sleep(late_ms / 1e3)
                collectives(truth, world, pair, rank, size)
                objects(truth, world, rank, size)
                point_to_point(truth, world, pair, rank, size)
                variants.step(truth, world, pair, rank)
    (folder / f"truth-{rank}.json").write_text(json.dumps({g: truths[g].rows for g in STEPS}))
    dist.destroy_process_group()


def main(folder: Path, size: int, late_ms: float = 0.0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    children = []
    for rank in range(size):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                job(folder, rank, size, late_ms)
                code = 0
            except BaseException:
                traceback.print_exc()
                raise
            finally:
                os._exit(code)
        children.append(child)
    failed = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    assert not any(failed), failed


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]) if len(sys.argv) > 3 else 0.0)
