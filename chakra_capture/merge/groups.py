"""The process group of each operation: stated, noted by torch while it was issued, or the only one that it can be."""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

import msgspec

from chakra_capture.annotations import PROCESS_GROUP_INIT
from chakra_capture.merge.collectives import host_collective
from chakra_capture.merge.comm_facts import CommFacts, bytes_of
from chakra_capture.merge.operations import Operation, may_run
from chakra_capture.merge.tables import Columns
from chakra_capture.trace.columns import MISSING
from chakra_capture.trace.device import DeviceTrace
from chakra_capture.trace.host import HostTrace
from chakra_capture.trace.issued import Issued, IssuedOperation
from chakra_capture.trace.process_groups import ProcessGroup, by_name, groups_in_init, sound_ranks

_POINT_TO_POINT = ("send", "recv")


@dataclass(frozen=True, slots=True)
class KnownGroups:
    """What one rank knows of process groups.

    Attributes:
        groups: those it belongs to, by name.
        names_of_ids: names by the address that host traces of schema 1.0.2 write.
        issued: what torch noted of each operation.
    """

    rank: int
    groups: dict[str, ProcessGroup] = field(default_factory=dict)
    names_of_ids: dict[int, str] = field(default_factory=dict)
    issued: Issued = field(default_factory=Issued)

    @classmethod
    def of(cls, rank: int, host: HostTrace | None, device: DeviceTrace | None, issued: Issued) -> "KnownGroups":
        """Gather what the files of a rank state."""
        stated, ids = _init_groups(host)
        listed = () if device is None else device.process_groups
        noted = [ProcessGroup(op.process_group, op.description or None) for op in issued.operations]
        # First: of a group of all ranks torch writes no list, so its trace does not tell their order.
        in_order = [ProcessGroup(g.name, ranks=sound_ranks(g.ranks)) for g in issued.groups if g.ranks]
        return cls(rank, by_name(in_order, stated, listed, noted), ids, issued)

    def complete(
        self, columns: Columns, operations: list[Operation], caller_group: Callable[[Operation], str | None]
    ) -> None:
        """Say of each operation which group it is of, as far as anything tells, and its members, root and peer."""
        left: list[IssuedOperation] = []
        times = _by_order(columns, operations, self.issued)
        if times is None:
            left = _from_notes(columns, operations, self.issued.operations)
            times = [int(columns.ts_ns[one.root]) if one.root >= 0 else MISSING for one in operations]
        for one in _without_group(operations):
            one.facts = replace(one.facts, process_group=caller_group(one))
        _by_thread(columns, operations)
        _from_notes(columns, operations, left)
        self._only_possible(operations, times)
        groups = by_name(self.groups.values(), _stated(operations))
        for one in operations:
            group = groups.get(one.facts.process_group or "")
            if group is not None:
                one.facts = _with_members(one.facts, group)

    def _only_possible(self, operations: list[Operation], times: list[int]) -> None:
        """Give operations that torch only counted (send, recv) the group that is the only one they can be of."""
        counts = _Counts.of({name for name, group in self.groups.items() if group.size != 1}, self.issued)
        able: dict[int, set[str]] = {}
        at: dict[int, dict[str, int]] = {}
        unknown = list(_without_group(operations))
        issued = [ts for one, ts in zip(operations, times, strict=True) if _is_unknown(one)]
        for number, (one, ts) in enumerate(zip(unknown, issued, strict=True)):
            at[number] = {name: count.interval(ts) for name, count in counts.items()}
            able[number] = {name for name in counts if self._reaches(self.groups[name], one.facts)}
        _settle(unknown, able, at, counts)
        for number, one in enumerate(unknown):
            if len(able[number]) == 1:
                one.facts = replace(one.facts, process_group=able[number].pop())

    def _reaches(self, group: ProcessGroup, facts: CommFacts) -> bool:
        """Whether the peer or root is a member, and not this rank itself."""
        at = facts.group_root if facts.group_peer is None else facts.group_peer
        if at is None or group.ranks is None:
            return True
        return at < len(group.ranks) and (facts.group_peer is None or group.ranks[at] != self.rank)


