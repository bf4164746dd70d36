"""Which Chakra .et files a PATH means: a file, a folder, or a PREFIX of PREFIX.<rank>.et."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from chakra_capture import layout
from chakra_capture.errors import TraceFileError
from chakra_capture.trace.discovery import find_run


@dataclass(frozen=True, slots=True)
class EtPaths:
    """The files of one export.

    Attributes:
        by_rank: file of each rank, in order.
        comm_group: the file of process groups beside them; None if there is none.
        is_whole: these are all ranks; false for one file asked for by its name.
        odd: files whose names nothing else finds, such as those with a padded rank.
    """

    by_rank: dict[int, Path]
    comm_group: Path | None
    is_whole: bool
    odd: tuple[Path, ...] = ()


def find_et(path: Path, job: str | None = None) -> EtPaths:
    """Find the .et files that ``path`` means.

    Raises:
        TraceFileError: there are none, or those of several exports.
    """
    if path.is_file():
        match = layout.ET_NAME.fullmatch(path.name)
        odd = () if match and _is_plain(match["rank"]) else (path,)
        return EtPaths({int(match["rank"]) if match else 0: path}, _comm_group(path.parent), False, odd)
    if path.is_dir():
        folder = next((one for one in (path, path / layout.ET_FOLDER) if _named(one)), None)
        if folder is None:
            folder = find_run(path, job).merged_dir / layout.ET_FOLDER
        return _of_prefix(folder, None, path)
    return _of_prefix(path.parent, path.name, path)


def _of_prefix(folder: Path, prefix: str | None, asked: Path) -> EtPaths:
    found = [(name, rank, file) for name, rank, file in _named(folder) if prefix in (None, name)]
    if not found:
        raise TraceFileError(
            f"{asked} holds no Chakra trace: expected a file X.et, a folder of PREFIX.<rank>.et, or that PREFIX. "
            "Give the path that an export wrote to; validate a run itself with --replay."
        )
    prefixes = Counter(name for name, _, _ in found)
    if len(prefixes) > 1:
        raise TraceFileError(
            f"{asked} holds traces of several exports: {', '.join(sorted(prefixes))}. Give the path with one of these."
        )
    by_rank: dict[int, Path] = {}
    odd = []
    for _, rank, file in sorted(found, key=lambda one: (not _is_plain(one[1]), one[2].suffix == ".gz", one[1])):
        if int(rank) in by_rank:
            continue
        by_rank[int(rank)] = file
        if not _is_plain(rank):
            odd.append(file)
    return EtPaths(dict(sorted(by_rank.items())), _comm_group(folder), True, tuple(odd))


def _named(folder: Path) -> list[tuple[str, str, Path]]:
    """Prefix, rank as written and path of each file in a folder."""
    if not folder.is_dir():
        return []
    return [
        (match["prefix"], match["rank"], child)
        for child in folder.iterdir()
        if (match := layout.ET_NAME.fullmatch(child.name)) and child.is_file()
    ]


def _is_plain(rank: str) -> bool:
    return rank == str(int(rank))


def _comm_group(folder: Path) -> Path | None:
    path = folder / layout.COMM_GROUP_FILE
    return path if path.is_file() else None
