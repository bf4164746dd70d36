"""Reading one trace file into columns: through the C scanner where it is built, else through msgspec.

Both hand unusual elements to the same slow reader and damaged ones to the same walker, so the columns are equal.
"""

import gc
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from chakra_capture.errors import MissingDependencyError, TraceFileError
from chakra_capture.trace import native
from chakra_capture.trace.columns import LARGEST, Coded, Int64, Positions, Rows, Sparse, insert_rows
from chakra_capture.trace.dictionary import Numbers
from chakra_capture.trace.feed import BUFFER_SIZE, Feed
from chakra_capture.trace.files import ByteSource, Limits, empty, what_it_looks_like
from chakra_capture.trace.mend import Shape
from chakra_capture.trace.packed import Texts
from chakra_capture.trace.salvage import Salvage
from chakra_capture.trace.scanners import ScannerKind
from chakra_capture.trace.spill import Spill
from chakra_capture.trace.text_scanner import TextScanner
from chakra_capture.trace.walk import Walker

# So many odd elements wait to be read together.
_BATCH = 20_000
# Elements of one layout are read together, so a larger piece costs less for each.
_TEXT_BUFFER_SIZE = 1 << 23
_PYTHON_EXPORTER = b'"CPU functions"'


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """How to read.

    Attributes:
        scanner: what reads; None takes the C core if it is built.
        spill: where columns go that are too large for memory; None keeps them all in it.
        buffer_size: bytes of the file that are looked at together; None takes what suits the scanner.
    """

    scanner: ScannerKind | None = None
    spill: Spill | None = None
    buffer_size: int | None = None
    limits: Limits = field(default_factory=Limits)


@dataclass(slots=True)
class Part:
    """Columns of some elements of a file; all its parts number their texts by the same dictionaries."""

    ints: dict[str, Int64]
    codes: dict[str, Positions]
    wide: dict[str, Sparse]

    def __len__(self) -> int:
        return len(next(iter(self.ints.values())))


class SlowReader(ABC):
    """Reads elements through msgspec, many at once or one by one.

    Beside the C core it reads what that hands over; its rows go before the given rows of the core.

    Attributes:
        numbers: the dictionaries of the text columns.
    """

    shape: Shape

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Forget what was read."""
        self.num_taken = 0
        self.numbers: dict[str, Numbers[Any]] = {key: Numbers() for key in self.native_layout().texts}
        self._waiting: list[Any] = []
        self._before: list[int] = []
        self._parts: list[Part] = []

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
        self._count([element])
        if self.kept([element]):
            self._waiting.append(element)
            self._before.append(before)
            if len(self._waiting) >= _BATCH:
                self._flush()
        return None

    def take_all(self, array: bytes) -> bool:
        """Read an array of elements; if not all of them are as they should be, none is read and it is false."""
        try:
            if not array.isascii():
                array.decode()
            elements = self.decode_all(array)
            part = self.to_part(self.kept(elements))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return False
        self._flush()
        self._parts.append(part)
        self._count(elements)
        return True

    def rows(self) -> tuple[Rows, Sequence[int]]:
        """All rows taken, and before which rows they go."""
        self._flush()
        parts = self._parts or [self.to_part([])]
        self._parts = []
        starts = np.cumsum([0, *map(len, parts)]).tolist()
        rows = Rows(
            ints={key: np.concatenate([part.ints.pop(key) for part in parts]) for key in list(parts[0].ints)},
            texts={key: self._coded(key, [part.codes.pop(key) for part in parts]) for key in list(parts[0].codes)},
            wide={key: _joined([part.wide.pop(key) for part in parts], starts) for key in list(parts[0].wide)},
        )
        return rows, self._before

    def _coded(self, key: str, codes: list[Positions]) -> Coded:
        layout = self.native_layout()
        entries = self.numbers.pop(key).entries()
        is_string = key in layout.texts[: layout.num_quoted]
        return Coded(np.concatenate(codes), list(entries) if is_string else Texts.of(entries))

    def _flush(self) -> None:
        if self._waiting:
            self._parts.append(self.to_part(self._waiting))
        self._waiting = []

    def _count(self, elements: list[Any]) -> None:
        self.num_taken += len(elements)
        self.count(elements)

    @abstractmethod
    def decode(self, text: bytes) -> Any:
        """The element, or in words why it is none."""

    @abstractmethod
    def decode_all(self, array: bytes) -> list[Any]:
        """The elements of a whole array.

        Raises:
            msgspec.DecodeError: one of them is not as it should be; those that become rows may also say so there.
        """

    @abstractmethod
    def kept(self, elements: list[Any]) -> list[Any]:
        """Those that become rows."""

    @abstractmethod
    def to_part(self, elements: list[Any]) -> Part:
        """Columns of elements that become rows.

        Raises:
            msgspec.DecodeError: one of them is not as it should be.
        """

    def count(self, elements: list[Any]) -> None:  # noqa: B027  # not every kind of trace has something to count
        """Count elements, whether they become rows or not."""

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
                    file = _read_msgspec(source, reader_type, options)
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
        feed = Feed(source, options.buffer_size or BUFFER_SIZE)
        feed.more(0)
        walker = _walk(source, feed, scanner, reader, salvage)
        rows = scanner.rows()
        reader.add_native_counts(scanner)
        num_elements = scanner.count
    slow, before = reader.rows()
    if before:
        rows = insert_rows(rows, slow, np.array(before, dtype=np.int64))
    return ReadFile(rows, walker.head, num_elements, reader.counts(), salvage, ScannerKind.NATIVE)


def _read_msgspec(source: ByteSource, reader_type: type[SlowReader], options: ReadOptions) -> ReadFile:
    salvage, reader = Salvage(), reader_type()
    scanner = TextScanner(reader, reader.shape)
    feed = Feed(source, options.buffer_size or _TEXT_BUFFER_SIZE)
    feed.more(0)
    walker = _walk(source, feed, scanner, reader, salvage)
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


def _joined(parts: list[Sparse], starts: list[int]) -> Sparse:
    return Sparse(
        np.concatenate([part.rows + start for part, start in zip(parts, starts, strict=False)]),
        np.concatenate([part.values for part in parts]),
    )


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
