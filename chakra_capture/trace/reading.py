"""Reading one trace file into columns: through the C scanner where it is built, else through msgspec.

Both hand unusual elements to the same slow reader and damaged ones to the same walker, so the columns are equal.
"""

import gc
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from chakra_capture.errors import MissingDependencyError, TraceFileError
from chakra_capture.trace import native
from chakra_capture.trace.columns import LARGEST, Coded, Rows, Sparse, concat_rows, insert_rows
from chakra_capture.trace.feed import BUFFER_SIZE, Feed
from chakra_capture.trace.files import ByteSource, Limits, empty, read_all, what_it_looks_like
from chakra_capture.trace.mend import Shape
from chakra_capture.trace.salvage import Salvage
from chakra_capture.trace.spill import Spill
from chakra_capture.trace.text_scanner import TextScanner
from chakra_capture.trace.walk import Walker

_BATCH = 20_000
_PYTHON_EXPORTER = b'"CPU functions"'


class ScannerKind(StrEnum):
    """What read a file: the C core, or msgspec where it is not built."""

    NATIVE = "native"
    MSGSPEC = "msgspec"


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """How to read.

    Attributes:
        scanner: what reads; None takes the C core if it is built.
        spill: where columns go that are too large for memory; None keeps them all in it.
    """

    scanner: ScannerKind | None = None
    spill: Spill | None = None
    buffer_size: int = BUFFER_SIZE
    limits: Limits = field(default_factory=Limits)


class SlowReader(ABC):
    """Reads elements one by one through msgspec; its rows go before the given rows of the fast scanner."""

    shape: Shape

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Forget what was read."""
        self.num_taken = 0
        self._waiting: list[Any] = []
        self._before: list[int] = []
        self._parts: list[Rows] = []

    def take(self, text: bytes, before: int = 0) -> str | None:
        """Read one element; returns why it was left out, if so."""
        try:
            element = self.decode(text)
        except msgspec.ValidationError:
            return "a field of a wrong type"
        except RecursionError:
            return "args nested too deep"
        except (msgspec.DecodeError, UnicodeDecodeError):
            return "text that is no JSON"
        if isinstance(element, str):
            return element
        self.num_taken += 1
        if self.keep([element]):
            self._waiting.append(element)
            self._before.append(before)
            if len(self._waiting) >= _BATCH:
                self._flush()
        return None

    def rows(self) -> tuple[Rows, Sequence[int]]:
        """All rows taken, and before which rows they go."""
        self._flush()
        self._parts = [concat_rows(self._parts)]
        return self._parts[0], self._before

    def take_all(self, raws: list[msgspec.Raw]) -> None:
        """Read all elements of a whole file.

        Raises:
            msgspec.ValidationError: an element is not as it should be.
        """
        for begin in range(0, len(raws), _BATCH):
            batch = raws[begin : begin + _BATCH]
            elements = self.decode_all(b"[" + b",".join(batch) + b"]")
            self.num_taken += len(batch)
            self._waiting = self.keep(elements)
            self._flush()

    def _flush(self) -> None:
        if self._waiting or not self._parts:
            self._parts.append(self.to_rows(self._waiting))
        self._waiting = []

    @abstractmethod
    def decode(self, text: bytes) -> Any:
        """The element, or in words why it is none."""

    @abstractmethod
    def decode_all(self, array: bytes) -> list[Any]:
        """The elements of a whole array."""

    @abstractmethod
    def keep(self, elements: list[Any]) -> list[Any]:
        """Count the elements; those that become rows."""

    @abstractmethod
    def to_rows(self, elements: list[Any]) -> Rows:
        """Columns of the elements that become rows."""

    def split(self, data: bytes | bytearray) -> tuple[list[msgspec.Raw] | None, dict[str, bytes]]:
        """The elements of a whole valid file, and raw JSON of the wanted values beside them.

        Raises:
            msgspec.DecodeError: the file is damaged, or no such trace.
        """
        if self.shape.bare and data[:64].lstrip()[:1] == b"[":
            return msgspec.json.decode(data, type=list[msgspec.Raw]), {}
        members = [(key, msgspec.Raw, msgspec.Raw()) for key in self.shape.head]
        file = msgspec.defstruct("File", [(self.shape.key, list[msgspec.Raw] | None, None), *members])
        found = msgspec.json.decode(data, type=file)
        return getattr(found, self.shape.key), {key: bytes(getattr(found, key)) for key in self.shape.head}

    @abstractmethod
    def native_layout(self) -> native.Layout:
        """The columns as the C core numbers them."""

    def counts(self) -> dict[str, int]:
        """Elements by category, where the kind of trace has one."""
        return {}

    @abstractmethod
    def add_native_counts(self, scan: native.NativeScanner) -> None:
        """Take over what the C core counted beside the rows."""


@dataclass(frozen=True, slots=True)
class ReadFile:
    """What came out of a file; ``num_elements`` and ``counts`` include what became no row."""

    rows: Rows
    head: dict[str, bytes]
    num_elements: int
    counts: dict[str, int]
    salvage: Salvage
    scanner: ScannerKind


def read_file(path: Path, reader_type: type[SlowReader], options: ReadOptions) -> ReadFile:
    """Read a trace file, plain or gzip; a damaged one as far as it is whole.

    Raises:
        TraceFileError: the file is missing, unreadable or empty, or holds no such trace.
        MissingDependencyError: the C core was asked for but is not built.
    """
    library = native.load() if options.scanner is not ScannerKind.MSGSPEC else None
    if options.scanner is ScannerKind.NATIVE and library is None:
        raise MissingDependencyError(
            "The C scanner of chakra_capture is not built. Install a wheel or a C compiler and reinstall: "
            "pip install --no-binary chakra-capture chakra-capture"
        )
    with ByteSource(path, options.limits) as source:
        try:
            if library is None:
                with _no_garbage_collection():
                    file = _read_msgspec(source, reader_type)
            else:
                file = _read_native(source, reader_type, library, options)
        except MemoryError as error:
            raise TraceFileError(
                f"{path} needs more memory than there is ({error}). "
                "Merge it with --memory-budget 1GB, one rank at a time, or on a larger machine."
            ) from None
    _narrow(file.rows, options.spill)
    return file


def _narrow(rows: Rows, spill: Spill | None) -> None:
    """Keep columns that stay for long in as few bytes as they need."""
    for key, column in rows.texts.items():
        narrow = column.narrowed()
        rows.texts[key] = Coded(spill.keep(narrow.codes), narrow.values) if spill else narrow
    for key, sparse in rows.wide.items():
        rows.wide[key] = Sparse(sparse.rows.astype(np.int32), sparse.values)


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """A million new objects without a cycle among them: looking for cycles would double the time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _read_native(
    source: ByteSource, reader_type: type[SlowReader], library: native.Library, options: ReadOptions
) -> ReadFile:
    salvage, reader = Salvage(), reader_type()
    with native.NativeScanner(library, reader.native_layout(), reader, options.spill) as scanner:
        feed = Feed(source, options.buffer_size)
        feed.more(0)
        walker = _walk(source, feed, scanner, reader, salvage)
        rows = scanner.rows()
        reader.add_native_counts(scanner)
        num_elements = scanner.count
    slow, before = reader.rows()
    if before:
        rows = insert_rows(rows, slow, np.array(before, dtype=np.int64))
    return ReadFile(rows, walker.head, num_elements, reader.counts(), salvage, ScannerKind.NATIVE)


