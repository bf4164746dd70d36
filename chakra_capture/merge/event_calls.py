"""What the event calls of a thread show where the trace has no ``cuda_sync`` records.

The calls carry neither stream nor event. Three things they show all the same:

* the stream of a collective is made to wait right before its launch, within its communication op or after a record
  call: the collective waits for what its thread launched;
* the wait of a ``wait`` op that names its collective by the sequence number (host trace) is for that collective;
* a thread that records an event and then waits for one itself waits for what it launched.

Any other wait could be for any event, and is counted as unresolved. A record and a wait between work on two streams
do not even show the direction: a prefetching loader launches compute, lets the compute stream wait for the copies, and
launches the next copy.
"""

from dataclasses import dataclass

import msgspec
import numpy as np

from chakra_capture.merge.collectives import kernel_collective
from chakra_capture.merge.rows import ACTIVITY_KINDS, CODE
from chakra_capture.merge.tables import Columns
from chakra_capture.trace.columns import MISSING, Bool, Int64, Positions

_COMM_OP = "record_param_comms"
_THREAD_WAITS = "EventSynchronize"


def is_event_wait(name: str) -> bool:
    """Whether a call lets a stream, or its own thread, wait for an event; the driver's and HIP's names end alike."""
    return name.endswith(("StreamWaitEvent", _THREAD_WAITS))


def _is_record(name: str) -> bool:
    return name.endswith(("EventRecord", "EventRecordWithFlags"))


@dataclass(frozen=True, slots=True)
class EventCalls:
    """What each wait call waits for, aligned with the calls.

    Attributes:
        src: the activity waited for, -1 where the calls do not show one.
        dst: the activity that waits; the call itself where its thread does.
        is_sync: the thread waits.
    """

    src: Int64
    dst: Int64
    is_sync: Bool


def read_event_calls(columns: Columns, waits: Int64) -> EventCalls:
    """Find what each of the wait calls waits for, and what of the work waits."""
    work = _Work.of(columns)
    compute = work.without(_is_collective(columns, work.rows))
    record, op = _record_before(columns, waits), _comm_op(columns, waits)
    recorded, target = np.where(record >= 0, record, waits), work.after(columns, waits)
    in_its_op = (op >= 0) & (op == _comm_op(columns, columns.launch[target]))
    shown = (target >= 0) & _is_collective(columns, target) & (in_its_op | ((op < 0) & (record >= 0)))
    src = np.where(shown, compute.before(columns, recorded), -1)

    number, is_wait_op = _named_by_wait(columns, op)
    src = np.where(is_wait_op, _by_number(columns, work, number, waits), src)
    dst = np.where(is_wait_op, compute.after(columns, waits), target)

    is_sync = columns.name.accepted(waits, lambda name: name.endswith(_THREAD_WAITS))
    src = np.where(is_sync, np.where(record >= 0, work.before(columns, record), -1), src)
    dst = np.where(is_sync, waits, dst)
    device, stream = ([columns.integers(key, rows) for rows in (src, dst)] for key in ("device", "stream"))
    # On one stream work is in order without a wait: then the wait was for something else.
    crosses = (dst >= 0) & (device[0] == device[1]) & (stream[0] != stream[1])
    return EventCalls(np.where((src >= 0) & (is_sync | crosses), src, -1), dst, is_sync)


@dataclass(frozen=True, slots=True)
class _Work:
    """Activities in the order of their launch calls; the row numbers of calls order those of one thread."""

    rows: Int64
    launch: Int64

    @classmethod
    def of(cls, columns: Columns) -> "_Work":
        launch, ts_ns = columns.launch, columns.ts_ns
        rows = np.flatnonzero(columns.is_kind(*ACTIVITY_KINDS) & (launch >= 0) & (ts_ns != MISSING))
        rows = rows[ts_ns[launch[rows]] != MISSING]
        rows = rows[np.lexsort((ts_ns[rows], launch[rows]))]
        return cls(rows, launch[rows])

    def without(self, left_out: Bool) -> "_Work":
        return _Work(self.rows[~left_out], self.launch[~left_out])

    def before(self, columns: Columns, calls: Int64) -> Int64:
        """Last activity that the thread of each call launched before it, -1 for none."""
        return self._at(columns, calls, np.searchsorted(self.launch, calls) - 1)

    def after(self, columns: Columns, calls: Int64) -> Int64:
        """First activity that the thread of each call launches after it, -1 for none."""
        return self._at(columns, calls, np.searchsorted(self.launch, calls, side="right"))

    def _at(self, columns: Columns, calls: Int64, at: Int64) -> Int64:
        if not len(self.rows):
            return np.full(len(calls), -1, dtype=np.int64)
        inside = (at >= 0) & (at < len(self.rows))
        at = np.where(inside, at, 0)
        same = inside & (columns.track[self.launch[at]] == columns.track[calls])
        return np.where(same, self.rows[at], -1)


