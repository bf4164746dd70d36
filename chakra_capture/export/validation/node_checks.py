"""V7 to V12: has every node the type, and the attributes of the kinds, that simulators read?"""

from collections import Counter
from dataclasses import dataclass
from enum import StrEnum

from chakra_capture.export.et_reader import Attribute, EtNode
from chakra_capture.export.et_schema import CollectiveType, NodeType, collective_name
from chakra_capture.export.validation import checks
from chakra_capture.export.validation.findings import Check, Findings, Place

_KIND = {
    "is_cpu_op": "bool_val",
    "num_ops": "int64_val",
    "tensor_size": "uint64_val",
    "comm_type": "int64_val",
    "comm_size": "int64_val",
    "comm_priority": "int32_val",
    "comm_src": "int32_val",
    "comm_dst": "int32_val",
    "comm_tag": "int32_val",
    "pg_name": "string_val",
    "involved_dim": "bool_list",
}
_INTEGERS = frozenset(
    f"{kind}_val"
    for kind in ("int32", "int64", "uint32", "uint64", "sint32", "sint64", "fixed32", "fixed64", "sfixed32")
) | {"sfixed64_val", "bool_val"}
COMMUNICATION = (NodeType.COMM_SEND_NODE, NodeType.COMM_RECV_NODE, NodeType.COMM_COLL_NODE)
_MEMORY = (NodeType.MEM_LOAD_NODE, NodeType.MEM_STORE_NODE)
_NEEDED: dict[int, tuple[str, ...]] = {
    NodeType.COMM_COLL_NODE: ("comm_type", "comm_size"),
    NodeType.COMM_SEND_NODE: ("comm_size", "comm_dst", "comm_tag"),
    NodeType.COMM_RECV_NODE: ("comm_size", "comm_src", "comm_tag"),
    NodeType.MEM_LOAD_NODE: ("tensor_size",),
    NodeType.MEM_STORE_NODE: ("tensor_size",),
}
_SIMULATED = frozenset(
    {
        CollectiveType.ALL_REDUCE,
        CollectiveType.ALL_GATHER,
        CollectiveType.BROADCAST,
        CollectiveType.ALL_TO_ALL,
        CollectiveType.REDUCE_SCATTER,
    }
)
_LARGEST_PG = 2**31 - 1
WORLD = 0


class Profile(StrEnum):
    """What is allowed in the files: what ASTRA-sim runs, or all that Chakra has."""

    ASTRA = "astra"
    FULL = "full"


@dataclass(frozen=True, slots=True)
class Operation:
    """A collective, a send or a receive, as far as it could be read; ``group`` 0 is all ranks."""

    node_id: int
    name: str
    type: int
    comm_type: int
    size: int
    root: int | None
    group: int
    src: int | None
    dst: int | None
    tag: int | None


