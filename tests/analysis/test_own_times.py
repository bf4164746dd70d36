"""In which phase a rank is late, from times by hand."""

import numpy as np
import polars as pl
import pytest
from builder import TraceBuilder

from chakra_capture import layout
from chakra_capture.analysis.loop import PHASES, loop_windows
from chakra_capture.analysis.own_times import LatePhase, OwnTimes, late_phases, own_times

STEP_NS = 100.0
SCHEMA = {"node_id": pl.Int64, "ts_ns": pl.Int64, "wait_ns": pl.Int64}


def rank(num_steps: int = 10, **phases: float) -> OwnTimes:
    """Steps of a rank; ``rest`` is in no phase."""
    own = np.array([phases.get("rest" if name is None else name, 0.0) for name in PHASES])
    return dict.fromkeys(range(num_steps), own)


def late(*ranks: OwnTimes) -> LatePhase | None:
    return late_phases([1], dict(enumerate(ranks)), STEP_NS).get(1)


@pytest.mark.parametrize(("excess", "is_said"), [(9.9, False), (10, True)])
def test_phase_with_the_most_excess_is_named_from_10_percent_of_a_step(excess, is_said):
    found = late(rank(forward=30, backward=20), rank(forward=31, backward=20 + excess))
    assert found == (LatePhase("backward", 20 + excess, 20) if is_said else None)


def test_what_is_in_no_phase_may_be_what_makes_a_rank_late_once_its_waiting_is_taken_out():
    assert late(rank(forward=30), rank(forward=30, rest=40)) == LatePhase(None, 40, 0)


@pytest.mark.parametrize(("num_longer", "is_said"), [(79, False), (80, True)])
def test_phase_is_longer_in_80_of_100_steps(num_longer, is_said):
    mine = rank(num_longer, forward=50) | {step: rank(1)[0] for step in range(num_longer, 100)}
    assert (late(rank(100, forward=30), mine) is not None) == is_said


def test_others_are_their_median_and_ranks_without_a_common_step_say_nothing():
    assert late(rank(forward=10), rank(forward=50), rank(forward=10), rank(forward=90)) == LatePhase("forward", 50, 10)
    assert late(rank(forward=10), {99: rank(forward=50)[0]}) is None
    assert late_phases([1], {1: rank(forward=50)}, STEP_NS) == {}
    assert late_phases([7], dict(enumerate([rank(), rank(forward=50)])), STEP_NS) == {}


def test_own_time_of_a_phase_is_without_the_union_of_the_waits_in_it_but_those_of_kernels(tmp_path):
    builder = TraceBuilder().step(1, 0, 100).annotation("forward", 10, 20).annotation("backward", 40, 50)
    trace = builder.launched("ncclDevKernel_AllReduce", 40, 20, 7, at=39).merged(tmp_path)
    (kernel,) = trace.nodes.filter(kind="kernel")["node_id"]
    # Waits from 15 to 25 in forward, from 60 to 80 and from 70 to 100 in backward and beyond it: us.
    waits = pl.DataFrame(
        [(1, 15_000, 10_000), (2, 60_000, 20_000), (3, 70_000, 30_000), (kernel, 40_000, 20_000)], SCHEMA, orient="row"
    )
    waits = waits.with_columns(rank=pl.lit(0, pl.Int64), window=pl.lit(0, pl.Int32))
    waits.write_parquet(trace.folder / layout.COMMUNICATION_FILE)
    (own,) = own_times(trace, waits, loop_windows(trace)).values()
    assert {name: int(ns) for name, ns in zip(PHASES, own, strict=True) if ns} == {
        "forward": 10_000, "backward": 20_000, None: 20_000,
    }  # fmt: skip
