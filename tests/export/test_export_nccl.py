"""NCCL's batched sends and receives, and what has no counterpart in a simulator, on small traces of two ranks."""

import pytest
from builder import TraceBuilder
from commands import run

from export.exported import errors, exported, groups_of, ranks_of, walked

COMP, SEND, RECV, COLL = 4, 5, 6, 7
ARGS = {"dtype": "Float", "Process Group Name": "0", "Process Group Ranks": "[0, 1]", "Group size": 2}


def issued(builder, name, collective, ts, correlation=None, *, count=10, kernel="AllReduce_RING_LL", **more):
    """An op of c10d with its record, and, with a correlation, the kernel it launches."""
    stated = {"Collective name": collective, "In msg nelems": count, "Out msg nelems": count, **ARGS, **more}
    builder.op(f"c10d::{name}", ts, 10).op("record_param_comms", ts + 1, 8, **stated)
    if correlation is not None:
        builder.annotation(f"nccl:{collective}", ts + 2, 6)
        builder.launched(f"ncclDevKernel_{kernel}(x)", ts + 20, 5, correlation, at=ts + 4, **stated)
    return builder


def exchanging(rank, *, count=3):
    """A kernel, an all-reduce, then a batch in which both ranks send and receive in one kernel, and a kernel after."""
    other = 1 - rank
    trace = TraceBuilder(rank=rank, world_size=2, pid=100 + rank).step(1, 0, 400)
    trace.op("aten::mm", 2, 9).launched("gemm", 14, 40, 1, at=4)
    issued(trace, "allreduce_", "allreduce", 60, 2, Seq=1)
    issued(trace, "send", "send", 100, count=count + rank, **{"Dst Rank": other})
    issued(trace, "recv_", "recv", 111, count=count + other, **{"Src Rank": other})
    trace.annotation("nccl:coalesced", 130, 10).launched("ncclDevKernel_SendRecv(x)", 150, 6, 3, at=132)
    return trace.op("aten::add", 200, 9).launched("add", 214, 4, 4, at=202)


@pytest.fixture
def run_of_two(tmp_path):
    for rank in (0, 1):
        exchanging(rank).write(tmp_path / "run", rank)
    assert run("merge", tmp_path / "run", "--workers", "1").code == 0
    return tmp_path / "run"


@pytest.mark.parametrize("profile", ["astra", "full"])
def test_a_batch_in_one_kernel_is_a_send_and_a_receive_side_by_side(run_of_two, tmp_path, profile):
    exported(run_of_two, tmp_path / "et", profile)
    for number, rank in ranks_of(tmp_path / "et").items():
        (send,), (recv,) = ([n for n in rank.communication if n.type == kind] for kind in (SEND, RECV))
        assert (send.attrs["comm_dst"], send.attrs["comm_tag"], send.attrs["comm_size"]) == (
            1 - number,
            0,
            12 + 4 * number,
        )
        assert (recv.attrs["comm_src"], recv.attrs["comm_size"]) == (1 - number, 12 + 4 * (1 - number))
        # Neither waits for the other, or two ranks that both receive first would wait for ever.
        assert recv.id not in send.deps
        assert send.id not in recv.deps
        (after,) = rank.named("add")[-1:]
        assert {send.id, recv.id} <= after.deps
        # The kernel took 6 us once, not once for each of its operations.
        assert send.duration_us + recv.duration_us == 6
    assert errors(tmp_path / "et", profile) == set()
    assert groups_of(tmp_path / "et") == {1: [0, 1]}
    walked(tmp_path / "et", full=profile == "full")


def test_sizes_that_differ_on_the_two_sides_of_a_send_are_named(tmp_path):
    for rank in (0, 1):
        exchanging(rank, count=3 if rank else 5).write(tmp_path / "run", rank)
    assert run("merge", tmp_path / "run", "--workers", "1").code == 0
    exported(tmp_path / "run", tmp_path / "et")
    assert errors(tmp_path / "et") == {"V18-pair-size"}


def test_a_collective_of_a_group_of_one_becomes_computation(tmp_path):
    trace = TraceBuilder(rank=0, world_size=1).step(1, 0, 100)
    alone = {"Process Group Ranks": "[0]", "Group size": 1}
    issued(trace, "allreduce_", "allreduce", 10, 2, **alone).write(tmp_path / "run", 0)
    assert run("merge", tmp_path / "run").code == 0
    said = exported(tmp_path / "run", tmp_path / "et")
    assert said["counts"]["operations of a group of one rank, written as computation"] == 1
    assert groups_of(tmp_path / "et") == {}
    (rank,) = ranks_of(tmp_path / "et").values()
    assert rank.communication == []
    (kernel,) = [node for node in rank.named("ncclDevKernel") if not node.on_cpu]
    assert (kernel.type, kernel.duration_us) == (COMP, 5)


@pytest.mark.parametrize(
    ("collective", "comm_type", "size", "note"),
    [
        ("reduce", 0, 40, "reduce lowered to ALL_REDUCE"),
        ("gather", 2, 40, "gather lowered to ALL_GATHER"),
        ("scatter", 5, 40, "scatter lowered to BROADCAST"),
        ("barrier", 0, 1, "barrier lowered to ALL_REDUCE"),
    ],
)
def test_what_astra_sim_does_not_run_is_lowered_and_counted(tmp_path, collective, comm_type, size, note):
    for number in (0, 1):
        trace = TraceBuilder(rank=number, world_size=2, pid=100 + number).step(1, 0, 100)
        issued(trace, f"{collective}_", collective, 10, 2, kernel="Generic_RING_LL", **{"Root Rank": 0})
        trace.write(tmp_path / "run", number)
    assert run("merge", tmp_path / "run", "--workers", "1").code == 0
    assert exported(tmp_path / "run", tmp_path / "et")["counts"][note] == 2
    for rank in ranks_of(tmp_path / "et").values():
        (node,) = rank.communication
        assert (node.attrs["comm_type"], node.attrs["comm_size"], node.attrs["pg_name"]) == (comm_type, size, "1")
    assert errors(tmp_path / "et") == set()
