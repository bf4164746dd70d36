"""Random traces through the whole merge, every link compared with its definition applied row by row."""

import tempfile
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

from builder import TraceBuilder
from hypothesis import given, settings
from hypothesis import strategies as st

from chakra_capture.annotations import parse_step
from chakra_capture.trace.merged import MergedTrace

CPU = ("annotation", "host_op", "python_function", "runtime", "memory", "instant")
ACTIVITY = ("kernel", "memcpy", "memset")
TIME, DURATION = st.integers(0, 40), st.integers(0, 15)
OPEN = st.sampled_from([None, -1])


@st.composite
def traces(draw: st.DrawFn) -> TraceBuilder:
    """Up to three threads and three streams with nested, crossing, open, empty and tied rows."""
    trace = TraceBuilder()
    tids, streams = st.sampled_from([11, 12]), st.sampled_from([7, 8])
    for number in range(draw(st.integers(0, 2))):
        trace.step(number, draw(TIME), draw(DURATION), tid=draw(tids))
    for number in range(draw(st.integers(0, 8))):
        cat = draw(st.sampled_from(["cpu_op", "cpu_op", "user_annotation"]))
        dur = draw(st.one_of(DURATION, DURATION, DURATION, OPEN))
        trace.op(f"op{number}", draw(TIME), dur, tid=draw(tids), cat=cat, host=False)
    for correlation in range(1, draw(st.integers(1, 6))):
        if draw(st.integers(0, 5)):
            trace.runtime("launch", draw(TIME), draw(st.integers(0, 6)), correlation, tid=draw(tids))
            if not draw(st.integers(0, 3)):
                trace.runtime("driver", draw(TIME), draw(st.integers(0, 6)), correlation, tid=11, cat="cuda_driver")
        for _ in range(draw(st.integers(0, 3))):
            cat = draw(st.sampled_from(["kernel", "gpu_memcpy", "gpu_memset"]))
            dur = draw(st.one_of(DURATION, DURATION, OPEN))
            trace.kernel("k", draw(TIME), dur, correlation, stream=draw(streams), cat=cat)
    return trace


def merged(trace: TraceBuilder) -> MergedTrace:
    folder = tempfile.TemporaryDirectory()
    with folder:
        if not trace.events:
            trace.op("only", 1, 1, host=False)
        result = trace.merged(Path(folder.name), host=False)
        _ = result.nodes, result.edges, result.steps, result.link
    return result


def rows_of(result: MergedTrace) -> list[dict[str, Any]]:
    rows = result.nodes.to_dicts()
    for row in rows:
        row["end"] = None if row["ts_ns"] is None or row["dur_ns"] is None else row["ts_ns"] + row["dur_ns"]
        row["is_step"] = parse_step(row["name"]) is not None
    return rows


def clipped_ends(rows: list[dict[str, Any]]) -> dict[int, int]:
    """End of each CPU row, clipped to that of the row around it."""
    ends: dict[int, int] = {}
    for row in rows:
        if row["kind"] not in CPU:
            continue
        around = holder(rows, ends, row)
        end = row["ts_ns"] if row["end"] is None else row["end"]
        if around is not None and (row["end"] is None or end > ends[around["node_id"]]):
            end = ends[around["node_id"]]
        ends[row["node_id"]] = end
    return ends


def holder(rows: list[dict[str, Any]], ends: dict[int, int], row: dict[str, Any], kinds: tuple[str, ...] = CPU,
           steps: bool = True) -> dict[str, Any] | None:  # fmt: skip
    """The last row before ``row`` on its thread that still holds its start."""
    found = None
    for other in rows[: row["node_id"]]:
        same = (other["pid"], other["tid"]) == (row["pid"], row["tid"]) and other["kind"] in kinds
        if same and ends[other["node_id"]] > row["ts_ns"] and (steps or not other["is_step"]):
            found = other
    return found


def node_id(row: dict[str, Any] | None) -> int | None:
    return None if row is None else int(row["node_id"])


def check_rows_are_in_order_and_parents_are_the_innermost_enclosing_rows(
    result: MergedTrace, rows: list[dict[str, Any]]
) -> None:
    assert [row["node_id"] for row in rows] == list(range(len(rows)))
    keys = [(r["pid"], r["tid"], r["ts_ns"], float("-inf") if r["dur_ns"] is None else -r["dur_ns"]) for r in rows]
    assert keys == sorted(keys)
    ends = clipped_ends(rows)
    for row in rows:
        if row["kind"] in CPU:
            assert row["parent_id"] == node_id(holder(rows, ends, row))


