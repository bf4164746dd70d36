"""Device activities that run past the next start on their stream."""

from pathlib import Path

import numpy as np
import polars as pl
from builder import TraceBuilder
from hypothesis import given
from hypothesis import strategies as st

from chakra_capture.analysis.device import device_time
from chakra_capture.analysis.kernels import kernel_summary
from chakra_capture.merge.intervals import total
from chakra_capture.merge.overlap import within_stream

ROW = st.tuples(st.integers(0, 1), st.integers(0, 2), st.integers(0, 12), st.integers(0, 6))


@given(st.lists(ROW, max_size=12), st.booleans())
def test_times_of_a_stream_sum_to_their_union_in_any_order(rows: list[tuple[int, ...]], is_sorted: bool) -> None:
    if is_sorted:
        rows = sorted(rows, key=lambda row: (*row[:3], -row[3]))
    device, stream, ts, dur = (np.array(c, dtype=np.int64) for c in (zip(*rows, strict=True) if rows else [[]] * 4))
    counted = within_stream(device, stream, ts, dur)
    assert ((counted >= 0) & (counted <= dur)).all()
    for key in {row[:2] for row in rows}:
        mine = (device == key[0]) & (stream == key[1])
        ends = ts[mine] + counted[mine]
        order = np.lexsort((ends, ts[mine]))
        assert (ends[order][:-1] <= ts[mine][order][1:]).all()
        # Nothing is lost but what ran on beyond a later start.
        lengths = [min([d, *(t - start for t in ts[mine].tolist() if t > start)])
                   for start, d in zip(ts[mine].tolist(), dur[mine].tolist(), strict=True)]  # fmt: skip
        assert counted[mine].sum() == total(ts[mine], ts[mine] + np.array(lengths, dtype=np.int64))


def test_activity_counts_up_to_the_next_start_on_its_stream(tmp_path: Path) -> None:
    trace = (
        TraceBuilder().step(1, 0, 100).kernel("spills", 10, 80).kernel("k", 30, 10).kernel("apart", 20, 70, stream=8)
    )
    merged = trace.kernel("other device", 15, 20, device=1).merged(tmp_path, host=False)
    shown = merged.nodes.filter(pl.col("kind") == "kernel").sort("name")
    assert shown.select("name", "dur_ns", "self_dur_ns", "repaired").rows() == [
        ("apart", 70000, 70000, False),
        ("k", 10000, 10000, False),
        ("other device", 20000, 20000, False),
        ("spills", 80000, 20000, True),
    ]
    assert dict(kernel_summary(merged).select("name", "total_ns").iter_rows())["spills"] == 20000
    (window,) = merged.link["windows"]
    assert window["repairs"]["rows_clipped_to_next_on_stream"] == 1
    # Overlap can be by design, so the trace is whole.
    assert window["salvaged"] is False
    assert device_time(merged)["busy_ns"].to_list() == merged.steps["device_busy_ns"].to_list() == [80000]