def _read_msgspec(source: ByteSource, reader_type: type[SlowReader]) -> ReadFile:
    reader = reader_type()
    data = read_all(source)
    if not source.cut:
        try:
            if not _is_utf8(data):
                raise msgspec.DecodeError("invalid UTF-8")
            raws, head = reader.split(data)
            reader.take_all(raws or [])
        except (msgspec.DecodeError, RecursionError):
            pass
        else:
            if raws is not None and _PYTHON_EXPORTER not in source.first:
                del data, raws
                rows, _ = reader.rows()
                return ReadFile(rows, head, reader.num_taken, reader.counts(), Salvage(), ScannerKind.MSGSPEC)
    return _read_text(source, reader_type(), bytes(data))


def _read_text(source: ByteSource, reader: SlowReader, data: bytes) -> ReadFile:
    """The way for a file that is not valid as a whole."""
    salvage = Salvage()
    scanner = TextScanner(data, reader)
    walker = _walk(source, Feed.whole(data, source.skipped), scanner, reader, salvage)
    return ReadFile(reader.rows()[0], walker.head, scanner.count, reader.counts(), salvage, ScannerKind.MSGSPEC)


def _walk(
    source: ByteSource, feed: Feed, scanner: "native.NativeScanner | TextScanner", reader: SlowReader, salvage: Salvage
) -> Walker:
    walker = Walker(feed, scanner, reader.shape, salvage)
    try:
        walker.run()
    except TraceFileError as error:
        raise TraceFileError(f"{source.path}: {error}") from None
    if source.cut:
        salvage.note(source.cut)
    if not walker.found or _PYTHON_EXPORTER in source.first:
        raise TraceFileError(_no_trace(source.path, source.first, walker.head, reader.shape))
    return walker


def head_integer(raw: bytes | None) -> int | None:
    """An integer beside the array, quoted or not; None if it is none."""
    text = (raw or b"").strip(b'"')
    value = int(text) if text.removeprefix(b"-").isdigit() and len(text) <= 20 else None
    return value if value is not None and abs(value) <= LARGEST else None


def head_text(raw: bytes | None) -> str | None:
    """A text beside the array; None if it is none."""
    try:
        return msgspec.json.decode(raw or b"null", type=str | None)
    except msgspec.DecodeError:
        return None


def _is_utf8(data: bytes | bytearray) -> bool:
    if data.isascii():
        return True
    try:
        with memoryview(data) as view:
            at = 0
            while at < len(view):
                end = min(len(view), at + BUFFER_SIZE)
                while end < len(view) and view[end] & 0xC0 == 0x80 and end > at:
                    end -= 1  # do not cut a character in two
                if end == at:
                    return False
                str(view[at:end], "utf-8")
                at = end
    except UnicodeDecodeError:
        return False
    return True


def _no_trace(path: Path, first: bytes, head: dict[str, bytes], shape: Shape) -> str:
    if not first.strip(b"\xef\xbb\xbf \t\r\n"):
        return empty(path)
    what, give = _WANTED[shape.key]
    if _PYTHON_EXPORTER in first:
        looks = "the export of torch's Python-only profiler, which has no process ids and no device side"
    elif head:
        keys = ", ".join(list(head)[:6])
        other = next((name for key, (name, _) in _WANTED.items() if key != shape.key and key in head), None)
        looks = f"a {other}" if other else f"JSON with the keys {keys[:200]}"
    else:
        looks = what_it_looks_like(first)
    return f"{path} is no {what}: it has no '{shape.key}' and looks like {looks}. {give}"


_WANTED = {
    "traceEvents": ("device trace", "Give the JSON that torch.profiler's export_chrome_trace wrote."),
    "nodes": ("host trace", "Give the JSON that the ExecutionTraceObserver wrote."),
}