def time_on_stream(rows: list[dict[str, Any]], row: dict[str, Any]) -> int | None:
    """Up to the next start on the stream; of several with one start the longest has it."""
    if row["dur_ns"] is None:
        return None
    timed = [r for r in rows if r["kind"] in ACTIVITY and r["dur_ns"] is not None and r is not row]
    others = [r for r in timed if r["stream"] == row["stream"]]
    twins = [r for r in others if r["ts_ns"] == row["ts_ns"]]
    if any((r["dur_ns"], -r["node_id"]) > (row["dur_ns"], -row["node_id"]) for r in twins):
        return 0
    return min([row["dur_ns"], *(r["ts_ns"] - row["ts_ns"] for r in others if r["ts_ns"] > row["ts_ns"])])


def check_self_times_sum_to_the_covered_time_of_the_thread(result: MergedTrace, rows: list[dict[str, Any]]) -> None:
    ends = clipped_ends(rows)
    covered, summed = defaultdict(set), defaultdict(int)
    for row in rows:
        if row["kind"] in CPU and row["dur_ns"] is not None:
            covered[row["tid"]] |= set(range(row["ts_ns"], ends[row["node_id"]], 1000))
            assert row["self_dur_ns"] >= 0
            summed[row["tid"]] += row["self_dur_ns"]
        elif row["kind"] in CPU:
            assert row["self_dur_ns"] is None
            assert row["repaired"]
        else:
            assert row["self_dur_ns"] == time_on_stream(rows, row)
            assert row["repaired"] == (row["dur_ns"] is None or row["self_dur_ns"] != row["dur_ns"])
    assert summed == {tid: 1000 * len(instants) for tid, instants in covered.items()}


def check_launch_parent_and_step_follow_their_definitions(result: MergedTrace, rows: list[dict[str, Any]]) -> None:
    ends = clipped_ends(rows)
    marks = [row for row in rows if row["is_step"] and row["kind"] == "annotation"]
    for row in rows:
        origin: dict[str, Any] | None = row
        if row["kind"] in ACTIVITY:
            calls = [r for r in rows if r["kind"] == "runtime" and r["correlation_id"] == row["correlation_id"]]
            origin = min(calls, key=lambda r: (r["ts_ns"], -r["dur_ns"], r["node_id"]), default=None)
            assert row["launch_id"] == node_id(origin)
            around = None if origin is None else holder(rows, ends, origin, ("host_op", "annotation"), steps=False)
            assert row["parent_id"] == node_id(around)
        else:
            assert row["launch_id"] is None
        if row["is_step"]:
            assert row["step"] == parse_step(row["name"])
        elif origin is not None:
            # As long as recorded: a step may begin within a short call; one that was still open ends with its thread.
            until = {m["node_id"]: ends[m["node_id"]] if m["end"] is None else m["end"] for m in marks}
            holding = [m for m in marks if m["ts_ns"] <= origin["ts_ns"] < until[m["node_id"]]]
            starts = [m["ts_ns"] for m in holding]
            allowed = {parse_step(m["name"]) for m in holding if m["ts_ns"] == max(starts)} or {None}
            assert row["step"] in allowed
        else:
            assert row["step"] is None
    device = result.link["windows"][0]["device"]
    activities = [row for row in rows if row["kind"] in ACTIVITY]
    assert device["num_launched"] == sum(row["launch_id"] is not None for row in activities)
    assert (
        device["num_activities"] == len(activities) == device["num_launched"] + device["orphans"]["launch_not_in_file"]
    )


def sides(rows: list[dict[str, Any]], offset: int) -> dict[tuple[int, str], int]:
    """Time of each side of each row, device rows moved by the clock offset."""
    times = {}
    for row in rows:
        moved = offset if row["kind"] in ACTIVITY else 0
        times[row["node_id"], "start"] = row["ts_ns"] + moved
        if row["end"] is not None:
            times[row["node_id"], "end"] = row["end"] + moved
    return times


def check_edges_go_forward_and_make_no_cycle(result: MergedTrace, rows: list[dict[str, Any]]) -> None:
    window = result.link["windows"][0]
    times = sides(rows, window["clock_offset_ns"])
    following = defaultdict(list)
    for row in rows:
        if row["end"] is not None:
            following[row["node_id"], "start"].append((row["node_id"], "end"))
    for edge in result.edges.iter_rows(named=True):
        source, target = (edge["src"], edge["src_at"]), (edge["dst"], edge["dst_at"])
        assert times[source] <= times[target]
        following[source].append(target)
    incoming = defaultdict(int)
    for targets in following.values():
        for target in targets:
            incoming[target] += 1
    ready = [side for side in times if not incoming[side]]
    for side in ready:
        for target in following[side]:
            incoming[target] -= 1
            if not incoming[target]:
                ready.append(target)
    assert len(ready) == len(times)