def _init_groups(host: HostTrace | None) -> tuple[list[ProcessGroup], dict[int, str]]:
    """Groups that the init node of a host trace lists; its input is a list of one JSON text."""
    if host is None:
        return [], {}
    found: tuple[list[ProcessGroup], dict[int, str]] = ([], {})
    for row in host.name.mask((PROCESS_GROUP_INIT,)).nonzero()[0].tolist()[-1:]:
        try:
            texts = msgspec.json.decode(host.input_values[row] or "[]", type=list[str])
        except (msgspec.DecodeError, RecursionError):
            continue
        found = groups_in_init(texts[0]) if texts else found
    return found


def _without_group(operations: Iterable[Operation]) -> Iterable[Operation]:
    return (one for one in operations if _is_unknown(one))


def _is_unknown(one: Operation) -> bool:
    return bool(one.collective) and one.facts.process_group is None


def _stated(operations: Iterable[Operation]) -> list[ProcessGroup]:
    return [
        ProcessGroup(f.process_group, f.description, f.ranks, f.group_size)
        for f in (one.facts for one in operations)
        if f.process_group is not None
    ]


def _with_members(facts: CommFacts, group: ProcessGroup) -> CommFacts:
    ranks = facts.ranks or group.ranks
    return replace(
        facts,
        description=facts.description or group.description,
        ranks=ranks,
        group_size=facts.group_size or group.size,
        root=_global(facts.root, facts.group_root, ranks),
        peer=_global(facts.peer, facts.group_peer, ranks),
    )


def _global(known: int | None, in_group: int | None, ranks: tuple[int, ...] | None) -> int | None:
    if known is not None or in_group is None or ranks is None or in_group >= len(ranks):
        return known
    return ranks[in_group]


def _from_notes(columns: Columns, operations: list[Operation], notes: list[IssuedOperation]) -> list[IssuedOperation]:
    """Give each note to the op of c10d that was under way when it was made.

    Returns:
        Notes that may be of several, which threads issued at once: they are of none until the group of one is known.
    """
    asked = sorted(
        (int(columns.ts_ns[one.root]), one)
        for one in operations
        if one.root >= 0 and one.collective and columns.ts_ns[one.root] != MISSING
    ) if notes else []  # fmt: skip
    starts = [ts for ts, _ in asked]
    ends = [ts + max(int(columns.dur_ns[one.root]), 0) for ts, one in asked]
    latest = _running_max(ends)
    left = []
    for note in notes:
        at = bisect_right(starts, note.time_ns) - 1
        under_way = []
        while at >= 0 and latest[at] >= note.time_ns:
            if ends[at] >= note.time_ns and _is_of(note, asked[at][1]):
                under_way.append(asked[at][1])
            at -= 1
        if len(under_way) == 1:
            one = under_way[0]
            one.facts = one.facts.or_else(_noted_facts(note, one))
        elif under_way:
            left.append(note)
    return left


def _by_order(columns: Columns, operations: list[Operation], issued: Issued) -> list[int] | None:
    """Give the notes to the operations of a host trace alone, in order, and say when each was issued.

    Only where both are one list, alike in kind and size: None where they are not, where a thread more may have come in
    between, and where times tell. What is not noted (send, recv) was issued after the last note before it.
    """
    roots = [one.root for one in operations if one.collective]
    notes, at, time = issued.operations, 0, issued.start_ns
    if issued.lost or not notes or not roots or min(roots) < 0 or (columns.ts_ns[roots] != MISSING).any():
        return None
    if len(set(columns.track[roots].tolist())) > 1:
        return None
    given: list[tuple[Operation, IssuedOperation]] = []
    times = []
    for one in operations:
        number = _num_notes(one, notes, at) if one.collective else 0
        if number is None:
            return None
        if number:
            given.append((one, notes[at]))
            at += number
            time = notes[at - 1].time_ns
        times.append(time)
    if at < len(notes):
        return None
    for one, note in given:
        one.facts = one.facts.or_else(_noted_facts(note, one))
    return times


def _num_notes(one: Operation, notes: list[IssuedOperation], at: int) -> int | None:
    """How many notes from there on are of this operation, several where others run in its place; None: they are not."""
    total = 0
    for row in range(at, len(notes)):
        note = notes[row]
        if not _is_of(note, one):
            break
        is_whole = host_collective(note.name) == one.collective
        total += bytes_of(note.in_elements, note.dtype) or 0
        if total == one.facts.in_bytes:
            return row + 1 - at
        if is_whole or one.facts.in_bytes is None or total > one.facts.in_bytes:
            return None
    return 0 if one.collective in _POINT_TO_POINT and not total else None


