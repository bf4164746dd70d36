"""One real rank as a program: its events and nodes as format strings with holes, and its communication operations.

Every number that differs between ranks, or between repetitions of the recorded steps, becomes a hole. A rank is then
written by filling the holes of whole documents at once, not by building each event again.
"""

import gzip
import json
import re
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np

_STEP = re.compile(r"ProfilerStep#(\d+)")
_THREAD_NAME = re.compile(r"(?<=thread )\d+")
_HOLE = re.compile(r'"\\u0001(\d+)\\u0001"|\\u0002(\d+)\\u0002')
_ROOTS = ("[pytorch|profiler|execution_trace|process]", "[pytorch|profiler|execution_trace|thread]")
_PG_INIT = "## process_group:init ##"
_ACTIVITIES = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCHES = ("cuda_runtime", "cuda_driver")
# Ids by which files and events refer to each other, and the counter that each is taken from.
_IDS = {
    "External id": "correlation",
    "correlation": "correlation",
    "wait_on_cuda_event_record_corr_id": "correlation",
    "Record function id": "rf",
    "Sequence number": "seq",
    "Ev Idx": "ev",
    "Python id": "python",
    "Python parent id": "python",
}


class SourceError(Exception):
    """This trace cannot be the rank that a run is made from."""


class Kind(IntEnum):
    """What fills a hole."""

    number = 0  # its value, grown by repetition
    pid = 1  # the pid of the rank, plus its value
    start_us = 2  # start of event number <value>
    start_ns = 3
    dur_us = 4
    dur_ns = 5
    group_name = 6  # of the group of operation number <value>
    group_desc = 7
    group_ranks = 8
    group_size = 9
    group_first = 10
    seq = 11
    elements = 12  # number of elements: <value> is an index into Template.sizes


@dataclass(slots=True)
class Template:
    """A document of many pieces as one format string and its holes."""

    pieces: list[str] = field(default_factory=list)
    owners: list[int] = field(default_factory=list)  # operation that a piece is all about, else -1
    ends: list[int] = field(default_factory=list)  # holes up to the end of each piece
    kinds: list[int] = field(default_factory=list)
    values: list[int] = field(default_factory=list)
    growth: list[int] = field(default_factory=list)
    sizes: list[tuple[int, int]] = field(default_factory=list)  # operation, elements
    _pending: list[tuple[tuple[int, int, int], ...]] = field(default_factory=list)

    def hole(self, kind: Kind, value: int, growth: int = 0) -> str:
        """A whole JSON value that is filled in later."""
        return self._mark("\x01", (kind, value, growth))

    def time(self, which: str, event: int) -> str:
        """A time in microseconds with three decimals."""
        us, ns = (Kind.start_us, Kind.start_ns) if which == "ts" else (Kind.dur_us, Kind.dur_ns)
        return self._mark("\x01", (us, event, 0), (ns, event, 0))

    def within(self, kind: Kind, value: int, growth: int = 0) -> str:
        """A part of a JSON string that is filled in later."""
        return self._mark("\x02", (kind, value, growth))

    def elements(self, operation: int, count: int) -> str:
        self.sizes.append((operation, count))
        return self.hole(Kind.elements, len(self.sizes) - 1)

    def _mark(self, mark: str, *holes: tuple[int, int, int]) -> str:
        self._pending.append(holes)
        return f"{mark}{len(self._pending) - 1}{mark}"

    def add(self, content: Any, owner: int = -1) -> None:
        """Add one event or node, which holds what ``hole``, ``time`` and ``within`` returned."""
        text = json.dumps(content, separators=(",", ":")).replace("%", "%%")
        self.pieces.append(_HOLE.sub(self._place, text))
        self.owners.append(owner)
        self.ends.append(len(self.kinds))
        self._pending.clear()

    def _place(self, match: "re.Match[str]") -> str:
        holes = self._pending[int(match[1] or match[2])]
        for kind, value, growth in holes:
            self.kinds.append(kind)
            self.values.append(value)
            self.growth.append(growth)
        texts = (Kind.group_name, Kind.group_desc, Kind.group_ranks)
        if holes[0][0] in texts:
            return '"%s"' if match[1] else "%s"
        return "%d.%03d" if len(holes) == 2 else "%d"


@dataclass(slots=True)
class Operation:
    """One communication operation of the real rank; times in ns from the start of the unit."""

    event: int
    name: str
    size: tuple[str, str]
    track: Any
    start: int
    end: int
    issue: int
    external: int | None
    waited: int | None = None  # when the host asked that what follows on the device waits for it


