"""Communication that gloo runs: what a thread waits for it, and what gloo's own threads wait, is no work."""

import numpy as np
from builder import TraceBuilder

from chakra_capture.export.making.items import Operations
from chakra_capture.export.making.window import make_window
from chakra_capture.merge.window import read_rows

FIRST, SECOND = 21, 22


def window(trace, *operations, turns=False):
    """Nodes; operations are (annotation, which of that name, op that asked, which of that name), all of one group."""
    rows = read_rows(trace, 0)

    def row(name, nth):
        return int(np.flatnonzero(rows.named(lambda one: one == name))[nth])

    ran = np.array([row(name, nth) for name, nth, _, _ in operations])
    asked = np.array([row(name, nth) for _, _, name, nth in operations])
    size = len(operations)
    turn = np.arange(size) if turns else np.full(size, -1)
    return rows, make_window(rows, Operations(ran, asked, np.ones(size, dtype=np.int64), turn), join=False).nodes


def path_ns(nodes, duration):
    end = np.zeros(len(nodes), dtype=np.int64)
    for node in range(len(nodes)):
        before = nodes.src[nodes.dst == node]
        end[node] = (end[before].max() if len(before) else 0) + duration[node]
    return int(end.max())


def receiving(*, works_until):
    """A receive from 110 to 5110 us, and a thread that works until then or waits for it."""
    trace = TraceBuilder().op("work", 0, 100).op("c10d::recv_", 100, 50).annotation("gloo:recv", 110, 5000)
    if works_until > 150:
        trace.op("more work", 150, works_until - 150)
    return trace.op("next", 5200, 100)


def test_wait_for_a_receive_is_not_carried_by_the_thread_too(tmp_path):
    _, nodes = window(receiving(works_until=150).merged(tmp_path), ("gloo:recv", 0, "c10d::recv_", 0))
    assert path_ns(nodes, nodes.duration_ns) == 5_300_000
    # 100 + 50 of the calls, 90 from the end of the receive to the next op, which takes 100.
    assert nodes.duration_ns[nodes.operation < 0].sum() == 340_000
    assert nodes.duration_ns[nodes.operation >= 0].tolist() == [5_000_000]


def test_thread_that_works_during_a_receive_waits_for_it_only_afterwards(tmp_path):
    _, nodes = window(receiving(works_until=4000).merged(tmp_path), ("gloo:recv", 0, "c10d::recv_", 0))
    assert path_ns(nodes, nodes.duration_ns) == 5_300_000
    at_once = np.where(nodes.operation >= 0, 0, nodes.duration_ns)
    assert path_ns(nodes, at_once) == (100 + 50 + 3850 + 90 + 100) * 1000


def test_thread_of_gloo_does_nothing_between_operations(tmp_path):
    trace = TraceBuilder().op("c10d::allreduce_", 0, 10)
    trace.annotation("gloo:all_reduce", 20, 40, tid=FIRST).op("aten::div_", 30, 10, tid=FIRST)
    trace.op("c10d::allreduce_", 1000, 10)
    trace.annotation("gloo:all_reduce", 1020, 40, tid=FIRST).op("aten::div_", 1030, 10, tid=FIRST)
    called = [("gloo:all_reduce", nth, "c10d::allreduce_", nth) for nth in (0, 1)]
    rows, nodes = window(trace.op("end", 1100, 10).merged(tmp_path), *called)
    (on_gloo,) = {int(rows.track[row]) for row in nodes.row[nodes.operation >= 0]}
    assert nodes.duration_ns[nodes.lane == on_gloo].sum() == 80_000
    assert nodes.duration_ns[nodes.operation >= 0].tolist() == [40_000, 40_000]


def test_second_of_two_operations_at_once_begins_when_the_first_has_ended(tmp_path):
    trace = TraceBuilder().op("c10d::allreduce_", 0, 10).annotation("gloo:all_reduce", 20, 80, tid=FIRST)
    trace.op("c10d::allreduce_", 12, 10).annotation("gloo:all_reduce", 30, 90, tid=SECOND)
    called = [("gloo:all_reduce", nth, "c10d::allreduce_", nth) for nth in (0, 1)]
    for turns in (False, True):
        _, nodes = window(trace.merged(tmp_path / str(turns)), *called, turns=turns)
        is_own = nodes.operation >= 0
        assert nodes.duration_ns[is_own].tolist() == [80_000, 20_000]
        assert nodes.start_ns[is_own][1] - nodes.start_ns[is_own][0] == 80_000
        assert path_ns(nodes, nodes.duration_ns) == 112_000  # 12 until both were asked for, 80 and 20


def test_operation_that_waits_for_another_one_still_depends_only_on_what_was_before_it_was_asked_for(tmp_path):
    trace = TraceBuilder().op("c10d::allreduce_", 0, 10).annotation("gloo:all_reduce", 20, 80, tid=FIRST)
    trace.op("c10d::allreduce_", 12, 10).annotation("gloo:all_reduce", 30, 90, tid=SECOND)
    trace.op("more", 32, 20).op("and more", 60, 20)
    called = [("gloo:all_reduce", nth, "c10d::allreduce_", nth) for nth in (0, 1)]
    rows, nodes = window(trace.merged(tmp_path), *called)
    second = np.flatnonzero(nodes.operation == 1)
    waited = nodes.src[np.isin(nodes.dst, second)]
    names = [rows.name.values[rows.name.codes[row]] for row in nodes.row[waited] if row >= 0]
    assert sorted(names) == ["c10d::allreduce_", "gloo:all_reduce"]
