"""Random traces with several threads and streams: every edge between tracks compared with its definition."""

import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

from builder import TraceBuilder
from hypothesis import given, settings
from hypothesis import strategies as st

from chakra_capture.trace.merged import MergedTrace

ENGINE = "autograd::engine::evaluate_function: X"
RUN_BACKWARD = "<built-in method run_backward of torch._C._EngineBase object at 0x7f00>"
NCCL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
ACTIVITY = ("kernel", "memcpy", "memset")
ACROSS = ("sync", "event_wait", "inter_thread")
TIME, DURATION = st.integers(0, 40), st.integers(0, 12)
WAITS = ("cudaStreamWaitEvent", "cudaEventSynchronize", "cudaStreamSynchronize", "cudaDeviceSynchronize")


@st.composite
def threads(draw: st.DrawFn) -> TraceBuilder:
    """Forward ops, ops of the engine and calls of ``run_backward`` on up to three threads."""
    trace = TraceBuilder()
    tids = st.sampled_from([11, 12, 13])
    for number in range(draw(st.integers(1, 10))):
        name = draw(st.sampled_from([ENGINE, ENGINE, RUN_BACKWARD, f"op{number}", f"op{number}"]))
        args = {"Sequence number": draw(st.integers(0, 2))} if name != RUN_BACKWARD and draw(st.booleans()) else {}
        cat = "python_function" if name == RUN_BACKWARD else "cpu_op"
        dur = draw(st.one_of(DURATION, DURATION, DURATION, st.just(-1)))
        trace.op(name, draw(TIME), dur, tid=draw(tids), cat=cat, host=False, **args)
    return trace


@st.composite
def waits(draw: st.DrawFn, *, records: bool) -> TraceBuilder:
    """Launches on two streams, collectives on a third, and event and synchronising calls on two threads."""
    trace = TraceBuilder()
    tids = st.sampled_from([11, 11, 12])
    for _ in range(draw(st.integers(0, 2))):
        trace.op("record_param_comms", draw(TIME), draw(DURATION), tid=draw(tids), host=False)
    event_calls = []
    for correlation in range(1, draw(st.integers(2, 10))):
        name = draw(st.sampled_from(["launch", "launch", "cudaEventRecord", *WAITS]))
        at = draw(TIME)
        trace.runtime(name, at, draw(st.integers(0, 6)), correlation, tid=draw(tids))
        if name == "launch":
            stream = draw(st.sampled_from([7, 8, 40]))
            what = (NCCL, "kernel") if stream == 40 else draw(st.sampled_from([("k", "kernel"), ("c", "gpu_memcpy")]))
            trace.kernel(what[0], at + draw(DURATION), draw(DURATION), correlation, stream=stream, cat=what[1])
        else:
            event_calls.append((name, correlation))
    recorded = [correlation for name, correlation in event_calls if name == "cudaEventRecord"]
    kinds = {"cudaStreamWaitEvent": "Stream Wait Event", "cudaEventSynchronize": "Event Sync",
             "cudaStreamSynchronize": "Stream Sync", "cudaDeviceSynchronize": "Context Sync"}  # fmt: skip
    for name, correlation in event_calls if records else []:
        if name in kinds and draw(st.booleans()):
            args = {"device": 0, "stream": draw(st.sampled_from([7, 8, 40])), "correlation": correlation}
            if recorded and "Event" in name:
                args["wait_on_stream"] = draw(st.sampled_from([7, 8, 40]))
                args["wait_on_cuda_event_record_corr_id"] = draw(st.sampled_from([*recorded, -1]))
            trace.event(ph="X", cat="cuda_sync", name=kinds[name], pid=0, tid=7, ts=1, dur=1, args=args)
    return trace


