"""What a device does when, against the sums of the other analyses and a small case by hand."""

from itertools import pairwise
from pathlib import Path

import polars as pl
import pytest
from builder import TraceBuilder, assert_table, merge_files
from handed import DATA, require

from chakra_capture.analysis.device import device_breakdown
from chakra_capture.analysis.device_states import SCHEMA, device_states
from chakra_capture.analysis.idle import idle_causes
from chakra_capture.trace.discovery import WindowFiles
from chakra_capture.trace.merged import MergedTrace

SUMS = {"compute": "compute_ns", "exposed communication": "exposed_communication_ns", "copy": "exposed_memory_ns"}


def test_communication_counts_while_nothing_computes_and_a_copy_while_neither_does(tmp_path: Path) -> None:
    trace = TraceBuilder().step(0, 0, 100)
    trace.launched("gemm", 10, 20, 1, at=1)
    trace.launched("ncclDevKernel_AllReduce_Sum_f32", 25, 20, 2, at=2, stream=20)
    trace.runtime("cudaMemcpyAsync", 4, 1, 3).kernel("Memcpy HtoD (Pinned -> Device)", 40, 20, 3, stream=22,
                                                     cat="gpu_memcpy", bytes=1)  # fmt: skip
    trace.launched("gemm", 60, 0, 4, at=5).launched("gemm", 70, 10, 5, at=6)
    states = device_states(trace.merged(tmp_path))
    first = states["begin_ns"][0]
    table = states.filter(pl.col("state") != "idle").select(
        "device", "state", begin=pl.col("begin_ns") - first, end=pl.col("end_ns") - first
    )
    assert_table(
        table,
        """
        device,state,begin,end
        0,compute,10000,30000
        0,exposed communication,30000,45000
        0,copy,45000,60000
        0,compute,70000,80000
        """,
    )
    idle = states.filter(state="idle")
    assert idle["cause"].null_count() == 0
    assert (states["begin_ns"][0], states["end_ns"][-1]) == (first, first + 100_000)


def test_without_activities_there_is_no_state(tmp_path: Path) -> None:
    states = device_states(TraceBuilder().op("a", 0, 1).merged(tmp_path))
    assert (states.height, dict(states.schema)) == (0, SCHEMA)


@pytest.mark.parametrize(
    "name", ["hta_ns_resolution", "mi300_qwen_0_5b_chat", "hta_event_sync_multi_stream", "h100_bert_small"]
)
def test_states_have_no_gap_and_sum_to_what_the_other_analyses_say(tmp_path: Path, name: str) -> None:
    path = require(DATA / "device_only" / f"{name}.json.gz")
    trace: MergedTrace = merge_files(tmp_path, WindowFiles(None, path))
    states, whole = device_states(trace), device_breakdown(trace).filter(pl.col("step").is_null())
    assert states.partition_by("window", "device")
    for mine in states.partition_by("window", "device"):
        rows = [*mine.select("begin_ns", "end_ns").iter_rows()]
        assert all(end == begin for (_, end), (begin, _) in pairwise(rows))
        assert all(end > begin for begin, end in rows)
    sums = dict(states.group_by("state").agg((pl.col("end_ns") - pl.col("begin_ns")).sum()).iter_rows())
    for state, column in SUMS.items():
        assert sums.get(state, 0) == whole[column].sum()
    assert sums.get("idle", 0) == idle_causes([trace])["total_ns"].sum()
