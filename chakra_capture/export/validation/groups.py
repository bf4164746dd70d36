"""V14: the file of process groups, and whether ranks use the groups they are in."""

from dataclasses import dataclass
from pathlib import Path

import msgspec

from chakra_capture.errors import TraceFileError
from chakra_capture.export.et_reader import EtNode
from chakra_capture.export.validation import checks
from chakra_capture.export.validation.findings import Findings, Place
from chakra_capture.export.validation.node_checks import WORLD, Operation

_LARGEST_FILE = 64 << 20
_LARGEST_ID = 2**31 - 1
_GROUPS_NODE = "process_group:init"


@dataclass(frozen=True, slots=True)
class Groups:
    """Members of each process group.

    Attributes:
        is_given: there is a group file that could be read.
    """

    members: dict[int, tuple[int, ...]]
    is_given: bool


def read_groups(path: Path | None, findings: Findings) -> Groups:
    """Read a group file and check what it says by itself; without one there are no groups.

    Raises:
        TraceFileError: the file cannot be read.
    """
    if path is None:
        return Groups({}, is_given=False)
    try:
        with path.open("rb") as file:
            text = file.read(_LARGEST_FILE + 1)
    except OSError as error:
        raise TraceFileError(f"{path} cannot be read: {error.strerror}. Give the file of process groups.") from None
    try:
        if len(text) > _LARGEST_FILE:
            raise msgspec.DecodeError(f"it is larger than {_LARGEST_FILE:,} bytes")
        given = msgspec.json.decode(text, type=dict[str, object])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        findings.add(checks.GROUPS_UNREADABLE, Place(detail=f"{path}: {error}"))
        return Groups({}, is_given=False)
    groups = Groups(dict(_checked(given, findings)), is_given=True)
    if groups.members and sorted(groups.members) != [*range(1, len(groups.members) + 1)]:
        shown = ", ".join(map(str, sorted(groups.members)[:10]))
        findings.add(checks.GROUP_IDS, Place(detail=shown))
    return groups


def _checked(given: dict[str, object], findings: Findings) -> list[tuple[int, tuple[int, ...]]]:
    found = []
    for key, members in given.items():
        if not (key.isascii() and key.isdigit() and len(key) <= 10 and 0 < int(key) <= _LARGEST_ID):
            findings.add(checks.GROUP_KEY, Place(detail=repr(key[:40])))
            continue
        ranks = _ranks(members)
        if ranks is None:
            findings.add(checks.GROUP_MEMBERS, Place(detail=f"group {key}"))
            continue
        if len(ranks) == 1:
            findings.add(checks.GROUP_OF_ONE, Place(rank=ranks[0], detail=f"group {key}"))
        found.append((int(key), ranks))
    return found


def _ranks(members: object) -> tuple[int, ...] | None:
    """Members as ranks; None if they are no list of different numbers from 0."""
    if not isinstance(members, list) or not members:
        return None
    ranks = tuple(one for one in members if type(one) is int and one >= 0)
    return ranks if len(ranks) == len(members) == len(set(ranks)) else None


class _Stated(msgspec.Struct):
    """A process group as torch's observer lists it."""

    pg_name: str
    ranks: list[int]


def stated_groups(node: EtNode) -> dict[str, tuple[int, ...]]:
    """Groups that a node ``process_group:init`` lists: its inputs are a Python list of one JSON text."""
    if _GROUPS_NODE not in node.name or node.inputs is None:
        return {}
    text = node.inputs.values.replace('\\"', '"').replace("\\'", "'")
    begin, end = text.find("[{"), text.rfind("}]")
    try:
        found = msgspec.json.decode(text[begin : end + 2] if begin >= 0 else "[]", type=list[_Stated])
    except (msgspec.DecodeError, RecursionError):
        return {}
    return {one.pg_name: tuple(one.ranks) for one in found if one.ranks}


def check_stated(by_rank: dict[int, dict[str, tuple[int, ...]]], findings: Findings) -> None:
    """Hold the groups that ranks list against each other: a group is the same for all ranks that list it."""
    first: dict[str, tuple[int, tuple[int, ...]]] = {}
    for rank, stated in by_rank.items():
        for name, members in stated.items():
            other, expected = first.setdefault(name, (rank, members))
            if members != expected:
                detail = f"group {name[:40]}: ranks {_shown(members)}, and rank {other} has {_shown(expected)}"
                findings.add(checks.GROUPS_DIFFER, Place(rank, detail=detail))


def _shown(members: tuple[int, ...]) -> str:
    return ", ".join(map(str, members[:8])) + (", ..." if len(members) > 8 else "")


def check_world_size(groups: Groups, num_ranks: int, findings: Findings) -> None:
    """Report members that no file can be of."""
    for number, ranks in groups.members.items():
        if outside := [rank for rank in ranks if rank >= num_ranks]:
            detail = f"group {number} has rank {outside[0]}, and there are {num_ranks} ranks"
            findings.add(checks.GROUP_OUTSIDE, Place(detail=detail))


def check_use(operations: list[Operation], rank: int, groups: Groups, findings: Findings) -> None:
    """Report collectives of a rank that name a group they cannot."""
    has_named = any(one.group != WORLD for one in operations)
    for one in operations:
        place = Place(rank, one.node_id, one.name, f"group {one.group}")
        if one.group == WORLD:
            if has_named or groups.members:
                findings.add(checks.WORLD_IMPLICIT, place)
        elif not groups.is_given:
            findings.add(checks.GROUPS_MISSING, place)
        elif one.group not in groups.members:
            findings.add(checks.PG_UNKNOWN, place)
        elif rank not in groups.members[one.group]:
            findings.add(checks.NOT_A_MEMBER, place)
        elif one.comm_type in checks.OF_FULL_INPUT and one.size % len(groups.members[one.group]):
            detail = f"{one.size:,} bytes, {len(groups.members[one.group])} ranks"
            findings.add(checks.COMM_SIZE_SHARE, Place(rank, one.node_id, one.name, detail))
