"""One window of one rank: host and device trace to linked columns in their final order."""

from dataclasses import dataclass, field

import msgspec
import numpy as np

from chakra_capture import annotations
from chakra_capture.merge.collectives import host_collective, kernel_collective, stated_collective
from chakra_capture.merge.link import HostLink, link_launches, match_keys
from chakra_capture.merge.nest import innermost_at, nest
from chakra_capture.merge.overlap import within_stream
from chakra_capture.merge.rows import (
    ACTIVITY_KINDS,
    CPU_KINDS,
    DEVICE_KINDS,
    device_kinds,
    end_of,
    host_kinds,
    of_kind,
    tracks,
)
from chakra_capture.trace.columns import MISSING, Bool, Coded, Int64, Sparse, concat_coded, missing, nulls
from chakra_capture.trace.device import DeviceTrace
from chakra_capture.trace.host import HostTrace

_NESTS_OUTSIDE = ("python_function", "annotation", "host_op", "runtime")


@dataclass(slots=True)
class Columns:
    """Linked rows of one window, sorted; row numbers are node ids within the window.

    ``parent``, ``launch`` and ``host_parent`` are row numbers, -1 for none; ``track`` numbers the (pid, tid) pairs.
    The column args is written from ``category`` (JSON, null for rows of the host trace alone), ``residue``, ``wide``
    and ``host_rest`` (pieces of text, null for rows of the device trace alone).
    """

    kind: "np.typing.NDArray[np.int8]"
    name: Coded
    ts_ns: Int64
    dur_ns: Int64
    pid: Int64
    tid: Int64
    ids: dict[str, Int64]
    host_id: Int64
    input_shapes: Coded
    input_types: Coded
    category: Coded
    residue: Coded
    wide: dict[str, Int64]
    host_rest: tuple[Coded, ...]
    host_parent: Int64
    parent: Int64 = field(default_factory=lambda: missing(0))
    launch: Int64 = field(default_factory=lambda: missing(0))
    track: Int64 = field(default_factory=lambda: missing(0))
    self_ns: Int64 = field(default_factory=lambda: missing(0))
    clipped_end_ns: Int64 = field(default_factory=lambda: missing(0))
    step: Int64 = field(default_factory=lambda: missing(0))
    repaired: Bool = field(default_factory=lambda: np.zeros(0, dtype=bool))
    num_clipped: int = 0
    num_overlaps: int = 0

    def is_kind(self, *kinds: str) -> Bool:
        return of_kind(self.kind, kinds)

    def __len__(self) -> int:
        return len(self.kind)


def link_rows(host: HostTrace | None, device: DeviceTrace | None, host_link: HostLink | None) -> Columns:
    """Union of both files' rows with parents, launches, self times and steps."""
    columns = _in_order(_union(host, device, host_link), host_only=device is None)
    columns.track = tracks(columns.pid, columns.tid)
    _nest_cpu(columns, host_only=device is None)
    _clip_streams(columns)
    columns.launch = link_launches(
        columns.ids["correlation_id"],
        columns.ts_ns,
        columns.dur_ns,
        pid=columns.pid,
        is_runtime=columns.is_kind("runtime"),
        is_activity=columns.is_kind(*ACTIVITY_KINDS),
    )
    _device_parents(columns)
    columns.step = _steps(columns)
    return columns


def _union(host: HostTrace | None, device: DeviceTrace | None, host_link: HostLink | None) -> Columns:
    if device is None:
        assert host is not None
        return _host_columns(host, np.arange(host.num_nodes), tid=host.attrs["tid"], parents=host_parents(host))
    columns = _device_columns(device)
    if host is None or host_link is None:
        return columns
    return _join(columns, host, host_link.device_row)


def _device_columns(device: DeviceTrace) -> Columns:
    kind = device_kinds(device)
    size = device.num_rows
    ids = dict(device.ids)
    on_device = of_kind(kind, DEVICE_KINDS)
    # Kineto gives device rows the device as pid and the stream as tid; the args say it too, mostly.
    for key, fallback in (("device", device.pid), ("stream", device.tid)):
        stated = np.where(ids[key] == MISSING, fallback, ids[key])
        # A record of a whole device ("Context Sync") has stream -1: none.
        ids[key] = np.where(on_device & (stated >= 0), stated, MISSING)
    return Columns(
        kind=kind,
        name=device.name,
        ts_ns=device.ts_ns,
        dur_ns=device.dur_ns,
        pid=device.pid,
        tid=device.tid,
        ids=ids,
        host_id=missing(size),
        input_shapes=device.input_shapes,
        input_types=device.input_types,
        category=_as_json(device.category),
        residue=device.residue,
        wide={key: _spread(column, size) for key, column in device.wide.items() if len(column.rows)},
        host_rest=(),
        host_parent=np.full(size, -1, dtype=np.int64),
    )