def _running_max(values: list[int]) -> list[int]:
    found, high = [], MISSING
    for value in values:
        high = max(high, value)
        found.append(high)
    return found


def _is_of(note: IssuedOperation, one: Operation) -> bool:
    if one.facts.process_group not in (None, note.process_group):
        return False
    name = host_collective(note.name)
    return name is not None and (name == one.collective or may_run(one.collective, name))


def _noted_facts(note: IssuedOperation, one: Operation) -> CommFacts:
    is_whole = host_collective(note.name) == one.collective  # of what runs instead the sizes are others
    return CommFacts(
        process_group=note.process_group,
        description=note.description or None,
        seq=note.seq,
        in_bytes=bytes_of(note.in_elements, note.dtype) if is_whole else None,
        out_bytes=bytes_of(note.out_elements, note.dtype) if is_whole else None,
    )


def _by_thread(columns: Columns, operations: list[Operation]) -> None:
    """A thread that a backend works on belongs to one process group (ProcessGroupGloo's constructor starts them)."""
    groups: dict[int, set[str]] = defaultdict(set)

    def threads(one: Operation) -> list[int]:
        own = columns.track[one.root] if one.root >= 0 else -1
        return [track for row in one.work if (track := int(columns.track[row])) != own]

    for one in operations:
        for track in threads(one):
            if one.facts.process_group is not None:
                groups[track].add(one.facts.process_group)
    for one in _without_group(operations):
        names = {name for track in threads(one) for name in groups[track]}
        if len(names) == 1 and one.collective not in _POINT_TO_POINT:
            one.facts = replace(one.facts, process_group=names.pop())


@dataclass(frozen=True, slots=True)
class _Counts:
    """How many operations a group had issued at which times: ``(time, issued before, issued after)``."""

    marks: list[tuple[int, int, int]]

    @classmethod
    def of(cls, names: set[str], issued: Issued) -> "dict[str, _Counts]":
        marks: dict[str, list[tuple[int, int, int]]] = {name: [] for name in sorted(names)}
        for op in issued.operations:
            if op.op and op.process_group in marks:
                marks[op.process_group].append((op.time_ns, op.op - 1, op.op))
        for count in issued.groups:
            if count.name in marks:
                start = None if issued.lost else count.start  # what lies between it and the first note is not known
                ends = ((issued.start_ns, start), (issued.end_ns, count.end))
                marks[count.name] += [(time, number, number) for time, number in ends if number is not None]
        return {name: cls(sorted(found)) for name, found in marks.items()}

    def interval(self, ts: int) -> int:
        """Number of the stretch between two marks that a time is in; -1 where one of them is not known."""
        at = bisect_right(self.marks, (ts, 2**63, 0))
        return at if ts != MISSING and 0 < at < len(self.marks) else -1

    def unnoted(self, interval: int) -> int:
        """How many operations were issued in it that torch counted, and did not note."""
        return self.marks[interval][1] - self.marks[interval - 1][2]


def _settle(
    unknown: list[Operation], able: dict[int, set[str]], at: dict[int, dict[str, int]], counts: dict[str, _Counts]
) -> None:
    """Strike out groups until nothing changes: a group that issued as many as could be its own issued all of them.

    Each send and recv counts once; a monitored barrier counts more, so a stretch with one is left as it is.
    """
    stretches: dict[tuple[str, int], list[int]] = defaultdict(list)
    for number, groups in at.items():
        for name, interval in groups.items():
            if interval > 0:
                stretches[name, interval].append(number)
    changed = True
    while changed:
        changed = False
        for (name, interval), inside in stretches.items():
            left = counts[name].unnoted(interval)
            possible = [number for number in inside if name in able[number]]
            certain = {number for number in possible if able[number] == {name}}
            countable = all(unknown[number].collective in _POINT_TO_POINT for number in possible)
            for number in possible:
                if left == 0 or (countable and left == len(certain) and number not in certain):
                    able[number].discard(name)
                    changed = True
                elif countable and left == len(possible) and len(able[number]) > 1:
                    able[number] = {name}
                    changed = True
