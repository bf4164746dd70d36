"""Which rows are communication, and which collective they run: arguments first, names second."""

import re

# NCCL 2.x kernels are ncclKernel_<Coll>_..., since 2.19 ncclDevKernel_<Coll>_..., with user buffers
# ncclSymkDevKernel_<Coll>; RCCL keeps NCCL's names. A bare "nccl" inside a name proves nothing.
_KERNEL = re.compile(r"^(?:void )?(?:nccl|rccl|msccl)(?:Symk|Symm)?(?:Dev)?Kernel_?(?P<coll>[A-Za-z]*)")
# Collectives outside NCCL: vLLM's and AITER's own all-reduce, torch's symmetric-memory kernels.
_CUSTOM = re.compile(
    r"(?:^|[\s:])(?:(?P<cross>cross_device_reduce)|(?:one_shot|two_shot|multimem)_(?P<coll>all_reduce|all_gather|reduce_scatter))"
)
_HOST = re.compile(r"^(?:gloo|nccl|c10d|mpi|ucc):{1,2}_?(?P<coll>[a-z_]+)")

_NAMES = {
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "allgatherbase": "all_gather",
    "allgatherintotensor": "all_gather",
    "reducescatter": "reduce_scatter",
    "reducescatterbase": "reduce_scatter",
    "reducescattertensor": "reduce_scatter",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "gather": "gather",
    "scatter": "scatter",
    "alltoall": "all_to_all",
    "alltoallbase": "all_to_all",
    "alltoallv": "all_to_all",
    "alltoallsingle": "all_to_all",
    "send": "send",
    "recv": "recv",
    "recvanysource": "recv",
    "sendrecv": "send_recv",
    "barrier": "barrier",
    "monitoredbarrier": "barrier",
}


def kernel_collective(name: str, stated: str | None) -> str | None:
    """Return the collective a kernel runs, ``"other"`` for communication of unknown kind, None for none.

    Args:
        name: kernel name.
        stated: the "Collective name" argument, which decides where it is there.
    """
    if stated:
        return _normal(stated)
    match = _KERNEL.match(name)
    if match:
        return _normal(match["coll"])
    custom = _CUSTOM.search(name)
    return _normal(custom["coll"] or "all_reduce") if custom else None


def host_collective(name: str) -> str | None:
    """Return the collective of a host op such as ``gloo:all_reduce`` or ``c10d::allreduce_``."""
    match = _HOST.match(name)
    return stated_collective(match["coll"]) if match else None


def stated_collective(text: str) -> str | None:
    """Return the collective that a host op names, None for what is none (``wait``, ``coalesced``)."""
    return _NAMES.get(_key(text))


def _normal(text: str) -> str:
    return _NAMES.get(_key(text), "other")


def _key(text: str) -> str:
    return re.sub(r"[^a-z]", "", text.lower()).removesuffix("coalesced")
