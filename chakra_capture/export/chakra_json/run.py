"""Linked JSON files of one rank: written under a working name, which becomes the final one when the file is whole."""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import polars as pl

from chakra_capture import layout
from chakra_capture.errors import TraceFileError
from chakra_capture.export.chakra_json.tables import RankTables
from chakra_capture.export.chakra_json.window import Contents, linked_window

Seen = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class LinkedFile:
    """One written file."""

    path: Path
    window: int
    num_bytes: int
    contents: Contents


def prepare_folder(folder: Path, ranks: Sequence[int], *, overwrite: bool = False) -> None:
    """Make sure that files of these ranks can be written, before the first of them is.

    Raises:
        TraceFileError: a file is there already and is not to be replaced, or the folder cannot be made.
    """
    there = [path for rank in ranks for path in _files(folder, rank)]
    if there and not overwrite:
        more = f" and {len(there) - 1} more files of this export" if len(there) > 1 else ""
        raise TraceFileError(
            f"{there[0]}{more} exists already. Give another folder with -o, or --overwrite to replace what is there."
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(folder, error) from error


def export_rank(tables: RankTables, folder: Path, *, seen: Seen | None = None) -> list[LinkedFile]:
    """Write the linked JSON of one rank into a prepared folder, a file for each window, in the place of earlier ones.

    Args:
        seen: told how many nodes of a window are written, and how many it has.

    Raises:
        TraceFileError: the tables cannot be read, or the folder cannot be written to.
    """
    written = []
    try:
        for window in tables.windows():
            path = folder / layout.linked_file_name(tables.rank, window.window)
            linked = linked_window(window)

            def report(done: int, of: int = linked.num_nodes) -> None:
                if seen is not None:
                    seen(done, of)

            size = _write(path, linked.texts(report))
            written.append(LinkedFile(path, window.window, size, linked.contents))
    except (FileNotFoundError, pl.exceptions.PolarsError) as error:
        why = str(error).splitlines()[0]
        raise TraceFileError(f"the tables of rank {tables.rank} cannot be read ({why}). Merge it again.") from error
    for path in {*_files(folder, tables.rank)} - {one.path for one in written}:
        path.unlink()  # of a run with more windows
    return written


def _files(folder: Path, rank: int) -> list[Path]:
    """Files that an export of one rank has left there."""
    return sorted({*folder.glob(layout.linked_file_name(rank)), *folder.glob(layout.linked_file_name(rank, "*"))})


def _write(path: Path, texts: Iterator[str]) -> int:
    part = layout.part_path(path)
    try:
        part.unlink(missing_ok=True)
        with part.open("x", encoding="utf-8") as file:
            file.writelines(texts)
        os.replace(part, path)
        return path.stat().st_size
    except FileNotFoundError:  # of the tables, which are read while they are written
        raise
    except OSError as error:
        raise _unwritable(path, error) from error
    finally:
        _remove(part)


def _unwritable(path: Path, error: OSError) -> TraceFileError:
    return TraceFileError(
        f"{path} cannot be written: {error.strerror or error}. Give a writable folder with enough space with -o."
    )


def _remove(part: Path) -> None:
    try:
        part.unlink(missing_ok=True)
    except OSError:
        return  # the folder that could not be written to
