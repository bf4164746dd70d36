"""Every kind of defect that validation knows, with what comes of it and what to do.

What comes of it was measured with ASTRA-sim's analytical backend and both C++ feeders, unless it says otherwise.
"""

from chakra_capture.export.et_schema import CollectiveType
from chakra_capture.export.validation.findings import Check, Level

_E, _W = Level.ERROR, Level.WARNING
OF_FULL_INPUT = (CollectiveType.ALL_TO_ALL, CollectiveType.REDUCE_SCATTER)

# V1: files
DAMAGED = Check(
    "V1", "damaged", _E, "the file cannot be read to its end; feeders drop the rest silently", "Export it again."
)
NO_METADATA = Check(
    "V1",
    "no-metadata",
    _E,
    "the first record is a node, but feeders take the first one as GlobalMetadata and lose it",
    "Write a GlobalMetadata record first.",
)
COMPRESSED = Check("V1", "compressed", _E, "the file is gzip, which ASTRA-sim does not read", "Unpack it with gunzip.")
READ_ONLY = Check(
    "V1",
    "read-only",
    _W,
    "nobody may write to the file; ASTRA-sim opens traces for appending and fails, unless it runs as root",
    "Run chmod u+w on it.",
)
RANK_MISSING = Check(
    "V1",
    "rank-missing",
    _E,
    "a rank has no file, though a higher one has; simulators need PREFIX.0.et to PREFIX.<n-1>.et",
    "Export all ranks.",
)
NAME = Check(
    "V1", "name", _E, "simulators do not look for a file of this name", "Rename it to PREFIX.<rank>.et, rank unpadded."
)

# V2 to V6: the graph
DUPLICATE_ID = Check(
    "V2", "duplicate-id", _E, "several nodes have one id; feeders crash or lose one", "Number the nodes uniquely."
)
DATA_DANGLING = Check(
    "V3",
    "data-dangling",
    _E,
    "a data dependency on a node that is not in the file: feeders refuse it or wait for ever",
    "Drop the dependency, or write the node.",
)
CTRL_DANGLING = Check(
    "V3",
    "ctrl-dangling",
    _E,
    "a control dependency on a node that is not in the file: ASTRA-sim refuses it",
    "Drop the dependency, or write the node.",
)
DATA_REPEATED = Check(
    "V4",
    "data-repeated",
    _E,
    "a data dependency stands twice: chakra's own feeder waits for ever",
    "Write each dependency once.",
)
CTRL_REPEATED = Check("V4", "ctrl-repeated", _W, "a control dependency stands twice", "Write each dependency once.")
SELF_DEPENDENCY = Check(
    "V4", "self-dependency", _E, "a node depends on itself, so it never runs", "Drop the dependency."
)
CYCLE = Check(
    "V5",
    "cycle",
    _E,
    "nodes depend on each other in a circle; neither they nor what depends on them ever runs",
    "Drop the dependency that points backwards in time.",
)
NO_NODES = Check("V6", "no-nodes", _E, "the file has no node", "Export it again, with a window that holds work.")
NO_ROOT = Check(
    "V6",
    "no-root",
    _E,
    "every node depends on another, so none can begin",
    "Leave the first node without dependencies.",
)

