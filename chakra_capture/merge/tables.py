"""One window of one rank: host and device trace to linked rows in their final order."""

from dataclasses import dataclass, field

import numpy as np

from chakra_capture import annotations
from chakra_capture.merge.link import HostLink, link_launches
from chakra_capture.merge.nest import innermost_at, nest
from chakra_capture.merge.overlap import within_stream
from chakra_capture.merge.rows import (
    ACTIVITY_KINDS,
    CODE,
    CPU_KINDS,
    DEVICE_KINDS,
    Tracks,
    by_number,
    climb,
    device_kinds,
    distinct_pairs,
    find_tracks,
    host_kinds,
    of_kind,
)
from chakra_capture.trace.columns import (
    MISSING,
    Bool,
    Coded,
    Int64,
    Ints,
    Part,
    Positions,
    concat_coded,
    missing,
    nulls,
    pick,
)
from chakra_capture.trace.device import DeviceTrace
from chakra_capture.trace.host import HostTrace
from chakra_capture.trace.keys import match_keys
from chakra_capture.trace.packed import Packed

_NESTS_OUTSIDE = ("python_function", "annotation", "host_op", "runtime")
_ALL = slice(None)
_LARGEST_KEY = 2**62


@dataclass(slots=True)
class Columns:
    """Linked rows of one window, sorted; row numbers are node ids within the window.

    Only what linking needs is here in that order. All else stays in the two traces and is fetched for the rows that
    are wanted: ``device_row`` and ``host_node`` say where a row stands there, -1 for nowhere. ``parent`` and
    ``launch`` are row numbers, -1 for none.
    """

    host: HostTrace | None
    device: DeviceTrace | None
    device_row: Positions
    host_node: Positions
    kind: "np.typing.NDArray[np.int8]"
    name: Coded
    ts_ns: Int64
    dur_ns: Int64
    tracks: Tracks
    parent: Positions = field(default_factory=lambda: np.zeros(0, dtype=np.int32))
    launch: Positions = field(default_factory=lambda: np.zeros(0, dtype=np.int32))
    self_ns: Int64 = field(default_factory=lambda: missing(0))
    step: Int64 = field(default_factory=lambda: missing(0))
    phase: Coded = field(default_factory=lambda: nulls(0))
    repaired: Bool = field(default_factory=lambda: np.zeros(0, dtype=bool))
    num_clipped: int = 0
    num_overlaps: int = 0

    def __len__(self) -> int:
        return len(self.kind)

    def is_kind(self, *kinds: str) -> Bool:
        return of_kind(self.kind, kinds)

    @property
    def track(self) -> Positions:
        """Number of the (pid, tid) of each row."""
        return self.tracks.number

    def unlinked(self, rows: Int64) -> "Columns":
        """The given rows in that order, without what linking found."""
        return Columns(
            host=self.host,
            device=self.device,
            device_row=self.device_row[rows],
            host_node=self.host_node[rows],
            kind=self.kind[rows],
            name=Coded(self.name.codes[rows], self.name.values),
            ts_ns=self.ts_ns[rows],
            dur_ns=self.dur_ns[rows],
            tracks=self.tracks.take(rows),
        )

    def integers(self, column: str, part: Part = _ALL) -> Int64:
        """An integer column of the table nodes that no link makes, for the given rows."""
        if column == "pid":
            return self.tracks.pid[self.track[part]]
        if column == "tid":
            return self.tracks.tid[self.track[part]]
        if column == "host_id":
            return self._of_host(None if self.host is None else self.host.node_id, part)
        values = self._of_device(None if self.device is None else self.device.ids[column], part)
        if column in _HOST_IDS:
            of_host = self._of_host(None if self.host is None else self.host.attrs[_HOST_IDS[column]], part)
            return np.where(values == MISSING, of_host, values)
        if column in _DEVICE_TRACKS:
            # Kineto gives device rows the device as pid and the stream as tid; the args say it too, mostly.
            on_device = of_kind(self.kind[part], DEVICE_KINDS)
            values = np.where(on_device & (values == MISSING), self.integers(_DEVICE_TRACKS[column], part), values)
            # A record of a whole device ("Context Sync") has stream -1: none.
            return np.where(values >= 0, values, MISSING)
        return values

    def wide(self, key: str, part: Part = _ALL) -> Int64:
        """An integer arg of the device trace that has no column, for the given rows."""
        column = None if self.device is None else self.device.wide.get(key)
        if column is None or self.device is None or not len(column.rows):
            return missing(len(self.device_row[part]))
        rows = self.device_row[part]
        at = np.minimum(np.searchsorted(column.rows, rows), len(column.rows) - 1)
        return np.where(column.rows[at] == rows, column.values[at], MISSING)

    def residue(self, row: int) -> str | None:
        """JSON text of the args of one row that have no column."""
        at = int(self.device_row[row])
        return None if self.device is None or at < 0 else self.device.residue[at]

    def host_parent(self) -> Positions:
        """Row of the parent that the host trace recorded, -1 for none or one that was never written."""
        if self.host is None:
            return np.full(len(self), -1, dtype=np.int32)
        row_of_node = np.full(self.host.num_nodes, -1, dtype=np.int32)
        known = np.flatnonzero(self.host_node >= 0)
        row_of_node[self.host_node[known]] = known
        parents = match_keys(self.host.parent[:], self.host.node_id[:])
        return pick(pick(row_of_node, parents, -1), self.host_node, -1)

    def _of_device(self, values: Packed | None, part: Part) -> Int64:
        rows = self.device_row[part]
        return missing(len(rows)) if values is None else values.pick(rows)

    def _of_host(self, values: Packed | None, part: Part) -> Int64:
        nodes = self.host_node[part]
        return missing(len(nodes)) if values is None else values.pick(nodes)


