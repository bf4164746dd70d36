"""Median and longest own time of operators."""

from pathlib import Path

from builder import TraceBuilder, assert_table

from chakra_capture.analysis.operator_spread import operator_spread


def test_median_and_longest_are_of_the_single_calls_of_the_steps(tmp_path: Path) -> None:
    trace = TraceBuilder().step(1, 10, 200).op("relu", 0, 9)
    for number, dur in enumerate((1, 3, 50)):
        trace.op("relu", 20 + 60 * number, dur)
    trace.op("add", 30, 10).op("mul", 32, 4)
    table = operator_spread([trace.merged(tmp_path)], ["relu", "add"])
    assert_table(table, "name,p50_ns,max_ns\nadd,6000,6000\nrelu,3000,50000")


def test_without_steps_all_that_was_recorded_counts(tmp_path: Path) -> None:
    trace = TraceBuilder().op("relu", 0, 9).op("relu", 10, 1).op("relu", 20, 2)
    assert operator_spread([trace.merged(tmp_path)], ["relu"]).row(0) == ("relu", 2000, 9000)


def test_of_no_rank_there_is_no_row() -> None:
    assert operator_spread([], ["relu"]).height == 0
