"""The part of a step that is in no phase, by what the loop's thread does: by hand, and summing to the rest."""

from pathlib import Path

import polars as pl
from builder import TraceBuilder, merge_files
from handed import DATA, require
from hypothesis import given, settings
from hypothesis import strategies as st

from chakra_capture.analysis.phase_times import phase_times
from chakra_capture.analysis.rest_parts import SCHEMA, mean_rest_parts, rest_parts
from chakra_capture.trace.discovery import WindowFiles


def test_whole_table_of_a_small_step(tmp_path: Path) -> None:
    builder = TraceBuilder().step(1, 0, 1000)
    builder.annotation("Optimizer.zero_grad#SGD.zero_grad", 0, 30).op("aten::zero_", 5, 10)
    builder.op("aten::to", 50, 20).annotation("forward", 100, 200).op("aten::mm", 110, 50)
    builder.op("aten::mse_loss", 310, 40).annotation("backward", 400, 300)
    builder.annotation("log metrics", 800, 60).op("aten::item", 810, 20).op("aten::add", 900, 10)
    builder.op("aten::elsewhere", 320, 40, tid=12)
    table = rest_parts(builder.merged(tmp_path))
    assert table.columns == [column.name for column in SCHEMA]
    assert dict(table.select("part", "wall_ns").rows()) == {
        "zero_grad": 30_000, "copies": 20_000, "loss": 40_000, "log metrics": 60_000, "ops": 10_000,
        "python": 1000_000 - 500_000 - 160_000,
    }  # fmt: skip


def test_what_holds_a_phase_counts_without_it(tmp_path: Path) -> None:
    builder = TraceBuilder().step(1, 0, 100).annotation("training_step", 10, 80).annotation("forward", 20, 50)
    assert dict(rest_parts(builder.merged(tmp_path)).select("part", "wall_ns").rows()) == {
        "training_step": 30_000,
        "python": 20_000,
    }


def test_handler_has_all_that_happens_in_it_wherever_it_is_but_not_what_another_handler_takes(tmp_path: Path) -> None:
    builder = TraceBuilder().step(1, 0, 1000).annotation("Optimizer.step#SGD.step", 0, 900)
    builder.annotation("forward", 100, 100).annotation("handler:Log.write", 300, 200).op("aten::item", 310, 20)
    builder.annotation("theirs", 340, 50).annotation("Optimizer.zero_grad#x", 400, 10)
    builder.annotation("handler:inner", 420, 30).op("aten::mse_loss", 550, 50).annotation("backward", 600, 100)
    builder.annotation("decollate", 910, 40)
    assert dict(rest_parts(builder.merged(tmp_path)).select("part", "wall_ns").rows()) == {
        "handler:Log.write": 170_000, "handler:inner": 30_000, "loss": 50_000, "decollate": 40_000,
        "Optimizer.step#SGD.step": 900_000 - 100_000 - 200_000 - 50_000 - 100_000, "python": 60_000,
    }  # fmt: skip


NAMES = st.sampled_from(["forward", "backward", "aten::to", "aten::add", "Optimizer.zero_grad#x", "mine", "handler:h"])


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 99), st.integers(1, 60), NAMES), max_size=7))
def test_parts_sum_to_the_rest(tmp_path_factory, rows) -> None:
    builder = TraceBuilder().step(1, 0, 100)
    for start, length, name in rows:
        add = builder.op if name.startswith("aten") else builder.annotation
        add(name, start, length)
    trace = builder.merged(tmp_path_factory.mktemp("t"))
    parts = rest_parts(trace)
    (rest,) = phase_times(trace).filter(pl.col("phase").is_null())["wall_ns"]
    assert parts["wall_ns"].sum() == rest
    assert (parts["wall_ns"] > 0).all()


def test_twin_pair_sums_to_its_rest(tmp_path: Path) -> None:
    folder = require(DATA / "pairs" / "resnet50_ddp_twin")
    files = WindowFiles(folder / "host" / "rank-0.json.gz", folder / "device" / "rank-0.json.gz")
    trace = merge_files(tmp_path, files, force=True)
    rest = phase_times(trace).filter(pl.col("phase").is_null())
    joined = rest.join(rest_parts(trace).group_by("step").agg(pl.col("wall_ns").sum()), on="step", suffix="_sum")
    assert joined.height == 3
    assert (joined["wall_ns"] == joined["wall_ns_sum"]).all()
    assert "zero_grad" in set(mean_rest_parts([rest_parts(trace)])["part"])
