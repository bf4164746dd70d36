"""Which rows are one operation, and what the table of operations says of it; small traces of NCCL and gloo."""

import numpy as np
import polars as pl
import pytest
from builder import TraceBuilder, merge_files

from chakra_capture.merge.comm_facts import CommFacts
from chakra_capture.merge.groups import KnownGroups
from chakra_capture.merge.operations import Operation
from chakra_capture.trace.columns import MISSING
from chakra_capture.trace.discovery import WindowFiles
from chakra_capture.trace.issued import GroupCount, Issued, IssuedOperation
from chakra_capture.trace.process_groups import ProcessGroup

WORKER = 20
ARGS = {"dtype": "Float", "Process Group Name": "0", "Process Group Ranks": "[0, 1]", "Group size": 2}


def stated(collective, count, **more):
    return {"Collective name": collective, "In msg nelems": count, "Out msg nelems": count, **ARGS, **more}


def nccl(builder, name, collective, ts, correlation=None, *, count=10, kernel="AllReduce_Sum_f32_RING_LL", **more):
    """An op of c10d of 10 us, its record and annotation, and, with a correlation, the kernel it launches."""
    builder.op(f"c10d::{name}", ts, 10).op("record_param_comms", ts + 1, 8, **stated(collective, count, **more))
    if correlation is not None:
        builder.annotation(f"nccl:{collective}", ts + 2, 6)
        builder.launched(f"ncclDevKernel_{kernel}(x)", ts + 20, 5, correlation, at=ts + 4, **stated(collective, count))
    return builder


def columns(table, *names):
    return table.select(names).rows()


def test_op_record_annotation_and_kernel_of_nccl_are_one_operation(tmp_path):
    builder = nccl(TraceBuilder().step(1, 0, 100), "allreduce_", "allreduce", 10, 1, Seq=4)
    trace = builder.merged(tmp_path)
    names = dict(trace.nodes.select("node_id", "name").rows())
    assert columns(trace.communication, "collective", "process_group", "group_ranks", "comm_bytes", "seq", "step",
                   "algorithm", "dur_ns") == [("all_reduce", "0", [0, 1], 40, 4, 1, "RING_LL", 5000)]  # fmt: skip
    row = trace.communication.row(0, named=True)
    assert names[row["node_id"]].startswith("ncclDevKernel")
    assert names[row["host_node_id"]] == "c10d::allreduce_"
    assert row["ts_ns"] - row["issued_ns"] == 20_000
    rows = trace.nodes.filter(pl.col("collective").is_not_null())
    assert rows.height == 4
    assert rows.select("collective", "process_group", "comm_bytes").unique().rows() == [("all_reduce", "0", 40)]


def test_operation_whose_kernel_is_not_recorded_has_no_time(tmp_path):
    trace = nccl(TraceBuilder().step(1, 0, 100), "allreduce_", "allreduce", 10).merged(tmp_path)
    assert columns(trace.communication, "collective", "comm_bytes", "ts_ns", "dur_ns") == [
        ("all_reduce", 40, None, None)
    ]


def test_kernel_that_was_launched_before_the_window_is_an_operation_without_host_op(tmp_path):
    builder = TraceBuilder().op("a", 0, 5).kernel("ncclDevKernel_AllGather_RING_LL(x)", 1, 2, 9)
    trace = builder.merged(tmp_path)
    assert columns(trace.communication, "collective", "host_node_id", "dur_ns", "comm_bytes") == [
        ("all_gather", None, 2000, None)
    ]


def test_a_barrier_that_runs_as_an_all_reduce_is_one_barrier_of_no_bytes(tmp_path):
    builder = TraceBuilder().op("c10d::barrier", 0, 30)
    nccl(builder, "allreduce_", "allreduce", 5, 1, count=1)
    trace = builder.merged(tmp_path)
    assert columns(trace.communication, "collective", "comm_bytes", "in_bytes", "dtype") == [("barrier", 0, 0, None)]