_HOST_IDS = {"record_function_id": "rf_id", "sequence_number": "seq_id"}
_DEVICE_TRACKS = {"device": "pid", "stream": "tid"}


def link_rows(host: HostTrace | None, device: DeviceTrace | None, host_link: HostLink | None) -> Columns:
    """Union of both files' rows with parents, launches, self times and steps."""
    columns = _in_order(_union(host, device, host_link), host_only=device is None)
    columns.device = None if device is None else device.without_times()
    ends = _nest_cpu(columns, host_only=device is None)
    _clip_streams(columns)
    columns.launch = link_launches(
        columns.integers("correlation_id"),
        columns.ts_ns,
        columns.dur_ns,
        pid=columns.integers("pid"),
        is_runtime=columns.is_kind("runtime"),
        is_activity=columns.is_kind(*ACTIVITY_KINDS),
    )
    _device_parents(columns)
    columns.step = _steps(columns, ends)
    return columns


def _union(host: HostTrace | None, device: DeviceTrace | None, host_link: HostLink | None) -> Columns:
    """The rows of the device trace, then the nodes of the host trace that it lacks."""
    size = 0 if device is None else device.num_rows
    device_row = np.arange(size, dtype=np.int32)
    host_node = np.full(size, -1, dtype=np.int32)
    if host is None:
        assert device is not None
        tracks = find_tracks(device.pid[:], device.tid[:])
        kind, name = device_kinds(device), device.name
        return Columns(host, device, device_row, host_node, kind, name, device.ts_ns, device.dur_ns, tracks)
    link = np.full(host.num_nodes, -1, dtype=np.int64) if host_link is None else host_link.device_row
    linked, alone = np.flatnonzero(link >= 0), np.flatnonzero(link < 0)
    host_node[link[linked]] = linked
    kind, name = host_kinds(host)[alone], Coded(host.name.codes[alone], host.name.values)
    ts_ns = dur_ns = missing(len(alone))
    pid, tid = np.full(len(alone), MISSING if host.pid is None else host.pid), host.attrs["tid"][alone]
    if device is not None:
        kind, name = np.concatenate([device_kinds(device), kind]), concat_coded(device.name, name)
        ts_ns, dur_ns = np.concatenate([device.ts_ns, ts_ns]), np.concatenate([device.dur_ns, dur_ns])
        pid = np.concatenate([device.pid[:], pid])
        tid = np.concatenate([device.tid[:], _thread_ids(host, device, link)[alone]])
    return Columns(
        host=host,
        device=device,
        device_row=np.concatenate([device_row, np.full(len(alone), -1, dtype=np.int32)]),
        host_node=np.concatenate([host_node, alone.astype(np.int32)]),
        kind=kind,
        name=name,
        ts_ns=ts_ns,
        dur_ns=dur_ns,
        tracks=find_tracks(pid, tid),
    )


