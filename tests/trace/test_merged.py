from pathlib import Path

import pytest
from builder import TraceBuilder

from chakra_capture.errors import TraceFileError
from chakra_capture.trace.merged import MergedTrace


def test_tables_and_link_are_read_when_asked_for(tmp_path: Path) -> None:
    trace = TraceBuilder().step(1, 0, 50).op("a", 5, 10).launched("k", 20, 5, 1, at=6).merged(tmp_path)
    assert (trace.nodes.height, trace.steps.height, trace.link["rank"]) == (6, 1, 0)  # two roots among them
    assert trace.device_activities["name"].to_list() == ["k"]
    assert trace.edges.height > 0


def test_activities_without_a_time_are_not_device_time(tmp_path: Path) -> None:
    trace = TraceBuilder().kernel("k", 20, -1, 1).kernel("l", None, 5, 2).kernel("m", 30, 0, 3)
    assert trace.merged(tmp_path, host=False).device_activities["name"].to_list() == ["m"]


def test_missing_tables_are_said(tmp_path: Path) -> None:
    trace = MergedTrace(0, tmp_path)
    with pytest.raises(TraceFileError, match=r"nodes\.parquet cannot be read"):
        _ = trace.nodes
    with pytest.raises(TraceFileError, match=r"link\.json cannot be read"):
        _ = trace.link