def test_operations_of_a_batch_share_the_kernel_that_runs_them_and_keep_their_own_host_ops(tmp_path):
    builder = nccl(TraceBuilder(), "allreduce_", "allreduce", 0, 1)
    nccl(builder, "send", "send", 100, count=3, **{"Dst Rank": 1})
    nccl(builder, "recv_", "recv", 111, count=7, **{"Src Rank": 1})
    builder.annotation("nccl:coalesced", 130, 10).launched("ncclDevKernel_SendRecv(x)", 150, 6, 2, at=132)
    trace = builder.merged(tmp_path)
    table = trace.communication
    assert columns(table, "collective", "comm_bytes", "in_bytes", "out_bytes", "peer", "dur_ns") == [
        ("all_reduce", 40, 40, 40, None, 5000),
        ("send", 12, 12, 0, 1, 6000),
        ("recv", 28, 0, 28, 1, 6000),
    ]
    assert table["node_id"].n_unique() == 2
    assert table["host_node_id"].n_unique() == 3
    kernel = trace.nodes.filter(node_id=table["node_id"][1]).row(0, named=True)
    assert (kernel["collective"], kernel["comm_bytes"], kernel["process_group"]) == ("send_recv", 40, "0")


def test_coalesced_kernel_without_known_operations_is_one_itself(tmp_path):
    builder = TraceBuilder().annotation("nccl:coalesced", 0, 10)
    builder.launched("ncclDevKernel_AllGather_RING_LL(x)", 20, 6, 2, at=2)
    assert columns(builder.merged(tmp_path).communication, "collective", "dur_ns") == [("all_gather", 6000)]


def test_annotation_that_outlasts_its_isend_does_not_swallow_the_operations_after_it(tmp_path):
    builder = TraceBuilder().op("c10d::send", 0, 4).annotation("gloo:send", 1, 100)
    builder.op("c10d::recv_", 10, 4).annotation("gloo:recv", 11, 80)
    table = builder.merged(tmp_path).communication
    assert columns(table, "collective", "dur_ns") == [("send", 101_000), ("recv", 81_000)]  # from the op on
    assert table["host_node_id"].n_unique() == 2


def test_work_on_a_backends_thread_belongs_to_the_last_op_that_began_before_it(tmp_path):
    builder = TraceBuilder().op("c10d::allreduce_", 0, 4).annotation("gloo:all_reduce", 30, 10, tid=WORKER)
    builder.op("c10d::allreduce_", 10, 4).annotation("gloo:all_reduce", 50, 10, tid=WORKER)
    table = builder.merged(tmp_path).communication
    assert [ts - table["issued_ns"][0] for ts in table["issued_ns"]] == [0, 10_000]
    assert [ts - table["issued_ns"][0] for ts in table["ts_ns"]] == [30_000, 50_000]


def test_work_that_no_op_asked_for_in_the_window_is_an_operation_of_its_own(tmp_path):
    builder = TraceBuilder().annotation("gloo:all_reduce", 0, 10, tid=WORKER).op("c10d::broadcast_", 20, 4)
    table = builder.merged(tmp_path).communication
    assert columns(table, "collective", "host_node_id") == [
        ("all_reduce", None),
        ("broadcast", table["host_node_id"][1]),
    ]


def test_work_of_another_kind_does_not_belong_to_the_last_op(tmp_path):
    builder = TraceBuilder().op("c10d::broadcast_", 0, 4).annotation("gloo:all_reduce", 30, 10, tid=WORKER)
    table = builder.annotation("gloo:broadcast", 31, 10, tid=WORKER + 1).merged(tmp_path).communication
    assert columns(table, "collective", "dur_ns") == [("broadcast", 10_000), ("all_reduce", 10_000)]
    builder.annotation("gloo:broadcast", 50, 20, tid=WORKER)
    second = builder.merged(tmp_path / "second").communication
    assert columns(second, "collective", "dur_ns")[2] == ("broadcast", 20_000)  # an op has one work


def test_reduce_scatter_takes_from_the_first_to_the_last_all_reduce_that_runs_in_its_place(tmp_path):
    builder = TraceBuilder().op("c10d::reduce_scatter_", 0, 4)
    builder.annotation("gloo:all_reduce", 10, 30, tid=WORKER).annotation("gloo:all_reduce", 12, 50, tid=WORKER + 1)
    (row,) = builder.merged(tmp_path).communication.to_dicts()
    assert (row["collective"], row["algorithm"]) == ("reduce_scatter", "all_reduce")
    assert (row["ts_ns"] - row["issued_ns"], row["dur_ns"]) == (10_000, 52_000)
    builder.annotation("gloo:all_reduce", 14, None, tid=WORKER + 2)
    assert builder.merged(tmp_path / "cut").communication["dur_ns"].to_list() == [None]