def _host_columns(host: HostTrace, nodes: Int64, *, tid: Int64, parents: Int64) -> Columns:
    """Columns of the given host nodes alone; ``parents`` has the row number of every node's parent."""
    size = len(nodes)
    ids = {key: missing(size) for key in ("external_id", "correlation_id", "device", "stream")}
    ids["record_function_id"] = host.attrs["rf_id"][nodes]
    ids["sequence_number"] = host.attrs["seq_id"][nodes]
    return Columns(
        kind=host_kinds(host)[nodes],
        name=Coded(host.name.codes[nodes], host.name.values),
        ts_ns=missing(size),
        dur_ns=missing(size),
        pid=np.full(size, MISSING if host.pid is None else host.pid, dtype=np.int64),
        tid=tid[nodes],
        ids=ids,
        host_id=host.node_id[nodes],
        input_shapes=Coded(host.input_shapes.codes[nodes], host.input_shapes.values),
        input_types=Coded(host.input_types.codes[nodes], host.input_types.values),
        category=nulls(size),
        residue=nulls(size),
        wide={},
        host_rest=tuple(Coded(part.codes[nodes], part.values) for part in _host_rest(host)),
        host_parent=parents[nodes],
    )


def host_parents(host: HostTrace) -> Int64:
    """Position of each node's parent in the host trace, -1 for none or a parent that was never written."""
    return match_keys(host.parent, host.node_id)


def _join(columns: Columns, host: HostTrace, device_row: Int64) -> Columns:
    """Give linked rows what the host trace knows of them; append the nodes the device trace lacks."""
    linked = np.flatnonzero(device_row >= 0)
    rows = device_row[linked]
    alone = np.flatnonzero(device_row < 0)
    row_of_node = device_row.copy()
    row_of_node[alone] = len(columns) + np.arange(len(alone))
    all_parents = host_parents(host)
    columns.host_id[rows] = host.node_id[linked]
    parents = np.where(all_parents >= 0, row_of_node[np.maximum(all_parents, 0)], -1)
    columns.host_parent[rows] = parents[linked]
    extra = _host_columns(host, alone, tid=_thread_ids(host, columns, device_row), parents=parents)
    sequence = host.attrs["seq_id"][linked]
    known = columns.ids["sequence_number"][rows] == MISSING
    columns.ids["sequence_number"][rows] = np.where(known, sequence, columns.ids["sequence_number"][rows])
    columns.input_shapes = _overlay(columns.input_shapes, rows, host.input_shapes, linked)
    columns.input_types = _overlay(columns.input_types, rows, host.input_types, linked)
    # One dictionary for both: they are the largest there are.
    rest = _host_rest(host)
    columns.host_rest = tuple(_placed(part, linked, rows, len(columns)) for part in rest)
    extra.host_rest = tuple(Coded(part.codes[alone], part.values) for part in rest)
    return _append(columns, extra)


def _thread_ids(host: HostTrace, columns: Columns, device_row: Int64) -> Int64:
    """Thread of each node as Kineto numbers it, learnt from the linked nodes of the same observer thread."""
    linked = np.flatnonzero(device_row >= 0)
    observer_tid, kineto_tid = host.attrs["tid"], missing(host.num_nodes)
    for number in np.unique(observer_tid):
        seen = columns.tid[device_row[linked[observer_tid[linked] == number]]]
        if len(seen):
            values, counts = np.unique(seen, return_counts=True)
            kineto_tid[observer_tid == number] = values[np.argmax(counts)]
    return kineto_tid


def _overlay(column: Coded, rows: Int64, source: Coded, at: Int64) -> Coded:
    """Replace ``column[rows]`` by ``source[at]``."""
    both = concat_coded(column, Coded(source.codes[at], source.values))
    codes = both.codes[: len(column)].copy()
    codes[rows] = both.codes[len(column) :]
    return Coded(codes, both.values)


def _host_rest(host: HostTrace) -> tuple[Coded, ...]:
    """The pieces of the text of what only the host trace has, in their order."""
    begin, middle, end = host.frames
    return begin, host.input_values, middle, host.output_values, end


def _placed(part: Coded, nodes: Int64, rows: Int64, size: int) -> Coded:
    """A column of ``size`` rows that has ``part[nodes]`` at ``rows``."""
    codes = np.full(size, -1, dtype=np.int32)
    codes[rows] = part.codes[nodes]
    return Coded(codes, part.values)


def _spread(column: Sparse, size: int) -> Int64:
    values = missing(size)
    values[column.rows] = column.values
    return values


