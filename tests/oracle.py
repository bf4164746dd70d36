"""An independent reader of device traces: plain Python, decimal times, heaps and scans, nothing of the product.

It answers slowly and simply what the merged tables must say.
"""

import heapq
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from decimal import ROUND_HALF_EVEN, Decimal
from itertools import pairwise
from pathlib import Path
from typing import Any

from handed import load_json

ACTIVITIES = ("kernel", "memcpy", "memset")
ON_CPU = ("host_op", "annotation", "python_function", "runtime")


def kind_of(event: dict[str, Any]) -> str:
    if event["ph"] in ("i", "I"):
        return "memory" if event.get("name") == "[memory]" else "instant"
    category = str(event.get("cat") or "").lower()
    if category in ("cuda_runtime", "cuda_driver", "runtime", "hip_runtime", "privateuse1_runtime"):
        return "runtime"
    return {
        "cpu_op": "host_op", "operator": "host_op", "user_annotation": "annotation", "kernel": "kernel",
        "python_function": "python_function", "gpu_memcpy": "memcpy", "memcpy": "memcpy", "gpu_memset": "memset",
        "memset": "memset", "gpu_user_annotation": "device_annotation", "cuda_sync": "sync", "overhead": "overhead",
    }.get(category, "other")  # fmt: skip


def to_ns(microseconds: Any, base_ns: int = 0) -> int:
    exact = Decimal(microseconds) * 1000
    return int(exact.to_integral_value(rounding=ROUND_HALF_EVEN)) + base_ns


@dataclass(eq=False)
class Row:
    """One slice or instant of the file."""

    kind: str
    name: str
    pid: Any
    tid: Any
    ts: int
    dur: int
    args: dict[str, Any]
    order: int
    event: dict[str, Any]

    @property
    def end(self) -> int:
        return self.ts + self.dur

    @property
    def key(self) -> tuple[str, str, int, int]:
        return (self.kind, self.name, self.ts, self.dur)

    @property
    def is_step(self) -> bool:
        head, _, number = self.name.partition("ProfilerStep#")
        return head == "" and number.isdecimal()


@dataclass
class DeviceFile:
    """Rows of a device file, and what follows from them by definition."""

    content: Any
    rows: list[Row]
    events: list[dict[str, Any]]
    launches: dict[int, Row] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> "DeviceFile":
        content = load_json(path)
        events = content["traceEvents"] if isinstance(content, dict) else content
        base = content.get("baseTimeNanoseconds", 0) if isinstance(content, dict) else 0
        rows = []
        for order, event in enumerate(events):
            if event["ph"] not in ("X", "i", "I"):
                continue
            args = event.get("args") or {}
            dur = 0 if event["ph"] != "X" else to_ns(event["dur"])
            ts = to_ns(event["ts"], base)
            rows.append(Row(kind_of(event), event["name"], event["pid"], event["tid"], ts, dur, args, order, event))
        return cls(content, rows, events)

    @property
    def activities(self) -> list[Row]:
        return [row for row in self.rows if row.kind in ACTIVITIES]

    def launch_of(self) -> dict[Row, Row | None]:
        """The outermost runtime call with the correlation of each activity."""
        calls: dict[Any, Row] = {}
        for row in self.rows:
            correlation = row.args.get("correlation")
            if row.kind != "runtime" or not correlation:
                continue
            seen = calls.get(correlation)
            if seen is None or (row.ts, -row.dur) < (seen.ts, -seen.dur):
                calls[correlation] = row
        return {row: calls.get(row.args.get("correlation")) if row.args.get("correlation") else None
                for row in self.activities}  # fmt: skip

    def covering(self) -> "Covering":
        return Covering(row for row in self.rows if row.kind in ("host_op", "annotation") and not row.is_step)


class Covering:
    """Innermost row around an instant on a thread, by scanning back from the last one that started."""

    def __init__(self, rows: Iterable[Row]) -> None:
        self._threads: dict[tuple[Any, Any], list[Row]] = defaultdict(list)
        for row in rows:
            self._threads[row.pid, row.tid].append(row)
        for thread in self._threads.values():
            thread.sort(key=lambda row: (row.ts, -row.dur))
        self._starts = {key: [row.ts for row in thread] for key, thread in self._threads.items()}

    def at(self, call: Row) -> list[Row]:
        """Rows that cover the start of ``call``, of latest start and least duration (several on an exact tie)."""
        key = (call.pid, call.tid)
        thread = self._threads.get(key, [])
        found: list[Row] = []
        for index in range(bisect_right(self._starts.get(key, []), call.ts) - 1, -1, -1):
            row = thread[index]
            if found and row.key[2:] != found[0].key[2:]:
                break
            if row.end > call.ts:
                found.append(row)
        return found


def self_times(rows: list[Row]) -> dict[Row, int]:
    """Time in which each row is the innermost one of its thread, by a sweep over all bounds (no crossing rows)."""
    total = dict.fromkeys(rows, 0)
    threads: dict[tuple[Any, Any], list[Row]] = defaultdict(list)
    for row in rows:
        threads[row.pid, row.tid].append(row)
    for thread in threads.values():
        bounds = sorted({t for row in thread for t in (row.ts, row.end)})
        waiting = sorted(thread, key=lambda row: row.ts, reverse=True)
        active: list[tuple[int, int, int, Row]] = []
        for begin, end in pairwise(bounds):
            while waiting and waiting[-1].ts <= begin:
                row = waiting.pop()
                heapq.heappush(active, (-row.ts, row.dur, -row.order, row))
            while active and active[0][3].end <= begin:
                heapq.heappop(active)
            if active:
                total[active[0][3]] += end - begin
    return total


def union_length(intervals: Iterable[tuple[int, int]]) -> int:
    """Covered length, by walking the sorted intervals."""
    covered, reached = 0, None
    for begin, end in sorted(intervals):
        if reached is None or begin > reached:
            covered += end - begin
            reached = end
        elif end > reached:
            covered += end - reached
            reached = end
    return covered
