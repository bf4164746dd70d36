"""What a merged rank was made from: a merge that would find the same does not do it again."""

from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import msgspec

from chakra_capture import layout
from chakra_capture.trace import SCHEMA_VERSION
from chakra_capture.trace.discovery import RankFiles


class Stamp(msgspec.Struct, frozen=True, kw_only=True):
    """One input file, told from a later one under its name."""

    name: str
    num_bytes: int
    mtime_ns: int


class WindowOrigin(msgspec.Struct, frozen=True, kw_only=True):
    """The inputs of one window."""

    host: Stamp | None
    device: Stamp | None
    unfinished: bool
    cut_steps: tuple[int, ...] | None
    issued: Stamp | None


class Origin(msgspec.Struct, frozen=True, kw_only=True):
    """All that decides what the tables of a rank hold.

    Attributes:
        version, schema_version: of the tool that merges, and of its tables.
        fault: why the rank is not of its run; merged all the same, by force.
    """

    version: str | None
    schema_version: int
    force: bool
    strict: bool
    fault: str | None
    windows: tuple[WindowOrigin, ...]
    phases: Stamp | None


class _Link(msgspec.Struct):
    made_from: Origin
    tables: dict[str, int]
    windows: list[dict[str, Any]]


def origin(files: RankFiles, *, force: bool, strict: bool, fault: str | None = None) -> Origin:
    """Look at the inputs of a rank as they are now."""
    return Origin(
        version=own_version(),
        schema_version=SCHEMA_VERSION,
        force=force,
        strict=strict,
        fault=fault if force else None,
        windows=_windows(files),
        phases=_stamp(files.phases),
    )


@cache
def own_version() -> str | None:
    """Version of this package; None where it is run without being installed."""
    try:
        return version("chakra-capture")
    except PackageNotFoundError:
        return None


def merged_from(folder: Path, made_from: Origin) -> tuple[dict[str, Any], ...] | None:
    """The windows of link.json, if the tables in ``folder`` are whole and made from just this; else None."""
    link = _read_link(folder)
    if link is None or link.made_from != made_from or not link.tables or link.tables != table_sizes(folder):
        return None
    return tuple(link.windows)


def is_of(folder: Path, files: RankFiles) -> bool:
    """Whether the tables in ``folder`` were made from these traces, however they were merged."""
    link = _read_link(folder)
    return link is not None and link.made_from.windows == _windows(files)


def _read_link(folder: Path) -> _Link | None:
    """None too of one that another version wrote."""
    try:
        return msgspec.json.decode((folder / layout.LINK_FILE).read_bytes(), type=_Link)
    except (OSError, msgspec.DecodeError):
        return None


def _windows(files: RankFiles) -> tuple[WindowOrigin, ...]:
    return tuple(
        WindowOrigin(
            host=_stamp(window.host),
            device=_stamp(window.device),
            unfinished=window.unfinished,
            cut_steps=window.cut_steps,
            issued=_stamp(window.issued),
        )
        for window in files.windows
    )


def table_sizes(folder: Path) -> dict[str, int]:
    """Bytes of each table in the folder of a rank."""
    return {path.name: path.stat().st_size for path in sorted(folder.glob("*.parquet"))}


def _stamp(path: Path | None) -> Stamp | None:
    """None too of a file that is gone: merging it says so."""
    try:
        status = path.stat() if path else None
    except OSError:
        return None
    return (
        None
        if path is None or status is None
        else Stamp(name=path.name, num_bytes=status.st_size, mtime_ns=status.st_mtime_ns)
    )
