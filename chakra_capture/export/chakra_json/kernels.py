"""Names of communication kernels: the converter takes type and direction from them, and ends at unknown ones."""

from dataclasses import dataclass

# In the order in which the converter looks for them in a name without "_" and "-".
_WORDS = {
    "AllReduce": "all_reduce",
    "AllToAll": "all_to_all",
    "AllGather": "all_gather",
    "ReduceScatter": "reduce_scatter",
    "Broadcast": "broadcast",
}
_WORD_OF = {collective: word for word, collective in _WORDS.items()}
_P2P = "ncclDevKernel_SendRecv"
# What the converter has no type for, as what moves at least the same: all that it says is an upper bound.
_LOWERED = {"barrier": "all_reduce", "reduce": "all_reduce", "gather": "all_gather", "scatter": "broadcast"}
COMPUTE = "compute"


@dataclass(frozen=True, slots=True)
class KernelName:
    """How a kernel is written: its name, what the converter takes it for, and whether that is less than the truth."""

    name: str
    taken_for: str
    is_exact: bool


def kernel_name(name: str, collective: str, op: str) -> KernelName:
    """Name a communication kernel so that the converter takes it for what it is.

    Args:
        name: as recorded.
        collective: what it runs, as nodes have it.
        op: the op by which the converter tells send and receive apart.
    """
    wanted = _LOWERED.get(collective, collective)
    for candidate in _candidates(name, wanted):
        if taken_for(candidate, op) == wanted:
            return KernelName(candidate, wanted, is_exact=wanted == collective)
    # A batch of sends and receives, or of a kind that nothing names: device time, and no communication.
    plain = name.replace("ncclDevKernel", "nccl").replace("ncclKernel", "nccl")
    return KernelName(plain, COMPUTE, is_exact=False)


def taken_for(name: str, op: str) -> str | None:
    """What the converter takes a kernel of this name for; None where it ends with an error."""
    if _P2P in name:
        for word in ("send", "recv"):
            if word in op:
                return word
    if "ncclKernel" not in name and "ncclDevKernel" not in name:
        return COMPUTE
    plain = name.replace("_", "").replace("-", "").lower()
    known = next((collective for word, collective in _WORDS.items() if word.lower() in plain), None)
    return "all_to_all" if known is None and _P2P in name else known


def _candidates(name: str, wanted: str) -> list[str]:
    word = _WORD_OF.get(wanted)
    if word is not None:
        return [name, f"ncclDevKernel_{word}: {name}", f"ncclDevKernel_{word}"]
    return [name, f"{_P2P}: {name}"] if wanted in ("send", "recv") else []
