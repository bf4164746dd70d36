"""How much memory merging a rank takes, and how much there is."""

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from chakra_capture.trace.files import GZIP_MAGIC

# Of the C scanner and of msgspec, beyond the imports; measured 0.4 and 0.6 on a large pair (scripts/bench_merge.py).
_PEAK_SHARE = {True: 0.6, False: 1.2}
_LINKING_SHARE = 0.25
_IMPORTS = 90_000_000
_GZIP_FACTOR = 25  # of recorded traces; 10 to 50
_LAST_OF_GZIP = 4
_V2 = ("memory.max", "memory.current", "inactive_file")
_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_NO_LIMIT = 1 << 62


def needed_bytes(files: Iterable[Path], *, is_native: bool, budget: int | None) -> int:
    """About how much memory merging these traces takes at most.

    Args:
        is_native: the C scanner reads them.
        budget: bytes of columns as read that may stay in memory; None for all.
    """
    size = sum(map(unpacked_size, files))
    share = _PEAK_SHARE[is_native] * size
    return _IMPORTS + int(share if budget is None else min(share, budget + _LINKING_SHARE * size))


def unpacked_size(path: Path) -> int:
    """Bytes of a trace, unpacked; of a gz file as it ends with, or as traces usually shrink; 0 of one that is gone."""
    try:
        with path.open("rb") as file:
            is_packed = file.read(2) == GZIP_MAGIC
            size = file.seek(0, os.SEEK_END)
            if not is_packed or size < _LAST_OF_GZIP:
                return size
            file.seek(-_LAST_OF_GZIP, os.SEEK_END)
            stated = int.from_bytes(file.read(_LAST_OF_GZIP), "little")
    except OSError:
        return 0
    # Stated modulo 4 GiB and of the last of several members; a cut file ends with anything.
    is_likely = 4 * size <= stated <= 60 * size and 60 * size < 1 << 32
    return stated if is_likely else _GZIP_FACTOR * size


def available_bytes(root: Path = Path("/")) -> int | None:
    """Memory that new processes may take, by the machine and by the control groups around this one; None: not known."""
    return min(_free_memory(root), default=None)


def _free_memory(root: Path) -> Iterator[int]:
    free = _fields(root / "proc/meminfo").get("MemAvailable:")
    if free is not None:
        yield free * 1024
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers in ("", "memory"):
            mount = root / "sys/fs/cgroup" / controllers
            names = _V1 if controllers else _V2
            group = mount / path.lstrip("/")
            # In a container the path is that of the machine, and the mount shows the container's own group.
            for folder in {mount, *(g for g in (group, *group.parents) if g.is_relative_to(mount))}:
                limit, used = (_number(folder / name) for name in names[:2])
                if limit is not None and used is not None and limit < _NO_LIMIT:
                    # Pages of files that were read are given up when memory is needed.
                    yield max(0, limit - used + _fields(folder / "memory.stat").get(names[2], 0))


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def _fields(path: Path) -> dict[str, int]:
    parts = [line.split() for line in _lines(path)]
    return {part[0]: int(part[1]) for part in parts if len(part) > 1 and part[1].isdecimal()}


def _number(path: Path) -> int | None:
    text = "".join(_lines(path)).strip()
    return int(text) if text.isdecimal() else None
