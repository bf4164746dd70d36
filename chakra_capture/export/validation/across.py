"""V15 and V17 to V20: do the ranks' communication operations fit together?"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise

from chakra_capture.export.et_reader import Value
from chakra_capture.export.et_schema import NodeType, collective_name
from chakra_capture.export.validation import checks
from chakra_capture.export.validation.findings import Findings, Place
from chakra_capture.export.validation.groups import Groups, check_stated
from chakra_capture.export.validation.node_checks import WORLD, Operation
from chakra_capture.export.validation.rank_order import Issued

_SHOWN_OF_CIRCLE = 4
# A send or receive: source, destination, tag.
Channel = tuple[int, int, int]


@dataclass(slots=True)
class RankOperations:
    """What one rank says that others must agree with.

    Attributes:
        point_to_point: sends and receives in the order in which they are issued.
        steps: what the file states of its steps; None if nothing.
        groups: members of the process groups that the file lists.
    """

    rank: int
    issued: list[Issued] = field(default_factory=list)
    point_to_point: list[Operation] = field(default_factory=list)
    steps: Value = None
    groups: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def of_group(self, group: int) -> list[Operation]:
        """The collectives of a group in order."""
        return [one.operation for one in self.issued if one.operation.group == group]


def check_ranks(ranks: list[RankOperations], groups: Groups, findings: Findings) -> None:
    """Check the ranks of one run against each other."""
    _check_steps(ranks, findings)
    check_stated({rank.rank: rank.groups for rank in ranks}, findings)
    for group in sorted({one.operation.group for rank in ranks for one in rank.issued}):
        members = [rank for rank in ranks if _is_member(rank.rank, group, groups)]
        _check_group(group, members, findings)
    _check_crossed(ranks, findings)


def _is_member(rank: int, group: int, groups: Groups) -> bool:
    return group == WORLD or rank in groups.members.get(group, ())


def _check_steps(ranks: list[RankOperations], findings: Findings) -> None:
    stated = [(rank.rank, rank.steps) for rank in ranks if rank.steps is not None]
    for rank, steps in stated[1:]:
        if steps != stated[0][1]:
            detail = f"{steps!r}, and rank {stated[0][0]} has {stated[0][1]!r}"
            findings.add(checks.STEPS_DIFFER, Place(rank, detail=detail))


def _check_group(group: int, members: list[RankOperations], findings: Findings) -> None:
    """Hold each member's order against that of the first; the first difference says it all."""
    if not members:
        return
    first, expected = members[0], members[0].of_group(group)
    for other in members[1:]:
        found = other.of_group(group)
        for number, (left, right) in enumerate(zip(expected, found, strict=False), 1):
            where = f"group {group}, collective {number}: "
            against = f"rank {first.rank} (node {left.node_id})"
            place = (other.rank, right.node_id, right.name)
            if left.comm_type != right.comm_type:
                types = f"{collective_name(right.comm_type)}, {against} has {collective_name(left.comm_type)}"
                findings.add(checks.ORDER_DIFFERS, Place(*place, where + types))
                break
            if left.size != right.size:
                sizes = f"{right.size:,} bytes, {against} has {left.size:,}"
                findings.add(checks.SIZE_DIFFERS, Place(*place, where + sizes))
                break
            if left.root != right.root:
                roots = f"root {right.root}, {against} has {left.root}"
                findings.add(checks.ROOT_DIFFERS, Place(*place, where + roots))
                break
        else:
            if len(found) != len(expected):
                counts = f"group {group}: {len(found)}, and rank {first.rank} has {len(expected)}"
                findings.add(checks.COUNT_DIFFERS, Place(other.rank, detail=counts))


