"""The file: events joined to one JSON object, compressed where its name ends in .gz, named when it is whole."""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import msgspec
from isal import isal_zlib

from chakra_capture import layout
from chakra_capture.errors import TraceFileError
from chakra_capture.trace.files import GZIP_WBITS

_LEVEL = 2


class EventFile:
    """One file that events go to.

    Attributes:
        num_events: written so far.
        num_bytes: of JSON.
    """

    def __init__(self, file: IO[bytes], *, compress: bool) -> None:
        self.num_events = self.num_bytes = 0
        self._file = file
        # Without a time stamp, so that equal input gives equal bytes.
        self._packer = isal_zlib.compressobj(_LEVEL, wbits=GZIP_WBITS) if compress else None

    def begin(self, head: dict[str, Any]) -> None:
        """Write the members of the object that come before the events."""
        # With blanks after the colons: HTA looks for the rank by a pattern, before it parses anything.
        text = str(msgspec.json.format(msgspec.json.encode(head), indent=1), "utf-8")
        self._put(f'{text.removesuffix("}").rstrip()},\n "traceEvents": [\n')

    def add(self, count: int, events: str) -> None:
        """Write some events, as elements of a list."""
        if count:
            self._put(f",\n{events}" if self.num_events else events)
            self.num_events += count

    def add_all(self, blocks: Iterable[tuple[int, str]]) -> int:
        """Write blocks of events; gives their number."""
        before = self.num_events
        for count, events in blocks:
            self.add(count, events)
        return self.num_events - before

    def end(self) -> None:
        """Write what closes the object."""
        self._put("\n]}\n")
        if self._packer is not None:
            self._file.write(self._packer.flush())

    def _put(self, text: str) -> None:
        data = text.encode()
        self.num_bytes += len(data)
        self._file.write(data if self._packer is None else self._packer.compress(data))


def check_free(paths: Iterable[Path], *, overwrite: bool) -> None:
    """Make sure that these files may be written, before the first of them is.

    Raises:
        TraceFileError: one is there already and is not to be replaced, or its folder cannot be made.
    """
    there = [path for path in paths if path.exists() and not overwrite]
    if there:
        raise TraceFileError(f"{there[0]} exists already. Give another name with -o, or --overwrite to replace it.")
    for path in paths:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _unwritable(path, error) from error


@contextmanager
def event_file(path: Path) -> Iterator[EventFile]:
    """Around the writing of a file, which has its name when all of it is written.

    Raises:
        TraceFileError: it cannot be written.
    """
    part = layout.part_path(path)
    try:
        part.unlink(missing_ok=True)
        with part.open("xb") as file:
            events = EventFile(file, compress=path.suffix == ".gz")
            yield events
            events.end()
        os.replace(part, path)
    except FileNotFoundError:  # of the tables, which are read while it is written
        raise
    except OSError as error:
        raise _unwritable(path, error) from error
    finally:
        _remove(part)


def _unwritable(path: Path, error: OSError) -> TraceFileError:
    why = error.strerror or error
    return TraceFileError(f"{path} cannot be written: {why}. Give a writable place with enough space with -o.")


def _remove(part: Path) -> None:
    try:
        part.unlink(missing_ok=True)
    except OSError:
        return  # in the folder that could not be written to