@dataclass(slots=True)
class Source:
    """The real rank: documents, events in time, operations."""

    head: dict[str, Any]
    host_head: dict[str, Any]
    events: Template
    once: Template
    nodes: Template
    node_roots: Template
    starts: "np.typing.NDArray[np.int64]"  # of each event, ns from the start of the unit
    ends: "np.typing.NDArray[np.int64]"
    tracks: list[Any]  # of each event: thread, or stream as ("stream", number)
    raw: list[dict[str, Any]]
    operations: list[Operation]
    zero_ns: int
    span_ns: int
    steps: list[int]
    main_pid: int
    has_device: bool


def read_json(path: Path) -> Any:
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        return json.load(file)


def load_source(host: Path | None, device: Path, *, tiny: bool = False) -> Source:
    """Read a pair of one rank, or its device trace alone.

    Args:
        tiny: keep the last step alone, and of it only ops that are within no other op.
    """
    kineto, execution = read_json(device), read_json(host) if host else {"nodes": []}
    records = kineto.pop("traceEvents")
    main_pid = _main_pid(records)
    kept = [e for e in records if e.get("ph") in ("X", "s", "f") and e.get("cat") != "Trace"]
    kept = [e for e in kept if e.get("name") != _PG_INIT]
    if tiny:
        kept = _thinned(kept, main_pid)
    return _Reader(kineto, execution, records, kept, main_pid).source()


def _main_pid(records: list[dict[str, Any]]) -> int:
    for event in records:
        if event.get("cat") in ("cpu_op", "user_annotation") and isinstance(event.get("pid"), int):
            return int(event["pid"])
    raise SourceError("the device trace has no host op or annotation, so no process can be told from it.")


def ns(value: float) -> int:
    return round(value * 1000)


def _thinned(events: list[dict[str, Any]], pid: int) -> list[dict[str, Any]]:
    steps = [e for e in events if _STEP.fullmatch(e.get("name", "")) and e.get("cat") == "user_annotation"]
    if not steps or any(e.get("cat") in _ACTIVITIES for e in events):
        raise SourceError("a tiny rank is made from a trace that marks its steps and has no device activity.")
    first, kept, end = max(e["ts"] for e in steps), [], {}
    ordered = [e for e in events if e["ph"] == "X" and e["ts"] >= first and e["pid"] == pid]
    for event in sorted(ordered, key=lambda e: (e["ts"], -e["dur"])):
        if event["cat"] == "cpu_op":
            if event["ts"] < end.get(event["tid"], 0) and not event["name"].startswith("c10d::"):
                continue
            end[event["tid"]] = max(end.get(event["tid"], 0), event["ts"] + event["dur"])
        kept.append(event)
    return kept


