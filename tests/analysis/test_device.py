from pathlib import Path

from builder import TraceBuilder, assert_table
from hypothesis import given, settings
from hypothesis import strategies as st

from chakra_capture.analysis.device import TIMES, device_time
from chakra_capture.analysis.kernels import kernel_summary
from chakra_capture.analysis.operators import operator_summary
from chakra_capture.analysis.steps import step_summary


def test_no_device_activity_gives_no_row(tmp_path: Path) -> None:
    trace = TraceBuilder().op("a", 0, 1).merged(tmp_path)
    assert device_time(trace).rows() == []
    assert kernel_summary(trace).rows() == []
    assert step_summary(trace).rows() == []
    assert device_time(trace).schema.names() == [column.name for column in TIMES]


SPAN = st.tuples(
    st.sampled_from(["kernel", "nccl", "gpu_memcpy", "gpu_memset"]), st.integers(0, 40), st.integers(0, 15)
)


@settings(max_examples=40, deadline=None)
@given(st.lists(SPAN, min_size=1, max_size=10))
def test_parts_are_those_of_counting_instants(spans: list[tuple[str, int, int]]) -> None:
    import tempfile

    trace = TraceBuilder()
    sets: dict[str, set[int]] = {"kernel": set(), "nccl": set(), "memory": set()}
    for stream, (what, ts, dur) in enumerate(spans):
        name = "ncclDevKernel_AllReduce_x" if what == "nccl" else "k"
        trace.kernel(name, ts, dur, stream=stream, cat="kernel" if what == "nccl" else what)
        sets[what if what in sets else "memory"] |= set(range(ts, ts + dur))
    with tempfile.TemporaryDirectory() as folder:
        (row,) = device_time(trace.merged(Path(folder), host=False)).to_dicts()
    compute, comm, memory = sets.values()
    span = max(ts + dur for _, ts, dur in spans) - min(ts for _, ts, _ in spans)
    assert row == {
        "num_activities": len(spans),
        "span_ns": 1000 * span,
        "busy_ns": 1000 * len(compute | comm | memory),
        "compute_ns": 1000 * len(compute),
        "communication_ns": 1000 * len(comm),
        "memory_ns": 1000 * len(memory),
        "exposed_communication_ns": 1000 * len(comm - compute),
        "exposed_memory_ns": 1000 * len(memory - compute - comm),
        "idle_ns": 1000 * (span - len(compute | comm | memory)),
    }


def test_kernel_summary_ranks_by_total_time(tmp_path: Path) -> None:
    trace = TraceBuilder().kernel("gemm", 0, 30).kernel("copy", 40, 5).kernel("copy", 50, 5).kernel("also", 60, 10)
    assert_table(
        kernel_summary(trace.merged(tmp_path, host=False)),
        """
        name,kind,count,total_ns,mean_ns,share
        gemm,kernel,1,30000,30000,0.6
        also,kernel,1,10000,10000,0.2
        copy,kernel,2,10000,5000,0.2
        """,
    )


def test_operator_summary_ranks_by_self_time_and_says_what_is_outside_any_op(tmp_path: Path) -> None:
    trace = TraceBuilder().step(1, 0, 100).op("a", 0, 40).op("b", 10, 30).op("b", 50, 10).op("open", 70, -1)
    assert_table(
        operator_summary(trace.merged(tmp_path, host=False)),
        """
        name,count,self_ns,total_ns,share
        (outside any op),1,50000,100000,0.5
        b,2,40000,40000,0.4
        a,1,10000,40000,0.1
        """,
    )


def test_operators_between_the_steps_are_not_in_the_summary_of_steps(tmp_path: Path) -> None:
    trace = TraceBuilder().step(1, 0, 10).op("inside", 0, 10).op("between", 20, 50)
    assert operator_summary(trace.merged(tmp_path, host=False))["name"].to_list() == ["inside", "(outside any op)"]


def test_operators_of_a_trace_without_steps_are_all_it_holds(tmp_path: Path) -> None:
    trace = TraceBuilder().op("a", 0, 10).op("b", 20, 50)
    assert operator_summary(trace.merged(tmp_path, host=False))["name"].to_list() == ["b", "a"]


def test_step_summary_of_whole_steps(tmp_path: Path) -> None:
    trace = TraceBuilder().step(5, 0, 10).step(6, 10, 20).step(7, 30, 60).step(8, 90, -1)
    (row,) = step_summary(trace.merged(tmp_path, host=False)).to_dicts()
    assert (row["num_steps"], row["first_step"], row["last_step"]) == (3, 5, 7)
    assert (row["mean_ns"], row["median_ns"], row["min_ns"], row["max_ns"]) == (30000, 20000, 10000, 60000)


def test_busy_and_idle_of_a_step_sum_to_it_and_activities_count_by_launch(tmp_path: Path) -> None:
    trace = TraceBuilder().step(1, 0, 50).step(2, 50, 50)
    trace.launched("late", 40, 30, 1, at=10).launched("k", 80, 10, 2, at=60)
    columns = ("step", "device_busy_ns", "device_idle_ns", "num_device_activities", "profiled", "forward_ns")
    assert_table(
        trace.merged(tmp_path, host=False).steps.select(columns),
        """
        step,device_busy_ns,device_idle_ns,num_device_activities,profiled,forward_ns
        1,10000,40000,1,True,
        2,30000,20000,1,True,
        """,
    )