def _record_before(columns: Columns, waits: Int64) -> Int64:
    """The record call before each wait on its thread, with no launch and no other wait between; -1 for none.

    Of two records in a row either may be meant: none is.
    """
    calls = np.flatnonzero(columns.kind == CODE["runtime"])
    launches = np.zeros(len(columns), dtype=bool)
    launches[columns.launch[columns.launch >= 0]] = True
    is_record = columns.name.accepted(calls, _is_record)
    stands = is_record | columns.name.accepted(calls, is_event_wait) | launches[calls]
    calls, is_record = calls[stands], is_record[stands]
    at = np.searchsorted(calls, waits) - 1
    same = columns.track[calls[at]] == columns.track[waits]
    earlier = np.maximum(at - 1, 0)
    twice = (at > 0) & is_record[earlier] & (columns.track[calls[earlier]] == columns.track[waits])
    return np.where((at >= 0) & same & is_record[at] & ~twice, calls[at], -1)


def _comm_op(columns: Columns, calls: Int64 | Positions) -> Int64:
    """Communication op around each call, the outermost of nested ones; -1 for none."""
    is_op = np.array([*(name == _COMM_OP for name in columns.name.values), False], dtype=bool)
    found = np.full(len(calls), -1, dtype=np.int64)
    at = np.where(calls >= 0, columns.parent[calls], -1)
    while (at >= 0).any():
        found = np.where((at >= 0) & is_op[columns.name.codes[at]], at, found)
        at = np.where(at >= 0, columns.parent[at], -1)
    return found


def _is_collective(columns: Columns, rows: Int64) -> Bool:
    """Which rows are kernels that are communication."""
    is_named = columns.name.accepted(rows, lambda name: kernel_collective(name, None) is not None)
    is_kernel: Bool = columns.kind[rows] == CODE["kernel"]
    return is_named & is_kernel


def _named_by_wait(columns: Columns, ops: Int64) -> tuple[Int64, Bool]:
    """Sequence number that each op names, and whether it is a ``wait`` op."""
    inputs = {op: _comm_inputs(columns, op) for op in set(ops[ops >= 0].tolist())}
    named = [inputs.get(op, (None, None)) for op in ops.tolist()]
    number = np.array([MISSING if number is None else number for number, _ in named], dtype=np.int64)
    return number, np.array([collective == "wait" for _, collective in named], dtype=bool)


def _by_number(columns: Columns, work: _Work, number: Int64, waits: Int64) -> Int64:
    """Last activity of the collective with each sequence number, -1 for none.

    Process groups count each for itself: a number that several collectives have names none of them.
    """
    found = np.full(len(number), -1, dtype=np.int64)
    if (number == MISSING).all():
        return found
    rows = np.sort(work.rows[_is_collective(columns, work.rows)])
    ops = _comm_op(columns, columns.launch[rows])
    last = {op: row for op, row in zip(ops.tolist(), rows.tolist(), strict=True) if op >= 0}  # in time order
    of_number: dict[int | None, list[int]] = {}
    for op in last:
        of_number.setdefault(_comm_inputs(columns, op)[0], []).append(op)
    for at, wanted in enumerate(number.tolist()):
        named = of_number.get(wanted, [])
        if len(named) == 1 and columns.ts_ns[named[0]] < columns.ts_ns[waits[at]]:
            found[at] = last[named[0]]
    return found


def _comm_inputs(columns: Columns, op: int) -> tuple[int | None, str | None]:
    """Sequence number and collective among the inputs of a communication op, as the host trace has them."""
    node = int(columns.host_node[op])
    text = columns.host.input_values[node] if columns.host is not None and node >= 0 else None
    try:
        inputs = msgspec.json.decode(text or "[]")
    except msgspec.DecodeError:
        return None, None
    sequence, collective = None, None
    for value in inputs if isinstance(inputs, list) else []:
        number = value[0] if isinstance(value, list) and len(value) == 2 and type(value[1]) is bool else value
        if type(number) is int and sequence is None:  # bare, or with a flag for point to point
            sequence = number
        elif isinstance(value, str) and collective is None:
            collective = value
    return sequence, collective
