"""The part of the steps in which something is communicated."""

from pathlib import Path

import pytest
from builder import TraceBuilder

from chakra_capture.analysis.communication_cover import communication_cover


def test_two_operations_at_once_count_once_and_only_within_steps(tmp_path: Path) -> None:
    trace = TraceBuilder(rank=0, world_size=2).step(1, 0, 100)
    trace.launched("ncclDevKernel_AllReduce_a", 10, 20, 1, at=1)
    trace.launched("ncclDevKernel_AllReduce_b", 20, 30, 2, at=3, stream=8)
    trace.launched("ncclDevKernel_AllReduce_c", 90, 40, 3, at=5)
    assert communication_cover([trace.merged(tmp_path)]) == pytest.approx(0.5)  # 10 to 50, 90 to 100


def test_nothing_that_has_a_time_is_no_share(tmp_path: Path) -> None:
    assert communication_cover([]) is None
