"""Files of a recording: reserved exclusively, checked for a whole end, published by a rename."""

import gzip
import json
import os
import re
import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path

from chakra_capture.errors import RecordingError
from chakra_capture.layout import PART_SUFFIX, part_path

FILE_MODE = 0o640
PROBE = b"\0"
_TAIL_BYTES = 64 * 1024
_HOST_TAIL = re.compile(rb'\]\s*,\s*"finish_ts"\s*:\s*\d+\s*\}\s*$')
_DEVICE_TAIL = re.compile(rb'\]\s*,\s*"traceName"\s*:\s*".*"\s*\}\s*$', re.DOTALL)


def make_folder(path: Path) -> None:
    """Create a folder of the run.

    Raises:
        RecordingError: it cannot be created.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as fault:
        raise RecordingError(
            f"{path} cannot be created: {fault.strerror or fault}; chakra_profile.trace_dir must be a folder that this "
            "process may write to. Remove what is in the way or set chakra_profile.trace_dir to another folder."
        ) from fault


def reserve(path: Path) -> None:
    """Create ``path`` with one byte in it, refusing whatever is there already.

    The byte tells later whether torch has opened the file: opening truncates it.

    Raises:
        RecordingError: the file exists, or its folder cannot be written to.
    """
    flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | getattr(os, "O_NOFOLLOW", 0)
    make_folder(path.parent)
    try:
        descriptor = os.open(path, flags, FILE_MODE)
        try:
            os.write(descriptor, PROBE)
        finally:
            os.close(descriptor)
    except FileExistsError as fault:
        raise RecordingError(
            f"{path} exists already, so another process is writing it or died while doing so; a recording needs the "
            "name for itself. Remove the file, or set chakra_profile.job_id to a name of its own."
        ) from fault
    except OSError as fault:
        raise RecordingError(
            f"{path} cannot be written: {fault.strerror or fault}; a recording needs a folder it can write to, with "
            "space left. Free space, change the permissions or set chakra_profile.trace_dir to another folder."
        ) from fault


def was_opened(path: Path) -> bool:
    """Say whether somebody has opened a reserved file for writing since."""
    try:
        return path.stat().st_size == 0
    except FileNotFoundError:
        return False


def size_of(path: Path) -> int:
    """Return the size of a file in bytes, 0 if there is none."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def discard(*paths: Path | None) -> None:
    """Remove files that hold nothing worth keeping."""
    for path in paths:
        if path is not None:
            path.unlink(missing_ok=True)


def _tail(path: Path) -> bytes:
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - _TAIL_BYTES))
        return file.read()


def is_whole_host_trace(path: Path) -> bool:
    """Say whether the observer has written its end mark, which it does last, and never after a failed write."""
    return path.is_file() and _HOST_TAIL.search(_tail(path)) is not None


def is_whole_device_trace(path: Path) -> bool:
    """Say whether Kineto has written its end mark."""
    return path.is_file() and _DEVICE_TAIL.search(_tail(path)) is not None


def rename_in_trace(path: Path, final: Path) -> None:
    """Replace the working name that Kineto wrote, unescaped, into the end of its file by the final one."""
    tail = _tail(path)
    start = tail.rfind(b'"traceName"')
    if start >= 0:
        with path.open("r+b") as file:
            file.seek(start - len(tail), os.SEEK_END)
            file.write(b'"traceName": ' + json.dumps(str(final)).encode() + b" }")
            file.truncate()


def compressed(part: Path, final: Path) -> Path:
    """Compress a whole ``part`` next to itself and return the new working file."""
    target = part_path(final)
    reserve(target)
    try:
        with part.open("rb") as source, target.open("wb") as sink:
            # The time stamp is left out, so that equal traces give equal files.
            with gzip.GzipFile(filename="", mode="wb", compresslevel=4, fileobj=sink, mtime=0) as packed:
                shutil.copyfileobj(source, packed, 1 << 20)
    except BaseException:
        discard(target)
        raise
    part.unlink()
    return target


def publish(part: Path, final: Path) -> int:
    """Give a whole file its final name, and return its size in bytes."""
    part.chmod(FILE_MODE & ~_umask())
    size = part.stat().st_size
    part.replace(final)
    return size


def _umask() -> int:
    # There is no way to read it without setting it for a moment; Linux shows it.
    try:
        text = Path("/proc/self/status").read_text()
    except OSError:
        return 0o022
    match = re.search(r"^Umask:\s*(\d+)$", text, re.MULTILINE)
    return int(match.group(1), 8) if match else 0o022


def _write_beside(path: Path, content: Mapping[str, object]) -> Path:
    make_folder(path.parent)
    draft = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}{PART_SUFFIX}")
    try:
        with os.fdopen(os.open(draft, os.O_CREAT | os.O_EXCL | os.O_WRONLY, FILE_MODE), "w") as file:
            json.dump(content, file, indent=1)
            file.write("\n")
    except BaseException:
        discard(draft)
        raise
    return draft


def write_json(path: Path, content: Mapping[str, object]) -> None:
    """Write a small JSON file so that a reader sees the old one or the new one, never a part."""
    _write_beside(path, content).replace(path)


def create_json(path: Path, content: Mapping[str, object]) -> bool:
    """Write a small JSON file unless ``path`` exists; say whether it was written."""
    draft = _write_beside(path, content)
    try:
        os.link(draft, path)
    except FileExistsError:
        return False
    except OSError:
        # A file system without hard links. Exclusive creation is as safe, only that a reader may see an empty file.
        return _create_exclusively(draft, path)
    finally:
        discard(draft)
    return True


def _create_exclusively(draft: Path, path: Path) -> bool:
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, FILE_MODE))
    except FileExistsError:
        return False
    draft.replace(path)
    return True