# V7 to V12: nodes
METADATA_NODE = Check(
    "V7",
    "metadata-node",
    _E,
    "METADATA_NODE ends ASTRA-sim with a failed assertion",
    "Export with --profile astra, or have its successors depend on what it depends on.",
)
INVALID_NODE = Check(
    "V7", "invalid-node", _E, "INVALID_NODE: nothing that depends on it is ever issued", "Give the node its type."
)
UNKNOWN_TYPE = Check("V7", "unknown-type", _E, "a node type that Chakra 1.0 does not have", "Use one of 1 to 7.")
MEMORY_NODE = Check(
    "V7",
    "memory-node",
    _W,
    "a node for remote memory; simulators need a memory model for it",
    "Write it as COMP_NODE with its duration.",
)
ATTRIBUTE_REPEATED = Check(
    "V8", "attribute-repeated", _E, "an attribute stands twice; which one counts differs", "Write it once."
)
ATTRIBUTE_KIND = Check(
    "V8",
    "attribute-kind",
    _E,
    "an attribute has a value of a kind that no feeder converts (bad_cast)",
    "Write it in the field that is named.",
)
ATTRIBUTE_KIND_OLD = Check(
    "V8",
    "attribute-kind-old",
    _W,
    "an attribute has a value of a kind that chakra's own feeder reads as nothing",
    "Write it in the field that is named.",
)
ATTRIBUTE_MISSING = Check(
    "V8", "attribute-missing", _E, "an attribute that the node type needs is missing", "Write the attribute."
)
IS_CPU_OP_MISSING = Check(
    "V8",
    "is-cpu-op-missing",
    _W,
    "is_cpu_op is missing; readers differ in whether the node then is on the CPU",
    "Write is_cpu_op on every node.",
)
COMM_TYPE_UNSUPPORTED = Check(
    "V9",
    "comm-type-unsupported",
    _E,
    "ASTRA-sim ends at this collective type",
    "Lower it: to ALL_REDUCE, ALL_GATHER, BROADCAST, ALL_TO_ALL or REDUCE_SCATTER.",
)
COMM_TYPE_UNKNOWN = Check("V9", "comm-type-unknown", _E, "a collective type that Chakra does not have", "Use 0 to 9.")
COMM_ON_CPU = Check(
    "V10", "comm-on-cpu", _E, "communication with is_cpu_op true ends ASTRA-sim", "Write is_cpu_op false."
)
COMM_SIZE_NEGATIVE = Check("V11", "comm-size-negative", _E, "comm_size is negative", "Write the bytes.")
COMM_SIZE_ZERO = Check(
    "V11", "comm-size-zero", _W, "comm_size is 0, so only latency is simulated", "Write the bytes that are sent."
)
COMM_SIZE_SHARE = Check(
    "V11",
    "comm-size-share",
    _W,
    "comm_size is no multiple of the group's size; of REDUCE_SCATTER and ALL_TO_ALL it is the full input of a rank",
    "Write the input's bytes, not the output's. Uneven splits are no defect.",
)
NO_DURATIONS = Check(
    "V12",
    "no-durations",
    _E,
    "no COMP_NODE has a duration: each takes 1 ns in a simulation",
    "Write duration_micros.",
)
ZERO_DURATION = Check(
    "V12",
    "zero-duration",
    _W,
    "duration_micros is 0, which is simulated as 1 ns",
    "Carry the rounding on from node to node, so that sums agree.",
)

# V13: is it what was measured?
NO_SUCCESSOR = Check(
    "V13",
    "no-successor",
    _W,
    "device nodes that nothing depends on, though they are not the last of their stream: a simulation waits for none",
    "Write the order of streams and what waits for the device.",
)
AT_START = Check(
    "V13",
    "collective-at-start",
    _W,
    "a collective depends on nothing, so it is simulated at time 0, though work came before it",
    "Have it depend on the kernels before it.",
)
PATH_AND_SPAN = Check(
    "V13",
    "path-and-span",
    _W,
    "the longest path through the dependencies is far from the time that was measured",
    "If it is shorter, dependencies or gaps of the CPU are missing; if longer, waits are counted twice.",
)

