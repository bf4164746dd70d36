"""Which rows are communication, and which collective they run: arguments first, names second."""

import re

# NCCL 2.x kernels are ncclKernel_<Coll>_..., since 2.19 ncclDevKernel_<Coll>_..., with user buffers
# ncclSymkDevKernel_<Coll>; RCCL keeps NCCL's names. A bare "nccl" inside a name proves nothing.
_KERNEL = re.compile(r"^(?:void )?(?:nccl|rccl|msccl)(?:Symk|Symm)?(?:Dev)?Kernel_?(?P<coll>[A-Za-z]*)")
# Collectives outside NCCL, as words of a qualified kernel name.
_CUSTOM = re.compile(
    r"(?:^|[\s:])(?:"
    r"(?P<reduce>cross_device_reduce|allreduce_prototype|allreduce_fusion_kernel)"  # vLLM, AITER; FlashInfer
    r"|(?:(?:one_shot|two_shot|multimem)_)+(?P<coll>all_reduce|all_gather|reduce_scatter)"  # torch's symmetric memory
    r"|deep_ep::(?:\w+::)?(?P<expert>dispatch|combine)"
    r"|(?P<other>deep_ep::(?:\w+::)?\w+|mscclpp\w*::\w+)"
    r"|(?:nvshmemx?i?|oneccl|ccl)_+(?P<named>[A-Za-z_]+)"  # NVSHMEM's and oneCCL's own kernels
    r")"
)
_HOST = re.compile(r"^(?:gloo|nccl|rccl|c10d|mpi|ucc|xccl|hccl|oneccl_bindings_for_pytorch):{1,2}_?(?P<coll>[a-z_]+)")
# What stands around the collective in the names of such kernels: nvshmem_float_sum_reduce_on_stream.
_WORDS = re.compile(
    r"all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|alltoall|fcollect|broadcast|barrier|reduce", re.I
)

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
    "fcollect": "all_gather",
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
    return _custom(custom) if custom else None


def _custom(match: "re.Match[str]") -> str:
    if match["reduce"]:
        return "all_reduce"
    if match["expert"]:  # tokens to the experts' ranks, and back
        return "all_to_all"
    if match["named"]:
        word = _WORDS.search(match["named"])
        return _normal(word[0]) if word else "other"
    return _normal(match["coll"] or "")


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
