"""What a reader of the traces may want to know of the process: versions, devices, process groups."""

import gc
import logging
import os
import platform
import sys
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

_DRIVER_VERSION = Path("/sys/module/nvidia/version")
_NCCL_VARIABLES = ("NCCL_", "TORCH_NCCL_")


def versions_in_use() -> dict[str, str | None]:
    """Return the versions a reader of the traces may need; torch is asked only if the job has imported it."""
    torch = sys.modules.get("torch")
    try:
        own: str | None = version("chakra-capture")
    except PackageNotFoundError:
        own = None
    found = {"python": platform.python_version(), "chakra_capture": own}
    if torch is None:
        return {**found, "torch": None, "cuda": None}
    cudnn = torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None
    return {
        **found,
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "cudnn": str(cudnn) if cudnn is not None else None,
        "driver": _driver_version(),
    }


def _driver_version() -> str | None:
    try:
        return _DRIVER_VERSION.read_text().strip()
    except OSError:
        return None


@dataclass(frozen=True, slots=True)
class MeshDimension:
    """A dimension of a DeviceMesh that a process group serves."""

    name: str
    mesh: list[str]


@dataclass(frozen=True, slots=True)
class ProcessGroupInfo:
    """One process group that this rank belongs to; ``ranks`` is null where it is all of them, in order."""

    name: str
    description: str
    backend: str
    size: int
    ranks: list[int] | None
    mesh_dimensions: list[MeshDimension]


@dataclass(frozen=True, slots=True)
class NcclInfo:
    """The NCCL in use and what the environment tells it."""

    version: str
    environment: dict[str, str]


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What is known when the first window begins."""

    devices: list[str] = field(default_factory=list)
    nccl: NcclInfo | None = None
    process_groups: list[ProcessGroupInfo] = field(default_factory=list)


def surroundings() -> Surroundings:
    """Look at the process as it is now; where torch does not tell, nothing is said."""
    try:
        return Surroundings(_devices(), _nccl(), _process_groups())
    except (AttributeError, KeyError, TypeError, ValueError, RuntimeError) as fault:
        # Much of this is private to torch, and no reason to record nothing.
        logger.warning("The manifest lacks process groups and devices: this torch does not tell (%s).", fault)
        return Surroundings()


def _devices() -> list[str]:
    import torch

    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):  # type: ignore[no-untyped-call]
        return []
    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]


def _nccl() -> NcclInfo | None:
    import torch

    distributed: Any = torch.distributed
    if not distributed.is_available() or not distributed.is_nccl_available() or not torch.cuda.is_available():
        return None
    number = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    environment = {name: value for name, value in sorted(os.environ.items()) if name.startswith(_NCCL_VARIABLES)}
    return NcclInfo(".".join(str(part) for part in number), environment)


def _process_groups() -> list[ProcessGroupInfo]:
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return []
    world_size = distributed.get_world_size()
    dimensions = _mesh_dimensions()
    found = []
    for config in distributed.distributed_c10d._get_all_pg_configs():
        ranks = [int(rank) for rank in config["ranks"]]
        name = str(config["pg_name"])
        found.append(
            ProcessGroupInfo(
                name=name,
                description=str(config["pg_desc"]),
                backend=str(config["backend_config"]),
                size=len(ranks),
                ranks=None if ranks == list(range(world_size)) else ranks,
                mesh_dimensions=dimensions.get(name, []),
            )
        )
    return found


def _mesh_dimensions() -> dict[str, list[MeshDimension]]:
    """Find which process group serves which dimension; a mesh is known only to those who made it, and to gc."""
    module: Any = sys.modules.get("torch.distributed.device_mesh")
    if module is None:
        return {}
    found: dict[str, list[MeshDimension]] = {}
    for mesh in [item for item in gc.get_objects() if type(item) is module.DeviceMesh]:
        groups = getattr(mesh, "_dim_group_names", None) or []
        names = [str(name) for name in mesh.mesh_dim_names or (f"dim_{index}" for index in range(mesh.ndim))]
        for group, name in zip(groups, names, strict=False):
            dimension = MeshDimension(name, names)
            known = found.setdefault(str(group), [])
            if dimension not in known:
                known.append(dimension)
    return found