def _check_crossed(ranks: list[RankOperations], findings: Findings) -> None:
    """Join the ranks' orders: a circle is a set of collectives that wait for each other."""
    said_by: dict[tuple[tuple[int, int], tuple[int, int]], tuple[int, Operation]] = {}
    sorter: TopologicalSorter[tuple[int, int]] = TopologicalSorter()
    for rank in ranks:
        for one in rank.issued:
            this = (one.operation.group, one.number)
            for earlier in one.after.items():
                said_by.setdefault((earlier, this), (rank.rank, one.operation))
                sorter.add(this, earlier)
    try:
        sorter.prepare()
    except CycleError as error:
        circle: list[tuple[int, int]] = error.args[1]
        parts = []
        for earlier, this in pairwise(circle):
            rank_of, operation = said_by[earlier, this]
            parts.append(
                f"rank {rank_of} has collective {earlier[1]} of group {earlier[0]} before {this[1]} of group {this[0]}"
                f" (node {operation.node_id})"
            )
        shown = "; ".join(parts[:_SHOWN_OF_CIRCLE]) + ("; ..." if len(parts) > _SHOWN_OF_CIRCLE else "")
        first_rank, operation = said_by[circle[0], circle[1]]
        findings.add(checks.CROSSED, Place(first_rank, operation.node_id, operation.name, shown))


def check_point_to_point(ranks: list[RankOperations], num_ranks: int, findings: Findings) -> None:
    """Pair sends and receives: the k-th of a source, destination and tag with the k-th."""
    sends: dict[Channel, list[Operation]] = {}
    receives: dict[Channel, list[Operation]] = {}
    for rank in ranks:
        for one in rank.point_to_point:
            channel = _channel(one, rank.rank, num_ranks, findings)
            if channel:
                side = sends if one.type == NodeType.COMM_SEND_NODE else receives
                side.setdefault(channel, []).append(one)
    known = {rank.rank for rank in ranks}
    for channel in sorted({*sends, *receives}):
        if known.issuperset(channel[:2]):
            _check_channel(channel, sends.get(channel, []), receives.get(channel, []), findings)


def _channel(one: Operation, rank: int, num_ranks: int, findings: Findings) -> Channel | None:
    is_send = one.type == NodeType.COMM_SEND_NODE
    own, peer = (one.src, one.dst) if is_send else (one.dst, one.src)
    if peer is None or one.tag is None:
        return None  # reported as a missing attribute
    if own not in (None, rank):
        detail = f"its own end is rank {own}"
        findings.add(checks.OWN_END, Place(rank, one.node_id, one.name, detail))
        return None
    if peer == rank or not 0 <= peer < num_ranks:
        detail = f"the other end is rank {peer}, and there are {num_ranks} ranks"
        findings.add(checks.PEER, Place(rank, one.node_id, one.name, detail))
        return None
    return (rank, peer, one.tag) if is_send else (peer, rank, one.tag)


def _check_channel(channel: Channel, sends: list[Operation], receives: list[Operation], findings: Findings) -> None:
    src, dst, tag = channel
    way = f"rank {src} to rank {dst}, tag {tag}"
    if len(sends) != len(receives):
        alone = _first_alone(sends, receives)
        rank = src if len(sends) > len(receives) else dst
        detail = f"{way}: {len(sends)} sent, {len(receives)} received"
        findings.add(checks.UNPAIRED, Place(rank, alone.node_id, alone.name, detail))
    for number, (left, right) in enumerate(zip(sends, receives, strict=False), 1):
        if left.size != right.size:
            detail = f"{way}, pair {number}: {left.size:,} bytes sent (node {left.node_id}), {right.size:,} received"
            findings.add(checks.PAIR_SIZE, Place(dst, right.node_id, right.name, detail))


def _first_alone(sends: list[Operation], receives: list[Operation]) -> Operation:
    more, fewer = (sends, receives) if len(sends) > len(receives) else (receives, sends)
    return more[len(fewer)]


def check_npus(num_ranks: int, npus: Iterable[int], findings: Findings) -> None:
    """Hold the number of ranks against the dimensions of a network."""
    product = 1
    for size in npus:
        product *= size
    if product != num_ranks:
        findings.add(checks.NPUS, Place(detail=f"{num_ranks} ranks, {product} NPUs"))