def _as_json(category: Coded) -> Coded:
    """Categories as JSON text; a device row without one has ``null``."""
    texts = [msgspec.json.encode(value).decode("utf-8", "replace") for value in category.values]
    return Coded(np.where(category.codes >= 0, category.codes, np.int32(len(texts))).astype(np.int32), [*texts, "null"])


def _append(first: Columns, second: Columns) -> Columns:
    def both(a: Int64, b: Int64) -> Int64:
        return np.concatenate([a, b])

    return Columns(
        kind=np.concatenate([first.kind, second.kind]),
        name=concat_coded(first.name, second.name),
        ts_ns=both(first.ts_ns, second.ts_ns),
        dur_ns=both(first.dur_ns, second.dur_ns),
        pid=both(first.pid, second.pid),
        tid=both(first.tid, second.tid),
        ids={key: both(first.ids[key], second.ids[key]) for key in first.ids},
        host_id=both(first.host_id, second.host_id),
        input_shapes=concat_coded(first.input_shapes, second.input_shapes),
        input_types=concat_coded(first.input_types, second.input_types),
        category=concat_coded(first.category, second.category),
        residue=concat_coded(first.residue, second.residue),
        wide={key: both(values, missing(len(second))) for key, values in first.wide.items()},
        host_rest=tuple(concat_coded(a, b) for a, b in zip(first.host_rest, second.host_rest, strict=True)),
        host_parent=both(first.host_parent, second.host_parent),
    )


def _in_order(columns: Columns, *, host_only: bool) -> Columns:
    """Sort by (pid, tid, ts, -dur), the enclosing kind first on a tie, then in order of opening."""
    opened = columns.ids["record_function_id"].copy()
    opened[opened == MISSING] = columns.ids["external_id"][opened == MISSING]
    if host_only:
        opened = columns.host_id
    depth = np.full(len(columns), len(_NESTS_OUTSIDE), dtype=np.int64)
    for level, kind in enumerate(_NESTS_OUTSIDE):
        depth[columns.is_kind(kind)] = max(level, 1) if kind == "annotation" else level
    depth[columns.is_kind("host_op")] = 1
    last = np.where(columns.dur_ns == MISSING, np.iinfo(np.int64).min, -columns.dur_ns)
    order = np.lexsort((opened, depth, last, columns.ts_ns, columns.tid, columns.pid))
    new_row = np.empty(len(order), dtype=np.int64)
    new_row[order] = np.arange(len(order))
    parent = columns.host_parent[order]

    def take(coded: Coded) -> Coded:
        return Coded(coded.codes[order], coded.values)

    return Columns(
        kind=columns.kind[order],
        name=take(columns.name),
        ts_ns=columns.ts_ns[order],
        dur_ns=columns.dur_ns[order],
        pid=columns.pid[order],
        tid=columns.tid[order],
        ids={key: values[order] for key, values in columns.ids.items()},
        host_id=columns.host_id[order],
        input_shapes=take(columns.input_shapes),
        input_types=take(columns.input_types),
        category=take(columns.category),
        residue=take(columns.residue),
        wide={key: values[order] for key, values in columns.wide.items()},
        host_rest=tuple(take(part) for part in columns.host_rest),
        host_parent=np.where(parent >= 0, new_row[np.maximum(parent, 0)], -1),
    )


def _nest_cpu(columns: Columns, *, host_only: bool) -> None:
    """Parents, ends and self times of the CPU rows; rows without a start keep the host trace's parent."""
    size = len(columns)
    has_time = (columns.ts_ns != MISSING) & (columns.dur_ns != MISSING)
    columns.self_ns = np.where(has_time & columns.is_kind(*ACTIVITY_KINDS), columns.dur_ns, MISSING)
    columns.clipped_end_ns = end_of(columns.ts_ns, columns.dur_ns)
    columns.repaired = (columns.ts_ns != MISSING) & (columns.dur_ns == MISSING)
    if not host_only:
        columns.repaired |= (columns.ts_ns == MISSING) & (columns.host_id == MISSING)
    timeless = columns.ts_ns == MISSING
    columns.parent = np.where(timeless, columns.host_parent, -1)
    rows = np.flatnonzero(columns.is_kind(*CPU_KINDS) & ~timeless)
    if not len(rows):
        return
    nesting = nest(columns.track[rows], columns.ts_ns[rows], columns.dur_ns[rows])
    columns.parent[rows] = np.where(nesting.parent >= 0, rows[np.maximum(nesting.parent, 0)], -1)
    columns.self_ns[rows] = nesting.self_ns
    columns.clipped_end_ns[rows] = nesting.end_ns
    columns.repaired[rows] |= nesting.clipped
    columns.num_clipped = int(np.count_nonzero(nesting.clipped))
    assert size == len(columns.parent)


