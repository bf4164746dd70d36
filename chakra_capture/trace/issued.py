"""Reading what torch noted of each operation as it was issued: group and numbers, which no trace of gloo holds."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec

_LARGEST_FILE = 64_000_000
# Numbers go to tables, and are multiplied by the bytes of an element.
_Number = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]
_Time = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class IssuedOperation(msgspec.Struct):
    """One collective, as torch's flight recorder noted it while it was issued.

    Attributes:
        time_ns: Unix epoch, within the op of c10d that issued it.
        seq: number among the collectives of its group; the same on every member.
        op: number among all operations of its group, send and recv included.
    """

    name: str
    process_group: str
    time_ns: _Time
    description: str | None = None
    seq: _Number | None = None
    op: _Number | None = None
    dtype: str | None = None
    in_elements: _Number | None = None
    out_elements: _Number | None = None


class GroupCount(msgspec.Struct):
    """How many operations a group had issued when the window began, and when it ended.

    Attributes:
        ranks: global ranks of its members, in group order.
    """

    name: str
    start: _Number | None = None
    end: _Number | None = None
    ranks: list[_Number] | None = None


class Issued(msgspec.Struct):
    """What a rank noted of one recorded cycle.

    Attributes:
        operations: those of the window that torch kept, in order.
        lost: torch kept fewer than were issued, so the first ones may be missing.
    """

    start_ns: _Time = 0
    end_ns: _Time = 0
    lost: bool = False
    groups: list[GroupCount] = []
    operations: list[IssuedOperation] = []


@dataclass(frozen=True, slots=True)
class IssuedFile:
    """A file of issued operations; ``note`` says what it lacks."""

    issued: Issued
    note: str | None = None


def read_issued(path: Path) -> IssuedFile:
    """Read the file; a damaged one costs what it would have told, not the merge."""
    try:
        if path.stat().st_size > _LARGEST_FILE:
            return IssuedFile(Issued(), f"{path.name} is too large to be what it should be, and is not used")
        issued = msgspec.json.decode(path.read_bytes(), type=Issued)
        lost = f"{path.name}: torch kept only the last {len(issued.operations)} collectives of the window"
        return IssuedFile(issued, lost if issued.lost else None)
    except (OSError, msgspec.DecodeError, RecursionError) as error:
        return IssuedFile(Issued(), f"{path.name} cannot be read ({error}), and is not used")