def test_monitored_barrier_takes_as_long_as_its_op(tmp_path):
    builder = TraceBuilder().op("c10d::monitored_barrier_", 0, 40)
    builder.annotation("gloo:send", 10, 5, tid=WORKER).annotation("gloo:recv", 20, 5, tid=WORKER)
    (row,) = builder.merged(tmp_path).communication.to_dicts()
    assert (row["collective"], row["algorithm"], row["dur_ns"]) == ("barrier", None, 40_000)


def test_wait_is_no_operation(tmp_path):
    builder = TraceBuilder().op("record_param_comms", 0, 5, **stated("wait", 0)).op("c10d::wait", 10, 4)
    assert builder.merged(tmp_path).communication.height == 0


def test_trace_without_communication_has_an_empty_table(tmp_path):
    assert TraceBuilder().op("a", 0, 5).merged(tmp_path).communication.height == 0


def test_host_trace_alone_has_operations_without_times(tmp_path):
    builder = nccl(TraceBuilder(), "allreduce_", "allreduce", 0, 1)
    table = merge_files(tmp_path / "out", WindowFiles(builder.write_host(tmp_path / "h.json"), None)).communication
    assert columns(table, "collective", "ts_ns", "issued_ns") == [("all_reduce", None, None)]


def test_op_that_a_host_trace_alone_puts_under_the_one_before_is_an_operation_of_its_own(tmp_path):
    builder = TraceBuilder().op("c10d::broadcast_", 0, 9).op("c10d::allreduce_", 2, 4)
    host_alone = WindowFiles(builder.write_host(tmp_path / "h.json"), None)
    assert merge_files(tmp_path / "out", host_alone).communication["collective"].to_list() == [
        "broadcast",
        "all_reduce",
    ]


class Times:
    """Stands for the rows of a window: times and threads of a few operations."""

    def __init__(self, *spans):
        self.ts_ns = np.array([start for start, _ in spans], dtype=np.int64)
        self.dur_ns = np.array([duration for _, duration in spans], dtype=np.int64)
        self.track = np.zeros(len(spans), dtype=np.int64)


def completed(known, spans, collectives, facts=()):
    operations = [Operation(row, members=[row], collective=name) for row, name in enumerate(collectives)]
    for operation, stated_facts in zip(operations, facts, strict=False):
        operation.facts = stated_facts
    known.complete(Times(*spans), operations, lambda _: None)
    return [operation.facts.process_group for operation in operations]


def completed_without_times(known, *operations, threads=None):
    """Groups of operations, ``(collective, bytes in)``, of a host trace alone."""
    listed = [
        Operation(row, members=[row], collective=name, facts=CommFacts(collective=name, in_bytes=num_bytes))
        for row, (name, num_bytes) in enumerate(operations)
    ]
    rows = Times(*[(MISSING, MISSING)] * len(listed))
    rows.track = np.array(threads or [0] * len(listed))
    known.complete(rows, listed, lambda _: None)
    return [one.facts.process_group for one in listed]


WORLD, PAIR = ProcessGroup("0", None, (0, 1, 2), 3), ProcessGroup("1", None, (0, 1), 2)


def test_note_belongs_to_the_op_that_was_under_way_and_to_none_where_several_were():
    notes = [IssuedOperation("gloo:all_reduce", "0", 5, seq=8), IssuedOperation("gloo:all_reduce", "1", 25)]
    known = KnownGroups(0, {"0": WORLD, "1": PAIR}, issued=Issued(operations=notes))
    spans = [(0, 10), (20, 10), (22, 10)]
    assert completed(known, spans, ["all_reduce"] * 3) == ["0", None, None]


