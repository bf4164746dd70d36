"""The program of one rank run again by N ranks that meet in its collectives: when everything happens, on a true clock.

All ranks go through the moments of the real rank in its order, as vectors over the ranks. What waited for something in
the real trace waits for it here, for as long as it now takes; what did not, takes what it took, times small noise.
No member leaves a collective before the last one has arrived.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from ranks_source import Operation, Source

_SYNC_CALLS = ("Synchronize",)
_ACTIVITIES = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCHES = ("cuda_runtime", "cuda_driver")
_BLOCKED_NS = 20_000  # a pause shorter than this, in which an operation happens to end, is no waiting for it
_END_SPREAD_NS = 4_000


@dataclass(frozen=True, slots=True)
class Straggler:
    """A rank whose own work takes ``factor`` times as long, everywhere or within what is called ``where``."""

    rank: int
    factor: float
    where: str | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """What is planted.

    Attributes:
        mesh: sizes of the dimensions of the ranks; operations go through the dimensions in turn.
        skew_ns: of each rank, what it comes late by in each step.
        absent: rank that leaves out the last operation of the last repetition.
    """

    num_ranks: int
    repeats: int
    seed: int
    jitter: float
    mesh: tuple[int, ...]
    skew_ns: dict[int, float]
    stragglers: tuple[Straggler, ...]
    transfer_ns: float | None = None
    absent: int | None = None


@dataclass(slots=True)
class Moment:
    """A point of the real rank's time at which something is decided."""

    at: int
    order: int
    do: str
    number: int = 0


@dataclass(slots=True)
class Repetition:
    """Where the moments of one repetition fell: (moments, ranks), ns on the true clock."""

    host_at: list[int] = field(default_factory=list)
    host: list[Any] = field(default_factory=list)
    arrivals: list[Any] = field(default_factory=list)
    ends: list[Any] = field(default_factory=list)
    activity_starts: dict[int, Any] = field(default_factory=dict)
    activity_ends: dict[int, Any] = field(default_factory=dict)


@dataclass(slots=True)
class _Activity:
    event: int
    stream: Any
    start: int
    end: int
    launch: int | None
    previous_end: int | None


