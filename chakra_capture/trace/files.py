"""Opening a trace file as a stream of bytes: plain or gzip by its first bytes, whatever its name says."""

import codecs
import io
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from isal import isal_zlib

from chakra_capture.errors import TraceFileError

GZIP_MAGIC = b"\x1f\x8b"
GZIP_WBITS = 31
_COMPRESSED_CHUNK = 1 << 16
_SMALL = 1 << 12
_PIECE = 1 << 20
_FIRST_BYTES = 4096
_UTF8_MARK = b"\xef\xbb\xbf"
_UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")


@dataclass(frozen=True, slots=True)
class Limits:
    """How much a gzip file may unfold: real traces shrink 10 to 50 times, a gzip bomb 1000 times.

    Attributes:
        ratio: decompressed bytes per compressed byte.
        free_bytes: whatever the ratio, this much is read.
    """

    ratio: int = 500
    free_bytes: int = 4 << 30


class ByteSource:
    """The text of one trace file as UTF-8 bytes, read piece by piece into the caller's buffer.

    Args:
        is_text: false for records of bytes, whose first ones may look like the mark of an encoding.

    Attributes:
        is_gzip: the file is compressed.
        cut: why a gzip stream gave fewer bytes than it should; None while it is whole.
        skipped: bytes of the byte order mark, which are not handed on.
        first: the first bytes of the text, decompressed, to see what a file is that is no trace.

    Raises:
        TraceFileError: the file is missing, not a file or unreadable, or unfolds past the limits.
    """

    def __init__(self, path: Path, limits: Limits | None = None, *, is_text: bool = True) -> None:
        self.path = path
        self.is_gzip = False
        self.cut: str | None = None
        self.skipped = 0
        self.first = b""
        self._limits = limits or Limits()
        self._is_text = is_text
        self._file = _open(path)
        self._waiting = memoryview(b"")
        self._pieces = self._start()

    def readinto(self, view: memoryview) -> int:
        """Fill the front of ``view``; 0 at the end."""
        while not self._waiting:
            if self._pieces is None:
                return self._read_plain(view)
            piece = next(self._pieces, None)
            if piece is None:
                return 0
            self._waiting = memoryview(piece)
        size = min(len(view), len(self._waiting))
        view[:size] = self._waiting[:size]
        self._waiting = self._waiting[size:]
        return size

    def __enter__(self) -> "ByteSource":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def _start(self) -> Iterator[bytes] | None:
        """Look at the first bytes; None for plain UTF-8, which goes straight into the caller's buffer."""
        head = self._read(_FIRST_BYTES)
        pieces: Iterator[bytes] | None = None
        self.is_gzip = head[:2] == GZIP_MAGIC
        if self.is_gzip:
            pieces = self._gunzip(head)
            head = next(pieces, b"")
        self.first = head[:_FIRST_BYTES]
        if self._is_text and head[:2] in _UTF16_MARKS:
            return _utf16_to_utf8(head, pieces or iter(lambda: self._read(_PIECE), b""))
        if self._is_text and head[:3] == _UTF8_MARK:
            self.skipped = len(_UTF8_MARK)
        self._waiting = memoryview(head)[self.skipped :]
        return pieces

    def _read(self, size: int) -> bytes:
        try:
            return self._file.read(size)
        except OSError as error:
            raise _unreadable(self.path, error) from None

    def _read_plain(self, view: memoryview) -> int:
        try:
            return self._file.readinto(view) or 0
        except OSError as error:
            raise _unreadable(self.path, error) from None

    def _gunzip(self, data: bytes) -> Iterator[bytes]:
        """Decompress every member; a cut or damaged stream gives what came before the damage."""
        member = isal_zlib.decompressobj(wbits=GZIP_WBITS)
        taken, given, begin, given_before = len(data), 0, 0, 0
        while True:
            try:
                piece = member.decompress(data, _PIECE)
            except (isal_zlib.error, zlib.error) as error:  # type: ignore[misc]  # isal's stub types its error as an instance
                self.cut = f"damaged gzip ({error})"
                yield from self._before_damage(begin, given - given_before)
                return
            data = member.unused_data if member.eof else member.unconsumed_tail
            given += len(piece)
            if given > max(self._limits.free_bytes, self._limits.ratio * taken):
                raise TraceFileError(_bomb(self.path, taken, given))
            if piece:
                yield piece
            if member.eof:
                data = data.lstrip(b"\0")  # padding between members
            if not data and not piece:
                data = self._read(_COMPRESSED_CHUNK)
                taken += len(data)
            if not data and not piece:
                self.cut = None if member.eof else "truncated gzip"
                return
            if member.eof and data:
                if GZIP_MAGIC[: len(data)] != data[:2]:
                    return  # whatever follows the last member is no gzip
                member = isal_zlib.decompressobj(wbits=GZIP_WBITS)
                begin, given_before = taken - len(data), given

    def _before_damage(self, begin: int, skip: int) -> Iterator[bytes]:
        """What the damaged member at ``begin`` gives up to its damage, ``skip`` bytes of which are read already.

        A failing call gives nothing, so the last ones are small.
        """
        self._file.seek(begin)
        stream = zlib.decompressobj(wbits=GZIP_WBITS)
        while part := self._read(_SMALL):
            before = stream.copy()
            try:
                pieces = [stream.decompress(part)]
            except zlib.error:
                pieces = list(_byte_by_byte(before, part))
                part = b""
            for piece in pieces:
                yield piece[skip:]
                skip = max(0, skip - len(piece))
            if not part:
                return