def test_note_of_threads_that_issued_at_once_goes_to_the_op_whose_group_is_known():
    notes = [IssuedOperation("gloo:all_reduce", "0", 5, seq=8), IssuedOperation("gloo:all_reduce", "1", 6, seq=3)]
    known = KnownGroups(0, {"0": WORLD, "1": PAIR}, issued=Issued(operations=notes))
    facts = [CommFacts(collective="all_reduce"), CommFacts(collective="all_reduce")]
    listed = [Operation(row, members=[row], collective="all_reduce", facts=one) for row, one in enumerate(facts)]
    known.complete(Times((0, 10), (1, 10)), listed, lambda one: "1" if one is listed[1] else None)
    assert [(one.facts.process_group, one.facts.seq) for one in listed] == [("0", 8), ("1", 3)]


def test_note_of_another_collective_is_not_taken():
    known = KnownGroups(0, {"0": WORLD, "1": PAIR}, issued=Issued(operations=[IssuedOperation("gloo:reduce", "0", 5)]))
    assert completed(known, [(0, 10)], ["all_reduce"]) == [None]


def noted(*operations, **more):
    """What torch noted of (name, group, elements), one after the other."""
    notes = [
        IssuedOperation(f"gloo:{name}", group, at, in_elements=elements, dtype="Float")
        for at, (name, group, elements) in enumerate(operations)
    ]
    return KnownGroups(0, {"0": WORLD, "1": PAIR}, issued=Issued(operations=notes, **more))


def test_notes_go_in_order_to_the_operations_of_a_host_trace_alone():
    known = noted(("broadcast", "1", 3), ("all_reduce", "0", 2), ("all_reduce", "0", 2), ("all_reduce", "1", 2))
    operations = [("broadcast", 12), ("reduce_scatter", 16), ("all_reduce", 8)]
    assert completed_without_times(known, *operations) == ["1", "0", "1"]


@pytest.mark.parametrize(
    "operations",
    [
        [("all_reduce", 8)],
        [("all_reduce", 8), ("all_reduce", 12), ("all_reduce", 12)],
        [("all_reduce", 8), ("all_reduce", 16)],
        [("all_reduce", 8), ("all_reduce", None)],
        [("all_reduce", 8), ("broadcast", 12)],
        [("all_reduce", 8), ("reduce_scatter", 24)],
        [("reduce_scatter", 16), ("all_reduce", 12)],
    ],
)
def test_notes_that_are_not_the_operations_of_the_host_trace_name_no_group(operations):
    known = noted(("all_reduce", "0", 2), ("all_reduce", "1", 3))
    assert completed_without_times(known, ("all_reduce", 8), ("all_reduce", 12)) == ["0", "1"]
    assert completed_without_times(known, *operations) == [None] * len(operations)


def test_notes_go_by_order_neither_among_threads_nor_where_torch_lost_some():
    notes, operations = [("all_reduce", "0", 2), ("all_reduce", "1", 2)], [("all_reduce", 8), ("all_reduce", 8)]
    assert completed_without_times(noted(*notes), *operations, threads=[4, 5]) == [None, None]
    assert completed_without_times(noted(*notes, lost=True), *operations) == [None, None]


def test_send_without_a_time_was_issued_between_the_notes_around_it():
    counts = [GroupCount("0", 0, 2), GroupCount("1", 0, 2)]
    notes = [("gloo:barrier", "0", 10, 1), ("gloo:barrier", "1", 20, 2), ("gloo:barrier", "0", 30, 2)]
    listed = [IssuedOperation(name, group, time, op=op) for name, group, time, op in notes]
    known = KnownGroups(0, {"0": WORLD, "1": PAIR}, issued=Issued(end_ns=40, groups=counts, operations=listed))
    send, barrier = ("send", 4), ("barrier", 0)
    assert completed_without_times(known, barrier, send, barrier, barrier) == ["0", "1", "1", "0"]
    assert completed_without_times(known, barrier, barrier, send, barrier) == ["0", "1", None, "0"]


def test_the_only_group_with_other_members_is_that_of_every_operation():
    alone = ProcessGroup("2", None, (0,), 1)
    assert completed(KnownGroups(0, {"0": WORLD, "2": alone}), [(0, 1)], ["all_reduce"]) == ["0"]
    assert completed(KnownGroups(0, {"0": WORLD, "1": PAIR}), [(0, 1)], ["all_reduce"]) == [None]