class Replay:
    """Runs the program; ``repetitions`` holds the times."""

    def __init__(self, source: Source, plan: Plan) -> None:
        self.source, self.plan = source, plan
        self.rng = np.random.default_rng(plan.seed)
        self.operations = source.operations
        self.activities = self._activities()
        self.waits = self._waits()
        self.slow = self._slow_spans()
        self.moments = self._moments()
        self.transfers = self._transfers()
        self.now = np.zeros(plan.num_ranks)
        self.repetitions = [self._run(number) for number in range(plan.repeats)]

    # What the real rank shows.

    def _transfers(self) -> list[float]:
        shortest: dict[tuple[str, Any], int] = {}
        for operation in self.operations:
            key, took = (operation.name, operation.size), operation.end - operation.start
            shortest[key] = min(shortest.get(key, took), took)
        return [self.plan.transfer_ns or max(1000.0, shortest[(o.name, o.size)]) for o in self.operations]

    def _activities(self) -> list[_Activity]:
        source, of_operation = self.source, {o.event for o in self.operations}
        launches = {}
        for i, event in enumerate(source.raw):
            if event.get("cat") in _LAUNCHES:
                launches[(event.get("args") or {}).get("correlation")] = int(source.starts[i])
        numbers = [i for i, e in enumerate(source.raw) if e.get("cat") in _ACTIVITIES]
        found, ends = [], {}
        for i in sorted(numbers, key=lambda i: int(source.starts[i])):
            stream, correlation = source.tracks[i], (source.raw[i].get("args") or {}).get("correlation")
            if i not in of_operation:
                found.append(
                    _Activity(i, stream, int(source.starts[i]), int(source.ends[i]), launches.get(correlation),
                              ends.get(stream))
                )  # fmt: skip
            ends[stream] = max(ends.get(stream, 0), int(source.ends[i]))
        return found

    def _outermost(self, track: Any) -> list[tuple[int, int]]:
        """Times of the ops of a thread that are in no other op."""
        source, found = self.source, []
        ops = [i for i, e in enumerate(source.raw) if e.get("cat") == "cpu_op" and source.tracks[i] == track]
        for i in sorted(ops, key=lambda i: (int(source.starts[i]), -int(source.ends[i]))):
            if not found or source.starts[i] >= found[-1][1]:
                found.append((int(source.starts[i]), int(source.ends[i])))
        return found

    def _issuer(self, operation: Operation) -> Any:
        for i, event in enumerate(self.source.raw):
            if event.get("cat") == "cpu_op" and int(self.source.starts[i]) == operation.issue:
                return self.source.tracks[i]
        return self.source.main_pid

    def _waits(self) -> dict[int, tuple[int, list[int]]]:
        """Moments at which the host goes on after operations: the start of the pause before, and the operations."""
        if self.source.has_device:
            return {}
        waits: dict[int, tuple[int, list[int]]] = {}
        late: list[int] = []  # ended while something else ran; waited for where the next one is
        for k in range(len(self.operations)):
            operation = self.operations[k]
            ops = self._outermost(self._issuer(operation))
            before = max((end for start, end in ops if start <= operation.end), default=0)
            after = min((start for start, _ in ops if start > operation.end), default=self.source.span_ns)
            pause = max(before, operation.start)
            if operation.end - pause >= _BLOCKED_NS:
                first, ended = waits.get(after, (pause, []))
                waits[after] = (min(first, pause), [*ended, *late, k])
                late = []
            elif any(later.issue < after for later in self.operations[k + 1 :]):
                late.append(k)
            else:
                first, ended = waits.get(after, (after, []))
                waits[after] = (first, [*ended, *late, k])
                late = []
        return waits

    def _slow_spans(self) -> list[list[tuple[int, int]]]:
        spans = []
        for straggler in self.plan.stragglers:
            if straggler.where is None:
                spans.append([(0, self.source.span_ns)])
                continue
            found = [
                (int(self.source.starts[i]), int(self.source.ends[i]))
                for i, e in enumerate(self.source.raw)
                if e["ph"] == "X" and isinstance(self.source.tracks[i], int) and _is_called(e["name"], straggler.where)
            ]
            if not found:
                raise ValueError(f"nothing in the trace is called {straggler.where!r}")
            spans.append(found)
        return spans

    def _moments(self) -> list[Moment]:
        source = self.source
        found = [Moment(0, 9, "mark")]
        for k, operation in enumerate(self.operations):
            found += [Moment(operation.issue, 5, "issue", k), Moment(operation.start, 6, "arrive", k)]
            found.append(Moment(max(operation.end, operation.start + 1), 0, "end", k))
        for after, (pause, _) in self.waits.items():
            found += [Moment(min(pause, after - 1), 4, "pause", after), Moment(after, 1, "resume", after)]
        for a, activity in enumerate(self.activities):
            if activity.launch is not None:
                found.append(Moment(activity.launch, 5, "launch", a))
            found += [Moment(activity.start, 3, "activity", a), Moment(activity.end, 0, "activity end", a)]
        found += self._sync_moments()
        for spans in self.slow:
            for start, end in spans:
                found += [Moment(start, 4, "mark"), Moment(end, 4, "mark")]
        for i, event in enumerate(source.raw):
            if event.get("cat") == "user_annotation" and event["name"].startswith("ProfilerStep#"):
                start, end = int(source.starts[i]), int(source.ends[i])
                inside = [int(s) for j, s in enumerate(source.starts) if start < s < end and _on_host(source, j)]
                found.append(Moment(start, 4, "step"))
                found.append(Moment(min(inside, default=end), 3, "skew"))
        found.append(Moment(source.span_ns, 9, "mark"))
        return sorted(found, key=lambda m: (m.at, m.order))

    def _sync_moments(self) -> list[Moment]:
        if not self.source.has_device:
            return []
        found = []
        for i, event in enumerate(self.source.raw):
            if event.get("cat") in _LAUNCHES and any(text in event["name"] for text in _SYNC_CALLS):
                found.append(Moment(int(self.source.starts[i]), 4, "sync", i))
                found.append(Moment(int(self.source.ends[i]), 1, "synced", i))
        return found

    # The run.

    def _run(self, number: int) -> Repetition:
        self.rep, self.number = Repetition(), number
        n, count = self.plan.num_ranks, len(self.operations)
        self.at, self.scale = 0, np.ones(n)
        self.waiting: int | None = None
        self.issued, self.launched = [self.now] * count, {}
        self.rep.arrivals, self.rep.ends = [self.now] * count, [self.now] * count
        self.done: set[int] = set()
        self.last_end: dict[Any, Any] = {}
        self.last_end_at: dict[Any, int] = {}
        self.device_end, self.device_end_at = self.now, 0
        self.floor, self.floor_at = self.now, 0
        self.owed = list(range(count))
        self._draw()
        for moment in self.moments:
            getattr(self, "_on_" + moment.do.replace(" ", "_"))(moment)
        self._advance(self.source.span_ns)
        self.now = np.maximum(self.now, np.maximum(self.device_end, np.max(self.rep.ends, axis=0))) + 1000
        return self.rep

    def _draw(self) -> None:
        noise = self.rng.lognormal(0.0, self.plan.jitter, self.plan.num_ranks) if self.plan.jitter else 1.0
        self.noise = np.ones(self.plan.num_ranks) * noise
        self._scale()

    def _scale(self) -> None:
        self.scale = self.noise.copy()
        for straggler, spans in zip(self.plan.stragglers, self.slow, strict=True):
            if any(start <= self.at < end for start, end in spans):
                self.scale[straggler.rank] *= straggler.factor

    def _advance(self, to: int) -> None:
        """Let the host work until ``to``; while it waits, it stays where it is."""
        if self.waiting is None:
            self.now = self.now + (to - self.at) * self.scale
            self._anchor(to)
        self.at = max(self.at, to)

    def _anchor(self, at: int) -> None:
        if self.rep.host_at and self.rep.host_at[-1] == at:
            self.rep.host[-1] = self.now
        else:
            self.rep.host_at.append(at)
            self.rep.host.append(self.now)

    def _jump(self, at: int, to: Any) -> None:
        """Go on at ``at`` no earlier than ``to``; what lies between the last anchor and there is stretched."""
        if self.rep.host_at[-1] >= at:
            self.rep.host_at[-1] = at - 1 if len(self.rep.host_at) < 2 else max(at - 1, self.rep.host_at[-2] + 1)
        self.now = np.maximum(self.now, to)
        self._anchor(at)
        self.at = at

    def _on_mark(self, moment: Moment) -> None:
        self._advance(moment.at)
        self._scale()

    def _on_step(self, moment: Moment) -> None:
        self._advance(moment.at)
        self._draw()

    def _on_skew(self, moment: Moment) -> None:
        self._advance(moment.at)
        late = np.zeros(self.plan.num_ranks)
        for rank, ns in self.plan.skew_ns.items():
            late[rank] = ns
        if late.any():
            self._jump(moment.at, self.now + late)

    def _on_issue(self, moment: Moment) -> None:
        self._advance(moment.at)
        self.issued[moment.number] = self.now

    def _on_arrive(self, moment: Moment) -> None:
        operation = self.operations[moment.number]
        reached, at = self.issued[moment.number], operation.issue
        if operation.track in self.last_end:
            reached = np.maximum(reached, self.last_end[operation.track])
            at = max(at, self.last_end_at[operation.track])
        if self.source.has_device:  # it was launched behind what the device had to do
            reached, at = np.maximum(reached, self.device_end), max(at, self.device_end_at)
        self.rep.arrivals[moment.number] = reached + max(0, operation.start - at)

    def _on_end(self, moment: Moment) -> None:
        k, operation = moment.number, self.operations[moment.number]
        arrivals = self.rep.arrivals[k].copy()
        if self.is_absent(self.number, k):
            arrivals[self.plan.absent] = -np.inf
        last = self.last_arrival(arrivals, k)
        spread = self.rng.uniform(0, _END_SPREAD_NS, self.plan.num_ranks)
        end = last + self.transfers[k] + spread
        self.rep.ends[k] = end
        self.done.add(k)
        self.last_end[operation.track], self.last_end_at[operation.track] = end, operation.end
        if self.waiting is None and not self.source.has_device:
            self._advance(moment.at)
            self._draw()

    def is_absent(self, repetition: int, k: int) -> bool:
        """Say whether the planted rank leaves this operation out."""
        last = repetition == self.plan.repeats - 1 and k == len(self.operations) - 1
        return self.plan.absent is not None and last

    def last_arrival(self, arrivals: Any, k: int) -> Any:
        """When the last member of each rank's group arrives."""
        mesh = self.plan.mesh
        if len(mesh) == 1:
            return np.full(len(arrivals), arrivals.max())
        shaped = arrivals.reshape(mesh)
        return np.broadcast_to(shaped.max(axis=k % len(mesh), keepdims=True), mesh).reshape(-1)

    def _on_pause(self, moment: Moment) -> None:
        self._advance(moment.at)
        if self.waiting is None:
            self.waiting = moment.number

    def _on_resume(self, moment: Moment) -> None:
        pause, operations = self.waits[moment.at]
        reached, at = self.now, min(pause, moment.at)
        for k in operations:
            reached, at = np.maximum(reached, self.rep.ends[k]), max(at, min(self.operations[k].end, moment.at))
        if self.waiting == moment.number:
            self.waiting = None
        self._jump(moment.at, reached + max(0, moment.at - at))
        self._draw()

    def _on_launch(self, moment: Moment) -> None:
        self._advance(moment.at)
        self.launched[moment.number] = (self.now, self.scale)

    def _on_activity(self, moment: Moment) -> None:
        activity = self.activities[moment.number]
        self._fold_waits(activity)
        reached, at = self.floor, self.floor_at
        scale = self.scale
        if moment.number in self.launched:
            launched, scale = self.launched[moment.number]
            reached, at = np.maximum(reached, launched), max(at, activity.launch or 0)
        if activity.stream in self.last_end:
            reached = np.maximum(reached, self.last_end[activity.stream])
            at = max(at, self.last_end_at[activity.stream])
        start = reached + max(0, activity.start - at)
        self.rep.activity_starts[activity.event] = start
        end = start + (activity.end - activity.start) * scale
        self.rep.activity_ends[activity.event] = end
        self.last_end[activity.stream], self.last_end_at[activity.stream] = end, activity.end

    def _fold_waits(self, activity: _Activity) -> None:
        """What was launched after the host asked for it starts after the end of the operation."""
        for k in list(self.owed):
            asked = self.operations[k].waited
            if k in self.done and (asked is None or (activity.launch or 0) >= asked):
                self.floor = np.maximum(self.floor, self.rep.ends[k])
                self.floor_at = max(self.floor_at, self.operations[k].end)
                self.owed.remove(k)

    def _on_activity_end(self, moment: Moment) -> None:
        activity = self.activities[moment.number]
        end = self.rep.activity_ends.get(activity.event)
        if end is not None:
            self.device_end = np.maximum(self.device_end, end)
            self.device_end_at = max(self.device_end_at, activity.end)

    def _on_sync(self, moment: Moment) -> None:
        self._advance(moment.at)
        if self.waiting is None:
            self.waiting = moment.number

    def _on_synced(self, moment: Moment) -> None:
        if self.waiting != moment.number:
            return
        self.waiting = None
        # What had ended when the call returned, has ended when it returns here.
        ends = [self.device_end, *(self.rep.ends[k] for k in self.done)]
        started = int(self.source.starts[moment.number])
        at = max([self.device_end_at, started, *(self.operations[k].end for k in self.done)])
        self._jump(moment.at, np.maximum(self.now, np.max(ends, axis=0)) + max(0, moment.at - at))


def _on_host(source: Source, event: int) -> bool:
    return source.tracks[event] == source.main_pid and source.raw[event]["ph"] == "X"


def _is_called(name: str, where: str) -> bool:
    return where in (name, name.strip("# "))
