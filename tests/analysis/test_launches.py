import tempfile
from pathlib import Path

from builder import TraceBuilder, assert_table, merge_files
from commands import run
from handed import CASES, require
from hypothesis import given, settings
from hypothesis import strategies as st

from chakra_capture.analysis.launches import SCHEMA, launch_statistics
from chakra_capture.trace.discovery import WindowFiles


def test_without_activities_or_ranks_there_is_no_row(tmp_path: Path) -> None:
    names = [column.name for column in SCHEMA]
    assert launch_statistics([]).columns == names
    assert launch_statistics([TraceBuilder().op("a", 0, 1).merged(tmp_path)]).rows() == []


def test_calls_delays_and_queues_of_a_stream(tmp_path: Path) -> None:
    # Calls at 0, 10, 20 take 4, 6, 8 us; the first kernel runs 5-65, so the others wait behind it.
    trace = TraceBuilder()
    for number, (at, dur, start, length) in enumerate([(0, 4, 5, 60), (10, 6, 65, 5), (20, 8, 70, 30)]):
        trace.runtime("cudaLaunchKernel", at, dur, number + 1).kernel("k", start, length, number + 1)
    columns = ("call", "num_launches", "num_activities", "call_total_ns", "call_p50_ns", "call_p90_ns",
               "delay_p50_ns", "delay_p90_ns", "activity_p50_ns", "num_short", "queue_p50", "queue_max")  # fmt: skip
    assert_table(
        launch_statistics([trace.merged(tmp_path, host=False)]).select(columns),
        f"""
        {",".join(columns)}
        cudaLaunchKernel,3,3,18000,6000,8000,50000,55000,30000,1,1,2
        """,
    )


def test_a_graph_is_one_call_of_many_activities(tmp_path: Path) -> None:
    path = require(CASES / "017-cuda-graph-one-launch-many-kernels" / "rank-0.json")
    table = launch_statistics([merge_files(tmp_path, WindowFiles(None, path))])
    assert table.select("num_launches", "num_activities", "queue_max").rows() == [(1, 3, 3), (1, 1, 1)]  # two streams


def test_work_launched_before_the_window_is_in_no_queue(tmp_path: Path) -> None:
    path = require(CASES / "018-launch-outside-window" / "rank-0.json")
    table = launch_statistics([merge_files(tmp_path, WindowFiles(None, path))])
    orphans = table.filter(table["call"].is_null())
    assert orphans["num_activities"].sum() == 2
    assert set(orphans.select("num_launches", "call_total_ns", "delay_p50_ns", "queue_max", "num_short").row(0)) == {
        None
    }
    assert (table["queue_p50"].drop_nulls() >= 0).all()


def test_calls_of_hip_are_launches_too(tmp_path: Path) -> None:
    path = require(CASES / "019-hip-launch-names" / "rank-0.json")
    table = launch_statistics([merge_files(tmp_path, WindowFiles(None, path))])
    assert (table["num_activities"].sum(), table["call"].null_count(), set(table["stream"])) == (5, 0, {0})


LAUNCH = st.tuples(st.integers(0, 60), st.integers(-5, 40), st.integers(0, 1))


@settings(max_examples=40, deadline=None)
@given(st.lists(LAUNCH, min_size=1, max_size=12))
def test_queues_are_those_of_counting_and_never_below_zero(launches: list[tuple[int, int, int]]) -> None:
    trace = TraceBuilder().runtime("cudaFree", 0, 1, 900)
    for number, (at, lag, stream) in enumerate(launches):
        trace.runtime("cudaLaunchKernel", at, 1, number + 1).kernel("k", at + lag, 3, number + 1, stream=stream)
    with tempfile.TemporaryDirectory() as folder:
        merged = trace.merged(Path(folder), host=False)
        table = launch_statistics([merged])
    offset = merged.clock_offsets[0] // 1000
    for stream in {stream for *_, stream in launches}:
        spans = [(at, max(at, at + lag + offset)) for at, lag, of in launches if of == stream]
        queues = sorted(sum(call <= at < start for call, start in spans) for at, _ in spans)
        (row,) = table.filter(stream=stream).to_dicts()
        assert (row["queue_max"], row["queue_p50"]) == (queues[-1], queues[(len(queues) + 1) // 2 - 1])
        assert queues[0] >= 0
        assert row["delay_p50_ns"] is None or row["delay_p50_ns"] >= 0


def test_the_command_says_how_many_launches_are_missing(tmp_path: Path) -> None:
    folder = TraceBuilder().launched("k", 5, 10, 1, at=0).kernel("k", 20, 10, 2).write(tmp_path)
    shown = run("analyze", "launches", folder)
    assert "note: the launches of 1 activities are not recorded" in shown.out
    assert "cudaLaunchKernel" in shown.out