def test_peer_that_is_no_member_or_oneself_excludes_a_group():
    groups = {"0": WORLD, "1": PAIR}
    to_2 = CommFacts(collective="send", group_peer=2)
    to_0 = CommFacts(collective="send", group_peer=0)
    known = KnownGroups(0, groups)
    assert completed(known, [(0, 1)], ["send"], [to_2]) == ["0"]
    assert completed(known, [(0, 1)], ["send"], [to_0]) == [None]  # member 0 of both is this rank itself
    turned = ProcessGroup("2", None, (1, 0), 2)
    to_1 = CommFacts(collective="send", group_peer=1)
    assert completed(KnownGroups(0, {"0": WORLD, "2": turned}), [(0, 1)], ["send"], [to_1]) == ["0"]


def test_root_and_peer_of_a_group_that_does_not_begin_at_rank_0_are_ranks_of_the_job():
    facts = [CommFacts(collective="broadcast", group_root=1), CommFacts(collective="recv", group_peer=0)]
    operations = [Operation(row, members=[row], collective=one.collective, facts=one) for row, one in enumerate(facts)]
    known = KnownGroups(5, {"3": ProcessGroup("3", None, (3, 5, 9), 3)})
    known.complete(Times((0, 1), (2, 1)), operations, lambda _: None)
    assert [(one.facts.process_group, one.facts.root, one.facts.peer) for one in operations] == [
        ("3", 5, None),
        ("3", None, 3),
    ]


def test_group_that_issued_as_many_as_could_be_its_own_issued_them_all():
    # The pair issued one operation that torch did not note, the world one before time 15: so the second is the pair's.
    notes = [IssuedOperation("gloo:barrier", "0", 15, op=2)]
    counts = [GroupCount("0", 0, 2), GroupCount("1", 4, 5)]
    issued = Issued(start_ns=0, end_ns=100, groups=counts, operations=notes)
    known = KnownGroups(0, {"0": WORLD, "1": PAIR}, issued=issued)
    assert completed(known, [(5, 1), (20, 1)], ["send", "send"]) == ["0", "1"]
    # Without the numbers at the end nothing can be said of what came after the note.
    open_end = Issued(start_ns=0, end_ns=100, groups=[GroupCount("0", 0), GroupCount("1", 4)], operations=notes)
    unknown = KnownGroups(0, {"0": WORLD, "1": PAIR}, issued=open_end)
    assert completed(unknown, [(5, 1), (20, 1)], ["send", "send"]) == ["0", None]


def test_numbers_at_the_start_tell_nothing_where_torch_lost_the_first_notes():
    notes = [IssuedOperation("gloo:barrier", "0", 15, op=2)]
    issued = Issued(start_ns=0, end_ns=100, lost=True, groups=[GroupCount("0", 0, 2), GroupCount("1", 4, 4)])
    issued.operations = notes
    known = KnownGroups(0, {"0": WORLD, "1": PAIR}, issued=issued)
    assert completed(known, [(5, 1)], ["send"]) == [None]


@pytest.mark.parametrize(
    "more",
    [
        {"Process Group Ranks": f"[0, {2**70}]"},
        {"Process Group Ranks": "[]", "Global rank start": 2**62, "Global rank stride": 2**62, "Group size": 4},
        {"Process Group Ranks": "[]", "Global rank start": 0, "Global rank stride": 1, "Group size": 2**70},
        {"Seq": 2**70, "Root Rank": 2**70, "Src Rank": 2**70, "Dst Rank": 2**70},
        {"In msg nelems": 2**70, "Out msg nelems": -(2**70)},
    ],
)
def test_numbers_that_no_table_can_hold_are_not_known(tmp_path, more):
    trace = nccl(TraceBuilder().step(1, 0, 100), "allreduce_", "allreduce", 10, **more).merged(tmp_path)
    (row,) = trace.communication.to_dicts()
    assert (row["collective"], row["seq"], row["root"]) == ("all_reduce", None, None)
    assert all(0 <= rank < 2**53 for rank in row["group_ranks"] or ())
