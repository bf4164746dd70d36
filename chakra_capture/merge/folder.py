"""A folder of results that is there whole or not at all, and takes the place of nothing."""

import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from chakra_capture import layout
from chakra_capture.errors import TraceFileError


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """Give a folder to write to, which gets the name ``out`` when all is written; after a fault nothing is left of it.

    Raises:
        TraceFileError: there is something of that name already, or the folder cannot be written to.
    """
    if out.exists() or out.is_symlink():
        raise _exists(out)
    part = layout.part_path(out.with_name(f"{out.name}.{secrets.token_hex(4)}"))
    try:
        part.mkdir(parents=True)
        yield part
        _give_name(part, out)
    except OSError as error:
        raise TraceFileError(
            f"{out} cannot be written: {error.strerror or error}. Give a writable folder with -o."
        ) from error
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _give_name(part: Path, out: Path) -> None:
    # A folder may be renamed to the name of an empty one: made here, it is nobody else's.
    try:
        out.mkdir()
    except FileExistsError:
        raise _exists(out) from None
    part.rename(out)


def _exists(out: Path) -> TraceFileError:
    return TraceFileError(f"{out} exists already, and nothing is written over. Name a new folder with -o.")