def _clip_streams(columns: Columns) -> None:
    """Count of each device activity only the time up to the next start on its stream."""
    rows = np.flatnonzero(columns.is_kind(*ACTIVITY_KINDS) & (columns.self_ns != MISSING))
    lasted = columns.dur_ns[rows]
    counted = within_stream(columns.ids["device"][rows], columns.ids["stream"][rows], columns.ts_ns[rows], lasted)
    cut = rows[counted < lasted]
    columns.self_ns[rows] = counted
    columns.clipped_end_ns[cut] = columns.ts_ns[cut] + columns.self_ns[cut]
    columns.repaired[cut] = True
    columns.num_overlaps = len(cut)


def _device_parents(columns: Columns) -> None:
    """Innermost host op or annotation, ProfilerStep excepted, around the launch of each device activity."""
    activities = np.flatnonzero(columns.launch >= 0)
    step_names = np.array([annotations.parse_step(v) is not None for v in columns.name.values], dtype=bool)
    accepted = columns.is_kind("host_op", "annotation") & ~columns.name.mask_of(step_names)
    at = columns.parent[columns.launch[activities]]
    # One level of the call stack per round; every round moves all rows still searching.
    while True:
        searching = (at >= 0) & ~accepted[np.maximum(at, 0)]
        if not searching.any():
            break
        at = np.where(searching, columns.parent[np.maximum(at, 0)], at)
    columns.parent[activities] = at


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


def _steps(columns: Columns) -> Int64:
    """Step of each row: the ProfilerStep of its process that holds its start; of a device row that of its launch."""
    numbers = _step_numbers(columns)
    step = missing(len(columns))
    named = step_rows(columns)
    marks = named[columns.ts_ns[named] != MISSING]
    is_cpu = columns.is_kind(*CPU_KINDS, "overhead", "other") & (columns.ts_ns != MISSING)
    for pid in np.unique(columns.pid[marks]):
        mine = marks[columns.pid[marks] == pid]
        rows = np.flatnonzero(is_cpu & (columns.pid == pid))
        holder = innermost_at(columns.ts_ns[rows], columns.ts_ns[mine], columns.clipped_end_ns[mine])
        step[rows] = np.where(holder >= 0, numbers[mine[np.maximum(holder, 0)]], MISSING)
    step[named] = numbers[named]
    launched = columns.launch >= 0
    step[launched] = step[columns.launch[launched]]
    return step


def collectives(columns: Columns) -> Coded:
    """Collective of each communication row, null elsewhere."""
    names, args = columns.name, columns.residue
    found: dict[str, int] = {}
    codes = np.full(len(columns), -1, dtype=np.int32)

    def fill(rows: Bool, per_value: list[str | None], of: Coded) -> None:
        table = np.array([-1 if v is None else found.setdefault(v, len(found)) for v in per_value] or [-1])
        codes[rows] = table[of.codes[rows]]

    is_kernel = columns.is_kind("kernel")
    fill(is_kernel, [kernel_collective(name, None) for name in names.values], names)
    stated = [_stated(text) for text in args.values]
    has_stated = args.mask_of(np.array([value is not None for value in stated], dtype=bool))
    fill(is_kernel & has_stated, [value and kernel_collective("", value) for value in stated], args)
    is_op = columns.is_kind("host_op", "annotation")
    fill(is_op, [host_collective(name) for name in names.values], names)
    per_args = [value and stated_collective(value) for value in stated]
    fill(is_op & args.mask_of(np.array([value is not None for value in per_args], dtype=bool)), per_args, args)
    # All of point-to-point and all-to-all run in one SendRecv kernel, any collective in a generic one.
    open_codes = [found[name] for name in ("send_recv", "other") if name in found]
    if open_codes:
        _name_by_caller(columns, codes, np.flatnonzero(is_kernel & ~has_stated & np.isin(codes, open_codes)))
    return Coded(codes, list(found))


def _name_by_caller(columns: Columns, codes: "np.typing.NDArray[np.int32]", kernels: Int64) -> None:
    """Give kernels that do not say their collective that of the innermost op around their launch that does."""
    at = columns.parent[kernels]
    while (searching := (at >= 0) & (codes[np.maximum(at, 0)] < 0)).any():
        at = np.where(searching, columns.parent[np.maximum(at, 0)], at)
    codes[kernels[at >= 0]] = codes[at[at >= 0]]


class _CommArgs(msgspec.Struct):
    collective: str | None = msgspec.field(name="Collective name", default=None)


def _stated(args: str | None) -> str | None:
    if not args or "Collective name" not in args:
        return None
    try:
        return msgspec.json.decode(args, type=_CommArgs).collective or None
    except msgspec.DecodeError:
        return None
