"""Device activities: order on their stream, the launch they wait for, and what that takes: one median per class.

Rules 3.1 to 3.3 and 3.7 of the replay. A kernel's launch latency is counted from the end of its launch call, that of a
copy that blocks its call from the begin. Which class an activity is in: its kind, the name of the call, and whether it
is a collective. Never the recorded lag of the activity itself: with those any graph gives back what it was made from.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median

from chakra_capture.analysis.replay.graph import Graph
from chakra_capture.analysis.replay.rows import ACTIVITY_KINDS, Rows, Track
from chakra_capture.analysis.replay.threads import Threads

US = 1_000
# What is launched so long before its predecessor ends has waited for that alone.
_LAUNCHED_BEFORE_NS = 20 * US
# The first activity of a stream that starts later waits for something launched before the window.
BACKLOG_NS = 200 * US
_DEFAULT_LAUNCH_NS, _DEFAULT_GAP_NS = 2 * US, 1 * US
_BLOCKING_CALLS = frozenset({"cudaMemcpy", "hipMemcpy", "hipMemcpyWithStream"})
_RETURN_NS = 10 * US


@dataclass(slots=True)
class Activities:
    """The activities of a window, and what each waits for.

    Attributes:
        rows: in time order of their streams.
        starts, ends: points of the graph.
        before: activity -> the one before it on its stream.
        blocking: copies whose launch call returns when they are done.
        stream_gap_ns: between two activities of a stream that were both launched long before.
        launch_lag_ns: by class, from the end of the launch call (of blocking copies the begin) to the start.
    """

    of_stream: dict[Track, list[int]]
    rows: list[int]
    starts: dict[int, int] = field(default_factory=dict)
    ends: dict[int, int] = field(default_factory=dict)
    before: dict[int, int] = field(default_factory=dict)
    blocking: set[int] = field(default_factory=set)
    stream_gap_ns: int = _DEFAULT_GAP_NS
    launch_lag_ns: dict[tuple[str, str, bool, bool], int] = field(default_factory=dict)


def read_activities(rows: Rows, threads: Threads, graph: Graph, duration: Callable[[int], int]) -> Activities:
    """Put all activities into the graph, each with its duration, and learn the lags of the trace."""
    of_stream: dict[Track, list[int]] = defaultdict(list)
    for row in range(len(rows)):
        if rows.kind[row] in ACTIVITY_KINDS and rows.is_timed(row):
            of_stream[rows.track[row]].append(row)
    for stream in of_stream.values():
        stream.sort(key=lambda row: (rows.start[row], row))
    found = Activities(of_stream, [row for stream in of_stream.values() for row in stream])
    for stream in of_stream.values():
        found.before.update({after: before for before, after in pairwise(stream)})
    for row in found.rows:
        start, end = span(rows, row)
        found.starts[row], found.ends[row] = graph.point(start), graph.point(end)
        graph.edge(found.starts[row], found.ends[row], duration(row), "run")
    found.blocking = {row for row in found.rows if _is_blocking(rows, threads, row)}
    _learn_gap(rows, threads, found)
    _learn_lags(rows, threads, found)
    return found


def span(rows: Rows, row: int) -> tuple[int, int]:
    """Start and end of a row that has both."""
    start, end = rows.start[row], rows.end[row]
    assert start is not None
    assert end is not None
    return start, end


def launched_at(rows: Rows, threads: Threads, found: Activities, row: int) -> int | None:
    """Time from which the launch latency of an activity counts; None without a launch."""
    call = rows.launch[row]
    if call not in threads.ends:
        return None
    return rows.start[call] if row in found.blocking else threads.ends[call]


def lag_of(rows: Rows, found: Activities, row: int) -> int:
    """Launch latency of the class of an activity, ns."""
    key = _class(rows, found, row)
    if key not in found.launch_lag_ns:
        alike = [lag for other, lag in found.launch_lag_ns.items() if (other[0], other[3]) == (key[0], key[3])]
        found.launch_lag_ns[key] = median_of(alike, _DEFAULT_LAUNCH_NS)
    return found.launch_lag_ns[key]


def median_of(values: Iterable[int], default: int) -> int:
    """Median, ns; ``default`` of nothing."""
    values = list(values)
    return int(median(values)) if values else default


def add_launches(rows: Rows, threads: Threads, found: Activities, graph: Graph, *, in_order: bool = True) -> None:
    """Have every activity wait for its launch, and with ``in_order`` for the one before it on its stream."""
    for row in found.rows:
        call = rows.launch[row]
        if call in threads.ends:
            point = threads.begin_point(rows, call) if row in found.blocking else threads.end_point(rows, call)
            graph.edge(point, found.starts[row], lag_of(rows, found, row), "launch")
        before = found.before.get(row)
        if before is not None and in_order:
            graph.edge(found.ends[before], found.starts[row], found.stream_gap_ns, "stream_order")


def _class(rows: Rows, found: Activities, row: int) -> tuple[str, str, bool, bool]:
    return rows.kind[row], rows.name[rows.launch[row]], rows.is_collective[row], row in found.blocking


def _is_blocking(rows: Rows, threads: Threads, row: int) -> bool:
    call = rows.launch[row]
    if rows.kind[row] != "memcpy" or call not in threads.ends:
        return False
    if "Pageable" not in rows.name[row] and rows.name[call] not in _BLOCKING_CALLS:
        return False
    (start, end), begun, returned = span(rows, row), rows.start[call], threads.ends[call]
    assert begun is not None
    return end <= returned + _RETURN_NS and returned - begun > end - start


def _learn_gap(rows: Rows, threads: Threads, found: Activities) -> None:
    gaps = []
    for row, before in found.before.items():
        call, done = rows.launch[row], span(rows, before)[1]
        if call in threads.ends and threads.ends[call] < done - _LAUNCHED_BEFORE_NS:
            gaps.append(span(rows, row)[0] - done)
    found.stream_gap_ns = median_of(gaps, _DEFAULT_GAP_NS)


def _learn_lags(rows: Rows, threads: Threads, found: Activities) -> None:
    """From activities that found their stream idle."""
    seen: dict[tuple[str, str, bool, bool], list[int]] = defaultdict(list)
    for row in found.rows:
        since, before = launched_at(rows, threads, found, row), found.before.get(row)
        if since is None or (before is not None and span(rows, before)[1] > since):
            continue
        lag = span(rows, row)[0] - since
        if before is not None or lag <= BACKLOG_NS:
            seen[_class(rows, found, row)].append(lag)
    found.launch_lag_ns = {key: median_of(lags, 0) for key, lags in seen.items()}
