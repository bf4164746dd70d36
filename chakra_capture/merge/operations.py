"""Which rows of a window belong to one communication operation: what asked for it, and what ran it."""

import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import msgspec
import numpy as np

from chakra_capture.merge.comm_facts import (
    NOTHING,
    CommFacts,
    facts_of_args,
    facts_of_dims,
    facts_of_op,
    facts_of_record,
)
from chakra_capture.merge.rows import climb
from chakra_capture.merge.tables import Columns
from chakra_capture.trace.columns import MISSING, Bool, Coded, Int64

RECORD = "record_param_comms"
# What a backend runs in place of an operation that it does not have.
_RUN_INSTEAD = {("reduce_scatter", "all_reduce"), ("barrier", "send"), ("barrier", "recv")}
_ASYNC = re.compile(r"gloo:")
_COALESCED = re.compile(r"(?:nccl|xccl|ucc):coalesced")
_ALGORITHM = re.compile(r"_((?:RING|TREE|COLLNET|NVLS|PAT)[A-Z_]*?_(?:LL128|LL|SIMPLE))(?=[_(<]|$)")
# c10d's op, the annotation of its backend and NCCL's record stand in one another.
_MOST_NESTED = 8


def may_run(asked: str | None, runs: str | None) -> bool:
    """Whether a backend runs the one operation in place of the other."""
    return (asked, runs) in _RUN_INSTEAD


@dataclass(slots=True)
class Operation:
    """One operation: the row that asked for it, -1 for none, and what ran it."""

    root: int
    members: list[int] = field(default_factory=list)
    kernels: list[int] = field(default_factory=list)
    work: list[int] = field(default_factory=list)
    shares_kernel: bool = False
    collective: str = ""
    facts: CommFacts = NOTHING

    @property
    def rows(self) -> list[int]:
        """All rows of the operation."""
        return [*self.members, *self.work, *([] if self.shares_kernel else self.kernels)]


