"""Roots put in for those that a host trace lacks, so that no node names a parent that is not there.

The observer writes the process root last, so a killed process leaves none; an op that threw is never written although
its children are (torch 2.13). A thread root without a process goes under an added process root, every other node under
an added root of its thread.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from chakra_capture.annotations import PROCESS_ROOT, THREAD_ROOT
from chakra_capture.merge.rows import by_number
from chakra_capture.trace.columns import MISSING, Coded, Int64
from chakra_capture.trace.host import USER_SCOPE, AddedRoots, HostTrace
from chakra_capture.trace.keys import match_keys
from chakra_capture.trace.packed import Packed, pack

_MOST_NAMED = 10


@dataclass(frozen=True, slots=True)
class _Root:
    """A root to add; ``parent`` is ``MISSING`` for that of the process."""

    node_id: int
    tid: int
    parent: int


def add_roots(host: HostTrace) -> HostTrace:
    """Give every node whose parent is not in the file an added root, which has an id that such a node named.

    Noted in ``host.salvage``, for it is a repair.
    """
    parent = host.parent[:]
    absent = (match_keys(parent, host.node_id[:]) < 0) & (parent != MISSING)
    if not absent.any():
        return host
    # Whatever a process root names, it is the root: under an added one, which stands under it, it would close a circle.
    parent[absent & host.is_process] = MISSING
    dangling = np.flatnonzero(absent & ~host.is_process)
    if not len(dangling):
        return replace(host, parent=pack(parent))
    named = np.unique(host.parent[dangling])
    missing_parents = tuple(named[:_MOST_NAMED].tolist())
    shown = ", ".join(map(str, missing_parents)) + (" ..." if len(named) > _MOST_NAMED else "")
    host.salvage.note(f"parents that are not in the file ({shown}), nodes put under added roots: {len(dangling)}")
    roots = _roots(host, dangling, parent)
    added = AddedRoots(len(dangling), missing_parents, len(roots))
    return replace(_appended(host, roots, parent), added=added)


def _roots(host: HostTrace, dangling: Int64, parent: Int64) -> list[_Root]:
    """The roots to add; enters them as parents."""
    tids, named, is_thread = host.attrs["tid"][dangling], host.parent[dangling], host.is_thread[dangling]
    roots = []
    process = host.node_id[host.is_process]
    if len(process):
        process_id = int(process[0])
    else:
        process_id = int(named[is_thread][0]) if is_thread.any() else _free_id(host)
        roots.append(_Root(process_id, int(tids[0]), MISSING))
    parent[dangling[is_thread]] = process_id
    taken, lowest = {root.node_id for root in roots}, _free_id(host)
    others = np.flatnonzero(~is_thread)
    for mine in by_number(others, tids[others]):
        node_id = next((number for number in named[mine].tolist() if number not in taken), lowest - len(roots))
        roots.append(_Root(node_id, int(tids[mine[0]]), process_id))
        taken.add(node_id)
        parent[dangling[mine]] = node_id
    return roots


def _free_id(host: HostTrace) -> int:
    """An id below all those in the file."""
    named = host.parent[:]
    named = named[named != MISSING]
    return min(int(host.node_id[:].min()), int(named.min(initial=0)), 0) - 1


def _appended(host: HostTrace, roots: list[_Root], parent: Int64) -> HostTrace:
    def ints(column: Packed | Int64, values: list[int]) -> Packed:
        return pack(np.append(column[:], np.array(values, dtype=np.int64)))

    none, no_texts = [MISSING] * len(roots), [None] * len(roots)
    of_root = {"tid": [root.tid for root in roots], "scope": [USER_SCOPE] * len(roots)}
    return replace(
        host,
        node_id=ints(host.node_id, [root.node_id for root in roots]),
        parent=ints(parent, [root.parent for root in roots]),
        name=_with_texts(host.name, [PROCESS_ROOT if root.parent == MISSING else THREAD_ROOT for root in roots]),
        attrs={key: ints(column, of_root.get(key, none)) for key, column in host.attrs.items()},
        input_shapes=_with_texts(host.input_shapes, no_texts),
        input_types=_with_texts(host.input_types, no_texts),
        input_values=_with_texts(host.input_values, ["[]"] * len(roots)),
        output_values=_with_texts(host.output_values, ["[]"] * len(roots)),
        details=_with_texts(host.details, no_texts),
    )


def _with_texts(column: Coded, texts: Sequence[str | None]) -> Coded:
    """Append rows. The dictionary is copied only for a text it lacks: it can be most of the trace."""
    values = column.values
    known: dict[str | None, int] = {None: -1}
    for text in texts:
        if text is not None and text not in known:
            known[text] = next((at for at, value in enumerate(values) if value == text), len(values))
            if known[text] == len(values):
                values = [*values, text]
    codes = [known[text] for text in texts]
    return Coded(np.concatenate([column.codes, np.array(codes, dtype=np.int32)]), values)