class NodeChecks:
    """Checks the nodes of one rank one by one."""

    def __init__(self, rank: int, profile: Profile, findings: Findings) -> None:
        self._rank, self._profile, self._findings = rank, profile, findings
        self._num_timed = 0
        self._untimed: list[Place] = []
        self._num_untimed = 0

    def check(self, node: EtNode) -> Operation | None:
        """Check a node; returns its communication, if it is one that can be matched with other ranks'."""
        self._check_type(node)
        self._check_kinds(node)
        self._check_duration(node)
        names = {one.name for one in node.attributes}
        for name in _NEEDED.get(node.type, ()):
            if name not in names:
                self._report(checks.ATTRIBUTE_MISSING, node, name)
        return self._operation(node) if node.type in COMMUNICATION else None

    def finish(self) -> None:
        """Report what only the whole file shows."""
        if self._num_untimed and not self._num_timed:
            self._findings.add(checks.NO_DURATIONS, Place(self._rank, detail=f"{self._num_untimed} nodes"))
        elif self._num_untimed:
            share = 100 * self._num_untimed / (self._num_untimed + self._num_timed)
            first = self._untimed[0]
            place = Place(first.rank, first.node, first.name, f"{share:.1f} % of the COMP_NODEs of the rank")
            self._findings.add(checks.ZERO_DURATION, place, count=self._num_untimed)

    def _report(self, check: Check, node: EtNode, detail: str = "") -> None:
        self._findings.add(check, Place(self._rank, node.node_id, node.name, detail))

    def _check_type(self, node: EtNode) -> None:
        if node.type not in NodeType._value2member_map_:
            self._report(checks.UNKNOWN_TYPE, node, f"type {node.type}")
        elif node.type == NodeType.INVALID_NODE:
            self._report(checks.INVALID_NODE, node)
        elif self._profile == Profile.ASTRA and node.type == NodeType.METADATA_NODE:
            self._report(checks.METADATA_NODE, node)
        elif self._profile == Profile.ASTRA and node.type in _MEMORY:
            self._report(checks.MEMORY_NODE, node)

    def _check_kinds(self, node: EtNode) -> None:
        for name, number in Counter(one.name for one in node.attributes).items():
            if number > 1:
                self._report(checks.ATTRIBUTE_REPEATED, node, f"{name}, {number} times")
        if all(one.name != "is_cpu_op" for one in node.attributes):
            self._report(checks.IS_CPU_OP_MISSING, node)
        for one in node.attributes:
            wanted = _KIND.get(one.name)
            if wanted and one.kind != wanted:
                is_converted = one.kind in _INTEGERS and wanted in _INTEGERS
                check = checks.ATTRIBUTE_KIND_OLD if is_converted else checks.ATTRIBUTE_KIND
                self._report(check, node, f"{one.name} in {one.kind or 'no field'}, wanted {wanted}")

    def _check_duration(self, node: EtNode) -> None:
        is_broadcast = node.type == NodeType.COMM_COLL_NODE and node.value("comm_type") == CollectiveType.BROADCAST
        if node.type != NodeType.COMP_NODE and not is_broadcast:
            return
        self._num_timed += node.duration_us > 0
        self._num_untimed += node.duration_us == 0
        if node.duration_us == 0 and not self._untimed:
            self._untimed.append(Place(self._rank, node.node_id, node.name))

    def _operation(self, node: EtNode) -> Operation | None:
        if node.value("is_cpu_op") is True:
            self._report(checks.COMM_ON_CPU, node)
        size, comm_type = _integer(node, "comm_size"), _integer(node, "comm_type")
        is_collective = node.type == NodeType.COMM_COLL_NODE
        group = self._group(node) if is_collective else WORLD
        if size is not None and size <= 0:
            self._report(checks.COMM_SIZE_NEGATIVE if size < 0 else checks.COMM_SIZE_ZERO, node)
        if is_collective and comm_type is not None:
            self._check_comm_type(node, comm_type)
        if size is None or group is None or (is_collective and comm_type is None):
            return None
        ends = (_integer(node, name) for name in ("comm_src", "comm_dst", "comm_tag"))
        root = _integer(node, "root_rank")
        return Operation(node.node_id, node.name, node.type, comm_type or 0, size, root, group, *ends)

    def _check_comm_type(self, node: EtNode, comm_type: int) -> None:
        name = collective_name(comm_type)
        if comm_type not in CollectiveType._value2member_map_:
            self._report(checks.COMM_TYPE_UNKNOWN, node, name)
        elif self._profile == Profile.ASTRA and comm_type not in _SIMULATED:
            self._report(checks.COMM_TYPE_UNSUPPORTED, node, name)

    def _group(self, node: EtNode) -> int | None:
        """Id of the group that a collective names; None if it names none that is a number."""
        given = node.value("pg_name")
        if given is None or given == "":
            return WORLD
        if not isinstance(given, str):
            return None  # reported as an attribute of a wrong kind
        # Python's int() takes signs, blanks, underscores and digits of other scripts.
        if not (given.isascii() and given.isdigit() and len(given) <= 10 and int(given) <= _LARGEST_PG):
            self._report(checks.PG_NAME, node, repr(given[:40]))
            return None
        return int(given)


def is_on_cpu(node: EtNode) -> bool:
    """Say whether a node runs on the CPU: without the attribute it does not."""
    return node.value("is_cpu_op") is True


def _integer(node: EtNode, name: str) -> int | None:
    found: Attribute | None = next((one for one in node.attributes if one.name == name), None)
    return found.value if found and found.kind in _INTEGERS and isinstance(found.value, int) else None