class _Reader:
    """Turns one pair into a Source."""

    def __init__(
        self,
        kineto: dict[str, Any],
        execution: dict[str, Any],
        records: list[dict[str, Any]],
        kept: list[dict[str, Any]],
        pid: int,
    ) -> None:
        self.kineto, self.execution, self.records, self.kept, self.pid = kineto, execution, records, kept, pid
        self.zero = min(ns(e["ts"]) for e in kept)
        self.starts = np.array([ns(e["ts"]) - self.zero for e in kept], np.int64)
        self.ends = np.array([ns(e["ts"]) + ns(e.get("dur", 0)) - self.zero for e in kept], np.int64)
        labels = [int(m[1]) for e in kept if e.get("cat") == "user_annotation" and (m := _STEP.fullmatch(e["name"]))]
        self.steps = sorted(labels)
        self.growth = self._growths()
        self.operations = self._operations()
        self.of_event = self._owners()

    def source(self) -> Source:
        events, once = self._events()
        nodes, roots = self._nodes()
        host_head = {k: v for k, v in self.execution.items() if k != "nodes"}
        return Source(
            self.kineto, host_head, events, once, nodes, roots, self.starts, self.ends,
            [self._track(e) for e in self.kept], self.kept, self.operations, self.zero,
            int(self.ends.max()) + 1000, self.steps, self.pid, any(e.get("cat") in _ACTIVITIES for e in self.kept),
        )  # fmt: skip

    def _growths(self) -> dict[str, int]:
        top: dict[str, int] = {}
        for event in self.kept:
            args = event.get("args") or {}
            for key, counter in _IDS.items():
                if isinstance(args.get(key), int):
                    top[counter] = max(top.get(counter, 0), args[key])
            if event["ph"] in "sf" and isinstance(event.get("id"), int):
                counter = "correlation" if event.get("cat") == "ac2g" else f"flow {event.get('cat')}"
                top[counter] = max(top.get(counter, 0), event["id"])
        for node in self.execution["nodes"]:
            top["node"] = max(top.get("node", 0), node["id"])
            for attr in node["attrs"]:
                counter = {"rf_id": "rf", "seq_id": "seq"}.get(attr["name"])
                if counter:
                    top[counter] = max(top.get(counter, 0), attr["value"])
        return {counter: value + 1 for counter, value in top.items()}

    def _track(self, event: dict[str, Any]) -> Any:
        return event["tid"] if event["pid"] == self.pid else ("stream", event["pid"], event["tid"])

    # Communication operations.

    def _operations(self) -> list[Operation]:
        kernels = [
            i for i, e in enumerate(self.kept)
            if e.get("cat") == "kernel" and ("Collective name" in (e.get("args") or {}) or e["name"].startswith("nccl"))
        ]  # fmt: skip
        launches = self._launches() if kernels else {}
        found = [self._of_kernel(i, launches) for i in kernels] if kernels else self._of_gloo()
        peers = sorted({o.name for o in found if o.name in ("send", "recv", "SendRecv")})
        if peers:
            raise SourceError(f"the trace has {peers[0]}: its program differs from rank to rank, so one cannot stand "
                              "for all. Give a rank that only runs collectives.")  # fmt: skip
        found.sort(key=lambda o: (o.issue, o.start))
        if not found:
            raise SourceError("the device trace has no collective, so nothing couples the ranks.")
        return found

    def _of_kernel(self, number: int, launches: dict[int, int]) -> Operation:
        event = self.kept[number]
        args = event.get("args") or {}
        launch = launches.get(args.get("correlation"), self.starts[number])
        size = (str(args.get("In msg nelems")), str(args.get("dtype")))
        name = args.get("Collective name") or event["name"]
        return Operation(
            number, name, size, self._track(event), int(self.starts[number]), int(self.ends[number]), int(launch),
            args.get("External id"),
        )  # fmt: skip

    def _launches(self) -> dict[int, int]:
        return {
            e["args"]["correlation"]: int(self.starts[i])
            for i, e in enumerate(self.kept)
            if e.get("cat") in _LAUNCHES and "correlation" in (e.get("args") or {})
        }

    def _of_gloo(self) -> list[Operation]:
        asked = sorted(
            (e["args"]["Record function id"], i) for i, e in enumerate(self.kept)
            if e.get("cat") == "cpu_op" and e["name"].startswith("c10d::") and "Record function id" in e["args"]
        )  # fmt: skip
        ids = [rf for rf, _ in asked]
        found = []
        for number, event in enumerate(self.kept):
            if event.get("cat") == "user_annotation" and event["name"].startswith("gloo:"):
                at = int(np.searchsorted(ids, event["args"].get("Record function id", 0))) - 1
                issue = self.starts[asked[at][1]] if at >= 0 else self.starts[number]
                issue = min(int(issue), int(self.starts[number]))
                size = (str(event["args"].get("Input Dims")), str(event["args"].get("Input type")))
                found.append(
                    Operation(number, event["name"].removeprefix("gloo:"), size, event["tid"],
                              int(self.starts[number]), int(self.ends[number]), issue, None)
                )  # fmt: skip
        return found

    def _owners(self) -> dict[int, int]:
        """Events that are all about one operation: it itself, its ops on the host, their annotations."""
        owners = {o.event: k for k, o in enumerate(self.operations)}
        by_external = {o.external: k for k, o in enumerate(self.operations) if o.external is not None}
        asked = {
            o.issue: k for k, o in enumerate(self.operations)
            if "Record function id" in (self.kept[o.event].get("args") or {})
        }  # fmt: skip
        spans: dict[Any, list[tuple[int, int, int]]] = {}
        for i, event in enumerate(self.kept):
            if event.get("cat") != "cpu_op":
                continue
            k = by_external.get((event.get("args") or {}).get("External id"))
            if event["name"].startswith("c10d::"):
                k = asked.get(int(self.starts[i]), k)
            if k is not None:
                owners[i] = k
                spans.setdefault(event["tid"], []).append((int(self.starts[i]), int(self.ends[i]), k))
        for i, event in enumerate(self.kept):  # nccl:all_reduce lies in record_param_comms, which lies in c10d::...
            if i in owners or event.get("cat") not in ("cpu_op", "user_annotation"):
                continue
            for start, end, k in spans.get(event["tid"], []):
                inside = event["name"].startswith("nccl:") and start <= self.starts[i] and self.ends[i] <= end
                around = event["name"].startswith("c10d::") and self.starts[i] <= start and end <= self.ends[i]
                if inside or around:
                    owners[i] = k
        return owners

    # The device trace.

    def _events(self) -> tuple[Template, Template]:
        events, once = Template(), Template()
        for number, event in enumerate(self.kept):
            events.add(self._event(events, event, number), self.of_event.get(number, -1))
        for event in self.records:
            if event.get("ph") in ("X", "s", "f") and event.get("cat") != "Trace":
                continue
            at = 1 if event.get("name") == "Record Window End" else 0
            once.add(self._event(once, event, at))
        return events, once

    def _event(self, into: Template, event: dict[str, Any], number: int) -> dict[str, Any]:
        made = dict(event)
        if "ts" in made:
            made["ts"] = into.time("ts", number)
        if "dur" in made:
            made["dur"] = into.time("dur", number)
        for key in ("pid", "tid"):
            if isinstance(made.get(key), int) and event["pid"] == self.pid and made[key]:
                made[key] = into.hole(Kind.pid, made[key] - self.pid)
        if event["ph"] in "sf" and isinstance(event.get("id"), int):
            counter = "correlation" if event.get("cat") == "ac2g" else f"flow {event.get('cat')}"
            made["id"] = into.hole(Kind.number, event["id"], self.growth[counter])
        if match := _STEP.fullmatch(str(event.get("name"))):
            made["name"] = "ProfilerStep#" + into.within(Kind.number, int(match[1]), len(self.steps))
        if event.get("args"):
            made["args"] = self._args(into, event, number)
        return made

    def _args(self, into: Template, event: dict[str, Any], number: int) -> dict[str, Any]:
        args = dict(event["args"])
        for key, counter in _IDS.items():
            if isinstance(args.get(key), int) and args[key] > 0:
                args[key] = into.hole(Kind.number, args[key], self.growth[counter])
        if event["ph"] == "M":
            if args.get("name") and (match := _THREAD_NAME.search(str(args["name"]))):
                offset = int(match[0]) - self.pid
                args["name"] = _THREAD_NAME.sub(lambda _: into.within(Kind.pid, offset), args["name"])
            if isinstance(args.get("sort_index"), int) and args["sort_index"] == self.pid:
                args["sort_index"] = into.hole(Kind.pid, 0)
            return args
        operation = self.of_event.get(number)
        if operation is None:
            return args
        if "Process Group Name" in args:
            args["Process Group Name"] = into.hole(Kind.group_name, operation)
            args["Process Group Description"] = into.hole(Kind.group_desc, operation)
            args["Process Group Ranks"] = into.hole(Kind.group_ranks, operation)
            args["Group size"] = into.hole(Kind.group_size, operation)
            args["Seq"] = into.hole(Kind.seq, operation)
            if "Global rank start" in args:
                args["Global rank start"] = into.hole(Kind.group_first, operation)
        for key in ("In msg nelems", "Out msg nelems"):
            if isinstance(args.get(key), int):
                args[key] = into.elements(operation, args[key])
        if "Input Dims" in args:
            args["Input Dims"] = _first_size(into, operation, args["Input Dims"])
        return args

    # The host trace.

    def _nodes(self) -> tuple[Template, Template]:
        nodes, roots = Template(), Template()
        all_nodes = self.execution["nodes"]
        by_id = {n["id"]: n for n in all_nodes}
        kept_rf = {(e.get("args") or {}).get("Record function id") for e in self.kept} - {None}
        owner_of = {
            self.kept[i]["args"]["Record function id"]: k for i, k in self.of_event.items()
            if "Record function id" in (self.kept[i].get("args") or {})
        }  # fmt: skip
        rf_of = {n["id"]: next((a["value"] for a in n["attrs"] if a["name"] == "rf_id"), 0) for n in all_nodes}
        root_ids = {n["id"] for n in all_nodes if n["name"] in _ROOTS}
        here = {n["id"] for n in all_nodes if n["id"] in root_ids or rf_of[n["id"]] in kept_rf}
        self._note_waits(by_id, rf_of)
        for node in all_nodes:
            if node["name"] in _ROOTS or node["name"] == _PG_INIT:
                roots.add(self._root(roots, node))
            elif node["id"] in here:
                node["ctrl_deps"] = _kept_parent(node, by_id, here)
                owner = owner_of.get(rf_of[node["id"]], -1)
                nodes.add(self._node(nodes, node, root_ids, here, owner), owner)
        return nodes, roots

    def _root(self, into: Template, node: dict[str, Any]) -> dict[str, Any]:
        made = dict(node)
        if node["name"] == _PG_INIT:  # the text that stands for the groups of the rank
            made["inputs"] = dict(node["inputs"], values=[into.hole(Kind.group_desc, -1)])
        return made

    def _node(self, into: Template, node: dict[str, Any], roots: set[int], here: set[int], owner: int) -> Any:
        made, by = dict(node), self.growth["node"]
        made["id"] = into.hole(Kind.number, node["id"], by)
        if match := _STEP.fullmatch(node["name"]):
            made["name"] = "ProfilerStep#" + into.within(Kind.number, int(match[1]), len(self.steps))
        parent = node["ctrl_deps"]
        made["ctrl_deps"] = parent if parent in roots else into.hole(Kind.number, parent, by)
        if owner >= 0:
            made["inputs"] = self._inputs(into, node, owner)
        attrs = []
        for attr in node["attrs"]:
            name, value = attr["name"], attr["value"]
            if name == "fw_parent" and value and value not in here:
                attr = dict(attr, value=0)
            elif (name in ("rf_id", "fw_parent") and value) or (name == "seq_id" and value >= 0):
                counter = {"rf_id": "rf", "fw_parent": "node", "seq_id": "seq"}[name]
                attr = dict(attr, value=into.hole(Kind.number, value, self.growth[counter]))
            attrs.append(attr)
        made["attrs"] = attrs
        return made

    def _inputs(self, into: Template, node: dict[str, Any], owner: int) -> dict[str, Any]:
        inputs = dict(node["inputs"])
        values = list(inputs["values"])
        if node["name"] == "record_param_comms":
            for at, value in enumerate(values):
                if isinstance(value, list) and len(value) == 2 and all(isinstance(x, str) for x in value) and value[0]:
                    values[at] = [into.hole(Kind.group_name, owner), into.hole(Kind.group_desc, owner)]
            if isinstance(values[1], int):
                values[1] = into.hole(Kind.seq, owner)
            values[-3] = into.hole(Kind.group_first, owner)
            values[-1] = into.hole(Kind.group_size, owner)
        inputs["values"] = [_sized_tensor(into, owner, value) for value in values]
        inputs["shapes"] = _first_size(into, owner, inputs["shapes"])
        return inputs

    def _note_waits(self, by_id: dict[int, dict[str, Any]], rf_of: dict[int, int]) -> None:
        """When the host made the device wait for an operation: record_param_comms "wait" names its number."""
        start_of = {
            e["args"]["Record function id"]: int(self.starts[i]) for i, e in enumerate(self.kept)
            if e.get("cat") == "cpu_op" and "Record function id" in (e.get("args") or {})
        }  # fmt: skip
        waits, numbers = {}, {}
        for node in by_id.values():
            if node["name"] != "record_param_comms":
                continue
            values = node["inputs"]["values"]
            if "wait" in values and values and isinstance(values[0], int):
                waits[values[0]] = start_of.get(rf_of[node["id"]])
            elif len(values) > 1 and isinstance(values[1], int):
                numbers[start_of.get(rf_of[node["id"]])] = values[1]
        for k, operation in enumerate(self.operations):
            own = [i for i, owner in self.of_event.items() if owner == k]
            asked = [numbers[int(self.starts[i])] for i in own if int(self.starts[i]) in numbers]
            operation.waited = waits.get(asked[0]) if asked else None


def _kept_parent(node: dict[str, Any], by_id: dict[int, dict[str, Any]], here: set[int]) -> int:
    parent = node["ctrl_deps"]
    while parent not in here and parent in by_id and by_id[parent]["ctrl_deps"] != parent:
        parent = by_id[parent]["ctrl_deps"]
    return int(parent)


def _first_size(into: Template, operation: int, dims: Any) -> Any:
    """The dims with a hole for the first length, where an operation of another size is planted."""
    if isinstance(dims, list) and dims:
        if isinstance(dims[0], int):
            return [into.elements(operation, dims[0]), *dims[1:]]
        return [_first_size(into, operation, dims[0]), *dims[1:]]
    return dims


def _sized_tensor(into: Template, operation: int, value: Any) -> Any:
    if isinstance(value, list):
        if len(value) == 6 and isinstance(value[5], str) and all(isinstance(x, int) for x in value[:5]):
            return [*value[:3], into.elements(operation, value[3]), *value[4:]]
        return [_sized_tensor(into, operation, part) for part in value]
    return value
