"""V16: in which order a rank issues its communication, and which operation must end before which."""

from dataclasses import dataclass

from chakra_capture.export.et_graph import Graph, Walk
from chakra_capture.export.et_schema import NodeType
from chakra_capture.export.validation import checks
from chakra_capture.export.validation.findings import Findings, Place
from chakra_capture.export.validation.node_checks import Operation

# What is known of a node's past is a number per group; past this many, the later groups are left out.
_MOST_GROUPS = 200

Clock = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Issued:
    """A collective in the order of its group on one rank.

    Attributes:
        number: 1 is the group's first on this rank.
        after: per group, the number of its last collective that must end before this one begins; 0: none.
    """

    operation: Operation
    number: int
    after: dict[int, int]


def issue_order(operations: dict[int, Operation], walked: Walk, graph: Graph) -> list[Operation]:
    """Communication of a rank as a simulator issues it; what never runs comes last, by id."""
    found = []
    for row in [*walked.order, *walked.stuck]:
        operation = operations.get(graph.node_id(row))
        if operation is not None:
            found.append(operation)
    return found


def collective_order(
    graph: Graph, walked: Walk, operations: dict[int, Operation], *, rank: int, findings: Findings
) -> list[Issued]:
    """Number the collectives of each group, and report those that no dependency puts behind the one before.

    Every node has a clock: per group, the last collective before it that it depends on. Most nodes share theirs with
    one that they wait for.
    """
    numbers: dict[int, int] = {}
    places: dict[int, int] = {}
    clocks: list[Clock] = [()] * len(graph)
    before, waiting = graph.edges
    issued: list[Issued] = []
    predecessors = _predecessors(before.tolist(), waiting.tolist(), len(graph))
    for row in walked.order:
        clock = _latest([clocks[one] for one in predecessors[row]])
        operation = operations.get(graph.node_id(row))
        if operation is not None and operation.type == NodeType.COMM_COLL_NODE:
            group = operation.group
            number = numbers[group] = numbers.get(group, 0) + 1
            place = places.setdefault(group, len(places))
            if place < _MOST_GROUPS:
                after = {one: clock[at] for one, at in places.items() if at < len(clock) and clock[at]}
                if number > 1 and after.get(group, 0) != number - 1:
                    detail = f"group {group}, collective {number}, not after the one before it"
                    findings.add(checks.UNCHAINED, Place(rank, operation.node_id, operation.name, detail))
                issued.append(Issued(operation, number, after))
                clock = _with(clock, place, number)
        clocks[row] = clock
    return issued


def _predecessors(before: list[int], waiting: list[int], number: int) -> list[list[int]]:
    found: list[list[int]] = [[] for _ in range(number)]
    for one, other in zip(before, waiting, strict=True):
        found[other].append(one)
    return found


def _latest(clocks: list[Clock]) -> Clock:
    latest: Clock = ()
    for clock in clocks:
        if clock is latest or not clock:
            continue
        if len(clock) < len(latest):
            clock, latest = latest, clock
        merged = tuple(map(max, clock, latest)) + clock[len(latest) :]
        latest = clock if merged == clock else merged
    return latest


def _with(clock: Clock, place: int, number: int) -> Clock:
    padded = clock + (0,) * (place + 1 - len(clock))
    return (*padded[:place], number, *padded[place + 1 :])