def _thread_ids(host: HostTrace, device: DeviceTrace, device_row: Int64) -> Int64:
    """Thread of each node as Kineto numbers it, learnt from the linked nodes of the same observer thread."""
    linked, own = np.flatnonzero(device_row >= 0), host.attrs["tid"][:]
    thread, tid, pair = distinct_pairs(own[linked], device.tid[device_row[linked]])
    order = np.lexsort((tid, -np.bincount(pair, minlength=len(tid)), thread))
    thread, tid = thread[order], tid[order]
    if not len(thread):
        return missing(len(own))
    # The first of a thread counts: the most frequent, of those the smallest.
    at = np.minimum(np.searchsorted(thread, own), len(thread) - 1)
    return np.where(thread[at] == own, tid[at], MISSING)


def _in_order(columns: Columns, *, host_only: bool) -> Columns:
    """Sort by (pid, tid, ts, -dur), the enclosing kind first on a tie, then in order of opening."""
    order = _order(columns, host_only=host_only)
    return columns.unlinked(order)


def _order(columns: Columns, *, host_only: bool) -> Int64:
    key = _track_and_time(columns)
    if key is None:
        return np.lexsort((*_tie_keys(columns, _ALL, host_only=host_only), columns.ts_ns, columns.track))
    order = np.argsort(key, kind="stable")
    equal = key[order[1:]] == key[order[:-1]]
    # Rows with one thread and start are few; only they are compared by more.
    tied = np.flatnonzero(np.append(equal, False) | np.append(False, equal)) if len(order) else order
    rows = order[tied]
    order[tied] = rows[np.lexsort((*_tie_keys(columns, rows, host_only=host_only), key[rows]))]
    return order


def _track_and_time(columns: Columns) -> Int64 | None:
    """Thread and start as one number; None where absurd times leave no room for the thread."""
    known = columns.ts_ns != MISSING
    if not known.any():
        return columns.track.astype(np.int64)
    first, last = int(columns.ts_ns[known].min()), int(columns.ts_ns[known].max())
    width = last - first + 2
    if width * len(columns.tracks.pid) > _LARGEST_KEY:
        return None
    return columns.track * np.int64(width) + np.where(known, columns.ts_ns - first + 1, 0)


def _tie_keys(columns: Columns, part: Part, *, host_only: bool) -> tuple[Ints, ...]:
    """What decides between rows of one thread and start, the most important last (as lexsort wants it)."""
    if host_only:
        opened = columns.integers("host_id", part)
    else:
        opened = columns.integers("record_function_id", part)
        opened = np.where(opened == MISSING, columns.integers("external_id", part), opened)
    dur = columns.dur_ns[part]
    return opened, _DEPTH[columns.kind[part]], np.where(dur == MISSING, MISSING, -dur)


def _depths() -> "np.typing.NDArray[np.int8]":
    """Which kind encloses which where both start and end at one time; annotations and ops in order of opening."""
    depth = np.full(len(CODE), len(_NESTS_OUTSIDE), dtype=np.int8)
    for level, kind in enumerate(_NESTS_OUTSIDE):
        depth[CODE[kind]] = level
    depth[CODE["annotation"]] = depth[CODE["host_op"]] = 1
    return depth


_DEPTH = _depths()


