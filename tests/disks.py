"""A disk that is full, and a folder that nobody may write to."""

import resource
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# A folder of the kernel's: writing there is refused to everybody, also to root.
READ_ONLY = Path("/sys/kernel")


@contextmanager
def files_end_at(size: int) -> Iterator[None]:
    """The system refuses what is past this size, as a full disk does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextmanager
def full_disk(folder: Path) -> Iterator[None]:
    """``folder`` is on a disk with no room for a recording; where nothing may be mounted, the system says so."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "full", folder]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        with files_end_at(4096):
            yield
        return
    try:
        yield
    finally:
        subprocess.run(["umount", folder], check=True)