def check_clock_offset_is_the_smallest_that_lets_every_launch_come_first(
    result: MergedTrace, rows: list[dict[str, Any]]
) -> None:
    late = [rows[r["launch_id"]]["ts_ns"] - r["ts_ns"] for r in rows if r["launch_id"] is not None]
    assert result.link["windows"][0]["clock_offset_ns"] == max([0, *late])


def check_launch_edges_imply_every_launch_and_none_implies_another(
    result: MergedTrace, rows: list[dict[str, Any]]
) -> None:
    kept = result.edges.filter(result.edges["kind"] == "launch").select("src", "dst").rows()
    assert set(result.edges.filter(result.edges["kind"] == "launch").select("src_at", "dst_at").rows()) <= {
        ("start", "start")
    }
    for src, dst in kept:
        assert rows[dst]["launch_id"] == src

    def chained(first: dict[str, Any], last: dict[str, Any]) -> bool:
        """Whether edges of the stream lead from one activity to the other."""
        stream = [r for r in rows if r["kind"] in ACTIVITY and r["stream"] == last["stream"] and r["end"] is not None]
        stream.sort(key=lambda r: (r["ts_ns"], r["node_id"]))
        if first is last or first not in stream or last not in stream:
            return first is last
        between = stream[stream.index(first) : stream.index(last) + 1]
        return all(a["end"] <= b["ts_ns"] for a, b in pairwise(between))

    def implied(call: dict[str, Any], activity: dict[str, Any], by: tuple[int, int]) -> bool:
        other_call, other = rows[by[0]], rows[by[1]]
        return (
            other_call["tid"] == call["tid"]
            and other["stream"] == activity["stream"]
            and other_call["ts_ns"] >= call["ts_ns"]
            and (other["ts_ns"], other["node_id"]) <= (activity["ts_ns"], activity["node_id"])
            and chained(other, activity)
        )

    for row in rows:
        if row["launch_id"] is not None:
            assert any(implied(rows[row["launch_id"]], row, edge) for edge in kept)
    for edge in kept:
        assert not any(implied(rows[edge[0]], rows[edge[1]], other) for other in kept if other != edge)


def check_thread_and_stream_order_are_the_chains_of_siblings_and_of_activities(
    result: MergedTrace, rows: list[dict[str, Any]]
) -> None:
    expected = set()
    groups = defaultdict(list)
    for row in rows:
        if row["kind"] in ACTIVITY and row["end"] is not None:
            groups["stream_order", row["stream"], None].append(row)
        elif row["kind"] in CPU and row["end"] is not None:
            parent = row["parent_id"]
            while parent is not None and rows[parent]["end"] is None:
                parent = rows[parent]["parent_id"]
            groups["thread_order", row["tid"], parent].append(row)
    for (kind, _, parent), group in groups.items():
        group.sort(key=lambda r: (r["ts_ns"], r["node_id"]))
        for first, second in pairwise(group):
            expected.add((kind, first["node_id"], "end", second["node_id"], "start"))
        if parent is not None:
            expected.add((kind, parent, "start", group[0]["node_id"], "start"))
            expected.add((kind, group[-1]["node_id"], "end", parent, "end"))
    times = sides(rows, 0)
    forward = {e for e in expected if times[e[1], e[2]] <= times[e[3], e[4]]}
    seen = result.edges.filter(result.edges["kind"] != "launch").select("kind", "src", "src_at", "dst", "dst_at")
    assert set(seen.iter_rows()) == forward
    assert seen.height == len(forward)
    left_out = result.link["windows"][0]["edges_backward_left_out"]
    assert sum(left_out.values()) == len(expected - forward)


@settings(max_examples=120, deadline=None)
@given(traces())
def test_random_traces_follow_every_definition(trace: TraceBuilder) -> None:
    result = merged(trace)
    rows = rows_of(result)
    check_rows_are_in_order_and_parents_are_the_innermost_enclosing_rows(result, rows)
    check_self_times_sum_to_the_covered_time_of_the_thread(result, rows)
    check_launch_parent_and_step_follow_their_definitions(result, rows)
    check_edges_go_forward_and_make_no_cycle(result, rows)
    check_clock_offset_is_the_smallest_that_lets_every_launch_come_first(result, rows)
    check_launch_edges_imply_every_launch_and_none_implies_another(result, rows)
    check_thread_and_stream_order_are_the_chains_of_siblings_and_of_activities(result, rows)
