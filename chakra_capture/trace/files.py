"""Opening a trace file: plain or gzip by its first bytes, whatever its name says."""

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from isal import isal_zlib

from chakra_capture.errors import TraceFileError

GZIP_MAGIC = b"\x1f\x8b"
GZIP_WBITS = 31
_CHUNK = 1 << 20
_SMALL = 1 << 12


@dataclass(frozen=True, slots=True)
class FileBytes:
    """The bytes of one file, decompressed; ``cut`` says why fewer than the whole came out."""

    path: Path
    data: bytes
    cut: str | None = None


def read_bytes(path: Path) -> FileBytes:
    """Read a plain or gzip file whole.

    Raises:
        TraceFileError: the file is missing, not a file, unreadable or empty.
    """
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        raise TraceFileError(f"{path} does not exist. Give the path of a recorded trace.") from None
    except IsADirectoryError:
        raise TraceFileError(f"{path} is a folder, but one trace file was expected. Give the file itself.") from None
    except OSError as error:
        raise TraceFileError(f"{path} cannot be read: {error.strerror}. Check its permissions.") from None
    cut = None
    if raw[:2] == GZIP_MAGIC:
        raw, cut = _gunzip(raw)
    if raw[:3] == b"\xef\xbb\xbf":
        raw = raw[3:]
    elif raw[:2] in (b"\xff\xfe", b"\xfe\xff"):
        raw = raw.decode("utf-16", "replace").encode()
    if not raw.strip():
        raise TraceFileError(f"{path} is empty, so it holds no trace. Record it again, or leave this rank out.")
    return FileBytes(path, raw, cut)


def _gunzip(raw: bytes) -> tuple[bytes, str | None]:
    """Decompress every member; a cut or damaged stream gives what came before the damage."""
    parts: list[bytes] = []
    view = memoryview(raw)
    at = 0
    while bytes(view[at : at + 2]) == GZIP_MAGIC:
        begin, whole = at, len(parts)
        member = isal_zlib.decompressobj(wbits=GZIP_WBITS)
        try:
            while at < len(raw) and not member.eof:
                parts.append(member.decompress(view[at : at + _CHUNK]))
                at = min(len(raw), at + _CHUNK)
        except (isal_zlib.error, zlib.error) as error:  # type: ignore[misc]  # isal's stub types its error as an instance
            return b"".join([*parts[:whole], *_before_damage(view[begin:])]), f"damaged gzip ({error})"
        if not member.eof:
            return b"".join(parts), "truncated gzip"
        at -= len(member.unused_data)
    return b"".join(parts), None


def _before_damage(member: memoryview) -> Iterator[bytes]:
    """What a damaged member gives up to its damage; a failing call gives nothing, so the last ones are small."""
    stream = zlib.decompressobj(wbits=GZIP_WBITS)
    for at in range(0, len(member), _SMALL):
        before = stream.copy()
        try:
            yield stream.decompress(member[at : at + _SMALL])
        except zlib.error:
            for byte in range(at, at + _SMALL):
                try:
                    yield before.decompress(member[byte : byte + 1])
                except zlib.error:
                    return
