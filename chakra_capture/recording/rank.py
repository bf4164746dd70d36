"""Which rank of the job this process is."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RankInfo:
    """Global rank and number of ranks."""

    rank: int
    world_size: int


def _number(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name, "")
    return int(text) if text.isdecimal() else None


def rank_from_environment(environ: Mapping[str, str]) -> RankInfo:
    """Read the rank that torchrun (``RANK``) or ``srun`` (``SLURM_PROCID``) gave this process."""
    rank, size = _number(environ, "RANK"), _number(environ, "WORLD_SIZE")
    if rank is not None and size is not None and rank < size:
        return RankInfo(rank, size)
    rank, size = _number(environ, "SLURM_PROCID"), _number(environ, "SLURM_NTASKS")
    # A batch script that was not started by srun also has SLURM_PROCID=0, and SLURM_NTASKS of its allocation.
    if rank is not None and size is not None and rank < size and size > 1 and "SLURM_STEP_ID" in environ:
        return RankInfo(rank, size)
    return RankInfo(0, 1)


def current_rank(environ: Mapping[str, str]) -> RankInfo:
    """Ask torch.distributed if the job has initialised it, else the launcher's variables."""
    # Looked up, not imported: a job that never imported it has no process group.
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return RankInfo(distributed.get_rank(), distributed.get_world_size())
    return rank_from_environment(environ)
