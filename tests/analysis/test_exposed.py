import json
from pathlib import Path

import polars as pl
import pytest
from builder import TraceBuilder, merge_files
from commands import run
from handed import DATA, require

from chakra_capture.analysis.device import device_breakdown
from chakra_capture.analysis.exposed import SCHEMA, exposed_of_kernels, waiting_ops
from chakra_capture.trace.discovery import WindowFiles

REDUCE = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(x)"


def reducing() -> TraceBuilder:
    """A gemm until 20, a reduction 10-50 of which 20-50 is exposed, then an op's kernel at 55."""
    trace = TraceBuilder().launched("gemm", 0, 20, 1, at=-5)
    return trace.launched(REDUCE, 10, 40, 2, at=-3, stream=8)


def test_without_communication_or_ranks_there_is_no_row(tmp_path: Path) -> None:
    names = [column.name for column in SCHEMA]
    assert waiting_ops([]).columns == names
    assert waiting_ops([TraceBuilder().launched("k", 5, 5, 1, at=0).merged(tmp_path, host=False)]).rows() == []


@pytest.mark.parametrize(
    ("launched", "expected"),
    [(5, {"waited for": 30000}), (35, {"host late": 15000, "waited for": 15000}), (53, {"host late": 30000})],
)
def test_until_the_next_launch_the_host_is_late_and_then_an_op_waits(
    launched: int, expected: dict[str, int], tmp_path: Path
) -> None:
    trace = reducing().op("outer", launched - 2, 10).op("inner", launched - 1, 5).launched("k", 55, 5, 3, at=launched)
    table = waiting_ops([trace.merged(tmp_path, host=False)])
    assert dict(table.select("cause", "total_ns").rows()) == expected
    assert set(table.select("collective", "waiting_op").rows()) == {("all_reduce", "outer")}
    assert table["share"].sum() == 1


def test_with_nothing_later_or_no_recorded_launch_nobody_is_named(tmp_path: Path) -> None:
    last = waiting_ops([reducing().merged(tmp_path / "a", host=False)])
    assert last.select("cause", "waiting_op", "total_ns").rows() == [("end of window", None, 30000)]
    loose = waiting_ops([reducing().kernel("k", 55, 5).merged(tmp_path / "b", host=False)])
    assert loose.select("cause", "waiting_op", "total_ns").rows() == [("launch not recorded", None, 30000)]


def test_of_two_collectives_at_once_the_first_is_exposed_and_each_kernel_has_its_own_time(tmp_path: Path) -> None:
    trace = reducing().launched("ncclDevKernel_AllGather_RING_LL(x)", 40, 20, 4, at=-2, stream=9)
    merged = trace.launched("k", 60, 5, 5, at=3).merged(tmp_path, host=False)
    rows = waiting_ops([merged]).select("collective", "total_ns").rows()
    assert rows == [("all_reduce", 30000), ("all_gather", 10000)]
    times = exposed_of_kernels(merged).sort("kernel_ns").select("kernel_ns", "exposed_ns").rows()
    assert times == [(20000, 20000), (40000, 30000)]


# In ms: waited for and host late, and of what waits the op that waits longest, as a study of these traces gives them.
STUDY = {
    "pairs/resnet50_ddp_twin/device/rank-0.json.gz": (1.99, 37.57, "torch::autograd::AccumulateGrad", 0.80),
    "device_only/hta_trace_diff_control.json.gz": (70.49, 17.43, "All2All_Pooled_Wait", 39.26),
    "pairs/dlrm_8gpu_by_order/device/rank-3.json.gz": (6.92, 2.53, "All2All_Pooled_Wait", 5.31),
}


@pytest.mark.parametrize("path", STUDY)
def test_real_traces_wait_where_the_study_says_and_all_of_it_is_exposed(path: str, tmp_path: Path) -> None:
    trace = merge_files(tmp_path, WindowFiles(None, require(DATA / path)), force=True)
    table = waiting_ops([trace])
    whole = device_breakdown(trace).filter(pl.col("step").is_null())
    assert table["total_ns"].sum() == whole["exposed_communication_ns"].sum()
    by_cause = dict(table.group_by("cause").agg(pl.col("total_ns").sum()).rows())
    waits = table.filter(cause="waited for").group_by("waiting_op").agg(pl.col("total_ns").sum())
    op, longest = waits.sort("total_ns", descending=True).row(0)
    found = (*(round(by_cause[cause] / 1e6, 2) for cause in ("waited for", "host late")), op, round(longest / 1e6, 2))
    assert found == STUDY[path]


def test_the_command_shows_classes_and_with_waiting_the_ops(tmp_path: Path) -> None:
    trace = reducing().launched("k", 55, 5, 3, at=5)
    folder = trace.write(tmp_path)
    shown = json.loads(run("analyze", "communication", folder, "--json").out)
    (row,) = shown["rows"]
    assert (row["collective"], row["count"], row["exposed_ns"], row["overlap"]) == ("all_reduce", 1, 30000, 0.25)
    waiting = json.loads(run("analyze", "communication", folder, "--waiting", "--json").out)
    assert [(row["cause"], row["total_ns"]) for row in waiting["rows"]] == [("waited for", 30000)]
