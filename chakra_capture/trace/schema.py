"""Every merged table: column, dtype and meaning, in one place; the docs are made from it."""

from dataclasses import dataclass

import polars as pl

from chakra_capture.annotations import PHASE_NAMES


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a merged table; ``unit`` is empty for a plain value."""

    name: str
    dtype: "pl.DataType | type[pl.DataType]"
    meaning: str
    unit: str = ""


@dataclass(frozen=True, slots=True)
class Table:
    """A merged table: its columns in order."""

    name: str
    meaning: str
    columns: tuple[Column, ...]

    @property
    def schema(self) -> pl.Schema:
        return pl.Schema({column.name: column.dtype for column in self.columns})


KINDS = (
    "process", "thread", "host_op", "annotation", "python_function", "runtime", "kernel", "memcpy", "memset",
    "device_annotation", "sync", "overhead", "memory", "instant", "other",
)  # fmt: skip
EDGE_KINDS = ("launch", "thread_order", "stream_order", "event_wait", "inter_thread", "sync")
SIDES = ("start", "end")

_INT = pl.Int64
_TEXT = pl.String

NODES = Table(
    "nodes",
    "one row per host op, runtime call, device activity and other record of one rank",
    (
        Column("node_id", _INT, "row number within the rank, in (window, pid, tid, ts, -dur) order"),
        Column("window", pl.Int32, "recorded window, 0 first; record-function ids and joins hold within one"),
        Column("kind", pl.Enum(KINDS), "what the row is, from the category of the device file where there is one"),
        Column("name", _TEXT, "name as recorded"),
        Column("parent_id", _INT, "CPU: innermost enclosing row of its thread (host trace alone: the parent recorded "
               "there). Device activity: innermost host op or annotation (never ProfilerStep) that covers the launch"),
        Column("launch_id", _INT, "device activity: the runtime call with its correlation id, outermost if nested"),
        Column("ts_ns", _INT, "start, Unix epoch", "ns"),
        Column("dur_ns", _INT, "duration as read; null if missing, negative or beyond 104 days", "ns"),
        Column("self_dur_ns", _INT, "duration less that of the children, after clipping (of a device activity: at the "
               "next start on its stream); never negative", "ns"),
        Column("repaired", pl.Boolean, "a time of this row was missing or negative, or reached past its parent's end "
               "or the next start on its stream; or the row is a root that the host trace lacks"),
        Column("pid", _INT, "process; for device rows the device as Kineto writes it"),
        Column("tid", _INT, "thread; for device rows the stream as Kineto writes it"),
        Column("device", _INT, "device of a device row"),
        Column("stream", _INT, "stream of a device row; null where it is of no stream (waiting for a whole device)"),
        Column("host_id", _INT, "id of the node in the host trace; of a root added for one that is not in the file, "
               "the id that its nodes name"),
        Column("record_function_id", _INT, "joins host op and CPU op"),
        Column("external_id", _INT, "joins CPU op and runtime event"),
        Column("correlation_id", _INT, "joins runtime event and device activity"),
        Column("sequence_number", _INT, "pairs a forward op with its backward op"),
        Column("step", _INT, "number of the ProfilerStep that holds the start (device activity: of the launch)"),
        Column("phase", _TEXT, "phase of the step that holds the start (device activity: of the launch), by the "
               "recording's annotations, else by what autograd, Optimizer.step and DataLoader mark; null: not known"),
        Column("collective", _TEXT, "collective operation of a communication row, e.g. all_reduce: as its arguments "
               "state it, else by its name, else (SendRecv and generic kernels) that of the op that launched it"),
        Column("process_group", _TEXT, "name of the process group of a communication row; null where nothing tells"),
        Column("comm_bytes", _INT, "bytes that this rank puts into the operation of a communication row, or gets from "
               "it where it puts nothing in (recv, scatter); barrier: 0; null where nothing tells", "bytes"),
        Column("input_shapes", _TEXT, "shapes of the inputs, JSON"),
        Column("input_types", _TEXT, "types of the inputs, JSON"),
        Column("args", _TEXT, "JSON of all that has no column; 'cat' is the category of the device file, "
               "'host' what only the host trace has; an event's args stand under 'args' where they have such a key"),
    ),
)  # fmt: skip

EDGES = Table(
    "edges",
    "dependencies between rows of nodes; the lag of an edge is the difference of its two times",
    (
        Column("window", pl.Int32, "recorded window"),
        Column("src", _INT, "node_id that comes first"),
        Column("src_at", pl.Enum(SIDES), "side of src that counts"),
        Column("dst", _INT, "node_id that waits"),
        Column("dst_at", pl.Enum(SIDES), "side of dst that waits"),
        Column("kind", pl.Enum(EDGE_KINDS), "why dst waits for src"),
    ),
)

PHASES = (*PHASE_NAMES, "residual")

STEPS = Table(
    "steps",
    "one row per recorded step; of a window that marks no step one row for all of it",
    (
        Column("window", pl.Int32, "recorded window"),
        Column(
            "step",
            _INT,
            "global step number, 0-based; null: no step is marked, the row is the whole window, from "
            "first start to last end",
        ),
        Column("node_id", _INT, "node_id of its ProfilerStep annotation; null for a whole window"),
        Column("pid", _INT, "process"),
        Column("ts_ns", _INT, "start, Unix epoch", "ns"),
        Column("dur_ns", _INT, "duration; null if the step has no recorded end", "ns"),
        *(
            Column(
                f"{phase}_ns",
                _INT,
                f"time in {phase}, exclusive of phases in it; null = not measured",
                "ns",
            )
            for phase in PHASES
        ),
        Column("coverage", pl.Float64, "share of the step that is in a named phase; null = not measured"),
        Column(
            "device_busy_ns",
            _INT,
            "time within the step with a device activity; null without device events "
            "and where the end of the device trace is lost",
            "ns",
        ),
        Column("device_idle_ns", _INT, "time within the step without one; null like device_busy_ns", "ns"),
        Column("num_device_activities", _INT, "device activities launched in the step; null like device_busy_ns"),
        Column("profiled", pl.Boolean, "recorded by the profiler"),
        Column("warmup", pl.Boolean, "a warm-up step; null = not known"),
        Column("partial", pl.Boolean, "the step was cut short; null = not known"),
        Column("update_skipped", pl.Boolean, "the optimizer skipped the update; null = not known"),
    ),
)

_OF_OPERATION = (
    Column("process_group", _TEXT, "name of the process group; null where nothing tells"),
    Column("mesh_dim", _TEXT, "dimension of the device mesh that the group serves (dp, tp, pp, cp, ep), by its "
           "description; null for none"),
    Column("group_ranks", pl.List(_INT), "global ranks of the group; null where nothing tells"),
    Column("collective", _TEXT, "operation that was asked for, e.g. all_reduce, send"),
    Column("dtype", _TEXT, "element type, as torch spells it (float32)"),
    Column("comm_bytes", _INT, "as in nodes", "bytes"),
    Column("seq", _INT, "sequence number within the group, as recorded"),
)  # fmt: skip

COMMUNICATION = Table(
    "communication",
    "one row per communication operation of one rank, in order of issue",
    (
        Column("window", pl.Int32, "recorded window"),
        Column("node_id", _INT, "row of nodes that ran it: kernel, else annotation of the backend, else host op"),
        Column("host_node_id", _INT, "host op that asked for it; null where none is recorded"),
        *_OF_OPERATION,
        Column("algorithm", _TEXT, "how it ran: of a kernel its algorithm and protocol (RING_LL), on a backend that "
               "has no such operation the one it ran instead (gloo: all_reduce for reduce_scatter)"),
        Column("in_bytes", _INT, "bytes that this rank puts in; null where nothing tells", "bytes"),
        Column("out_bytes", _INT, "bytes that this rank gets; null where nothing tells", "bytes"),
        Column("root", _INT, "global rank of the root (broadcast, reduce, gather, scatter)"),
        Column("peer", _INT, "global rank of the other side of a send or recv"),
        Column("tag", _INT, "tag of a send or recv"),
        Column("step", _INT, "as in nodes"),
        Column("issued_ns", _INT, "start of the host op that asked for it, Unix epoch", "ns"),
        Column("ts_ns", _INT, "start of the row that ran it, Unix epoch: the rank has arrived (gloo's send and recv: "
               "of the op that asked, which hands the data over)", "ns"),
        Column("dur_ns", _INT, "from then to the end of that row: waiting for the other ranks and transfer", "ns"),
    ),
)  # fmt: skip

COLLECTIVES = Table(
    "collectives",
    "one row per communication operation of the run and rank that took part, in order of operation and rank",
    (
        Column("collective_id", _INT, "number of the operation within the run"),
        Column("rank", _INT, "global rank"),
        Column("window", pl.Int32, "recorded window"),
        Column("order", _INT, "how many operations of its group (send, recv: of its two ranks and tag) this rank had "
               "issued before within the window; null where its time is lost"),
        # The members stand in alignment.json: in each row they would be members x members values per operation.
        *(column for column in _OF_OPERATION if column.name != "group_ranks"),
        Column("num_ranks", _INT, "ranks that take part: members of the group, 2 for send and recv; null: not known"),
        Column("num_found", _INT, "ranks of which it is recorded"),
        Column("step", _INT, "as in nodes"),
        Column("node_id", _INT, "row of nodes of this rank that ran it"),
        Column("host_node_id", _INT, "host op of this rank that asked for it"),
        Column("arrival_ns", _INT, "when this rank arrived, on the clock of the reference rank (alignment.json)", "ns"),
        Column("end_ns", _INT, "when it ended on this rank, on the same clock", "ns"),
        Column("wait_ns", _INT, "from this rank's arrival to that of the last rank it needs (of a root: the root; else "
               "all), at most to its own end; null where a rank is missing, the clocks cannot be compared, or nothing "
               "tells who waits for whom. Where the members are not known: among those recorded", "ns"),
        Column("transfer_ns", _INT, "the rest of the time until its end; null like wait_ns", "ns"),
        Column("skew_ns", _INT, "from the first arrival to the last one; null like wait_ns", "ns"),
        Column("last_rank", _INT, "rank that arrived last; null like wait_ns"),
        Column("mismatch", _TEXT, "how the ranks differ (type, size, root), or which ranks lack it; null: they agree"),
    ),
)  # fmt: skip

TABLES = (NODES, EDGES, STEPS, COMMUNICATION)