def _byte_by_byte(stream: "zlib._Decompress", part: bytes) -> Iterator[bytes]:
    for at in range(len(part)):
        try:
            yield stream.decompress(part[at : at + 1])
        except zlib.error:
            return


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
    with ByteSource(path) as source:
        data = bytes(read_all(source))
        if not data.strip():
            raise TraceFileError(empty(path))
        return FileBytes(path, data, source.cut)


def empty(path: Path) -> str:
    """What is said of a file without a byte of text."""
    return f"{path} is empty, so it holds no trace. Record it again, or leave this rank out."


def read_all(source: ByteSource) -> bytearray:
    """The rest of a source, whole in memory."""
    data = bytearray(_PIECE)
    size = 0
    while True:
        with memoryview(data) as view:
            got = source.readinto(view[size:])
        size += got
        if not got:
            break
        if len(data) - size < _PIECE // 4:
            data.extend(bytes(max(_PIECE, len(data) // 2)))
    del data[size:]
    return data


def what_it_looks_like(head: bytes) -> str:
    """Name what a file without a trace in it seems to be, from its first bytes."""
    text = head.lstrip().lower()
    for start, name in _LOOKS:
        if head.startswith(start):
            return name
    if text.startswith((b"<!doctype", b"<html", b"<head", b"<?xml", b"<")):
        return "an HTML or XML page"
    if head[:1] == b"\x0a" and head[1:2] not in (b"", b" ", b"\n", b"\r", b"\t", b"{", b"["):
        return "a protobuf file such as Perfetto's .pftrace"
    if text[:1] in (b"{", b"["):
        return "JSON of another kind"
    readable = b"\0" not in head and len(head.decode("utf-8", "ignore").encode()) > 0.95 * len(head)
    return "text" if readable else "binary data"


_LOOKS = (
    (b"PK\x03\x04", "a zip archive (or a torch checkpoint)"),
    (b"\x28\xb5\x2f\xfd", "a zstd archive: unpack it first"),
    (b"BZh", "a bzip2 archive: unpack it first"),
    (b"\xfd7zXZ", "an xz archive: unpack it first"),
    (b"SQLite format 3", "an SQLite file such as Nsight's export"),
    (b"PAR1", "a Parquet table"),
    (b"ARROW1", "an Arrow table"),
    (b"\x89HDF", "an HDF5 file"),
    (b"\x80\x02", "a Python pickle"),
    (b"\x80\x03", "a Python pickle"),
    (b"\x80\x04", "a Python pickle"),
    (b"\x80\x05", "a Python pickle"),
)


def _open(path: Path) -> io.FileIO:
    try:
        return io.FileIO(path)
    except FileNotFoundError:
        raise TraceFileError(f"{path} does not exist. Give the path of a recorded trace.") from None
    except IsADirectoryError:
        raise TraceFileError(f"{path} is a folder, but one trace file was expected. Give the file itself.") from None
    except OSError as error:
        raise _unreadable(path, error) from None


def _unreadable(path: Path, error: OSError) -> TraceFileError:
    return TraceFileError(f"{path} cannot be read: {error.strerror}. Check its permissions.")


def _bomb(path: Path, taken: int, given: int) -> str:
    return (
        f"{path} unfolds to more than {given:,} bytes from {taken:,} compressed ones, as no recorded trace does. "
        "If you trust it, unpack it with gunzip and give the unpacked file."
    )


def _utf16_to_utf8(head: bytes, pieces: Iterator[bytes]) -> Iterator[bytes]:
    decoder = codecs.getincrementaldecoder("utf-16")("replace")
    yield decoder.decode(head).encode("utf-8", "replace")
    for piece in pieces:
        yield decoder.decode(piece).encode("utf-8", "replace")
    yield decoder.decode(b"", final=True).encode("utf-8", "replace")
