"""The records of a Chakra .et file: each is its length as a varint, then that many bytes of protobuf."""

from collections.abc import Callable, Iterator

from chakra_capture.errors import TraceFileError
from chakra_capture.trace.files import ByteSource, what_it_looks_like

# Far above a node that lists the groups of thousands of ranks; what claims more is no record.
LARGEST_RECORD = 16 << 20
_PIECE = 256 << 10
_VARINT_BYTES = 5


class DamagedEtError(TraceFileError):
    """A .et file cannot be read on; what came before the damage is as it was written."""


def records(source: ByteSource, seen: Callable[[int], None] | None = None) -> Iterator[tuple[int, bytes]]:
    """Give each record with the byte at which it begins (of the unpacked file, where it is compressed).

    Args:
        seen: told how many bytes were read so far, once a piece.

    Raises:
        DamagedEtError: a record is cut, empty, or claims a size that none has.
    """
    window = _Window(source, seen)
    while window.has(1):
        offset = window.offset
        length = _length(window, offset)
        if length == 0:
            raise _damaged(source, offset, "is empty, and readers stop at it")
        if length > LARGEST_RECORD:
            raise _damaged(source, offset, f"claims {length:,} bytes, more than any record has")
        if not window.has(length):
            why = f" ({source.cut})" if source.cut else ""
            raise _damaged(source, offset, f"claims {length:,} bytes, but the file ends after {window.left:,}{why}")
        yield offset, window.take(length)
    if source.cut:
        raise _damaged(source, window.offset, f"is missing: {source.cut}")


def _length(window: "_Window", offset: int) -> int:
    length = 0
    for at in range(_VARINT_BYTES):
        if not window.has(1):
            raise _damaged(window.source, offset, "is cut within its length")
        byte = window.take_byte()
        length |= (byte & 0x7F) << (7 * at)
        if byte < 0x80:
            return length
    raise _damaged(window.source, offset, "does not begin with a length")


def _damaged(source: ByteSource, offset: int, what: str) -> DamagedEtError:
    inside = " of the unpacked file" if source.is_gzip else ""
    if offset == 0:
        return not_an_et(source, f"its first record {what}")
    return DamagedEtError(f"{source.path} is damaged: the record at byte {offset:,}{inside} {what}. Export it again.")


def not_an_et(source: ByteSource, why: str) -> DamagedEtError:
    """What is said of a file whose very first record is none."""
    return DamagedEtError(
        f"{source.path} is no Chakra .et file, or damaged from its start: {why}; it looks like "
        f"{what_it_looks_like(source.first)}. Give a file that an export wrote."
    )


class _Window:
    """Bytes of a source from where the reading stands."""

    def __init__(self, source: ByteSource, seen: Callable[[int], None] | None) -> None:
        self.source = source
        self._seen = seen
        self._data = bytearray()
        self._at = 0
        self._base = 0
        self._piece = memoryview(bytearray(_PIECE))

    @property
    def offset(self) -> int:
        return self._base + self._at

    @property
    def left(self) -> int:
        return len(self._data) - self._at

    def has(self, size: int) -> bool:
        """Say whether ``size`` bytes follow; reads no further than needed for them."""
        while self.left < size:
            got = self.source.readinto(self._piece)
            if not got:
                return False
            del self._data[: self._at]
            self._base, self._at = self.offset, 0
            self._data += self._piece[:got]
            if self._seen:
                self._seen(self._base + len(self._data))
        return True

    def take_byte(self) -> int:
        self._at += 1
        return self._data[self._at - 1]

    def take(self, size: int) -> bytes:
        self._at += size
        return bytes(memoryview(self._data)[self._at - size : self._at])