class CommRows:
    """The rows that communicate, and what they are: asking (ops, records, annotations) or running (kernels, gloo)."""

    def __init__(self, columns: Columns, collective: Coded) -> None:
        self._columns = columns
        self._collective = collective
        self._names = columns.name
        on_host = columns.is_kind("host_op", "annotation")
        communicates = on_host & (collective.codes >= 0)
        self._is_record = on_host & self._of_name(lambda name: name == RECORD)
        self._is_marker = on_host & self._of_name(lambda name: bool(_COALESCED.match(name)))
        self._is_work = communicates & self._of_name(lambda name: bool(_ASYNC.match(name)))
        self._is_op = on_host & self._of_name(lambda name: name.startswith("c10d::"))
        self._is_asking = (communicates & ~self._is_work) | self._is_record | self._is_marker
        self._kernels = np.flatnonzero(columns.is_kind("kernel") & (collective.codes >= 0))
        dur = np.where(columns.dur_ns == MISSING, 0, columns.dur_ns)
        self._ends = np.where(columns.ts_ns == MISSING, MISSING, columns.ts_ns + dur)

    def _of_name(self, accept: Callable[[str], bool]) -> Bool:
        return self._names.mask_of(np.array([accept(name) for name in self._names.values], dtype=bool))

    def operations(self) -> list[Operation]:
        """All operations in order of issue."""
        asking = np.flatnonzero(self._is_asking)
        root_of = self._roots(asking)
        by_root: dict[int, Operation] = {}
        for row in asking.tolist():
            root = root_of[row]
            by_root.setdefault(root, Operation(root)).members.append(row)
        alone = self._give_work(by_root)
        markers = {root for root in by_root if self._is_marker[root]}
        alone += self._give_kernels(by_root, root_of)
        ordered = sorted([*by_root.values(), *alone], key=self._issue_key)
        self._share_coalesced(ordered, markers)
        for operation in ordered:
            operation.collective = self._collective_of(operation)
        self._drop_markers(ordered, markers)
        return ordered

    def _roots(self, asking: Int64) -> dict[int, int]:
        """The outermost asking row around each asking row."""
        # What a backend runs holds nothing: it ends on another thread, and a host trace may put what follows under it.
        up = climb(self._columns.parent[asking], self._columns.parent, self._is_asking | self._is_work)
        up[(up >= 0) & self._is_work[up]] = -1
        # No op of c10d runs in another one: without times it may stand under one that has ended.
        up[self._is_op[asking] & (self._columns.ts_ns[asking] == MISSING)] = -1
        above = dict(zip(asking.tolist(), up.tolist(), strict=True))
        roots: dict[int, int] = {}
        for row in asking.tolist():
            at = row
            for _ in range(_MOST_NESTED):
                if above.get(at, -1) < 0:
                    break
                at = above[at]
            roots[row] = at
        return roots

    def _give_work(self, by_root: dict[int, Operation]) -> list[Operation]:
        """Give what a backend ran on threads of its own to the op that asked for it: the last one numbered before it.

        Record-function ids ascend as functions begin, and a backend begins its annotation within the op.
        """
        work = np.flatnonzero(self._is_work)
        rows = np.array([*by_root, *work.tolist()], dtype=np.int64)
        number = dict(zip(rows.tolist(), self._columns.integers("record_function_id", rows).tolist(), strict=True))
        thread = self._host_threads(rows)
        ops: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for root in by_root:
            if number[root] != MISSING:
                ops[thread[root]].append((number[root], root))
        for found in ops.values():
            found.sort()
        alone = []
        for row in sorted(work.tolist(), key=lambda row: number[row]):
            inside = self._asking_around(row, by_root)
            if inside is None and number[row] != MISSING:
                candidates = ops.get(thread[row], [])
                at = bisect_right(candidates, (number[row], -1)) - 1
                inside = by_root[candidates[at][1]] if at >= 0 else None
            if inside is not None and self._may_run(inside, row):
                inside.work.append(row)
            else:
                alone.append(Operation(-1, work=[row]))
        return alone

    def _host_threads(self, rows: Int64) -> dict[int, int]:
        """The threads on which functions began, as the host trace numbers them; without one all count as one."""
        host, node = self._columns.host, self._columns.host_node[rows]
        if host is None:
            return dict.fromkeys(rows.tolist(), 0)
        return dict(zip(rows.tolist(), host.attrs["tid"].pick(node).tolist(), strict=True))

    def _asking_around(self, row: int, by_root: dict[int, Operation]) -> "Operation | None":
        """The op on whose own thread this annotation began."""
        at = int(climb(self._columns.parent[[row]], self._columns.parent, self._is_asking)[0])
        begun = self._columns.ts_ns[row]
        if at < 0 or begun == MISSING or self._ends[at] <= begun:
            return None
        return by_root.get(at)

    def _may_run(self, operation: Operation, row: int) -> bool:
        asked, runs = self._name_of(operation.root), self._name_of(row)
        return not operation.work if asked == runs else may_run(asked, runs)

    def _name_of(self, row: int) -> str | None:
        return self._collective[row]

    def _give_kernels(self, by_root: dict[int, Operation], root_of: dict[int, int]) -> list[Operation]:
        """Give kernels to the op around their launch; those without one are operations of their own."""
        parent = self._columns.parent
        at = climb(parent[self._kernels], parent, self._is_asking)
        alone = []
        for kernel, row in zip(self._kernels.tolist(), at.tolist(), strict=True):
            if row >= 0:
                by_root[root_of[row]].kernels.append(kernel)
            else:
                alone.append(Operation(-1, kernels=[kernel]))
        return alone

    def _issue_key(self, operation: Operation) -> tuple[bool, int, int]:
        """In order of time; without one in that of the host trace, after the others: there the device trace is cut."""
        columns = self._columns
        row = operation.root
        if row < 0:
            row = operation.kernels[0] if operation.kernels else operation.work[0]
            launch = int(columns.launch[row])
            row = launch if launch >= 0 else row
        ts = int(columns.ts_ns[row])
        if ts != MISSING:
            return False, ts, row
        return True, int(columns.integers("host_id", np.array([row]))[0]), row

    def _share_coalesced(self, ordered: list[Operation], markers: set[int]) -> None:
        """Let operations that were issued one by one, and ran in one kernel at the end, share it."""
        if not markers:
            return
        open_ops: dict[int, list[Operation]] = defaultdict(list)
        for operation in ordered:
            track = int(self._columns.track[operation.root]) if operation.root >= 0 else -1
            if operation.root in markers:
                waiting = open_ops.pop(track, [])
                for one in waiting:
                    one.kernels, one.shares_kernel = operation.kernels, True
                if waiting:
                    operation.shares_kernel = True
            elif operation.kernels:
                open_ops.pop(track, None)
            elif operation.root >= 0 and self._name_of(operation.root) is not None:
                open_ops[track].append(operation)

    def _drop_markers(self, ordered: list[Operation], markers: set[int]) -> None:
        """A coalesced kernel whose operations are known is no further operation."""
        for operation in ordered:
            if operation.root in markers and (operation.shares_kernel or not operation.kernels):
                operation.collective = ""

    def _collective_of(self, operation: Operation) -> str:
        for row in [operation.root, *operation.members]:
            if row >= 0 and (name := self._name_of(row)) is not None:
                return name
        if operation.root >= 0 and not operation.kernels:
            facts = [self._record_facts(row, {}) for row in operation.members if self._is_record[row]]
            return next((f.collective for f in facts if f.collective), "")
        for row in [*operation.kernels, *operation.work]:
            if (name := self._name_of(row)) is not None:
                return name
        return ""

    def facts(self, operation: Operation, group_names: dict[int, str]) -> CommFacts:
        """All that the rows of an operation say, those first that were made for it."""
        found = CommFacts(collective=operation.collective or None)
        for more in self._sources(operation, group_names):
            found = found.or_else(more)
            if found.is_whole and found.seq is not None:
                break
        return _one_way(found)

    def _sources(self, operation: Operation, group_names: dict[int, str]) -> Iterator[CommFacts]:
        if operation.kernels and not operation.shares_kernel:
            yield self._stated_facts(operation.kernels[0])
        records = [row for row in operation.members if self._is_record[row]]
        yield from (self._stated_facts(row) for row in records)
        yield from (self._record_facts(row, group_names) for row in records)
        for row in [operation.root, *operation.members, *operation.work]:
            if row >= 0 and not self._is_record[row]:
                yield self._op_facts(row)

    def _stated_facts(self, row: int) -> CommFacts:
        return facts_of_args(self._columns.residue(row))

    def _record_facts(self, row: int, group_names: dict[int, str]) -> CommFacts:
        host, node = self._columns.host, int(self._columns.host_node[row])
        if host is None or node < 0:
            return NOTHING
        texts = (host.details[node], host.input_values[node], host.input_types[node], host.output_values[node])
        return facts_of_record(*texts, group_names)

    def _op_facts(self, row: int) -> CommFacts:
        name = self._names[row] or ""
        host, device = self._columns.host, self._columns.device
        node, at = int(self._columns.host_node[row]), int(self._columns.device_row[row])
        found = NOTHING
        if host is not None and node >= 0:
            found = facts_of_op(name, host.input_values[node], host.input_types[node])
        if device is not None and at >= 0:
            concrete = _concrete(device.residue[at])
            found = found.or_else(facts_of_dims(name, device.input_shapes[at], device.input_types[at], concrete))
        return found

    def caller_group(self, operation: Operation) -> str | None:
        """Group that torch's functional collectives name: the last input of the op around this one."""
        if operation.root < 0:
            return None
        columns = self._columns
        is_functional = self._of_name(lambda name: name.removeprefix("_").startswith("c10d_functional::"))
        at = int(climb(columns.parent[[operation.root]], columns.parent, is_functional)[0])
        node = int(columns.host_node[at]) if at >= 0 else -1
        if columns.host is None or node < 0:
            return None
        try:
            inputs: list[object] = msgspec.json.decode(columns.host.input_values[node] or "[]", type=list)
        except msgspec.DecodeError:
            return None
        name = inputs[-1] if inputs else None
        return name if isinstance(name, str) else None

    def ran(self, operation: Operation) -> tuple[int, int | None, int | None]:
        """The row that ran it, and when it began and how long it took; no time where the work is not recorded."""
        if operation.kernels:
            return self._span(operation.kernels)
        if running := self._running(operation):
            return self._work_times(operation, running)
        if any(self._is_record[row] for row in operation.members):  # what a device ran, and nobody recorded
            return operation.root, None, None
        return self._span([operation.root])

    def _running(self, operation: Operation) -> list[int]:
        """What a backend ran: the work of this name, else what it ran in its place, which may be several of one kind.

        Gloo runs an all_reduce for each tensor of a reduce_scatter. A monitored barrier, of sends and recvs, runs on
        the thread that asks.
        """
        own = [row for row in operation.work if self._name_of(row) == operation.collective]
        names = {self._name_of(row) for row in operation.work}
        return own[:1] or (operation.work if len(names) == 1 else [])

    def _work_times(self, operation: Operation, rows: list[int]) -> tuple[int, int | None, int | None]:
        """Gloo hands a send or recv over within the op that asks, before it begins the annotation."""
        at, ts, dur = self._span(rows)
        begun = int(self._columns.ts_ns[operation.root]) if operation.root >= 0 else MISSING
        if operation.collective not in ("send", "recv") or ts is None or begun == MISSING:
            return at, ts, dur
        return at, begun, None if dur is None else ts + dur - begun

    def _span(self, rows: list[int]) -> tuple[int, int | None, int | None]:
        """The first of the rows, and the time from its begin to the end of the last."""
        ts, dur = self._columns.ts_ns[rows], self._columns.dur_ns[rows]
        first, begun = rows[int(np.argmin(ts))], int(ts.min())
        if begun == MISSING:
            return first, None, None
        return first, begun, None if (dur == MISSING).any() else int(self._ends[rows].max()) - begun

    def algorithm(self, operation: Operation) -> str | None:
        """How it ran."""
        if operation.kernels:
            match = _ALGORITHM.search(self._names[operation.kernels[0]] or "")
            return match[1] if match else None
        names = {self._name_of(row) for row in self._running(operation)} - {operation.collective}
        return names.pop() if names else None


def _one_way(facts: CommFacts) -> CommFacts:
    """What only puts in, only gets, or moves nothing: backends annotate it with whatever tensor is at hand."""
    if facts.collective == "recv":
        out_bytes = facts.in_bytes if facts.out_bytes is None else facts.out_bytes
        return replace(facts, in_bytes=0, out_bytes=out_bytes)
    if facts.collective == "send":
        return replace(facts, out_bytes=0)
    return replace(facts, dtype=None, in_bytes=0, out_bytes=0) if facts.collective == "barrier" else facts


def _concrete(args: str | None) -> Sequence[object]:
    if not args or "Concrete Inputs" not in args:
        return ()
    try:
        return msgspec.json.decode(args, type=_Concrete).inputs
    except msgspec.DecodeError:
        return ()


class _Concrete(msgspec.Struct):
    inputs: list[object] = msgspec.field(name="Concrete Inputs", default_factory=list)