class Reader:
    """The merged tables as plain rows."""

    def __init__(self, trace: TraceBuilder) -> None:
        with tempfile.TemporaryDirectory() as folder:
            merged: MergedTrace = trace.merged(Path(folder), host=False)
            self.rows: list[dict[str, Any]] = merged.nodes.to_dicts()
            self.edges = list(merged.edges.iter_rows(named=True))
            self.window: dict[str, Any] = merged.link["windows"][0]
        self.times: dict[tuple[int, str], int] = {}
        for row in self.rows:
            moved = self.window["clock_offset_ns"] if row["kind"] in ACTIVITY else 0
            row["end"] = None if row["ts_ns"] is None or row["dur_ns"] is None else row["ts_ns"] + row["dur_ns"]
            self.times[row["node_id"], "start"] = row["ts_ns"] + moved
            if row["end"] is not None:
                self.times[row["node_id"], "end"] = row["end"] + moved

    def kept(self, kind: str) -> set[tuple[int, int]]:
        return {(e["src"], e["dst"]) for e in self.edges if e["kind"] == kind}

    def track(self, node: int) -> tuple[Any, ...]:
        row = self.rows[node]
        return (row["pid"], row["tid"])

    def check_order(self) -> None:
        """No edge points back, no path returns to where it began, and none implies another of its kind."""
        following = defaultdict(list)
        incoming: dict[tuple[int, str], int] = defaultdict(int)
        points = [((e["src"], e["src_at"]), (e["dst"], e["dst_at"])) for e in self.edges]
        points += [((r["node_id"], "start"), (r["node_id"], "end")) for r in self.rows if r["end"] is not None]
        for source, target in points:
            assert self.times[source] <= self.times[target]
            following[source].append(target)
            incoming[target] += 1
        ready = [point for point in self.times if not incoming[point]]
        for point in ready:
            for target in following[point]:
                incoming[target] -= 1
                if not incoming[target]:
                    ready.append(target)
        assert len(ready) == len(self.times)
        for kind in ACROSS:
            edges = self.kept(kind)
            for edge in edges:
                assert not any(self.implies(kind, other, edge) for other in edges - {edge})

    def implies(self, kind: str, edge: tuple[int, int], other: tuple[int, int]) -> bool:
        """Between the same two tracks, from no earlier an end to no later a side."""
        side = "end" if kind == "sync" else "start"
        same = [self.track(a) == self.track(b) for a, b in zip(edge, other, strict=True)]
        later = self.times[edge[0], "end"] >= self.times[other[0], "end"]
        return all(same) and later and self.times[edge[1], side] <= self.times[other[1], side]

    def check_found(self, kind: str, defined: set[tuple[int, int]]) -> None:
        """What is kept is defined; what is defined is kept, implied, or counted because it points back."""
        side = "end" if kind == "sync" else "start"
        kept = self.kept(kind)
        assert kept <= defined
        back = 0
        for src, dst in defined:
            before, after = self.times[src, "end"], self.times[dst, side]
            takes_time = kind != "inter_thread" and self.rows[src]["dur_ns"] > 0
            if before < after or (before == after and takes_time):
                assert any(self.implies(kind, edge, (src, dst)) for edge in kept)
            else:
                back += 1
        assert self.window["edges_backward_left_out"].get(kind, 0) == back


def around(reader: Reader, row: dict[str, Any]) -> list[dict[str, Any]]:
    found = []
    while row["parent_id"] is not None:
        row = reader.rows[row["parent_id"]]
        found.append(row)
    return found


def by_number(reader: Reader) -> tuple[set[tuple[int, int]], int]:
    """Forward row and op of the engine with one number, and how many ops have it on several threads."""
    timed = [r for r in reader.rows if r["end"] is not None and r["sequence_number"] is not None]
    pairs, unclear = set(), 0
    for op in [r for r in timed if r["name"] == ENGINE]:
        others = [
            r for r in timed
            if r["sequence_number"] == op["sequence_number"] and r["tid"] != op["tid"] and r["name"] != ENGINE
            and (r["parent_id"] is None or reader.rows[r["parent_id"]]["name"] != ENGINE
                 or reader.rows[r["parent_id"]]["end"] is None)
        ]  # fmt: skip
        if len({r["tid"] for r in others}) > 1:
            unclear += 1
        elif others:
            pairs.add((max(others, key=lambda r: (r["end"], r["node_id"]))["node_id"], op["node_id"]))
    return pairs, unclear


def by_call(reader: Reader) -> tuple[set[tuple[int, int]], int]:
    """Row before each lone call to the first op of the engine on each thread, and the last op to the row after it."""
    timed = [r for r in reader.rows if r["end"] is not None]
    calls = [r for r in timed if r["name"] == RUN_BACKWARD]
    calls = [
        c for c in calls
        if not any(r["name"] == ENGINE and r["end"] is not None for r in around(reader, c))
    ]  # fmt: skip

    def meet(a: dict[str, Any], b: dict[str, Any]) -> bool:
        first, second = sorted((a, b), key=lambda r: (r["ts_ns"], r["node_id"]))
        return bool(second["ts_ns"] < first["end"])

    lone = [c for c in calls if not any(meet(c, other) for other in calls if other is not c)]
    pairs = set()
    for call in lone if any(r["name"] == ENGINE for r in timed) else []:
        mine = [r for r in timed if r["tid"] == call["tid"]]
        ended = [r for r in mine if r["end"] <= call["ts_ns"]]
        before = max(ended, key=lambda r: (r["end"], r["node_id"]), default=None)
        after = next((r for r in mine if r["ts_ns"] >= call["end"]), None)
        for tid in {11, 12, 13} - {call["tid"]}:
            run = [
                r for r in timed
                if r["tid"] == tid and r["name"] == ENGINE and r["ts_ns"] >= call["ts_ns"] and r["end"] <= call["end"]
                and r["ts_ns"] < call["end"]
            ]  # fmt: skip
            if run and before:
                pairs.add((before["node_id"], run[0]["node_id"]))
            if run and after:
                pairs.add((max(run, key=lambda r: r["end"])["node_id"], after["node_id"]))
    has_engine = any(r["name"] == ENGINE for r in timed)
    return pairs, len(calls) - len(lone) if has_engine else 0


