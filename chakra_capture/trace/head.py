"""What a trace states of itself on top, found without decoding it: cheap enough for a look at every rank of a run."""

import hashlib
import re
import zlib
from dataclasses import dataclass
from pathlib import Path

from chakra_capture.trace.files import GZIP_MAGIC, GZIP_WBITS, read_bytes

_HEAD = 1 << 20
# Enough for what stands before the events, and the first of these.
_SHORT = 1 << 16
_INFO = re.compile(rb'"distributedInfo"\s*:\s*\{')
_RANK = re.compile(rb'"rank"\s*:\s*(\d{1,9})\b')
_WORLD_SIZE = re.compile(rb'"world_size"\s*:\s*(\d{1,9})\b')
_REACH = 2000
LARGEST_RANK = 2**31 - 1
_PID = rb'(?<!\\)"pid"\s*:\s*(\d{1,10})\b'
# Metadata and device activities carry the number of a device where others have their process.
_CPU_PID = re.compile(rb'"cat"\s*:\s*"(?:cpu_op|user_annotation|cuda_runtime|python_function)"[^{}]{0,400}?' + _PID)
_HOST_PID = re.compile(_PID)
_BASE = re.compile(rb'"baseTimeNanoseconds"\s*:\s*(\d{1,19})\b')
_FIRST_TS = re.compile(rb'"traceEvents"\s*:[^}]{0,400}?(?<!\\)"ts"\s*:\s*(\d{1,16})')
_START = re.compile(rb'"start_ts"\s*:\s*(\d{1,16})\b')
_NODES = re.compile(rb'"nodes"\s*:')


@dataclass(frozen=True, slots=True)
class DeviceHead:
    """The beginning of a device trace; what it does not state there is None.

    Attributes:
        pids: processes of the first CPU-side events.
        begin_ns: about when recording began, Unix epoch.
        digest: of the first bytes, which no two recordings have in common.
    """

    rank: int | None
    world_size: int | None
    pids: frozenset[int]
    begin_ns: int | None
    digest: bytes | None


@dataclass(frozen=True, slots=True)
class HostHead:
    """The beginning of a host trace; ``start_ms`` is on the machine's monotonic clock."""

    pid: int | None
    start_ms: int | None
    digest: bytes | None


def device_head(path: Path) -> DeviceHead:
    """Look at the beginning of a device trace; a file that cannot be read states nothing."""
    data = _head(path, _SHORT)
    base, first = _integer(_BASE, data), _integer(_FIRST_TS, data)
    return DeviceHead(
        rank=_stated(_RANK, data),
        world_size=_stated(_WORLD_SIZE, data),
        pids=frozenset(map(int, _CPU_PID.findall(data))),
        begin_ns=None if base is None or first is None else base + 1000 * first,
        digest=_digest(data),
    )


def host_head(path: Path) -> HostHead:
    """Look at the beginning of a host trace; a file that cannot be read states nothing."""
    data = _head(path, _SHORT)
    nodes = _NODES.search(data)
    before = data[: nodes.start()] if nodes else data[:_REACH]
    return HostHead(_integer(_HOST_PID, before), _integer(_START, before), _digest(data))


def stated_rank(path: Path) -> int | None:
    """Rank that a device trace states; Kineto writes it before the events, other tools anywhere.

    Raises:
        TraceFileError: the file is missing, unreadable or empty.
    """
    rank = _stated(_RANK, _head(path, _HEAD))
    return rank if rank is not None else _stated(_RANK, read_bytes(path).data)


def _head(path: Path, size: int) -> bytes:
    try:
        with path.open("rb") as file:
            raw = file.read(size)
        return zlib.decompressobj(wbits=GZIP_WBITS).decompress(raw, size) if raw[:2] == GZIP_MAGIC else raw
    except (OSError, zlib.error):
        return b""


def _digest(data: bytes) -> bytes | None:
    return hashlib.blake2b(data, digest_size=16).digest() if data else None


def _integer(pattern: re.Pattern[bytes], data: bytes) -> int | None:
    match = pattern.search(data)
    return int(match[1]) if match else None


def _stated(pattern: re.Pattern[bytes], data: bytes) -> int | None:
    """A number that stands in the trace's account of the process group."""
    info = _INFO.search(data)
    match = pattern.search(data, info.end(), info.end() + _REACH) if info else None
    return int(match[1]) if match else None
