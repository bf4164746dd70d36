"""In which phase a rank is late, from times by hand."""

import numpy as np
import polars as pl
import pytest
from builder import TraceBuilder

from chakra_capture.analysis.late_ops import Cause, LateOp, call_path
from chakra_capture.analysis.loop import loop_windows
from chakra_capture.analysis.own_times import BETWEEN, PARTS, LatePhase, OwnTimes, late_phases, own_times

STEP_NS = 100.0
OPS = {"step": pl.Int64, "phase": pl.String, "name": pl.String, "kind": pl.String, "ns": pl.Int64}


def rank(num_steps: int = 10, **phases: float) -> OwnTimes:
    """Steps of a rank; ``rest`` is in no phase, ``between`` before the step."""
    named = {None: "rest", BETWEEN: "between"}
    own = np.array([phases.get(named.get(name, name), 0.0) for name in PARTS])
    return OwnTimes(dict.fromkeys(range(num_steps), own))


def with_ops(times: OwnTimes, phase: str | None, kind: str = "op", **ops: int) -> OwnTimes:
    """The same with ops that take so much in each step."""
    rows = [(step, phase, name, kind, ns) for step in times.host for name, ns in ops.items()]
    return OwnTimes(times.host, times.device, pl.DataFrame(rows, OPS, orient="row"))


def late(*ranks: OwnTimes) -> LatePhase | None:
    return late_phases([1], dict(enumerate(ranks)), STEP_NS).get(1)


@pytest.mark.parametrize(("excess", "is_said"), [(9.9, False), (10, True)])
def test_phase_with_the_most_excess_is_named_from_10_percent_of_a_step(excess, is_said):
    found = late(rank(forward=30, backward=20), rank(forward=30, backward=20 + excess))
    assert found == (LatePhase("backward", 20 + excess, 20) if is_said else None)


def test_what_is_in_no_phase_may_be_what_makes_a_rank_late_once_its_waiting_is_taken_out():
    assert late(rank(forward=30), rank(forward=30, rest=40)) == LatePhase(None, 40, 0)


@pytest.mark.parametrize(("num_longer", "is_said"), [(79, False), (80, True)])
def test_phase_is_longer_in_80_of_100_steps(num_longer, is_said):
    mine = rank(100, forward=0).host | rank(num_longer, forward=50).host
    assert (late(rank(100, forward=30), OwnTimes(mine)) is not None) == is_said


def test_others_are_their_median_and_ranks_without_a_common_step_say_nothing():
    assert late(rank(forward=10), rank(forward=50), rank(forward=10), rank(forward=90)) == LatePhase("forward", 50, 10)
    assert late_phases([1], {0: rank(forward=10), 1: OwnTimes({99: rank().host[0]})}, STEP_NS) == {}
    assert late_phases([1], {1: rank(forward=50)}, STEP_NS) == {}
    assert late_phases([7], dict(enumerate([rank(), rank(forward=50)])), STEP_NS) == {}


def test_rank_that_takes_no_longer_is_not_late_and_one_that_does_in_all_phases_together_is_in_no_one_phase():
    assert late_phases([1], {0: rank(forward=50), 1: rank(forward=50)}, STEP_NS) == {1: None}
    a_bit = {"forward": 35.0, "backward": 45.0, "optimizer": 15.0}
    found = late(rank(forward=30, backward=40, optimizer=10), rank(**a_bit))
    assert found == LatePhase(None, 95, 80, LateOp(Cause.SPREAD))


def test_time_before_a_step_may_be_what_makes_a_rank_late():
    assert late(rank(forward=30), rank(forward=30, between=40)) == LatePhase(BETWEEN, 40, 0, LateOp(Cause.UNKNOWN))


@pytest.mark.parametrize(("ns", "is_named"), [(19, False), (20, True)])
@pytest.mark.parametrize(
    ("phase", "without"), [("forward", Cause.PYTHON), (None, Cause.PYTHON), ("input_wait", Cause.LOADER)]
)
def test_op_is_named_if_it_takes_half_of_what_the_phase_takes_longer(phase, without, ns, is_named):
    name = "rest" if phase is None else phase
    slow = with_ops(rank(**{name: 50.0}), phase, mm=ns + 3, add=5, relu=9)
    found = late(with_ops(rank(**{name: 10.0}), phase, mm=3, relu=9), slow)  # 40 longer
    assert found.what == (LateOp(Cause.OP, "mm", ns + 3, 3) if is_named else LateOp(without))


def test_op_of_another_phase_or_of_few_steps_is_not_named():
    slow = with_ops(rank(forward=50), "backward", mm=40)
    assert late(rank(forward=10), slow).what == LateOp(Cause.PYTHON)
    now_and_then = with_ops(rank(4, forward=50), "forward", mm=40).ops
    assert late(rank(forward=10), OwnTimes(rank(forward=50).host, ops=now_and_then)).what == LateOp(Cause.PYTHON)


