"""Process groups as traces state them: name, description, members."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec

# torch's DeviceMesh describes the group of dimension dp as mesh_dp.
_MESH = re.compile(r"mesh_(?P<dim>\w+)")
# Megatron (and NeMo) describe theirs in words.
_MEGATRON = {
    "DATA_PARALLEL_GROUP": "dp",
    "DATA_PARALLEL_GROUP_WITH_CP": "dp_cp",
    "TENSOR_MODEL_PARALLEL_GROUP": "tp",
    "PIPELINE_MODEL_PARALLEL_GROUP": "pp",
    "CONTEXT_PARALLEL_GROUP": "cp",
    "EXPERT_MODEL_PARALLEL_GROUP": "ep",
}
MOST_RANKS = 1 << 20


@dataclass(frozen=True, slots=True)
class ProcessGroup:
    """One process group that a rank belongs to.

    Attributes:
        ranks: global ranks in group order; None where the trace does not tell.
    """

    name: str
    description: str | None = None
    ranks: tuple[int, ...] | None = None
    size: int | None = None

    @property
    def mesh_dim(self) -> str | None:
        """Dimension of the device mesh that the group serves."""
        return mesh_dimension(self.description)


class _Stated(msgspec.Struct):
    """A group in the JSON of the host trace's init node, or in distributedInfo of the device trace."""

    pg_name: str | int
    pg_desc: str | None = None
    backend_id: int | None = None
    ranks: list[int] | str | None = None
    group_size: int | None = None
    pg_size: int | None = None


def mesh_dimension(description: str | None) -> str | None:
    """Dimension of a device mesh that a group's description names: ``tp`` for ``mesh_tp``; None for none."""
    if description is None:
        return None
    match = _MESH.fullmatch(description)
    return match["dim"] if match else _MEGATRON.get(description)


def groups_in_init(value: str) -> tuple[list[ProcessGroup], dict[int, str]]:
    """Groups in the input of an init node, and the names of their backends' ids; nothing where it is none."""
    try:
        stated = msgspec.json.decode(value, type=list[_Stated])
    except (msgspec.DecodeError, RecursionError):
        return [], {}
    ids = {one.backend_id: str(one.pg_name) for one in stated if one.backend_id is not None}
    return [_group(one) for one in stated], ids


def groups_in_config(raw: bytes) -> list[ProcessGroup]:
    """Groups in ``pg_config`` of a device trace's distributedInfo; what is none is left out."""
    try:
        items: list[msgspec.Raw] = msgspec.json.decode(raw, type=list[msgspec.Raw])
    except (msgspec.DecodeError, RecursionError):
        return []
    found = []
    for item in items:
        try:
            found.append(_group(msgspec.json.decode(item, type=_Stated)))
        except (msgspec.DecodeError, RecursionError):
            continue
    return found


def _group(stated: _Stated) -> ProcessGroup:
    size = stated.group_size if stated.group_size is not None else stated.pg_size
    listed = stated.ranks if isinstance(stated.ranks, list) else ranks_in_text(stated.ranks)
    if not listed and size is not None and 0 < size <= MOST_RANKS:
        listed = list(range(size))  # of all ranks torch writes an empty list
    ranks = sound_ranks(listed)
    return ProcessGroup(str(stated.pg_name), stated.pg_desc or None, ranks, size or (len(ranks) if ranks else None))


def sound_ranks(listed: Sequence[int] | None) -> tuple[int, ...] | None:
    """Members as listed; None for none, and for a list with a number that no rank has."""
    return tuple(listed) if listed and min(listed) >= 0 and max(listed) < MOST_RANKS else None


def ranks_in_text(text: str | None) -> list[int] | None:
    """Ranks as Kineto writes them, ``"[0, 1]"``; None where the list is cut (``...``) or is none."""
    if not text or "..." in text:
        return None
    try:
        return msgspec.json.decode(text, type=list[int])
    except (msgspec.DecodeError, RecursionError):
        return None


def by_name(*sources: Iterable[ProcessGroup]) -> dict[str, ProcessGroup]:
    """Groups of several sources by name; the first source that knows the members, or the description, counts."""
    known: dict[str, ProcessGroup] = {}
    for source in sources:
        for group in source:
            old = known.get(group.name)
            known[group.name] = group if old is None else _both(old, group)
    return known


def _both(first: ProcessGroup, second: ProcessGroup) -> ProcessGroup:
    return ProcessGroup(
        first.name,
        first.description or second.description,
        second.ranks if first.ranks is None else first.ranks,
        second.size if first.size is None else first.size,
    )