@settings(max_examples=300, deadline=None)
@given(threads())
def test_handovers_follow_their_definition(trace: TraceBuilder) -> None:
    reader = Reader(trace)
    reader.check_order()
    numbered, unclear = by_number(reader)
    called, unclear_calls = by_call(reader)
    assert reader.kept("inter_thread") <= numbered | called
    for src, dst in numbered | called:
        if reader.times[src, "end"] < reader.times[dst, "start"]:
            edges = reader.kept("inter_thread")
            assert any(reader.implies("inter_thread", edge, (src, dst)) for edge in edges)
    counted = reader.window["waits_unresolved"].get("autograd::engine", 0)
    assert counted == unclear + unclear_calls


def event_waits(reader: Reader) -> tuple[set[tuple[int, int]], set[tuple[int, int]], int]:
    """Event waits, waits of a thread for its own event, and how many calls show neither: for traces without records."""
    events, own, unclear = set(), set(), 0
    launches = {r["launch_id"] for r in reader.rows if r["launch_id"] is not None}
    for call in [r for r in reader.rows if r["name"] in WAITS[:2]]:
        if call["parent_id"] is not None and reader.rows[call["parent_id"]]["name"] in WAITS:
            continue  # one wait, recorded twice
        calls = [
            r for r in reader.rows
            if r["tid"] == call["tid"] and r["kind"] == "runtime" and r["node_id"] < call["node_id"]
            and (r["node_id"] in launches or r["name"] in (*WAITS[:2], "cudaEventRecord"))
        ]  # fmt: skip
        is_record = [r["name"] == "cudaEventRecord" for r in calls[-2:]]
        record = calls[-1] if is_record and is_record[-1] and is_record != [True, True] else None
        launched = [
            r for r in reader.rows if r["launch_id"] is not None and reader.rows[r["launch_id"]]["tid"] == call["tid"]
        ]
        launched.sort(key=lambda r: (r["launch_id"], r["ts_ns"]))
        before = [r for r in launched if r["launch_id"] < (record or call)["node_id"]]
        after = [r for r in launched if r["launch_id"] > call["node_id"]]
        pair = None
        if call["name"] == "cudaEventSynchronize":
            if record and before:
                own.add((before[-1]["node_id"], call["node_id"]))
                continue
        elif after and after[0]["name"] == NCCL:
            ops = [r["node_id"] for r in around(reader, call) if r["name"] == "record_param_comms"]
            its = [r["node_id"] for r in around(reader, reader.rows[after[0]["launch_id"]])]
            within = bool(ops) and ops[-1] in its
            compute = [r for r in before if r["name"] != NCCL]
            if compute and (within or (not ops and record)):
                pair = (compute[-1]["node_id"], after[0]["node_id"])
        if pair:
            events.add(pair)
        else:
            unclear += 1
    return events, own, unclear


@settings(max_examples=300, deadline=None)
@given(waits(records=False))
def test_event_waits_of_the_calls_follow_their_definition(trace: TraceBuilder) -> None:
    reader = Reader(trace)
    reader.check_order()
    events, own, unclear = event_waits(reader)
    reader.check_found("event_wait", events)
    names = [row["name"] for row in reader.rows]
    assert {e for e in reader.kept("sync") if names[e[1]] == "cudaEventSynchronize"} <= own
    counted = reader.window["waits_unresolved"]
    assert sum(n for name, n in counted.items() if name in WAITS[:2]) == unclear


@settings(max_examples=200, deadline=None)
@given(waits(records=True))
def test_waits_of_the_records_go_forward_and_make_no_cycle(trace: TraceBuilder) -> None:
    Reader(trace).check_order()
