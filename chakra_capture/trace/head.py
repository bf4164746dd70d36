"""What a device trace states of itself, found without decoding it: cheap enough for a look into a folder."""

import re
import zlib
from pathlib import Path

from chakra_capture.trace.files import GZIP_MAGIC, GZIP_WBITS, read_bytes

_HEAD = 1 << 20
_INFO = re.compile(rb'"distributedInfo"\s*:\s*\{')
_RANK = re.compile(rb'"rank"\s*:\s*(\d{1,9})\b')
_REACH = 2000


def stated_rank(path: Path) -> int | None:
    """Rank that a device trace states; Kineto writes it before the events, other tools anywhere.

    Raises:
        TraceFileError: the file is missing, unreadable or empty.
    """
    rank = _rank_in(_head(path))
    return rank if rank is not None else _rank_in(read_bytes(path).data)


def _head(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            raw = file.read(_HEAD)
        return zlib.decompressobj(wbits=GZIP_WBITS).decompress(raw, _HEAD) if raw[:2] == GZIP_MAGIC else raw
    except (OSError, zlib.error):
        return b""


def _rank_in(data: bytes) -> int | None:
    info = _INFO.search(data)
    rank = _RANK.search(data, info.end(), info.end() + _REACH) if info else None
    return int(rank[1]) if rank else None