def _nest_cpu(columns: Columns, *, host_only: bool) -> Int64:
    """Parents and self times of the CPU rows; rows without a start keep the host trace's parent.

    Returns:
        end of each CPU row, clipped to that of its parent; ``MISSING`` for every other row.
    """
    timeless, endless = columns.ts_ns == MISSING, columns.dur_ns == MISSING
    activity = columns.is_kind(*ACTIVITY_KINDS)
    columns.self_ns = np.where(activity & ~timeless & ~endless, columns.dur_ns, MISSING)
    ends = missing(len(columns))
    columns.repaired = ~timeless & endless
    if not host_only:
        columns.repaired |= timeless & (columns.host_node < 0)
    if columns.host is not None and columns.host.added.num_roots:
        columns.repaired |= columns.host_node >= columns.host.num_nodes - columns.host.added.num_roots
    columns.parent = np.full(len(columns), -1, dtype=np.int32)
    if timeless.any():
        columns.parent[timeless] = columns.host_parent()[timeless]
    rows = np.flatnonzero(columns.is_kind(*CPU_KINDS) & ~timeless).astype(np.int32)
    if not len(rows):
        return ends
    nesting = nest(columns.track[rows], columns.ts_ns[rows], columns.dur_ns[rows])
    columns.parent[rows] = pick(rows, nesting.parent, -1)
    columns.self_ns[rows] = nesting.self_ns
    ends[rows] = nesting.end_ns
    columns.repaired[rows] |= nesting.clipped
    columns.num_clipped = int(np.count_nonzero(nesting.clipped))
    return ends


def _clip_streams(columns: Columns) -> None:
    """Count of each device activity only the time up to the next start on its stream."""
    rows = np.flatnonzero(columns.is_kind(*ACTIVITY_KINDS) & (columns.self_ns != MISSING))
    lasted = columns.dur_ns[rows]
    counted = within_stream(
        columns.integers("device", rows), columns.integers("stream", rows), columns.ts_ns[rows], lasted
    )
    cut = rows[counted < lasted]
    columns.self_ns[rows] = counted
    columns.repaired[cut] = True
    columns.num_overlaps = len(cut)


def _device_parents(columns: Columns) -> None:
    """Innermost host op or annotation, ProfilerStep excepted, around the launch of each device activity."""
    activities = np.flatnonzero(columns.launch >= 0)
    step_names = np.array([annotations.parse_step(v) is not None for v in columns.name.values], dtype=bool)
    accepted = columns.is_kind("host_op", "annotation") & ~columns.name.mask_of(step_names)
    around = columns.parent[columns.launch[activities]]
    columns.parent[activities] = climb(around, columns.parent, accepted)


def step_rows(columns: Columns) -> Int64:
    """Rows of the ProfilerStep annotations that have a start, in time order."""
    numbers = _step_numbers(columns)
    rows = np.flatnonzero((numbers != MISSING) & columns.is_kind("annotation", "host_op"))
    return rows[np.argsort(columns.ts_ns[rows], kind="stable")]


def _step_numbers(columns: Columns) -> Int64:
    per_name = np.array(
        [MISSING if (n := annotations.parse_step(v)) is None else n for v in columns.name.values] or [MISSING],
        dtype=np.int64,
    )
    return np.where(columns.name.codes >= 0, per_name[columns.name.codes], MISSING)


def _steps(columns: Columns, ends: Int64) -> Int64:
    """Step of each row: the ProfilerStep of its process that holds its start; of a device row that of its launch."""
    # A recorded Python stack has a step begin in a call (``__enter__``) that ends long before it: clipped to that call
    # it would hold nothing. Only of a step that was still open its thread tells the end.
    ends = np.where(columns.dur_ns == MISSING, ends, columns.ts_ns + columns.dur_ns)
    numbers = _step_numbers(columns)
    step = missing(len(columns))
    named = step_rows(columns)
    marks = named[columns.ts_ns[named] != MISSING]
    is_cpu = columns.is_kind(*CPU_KINDS, "overhead", "other") & (columns.ts_ns != MISSING)
    for mine in by_number(marks, columns.integers("pid", marks)):
        pid = columns.tracks.pid[columns.track[mine[0]]]
        # Tracks ascend by pid, rows by track.
        tracks = np.searchsorted(columns.tracks.pid, pid), np.searchsorted(columns.tracks.pid, pid, side="right")
        first, after = np.searchsorted(columns.track, tracks)
        rows = first + np.flatnonzero(is_cpu[first:after])
        holder = innermost_at(columns.ts_ns[rows], columns.ts_ns[mine], ends[mine])
        step[rows] = np.where(holder >= 0, numbers[mine[np.maximum(holder, 0)]], MISSING)
    step[named] = numbers[named]
    launched = columns.launch >= 0
    step[launched] = step[columns.launch[launched]]
    return step