def test_others_ops_are_their_median():
    ranks = [with_ops(rank(forward=10), "forward", mm=ns) for ns in (1, 4, 90)]
    slow = with_ops(rank(forward=60), "forward", mm=54)
    assert late(ranks[0], slow, *ranks[1:]).what == LateOp(Cause.OP, "mm", 54, 4)


def test_device_is_slow_where_its_work_takes_longer_than_that_of_the_loops_thread():
    own = OwnTimes(rank(forward=30).host, rank(backward=60).host)
    slow = with_ops(own, "backward", "device", addmm=50)
    usual = OwnTimes(rank(forward=20).host, rank(backward=20).host)
    assert late(usual, slow) == LatePhase("backward", 60, 20, LateOp(Cause.DEVICE, "addmm", 50, 0))
    assert late(usual, OwnTimes(own.host, own.device)).what == LateOp(Cause.UNKNOWN)


def collective(builder: TraceBuilder, at: int, dur: int, **more) -> TraceBuilder:
    """An all_reduce of gloo: the op that asks, and the row that runs it on a thread of its own."""
    return builder.op("c10d::allreduce_", at, 1).annotation("gloo:all_reduce", at + 1, dur, tid=77, **more)


def parts(trace) -> dict[str | None, int]:
    (own,) = own_times(trace, loop_windows(trace)).host.values()
    return {name: int(ns) for name, ns in zip(PARTS, own, strict=True) if ns}


def test_own_time_of_a_phase_is_without_that_in_which_the_loop_communicates_and_does_nothing_else(tmp_path):
    builder = TraceBuilder().step(1, 0, 10_000).annotation("forward", 1_000, 3_000).annotation("backward", 5_000, 4_000)
    # In forward 2000 us with an op of 500 in it, in backward 1000 with an op on autograd's thread all the time.
    builder = collective(builder.op("aten::add", 2_000, 500), 1_500, 2_000)
    builder = collective(builder, 6_000, 1_000)
    builder.op("autograd::engine::evaluate_function: MmBackward0", 5_900, 2_000, tid=12)
    trace = builder.merged(tmp_path)
    assert parts(trace) == {"forward": (3_000 - 2_001 + 500) * 1000, "backward": 4_000_000, None: 3_000_000}


def test_call_that_waits_for_the_device_is_no_work_of_the_loop_but_the_kernel_is_one_of_its_op(tmp_path):
    builder = TraceBuilder().step(1, 0, 10_000).annotation("forward", 0, 4_000).annotation("optimizer", 4_000, 6_000)
    builder.op("aten::linear", 1_000, 100).op("aten::addmm", 1_010, 80).launched("gemm", 1_100, 5_000, 1, at=1_020)
    builder.runtime("cudaDeviceSynchronize", 4_000, 2_200, 2)
    trace = builder.merged(tmp_path)
    assert parts(trace) == {"forward": 4_000_000, "optimizer": 3_800_000}
    own = own_times(trace, loop_windows(trace))
    assert own.device[1][PARTS.index("forward")] == own.device[1].sum() == 5_000_000
    kernels = own.ops.filter(kind="device").drop("kind").rows()
    assert kernels == [(1, "forward", "aten::addmm", 5_000_000)]
    assert call_path(loop_windows(trace), "forward", "aten::addmm", on_device=True) == ("aten::linear",)


def test_ops_of_the_loop_and_of_autograd_count_and_what_communicates_or_is_of_other_threads_does_not(tmp_path):
    builder = TraceBuilder().step(1, 0, 1_000).annotation("input_wait", 0, 100).annotation("backward", 200, 500)
    builder.annotation("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 10, 80).op("aten::stack", 20, 30)
    builder.op("autograd::engine::evaluate_function: SlowBackward", 210, 300, tid=12)
    builder.op("SlowBackward", 220, 280, tid=12).op("aten::mm", 230, 200, tid=12)
    builder.op("aten::pin_memory", 210, 300, tid=13)
    trace = collective(builder.op("aten::mm", 800, 50), 600, 50).merged(tmp_path)
    table = own_times(trace, loop_windows(trace)).ops.filter(kind="op").drop("kind", "step")
    assert sorted(table.rows(), key=str) == sorted([
        ("input_wait", "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 50_000),
        ("input_wait", "aten::stack", 30_000),
        ("backward", "SlowBackward", 100_000),
        ("backward", "aten::mm", 200_000),
        (None, "aten::mm", 50_000),
    ], key=str)  # fmt: skip
    assert call_path(loop_windows(trace), "backward", "aten::mm", on_device=False) == ("SlowBackward",)
    assert call_path(loop_windows(trace), None, "aten::mm", on_device=False) == ()
