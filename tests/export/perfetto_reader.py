"""A reader of Chrome JSON that knows nothing of how it was written: what a viewer would draw, in whole ns."""

import gzip
import json
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from decimal import Decimal
from itertools import pairwise
from pathlib import Path
from typing import Any


def ns(us: Decimal | int) -> int:
    """Microseconds as nanoseconds; more than three decimals are refused."""
    value = Decimal(us) * 1000
    assert value == value.to_integral_value(), us
    return int(value)


@dataclass
class Slice:
    name: str
    cat: str | None
    pid: int
    tid: int
    begin: int
    end: int
    args: dict[str, Any]


@dataclass
class Trace:
    """What is in a file.

    Attributes:
        slices, instants: in the order of the file; times since the base.
        counters: (pid, name) -> samples in order.
        arrows: kind -> pairs of (pid, tid, time).
        threads, processes: their names, and where they stand.
    """

    head: dict[str, Any]
    slices: list[Slice] = field(default_factory=list)
    instants: list[Slice] = field(default_factory=list)
    counters: dict[tuple[int, str], list[tuple[int, Decimal]]] = field(default_factory=lambda: defaultdict(list))
    arrows: dict[str, list[tuple[tuple[int, int, int], tuple[int, int, int]]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    threads: dict[tuple[int, int], str] = field(default_factory=dict)
    processes: dict[int, str] = field(default_factory=dict)
    order: dict[tuple[int, int], int] = field(default_factory=dict)

    @property
    def base(self) -> int:
        return self.head["baseTimeNanoseconds"]  # type: ignore[no-any-return]

    def of_cat(self, *cats: str) -> list[Slice]:
        return [one for one in self.slices if one.cat in cats]

    def on(self, process: str, thread: str) -> list[Slice]:
        """Slices of the tracks with this name."""
        (pid,) = [pid for pid, name in self.processes.items() if name == process]
        tids = [tid for (of, tid), name in self.threads.items() if of == pid and name == thread]
        return [one for one in self.slices if one.pid == pid and one.tid in tids]

    def rows(self) -> dict[tuple[int, int], Slice]:
        """Slices and instants of rows, by (rank, node_id)."""
        found = {}
        for one in [*self.slices, *self.instants]:
            if "node_id" in one.args and one.cat != "critical_path":
                key = one.pid // 10 - 1, one.args["node_id"]
                assert key not in found, key
                found[key] = one
        return found


def read(path: Path) -> Trace:
    """Read a file and check what every viewer relies on."""
    raw = path.read_bytes()
    if path.suffix == ".gz":
        raw = gzip.decompress(raw)
    content = json.loads(raw, parse_float=Decimal)
    events = content.pop("traceEvents")
    trace = Trace(content)
    starts: dict[int, tuple[str, tuple[int, int, int]]] = {}
    for one in events:
        kind = one["ph"]
        if kind in "Xi":
            begin = ns(one["ts"])
            end = begin + ns(one.get("dur", 0))
            made = Slice(one["name"], one.get("cat"), one["pid"], one["tid"], begin, end, one["args"])
            (trace.slices if kind == "X" else trace.instants).append(made)
        elif kind == "C":
            trace.counters[one["pid"], one["name"]].append((ns(one["ts"]), one["args"]["value"]))
        elif kind == "s":
            assert one["id"] not in starts
            starts[one["id"]] = one["cat"], (one["pid"], one["tid"], ns(one["ts"]))
        elif kind == "f":
            assert one["bp"] == "e"
            cat, start = starts[one["id"]]  # written before: equal times are read in the order of the file
            assert cat == one["cat"]
            trace.arrows[cat].append((start, (one["pid"], one["tid"], ns(one["ts"]))))
        else:
            assert kind == "M"
            _name(trace, one)
    assert len(starts) == sum(map(len, trace.arrows.values()))
    check(trace)
    return trace


def _name(trace: Trace, one: dict[str, Any]) -> None:
    thread = one["pid"], one["tid"]
    if one["name"] == "thread_name":
        assert thread not in trace.threads
        trace.threads[thread] = one["args"]["name"]
    elif one["name"] == "thread_sort_index":
        trace.order[thread] = one["args"]["sort_index"]
    elif one["name"] == "process_name":
        assert one["pid"] not in trace.processes
        trace.processes[one["pid"]] = one["args"]["name"]


def check(trace: Trace) -> None:
    """No slice crosses another on its track, arrows end in slices, counters are sound, all is named."""
    tracks = defaultdict(list)
    for one in trace.slices:
        assert one.begin >= 0
        assert one.end >= one.begin
        tracks[one.pid, one.tid].append(one)
    for slices in tracks.values():
        assert_nests(slices)
    assert {*tracks} | {(one.pid, one.tid) for one in trace.instants} <= {*trace.threads}
    assert {*trace.threads} == {*trace.order}
    assert {pid for pid, _ in trace.threads} <= {*trace.processes}
    assert len({tid for _, tid in trace.threads}) == len(trace.threads)
    for pairs in trace.arrows.values():
        for start, end in pairs:
            assert start[2] <= end[2]
            for pid, tid, at in (start, end):
                # At its end a slice is over, but for one without a length.
                assert any(one.begin <= at < max(one.end, one.begin + 1) for one in tracks[pid, tid]), (pid, tid, at)
    for (_, name), samples in trace.counters.items():
        assert name.endswith("]")
        assert [at for at, _ in samples] == sorted(at for at, _ in samples)
        assert all(value >= 0 for _, value in samples)
        assert samples[-1][1] == samples[-2][1] if len(samples) > 1 else True
        assert all(a != b for (_, a), (_, b) in pairwise(samples[:-1]))


def assert_nests(slices: list[Slice]) -> None:
    """In the order of the file, as a viewer draws them: sorted, and each within all that is open."""
    opened: list[Slice] = []
    before = None
    for one in slices:
        assert before is None or (before.begin, -before.end) <= (one.begin, -one.end), (before, one)
        while opened and opened[-1].end <= one.begin:
            opened.pop()
        assert not opened or one.end <= opened[-1].end, (opened[-1], one)
        opened.append(one)
        before = one


def counts(slices: list[Slice]) -> Counter[str | None]:
    return Counter(one.cat for one in slices)