# V14: groups
GROUPS_MISSING = Check(
    "V14",
    "groups-missing",
    _E,
    "nodes name process groups, but there is no group file; simulators end at the first",
    "Give it with --comm-group, or write comm_group.json.",
)
GROUPS_UNREADABLE = Check(
    "V14", "groups-unreadable", _E, "the group file is not JSON of group ids and ranks", "Write it again."
)
GROUP_KEY = Check("V14", "group-key", _E, "a group's key is no decimal number above 0", "Number groups from 1.")
GROUP_MEMBERS = Check(
    "V14", "group-members", _E, "a group's members are no list of different ranks from 0", "List each rank once."
)
GROUP_OUTSIDE = Check(
    "V14",
    "group-outside",
    _E,
    "a group has a member beyond the number of ranks",
    "Export all ranks, or mend the group.",
)
GROUP_OF_ONE = Check(
    "V14", "group-of-one", _E, "a group of one rank hangs ASTRA-sim", "Leave out its collectives, or write COMP_NODEs."
)
GROUP_IDS = Check("V14", "group-ids", _W, "group ids are not 1 to K without gaps", "Number them so.")
PG_NAME = Check(
    "V14", "pg-name", _E, "pg_name is no decimal number that fits 32 bits", "Write the group's id, such as 1."
)
PG_UNKNOWN = Check("V14", "pg-unknown", _E, "pg_name is not in the group file", "Add the group to the file.")
NOT_A_MEMBER = Check(
    "V14", "not-a-member", _E, "a rank has a collective of a group it is not in", "Mend the group or the collective."
)
GROUPS_DIFFER = Check(
    "V14",
    "groups-differ",
    _E,
    "ranks state different members of one process group in their traces; simulators that read groups there mix them up",
    "Give every group a name of its own.",
)
WORLD_IMPLICIT = Check(
    "V14",
    "world-implicit",
    _E,
    "collectives of all ranks have no pg_name, or 0, beside ones of sub-groups: ASTRA-sim numbers them across all "
    "groups, and ranks that take part in different numbers wait for each other for ever",
    "Give the world an id of its own in the group file.",
)

# V15 to V20: across ranks
ORDER_DIFFERS = Check(
    "V15",
    "order-differs",
    _E,
    "members of a group have different collectives at one place of its order: they wait for each other for ever",
    "Write the collectives of a group in the same order on all ranks.",
)
SIZE_DIFFERS = Check(
    "V15",
    "size-differs",
    _E,
    "members of a group state different sizes of one collective",
    "State the same comm_size on all ranks.",
)
ROOT_DIFFERS = Check(
    "V15", "root-differs", _E, "members of a group state different roots of one collective", "State the same root_rank."
)
UNCHAINED = Check(
    "V16",
    "unchained",
    _E,
    "no dependency orders two collectives of a group on a rank; ranks may issue them in different orders and hang",
    "Have each collective of a group depend on the one before it.",
)
CROSSED = Check(
    "V17",
    "crossed",
    _E,
    "ranks have collectives of several groups in opposite orders: each waits for another",
    "Write them in one order on all ranks.",
)
UNPAIRED = Check(
    "V18",
    "unpaired",
    _E,
    "a rank sends what the other does not receive, or waits for what is not sent",
    "Record both ranks over the same steps; pair source, destination and tag.",
)
PAIR_SIZE = Check("V18", "pair-size", _E, "send and receive of a pair differ in size", "State the same comm_size.")
OWN_END = Check(
    "V18",
    "own-end",
    _E,
    "a send does not come from its own rank, or a receive does not go to it",
    "Leave comm_src of sends and comm_dst of receives to the rank itself.",
)
PEER = Check("V18", "peer", _E, "the other end is no other rank of the run", "State a rank below the number of ranks.")
COUNT_DIFFERS = Check(
    "V19",
    "count-differs",
    _E,
    "members of a group have different numbers of its collectives, so some never finish: not the same steps?",
    "Export the same steps of all ranks.",
)
STEPS_DIFFER = Check(
    "V19",
    "steps-differ",
    _E,
    "the files state different steps",
    "Export the same steps of all ranks.",
)
NPUS = Check(
    "V20",
    "npus",
    _E,
    "the number of ranks is not the number of NPUs of the network",
    "Give the network as many NPUs as there are files, the product of its npus_count.",
)
