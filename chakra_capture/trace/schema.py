"""Every merged table: column, dtype and meaning, in one place; the docs are made from it."""

from dataclasses import dataclass

import polars as pl

from chakra_capture.annotations import PHASE_NAMES

SCHEMA_VERSION = 1


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
        Column("phase", _TEXT, "step phase; null until phases are joined"),
        Column("collective", _TEXT, "collective operation of a communication row, e.g. all_reduce: as its arguments "
               "state it, else by its name, else (SendRecv and generic kernels) that of the op that launched it"),
        Column("process_group", _TEXT, "process group of a communication row; null until groups are joined"),
        Column("comm_bytes", _INT, "bytes of a communication row; null until sizes are joined", "bytes"),
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

TABLES = (NODES, EDGES, STEPS)
