"""Linked JSON files of one rank: written under a working name, which becomes the final one when the file is whole."""

import os
from collections.abc import Callable, Iterator
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


def export_rank(
    tables: RankTables, folder: Path, *, overwrite: bool = False, seen: Seen | None = None
) -> list[LinkedFile]:
    """Write the linked JSON of one rank, a file for each window.

    Args:
        overwrite: replace files of an export before this one.
        seen: told how many nodes of a window are written, and how many it has.

    Raises:
        TraceFileError: the tables cannot be read, a file is there already, or the folder cannot be written to.
    """
    written = []
    try:
        windows = list(tables.windows())
        paths = [folder / layout.linked_file_name(tables.rank, window.window) for window in windows]
        for path in paths:
            if path.exists() and not overwrite:
                raise TraceFileError(f"{path} exists already. Give another folder with -o, or --overwrite to replace it.")
        for window, path in zip(windows, paths, strict=True):
            linked = linked_window(window)

            def report(done: int, of: int = linked.num_nodes) -> None:
                if seen is not None:
                    seen(done, of)

            size = _write(path, linked.texts(report))
            written.append(LinkedFile(path, window.window, size, linked.contents))
    except (FileNotFoundError, pl.exceptions.PolarsError) as error:
        why = str(error).splitlines()[0]
        raise TraceFileError(f"the tables of rank {tables.rank} cannot be read ({why}). Merge it again.") from error
    return written


def _write(path: Path, texts: Iterator[str]) -> int:
    part = layout.part_path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.unlink(missing_ok=True)
        with part.open("x", encoding="utf-8") as file:
            file.writelines(texts)
        os.replace(part, path)
        return path.stat().st_size
    except FileNotFoundError:
        raise
    except OSError as error:
        why = error.strerror or str(error)
        raise TraceFileError(f"{path} cannot be written: {why}. Give a writable folder with -o.") from error
    finally:
        _remove(part)


def _remove(part: Path) -> None:
    try:
        part.unlink(missing_ok=True)
    except OSError:
        return  # the folder that could not be written to
