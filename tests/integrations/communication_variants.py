"""Further ways to communicate with gloo: options of DDP, hybrid shards, functional, coalesced and late ones.

Each returns what it keeps between steps, and notes what it really sends and gets as ``communication_job`` does.
"""

import pickle

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

_FLOAT = 4
# Of a cap smaller than any parameter each one has a bucket of its own.
_ONE_EACH_MB = 1e-6


class HalfUsed(nn.Module):
    """A model whose second layer takes no part."""

    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(6, 3), nn.Linear(6, 2)

    def forward(self, x):
        return self.used(x)


class Variants:
    """Models and groups of this rank, made before the first step."""

    def __init__(self, size):
        torch.manual_seed(0)

        def layers():
            return nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3))

        self.size = size
        self.static = DistributedDataParallel(layers(), static_graph=True, gradient_as_bucket_view=True)
        for _ in range(3):  # torch settles on its buckets
            self.static(torch.randn(4, 6)).sum().backward()
        self.unused = DistributedDataParallel(HalfUsed(), find_unused_parameters=True)
        self.buckets = DistributedDataParallel(layers(), bucket_cap_mb=_ONE_EACH_MB)
        self.compressed = DistributedDataParallel(layers())
        self.compressed.register_comm_hook(None, fp16_compress_hook)
        self.mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("replicate", "shard"))
        self.hybrid = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3))
        for module in (*self.hybrid, self.hybrid):
            fully_shard(module, mesh=self.mesh)
        self.twin = dist.new_group(list(range(size)), group_desc="the same ranks again")
        self.turned = dist.new_group(list(reversed(range(size))), sort_ranks=False)
        self.compiled = torch.compile(_exchange, backend="aot_eager", fullgraph=True) if size == 2 else None

    def step(self, truth, world, pair, rank):
        self.data_parallel(truth, world)
        self.hybrid_shard(truth)
        self.functional(truth, world)
        self.coalesced(truth, world)
        self.late(truth, world)
        self.lists(truth, world, pair, rank)
        self.objects(truth, world, rank)

    def data_parallel(self, truth, world):
        x = torch.randn(4, 6)

        def reduced(count, width=_FLOAT):
            truth.note("all_reduce", world, count * width, count * width)

        self.static(x).sum().backward()
        reduced(_count(self.static))
        self.unused(x).sum().backward()
        for count in (_count(self.unused), 4):  # the gradients; which of 4 parameters were used anywhere, as int32
            reduced(count)
        with self.buckets.no_sync():
            self.buckets(x).sum().backward()
        self.buckets(x).sum().backward()
        for parameter in reversed(list(self.buckets.parameters())):
            reduced(parameter.numel())
        self.compressed(x).sum().backward()
        reduced(_count(self.compressed), 2)

    def hybrid_shard(self, truth):
        shard, replicate = self.mesh.get_group("shard"), self.mesh.get_group("replicate")
        self.hybrid(torch.randn(4, 6)).sum().backward()
        # Dimension 0 is padded to a multiple of the shards.
        whole = [sum(_padded(p.shape) * _FLOAT for p in layer.parameters()) for layer in self.hybrid]
        for layer in whole:
            truth.note("all_gather", shard, layer // 2, layer)
        truth.note("all_gather", shard, whole[1] // 2, whole[1])  # again for the backward pass
        truth.note("all_gather", shard, whole[0] // 2, whole[0])
        for layer in reversed(whole):
            truth.note("reduce_scatter", shard, layer, layer // 2)
            truth.note("all_reduce", replicate, layer // 2, layer // 2)

    def functional(self, truth, world):
        size, t = self.size, torch.ones
        functional.all_reduce(t(21), "sum", world).sum()
        truth.note("all_reduce", world, 84, 84)
        functional.all_gather_tensor(t(22), 0, world).sum()
        truth.note("all_gather", world, 88, 88 * size)
        functional.reduce_scatter_tensor(t(23 * size), "sum", 0, world).sum()
        truth.note("reduce_scatter", world, 92 * size, 92)
        functional.all_to_all_single(t(24 * size), [24] * size, [24] * size, world).sum()
        truth.note("all_to_all", world, 96 * size, 96 * size)
        functional.broadcast(t(25), 1, world).sum()
        truth.note("broadcast", world, 100, 100, root=1)
        several = functional.all_reduce_coalesced([t(26), t(27)], "sum", world)
        truth.note("all_reduce", world, 212, 212)
        several += functional.all_gather_into_tensor_coalesced([t(28), t(29)], world)
        truth.note("all_gather", world, 228, 228 * size)
        several += functional.reduce_scatter_tensor_coalesced([t(30 * size), t(31 * size)], "sum", [0, 0], world)
        truth.note("reduce_scatter", world, 244 * size, 244)
        for tensor in several:
            tensor.sum()
        if self.compiled is not None:
            self.compiled(t(32), world)
            truth.note("all_reduce", world, 128, 128)
            truth.note("all_gather", world, 128, 128 * size)

    def coalesced(self, truth, world):
        size, t = self.size, torch.ones
        with dist._coalescing_manager():
            dist.all_reduce(t(41))
            dist.all_reduce(t(42))
        truth.note("all_reduce", world, 332, 332)
        with dist._coalescing_manager():
            dist.all_gather_into_tensor(torch.zeros(43 * size), t(43))
            dist.all_gather_into_tensor(torch.zeros(44 * size), t(44))
        truth.note("all_gather", world, 348, 348 * size)
        with dist._coalescing_manager():
            dist.reduce_scatter_tensor(torch.zeros(45), t(45 * size))
            dist.reduce_scatter_tensor(torch.zeros(46), t(46 * size))
        truth.note("reduce_scatter", world, 364 * size, 364)

    def late(self, truth, world):
        """Several at once on two groups of the same ranks, waited for much later and the other way round."""
        size, handles = self.size, []
        for count, group in ((51, world), (52, self.twin), (53, self.twin), (54, world)):
            handles.append(dist.all_reduce(torch.ones(count), group=group, async_op=True))
            truth.note("all_reduce", group, 4 * count, 4 * count)
        into = torch.zeros(55 * size)
        handles.append(dist.all_gather_into_tensor(into, torch.ones(55), group=self.twin, async_op=True))
        truth.note("all_gather", self.twin, 220, 220 * size)
        torch.ones(64, 64) @ torch.ones(64, 64)
        for handle in reversed(handles):
            handle.wait()

    def lists(self, truth, world, pair, rank):
        size, t = self.size, torch.ones
        dist.reduce_scatter(torch.zeros(61), [t(61) for _ in range(size)])
        truth.note("reduce_scatter", world, 244 * size, 244)
        put, got = ([t(65, dtype=torch.float64) for _ in range(size)] for _ in range(2))
        dist.all_to_all(got, put)
        truth.note("all_to_all", world, 520 * size, 520 * size)
        for count in (62, 0, 63):
            dist.all_gather([torch.zeros(count, dtype=torch.uint8) for _ in range(size)], t(count, dtype=torch.uint8))
            truth.note("all_gather", world, count, count * size)
        if rank == 0:
            dist.send(t(64), 1, group=pair)
            truth.note("send", pair, 256, 0, peer=1, tag=0)
        if rank == 1:
            dist.recv(torch.zeros(64), None, group=pair)
            truth.note("recv", pair, 0, 256, tag=0)
        dist.broadcast(t(66), src=0, group=self.turned)
        truth.note("broadcast", self.turned, 264, 264, root=0)
        dist.barrier(group=self.twin)
        truth.note("barrier", self.twin, 0, 0)

    def objects(self, truth, world, rank):
        """Objects travel as bytes padded to the longest; their lengths beside them."""
        size = self.size
        texts = ["b" * 10 * other for other in range(size)]
        lengths = [len(pickle.dumps(text)) for text in texts]
        is_first = rank == 0
        dist.scatter_object_list([None], texts if is_first else None, src=0)
        truth.note("broadcast", world, 8, 8, root=0)
        truth.note("scatter", world, max(lengths) * size if is_first else 0, max(lengths), root=0)
        truth.note("scatter", world, 8 * size if is_first else 0, 8, root=0)
        dist.gather_object(texts[rank], [None] * size if is_first else None, dst=0)
        truth.note("all_gather", world, 8, 8 * size)
        truth.note("gather", world, max(lengths), max(lengths) * size if is_first else 0, root=0)
        sent = [texts[1]]
        if is_first:
            dist.send_object_list(sent, 1)
        if rank == 1:
            dist.recv_object_list([None], 0)
        if rank < 2:
            for num_bytes in (8, lengths[1]):
                put, got = (num_bytes, 0) if is_first else (0, num_bytes)
                truth.note("send" if is_first else "recv", world, put, got, peer=1 - rank, tag=0)


def _exchange(x, group):
    reduced = functional.all_reduce(x, "sum", group)
    return functional.all_gather_tensor(reduced * 2, 0, group).sum()


def _count(model):
    return sum(parameter.numel() for parameter in model.parameters())


def _padded(shape):
    """Elements of a parameter of two shards, its first dimension padded to a multiple of two."""
    rows = shape[0] + shape[0] % 2
    return rows * shape[1:].numel()
