"""What of a run the Perfetto export shows when it is asked for a part, and which files it writes."""

import polars as pl
import pytest
from builder import TraceBuilder
from commands import refused, run
from handed import DATA, require

from export.exported import merged, merged_device
from export.perfetto_checks import TRACES, exported, nodes_of
from export.perfetto_reader import read


def test_a_cut_by_time_clips_and_flags_and_drops_arrows_with_one_end_outside(tmp_path):
    built = TraceBuilder().op("whole", 0, 100).op("inside", 30, 10).op("before", 5, 10)
    built.launched("early", 35, 10, 1, at=6).launched("late", 55, 30, 2, at=31).launched("after", 95, 3, 3, at=32)
    built.merged(tmp_path / "b")
    rank = (tmp_path / "b" / "out").rename(tmp_path / "rank=0")
    trace, said = exported(rank, tmp_path / "t.json", "--from", "20us", "--to", "60us")
    shown = {one.name: (one.begin, one.end, one.args.get("clipped")) for one in trace.rows().values()}
    assert shown == {
        "whole": (20_000, 60_000, True), "inside": (30_000, 40_000, None), "early": (35_000, 45_000, None),
        "late": (55_000, 60_000, True), "cudaLaunchKernel": (32_000, 33_000, None),
    }  # fmt: skip
    (whole,) = [one for one in trace.slices if one.name == "whole" and one.cat == "cpu_op"]
    assert whole.args["whole_ns"] == 100_000
    assert said["arrows"]["ac2g"] == {"written": 1, "outside": 2, "backward": 0}
    assert (said["num_clipped"], said["num_left_out"]) == (2, 3)
    assert all(one.begin >= 20_000 and one.end <= 60_000 for one in trace.slices)
    (queue,) = trace.counters.values()
    assert queue == [(20_000, 1), (31_000, 2), (32_000, 3), (35_000, 2), (55_000, 1), (60_000, 1)]


def test_a_cut_by_step_and_rank_shows_their_time_to_the_last_thing_launched(tmp_path):
    merging = run("merge", TRACES / "digits_ddp2_gloo", "-o", tmp_path / "m")
    assert merging.code == 0, merging.err
    steps = pl.read_parquet(tmp_path / "m" / "rank=1" / "steps.parquet")
    number = steps["step"].drop_nulls()[1]
    trace, said = exported(tmp_path / "m", tmp_path / "t.json", "--steps", number, "--ranks", 1)
    assert said["ranks"] == [1]
    nodes = nodes_of(tmp_path / "m", 1).filter(pl.col("ts_ns").is_not_null())
    mine = nodes.filter(step=number)
    low, high = mine["ts_ns"].min(), (mine["ts_ns"] + mine["dur_ns"].fill_null(0)).max()
    expected = nodes.filter((pl.col("ts_ns") < high) & (pl.col("ts_ns") + pl.col("dur_ns").fill_null(0) > low))
    shown = {node for (_, node) in trace.rows()}
    assert {*mine["node_id"]} <= shown
    assert {*expected["node_id"]} == shown
    (step,) = trace.of_cat("step")
    assert step.name == f"step {number}"
    path = trace.of_cat("critical_path")
    assert (path[0].begin, path[-1].end) == (min(s.begin for s in trace.slices), path[-1].end)
    assert [a.end for a in path[:-1]] == [b.begin for b in path[1:]]


def test_kinds_are_chosen_by_name(tmp_path):
    folder = merged_device(tmp_path / "m", "hta_simple_add_critical_path")
    trace, said = exported(folder, tmp_path / "t.json", "--kind", "kernel", "device-state")
    assert {*said["rows"]} == {"kernel"}
    assert {one.cat for one in trace.slices} == {"kernel", "gpu_state"}
    assert not trace.counters
    assert not trace.arrows


def test_what_shows_nothing_says_so(tmp_path):
    folder = merged_device(tmp_path / "m", "hta_simple_add_critical_path")
    done = run("export", "perfetto", folder, "-o", tmp_path / "t.json", "--from", "1000s")
    assert done.code == 0
    assert "nothing lies in what was asked for" in done.out
    assert read(tmp_path / "t.json").slices == []


def test_what_is_written_is_said_in_words(tmp_path):
    built = TraceBuilder().op("a", 0, 50).op("b", 40, 30).launched("k", 10, 5, 1, at=2)
    built.merged(tmp_path / "b")
    (tmp_path / "b" / "out").rename(tmp_path / "rank=0")
    done = run("export", "perfetto", tmp_path / "rank=0", "-o", tmp_path / "t.json", "--kind", "host_op", "runtime")
    assert done.code == 0, done.err
    size = (tmp_path / "t.json").stat().st_size
    # Three events for each of three processes, two for each of two lanes.
    assert done.out.splitlines() == [
        "about 2.1 kB of JSON in all, before anything is cut or compressed",
        f"{tmp_path / 't.json'}: {size / 1e3:.1f} kB, 16 events, 3 rows of 1 rank",
        "  left out: rows outside of what is shown 1, arrows with one end outside 1",
        "  note: rows of rank 0: host, thread 11 cross each other; they are on 2 lanes",
        f"open it: https://ui.perfetto.dev, Open trace file, {tmp_path / 't.json'}",
    ]


def test_a_host_trace_alone_has_no_times_and_says_so(tmp_path):
    path = require(DATA / "host_only" / "small_schema_1.0.2.json.gz")
    folder = merged(tmp_path / "m", host=path)
    trace, said = exported(folder, tmp_path / "t.json.gz")
    assert trace.slices == []
    assert sum(said["without_time"].values()) > 0


def test_per_rank_files_hold_the_rows_of_one_rank_and_name_it(tmp_path):
    merging = run("merge", TRACES / "digits_ddp2_gloo", "-o", tmp_path / "m")
    assert merging.code == 0, merging.err
    done = run("export", "perfetto", tmp_path / "m", "-o", tmp_path / "f", "--per-rank")
    assert done.code == 0, done.err
    assert sorted(path.name for path in (tmp_path / "f").iterdir()) == ["rank-0.json.gz", "rank-1.json.gz"]
    for rank in (0, 1):
        trace = read(tmp_path / "f" / f"rank-{rank}.json.gz")
        assert trace.head["distributedInfo"]["rank"] == rank
        assert {key[0] for key in trace.rows()} == {rank}
        assert len(trace.rows()) == len(trace.slices) + len(trace.instants)
        assert not trace.counters


def test_a_file_that_is_there_is_not_replaced_unless_asked_for(tmp_path):
    folder = merged_device(tmp_path / "m", "hta_simple_add_critical_path")
    target = tmp_path / "t.json.gz"
    target.write_text("mine")
    refused(run("export", "perfetto", folder, "-o", target), "exists already", "--overwrite")
    assert target.read_text() == "mine"
    first, _ = exported(folder, target, "--overwrite")
    bytes_before = target.read_bytes()
    exported(folder, target, "--overwrite")
    assert target.read_bytes() == bytes_before
    assert first.slices
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m", "t.json.gz"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--from", "5"), "is no time"),
        (("--from", "5ms", "--to", "5ms"), "is not after"),
        (("--steps", "x"), "is no number or range"),
        (("--kind", "nonsense"), "nonsense"),
    ],
)
def test_wrong_usage_is_told(tmp_path, options, said):
    folder = merged_device(tmp_path / "m", "hta_simple_add_critical_path")
    done = run("export", "perfetto", folder, "-o", tmp_path / "t.json", *options)
    assert done.code == 2
    assert said in done.err
    assert not (tmp_path / "t.json").exists()


def test_a_folder_that_cannot_be_written_to_is_told(tmp_path):
    folder = merged_device(tmp_path / "m", "hta_simple_add_critical_path")
    (tmp_path / "file").write_text("")
    refused(run("export", "perfetto", folder, "-o", tmp_path / "file" / "t.json"), "cannot be written", "-o")


def test_damaged_tables_are_told(tmp_path):
    folder = merged_device(tmp_path / "m", "hta_simple_add_critical_path")
    (nodes,) = folder.glob("rank=*/nodes.parquet")
    nodes.write_bytes(b"PAR1 of another kind")
    refused(run("export", "perfetto", folder, "-o", tmp_path / "t.json"), "cannot be read")
    nodes.unlink()
    refused(run("export", "perfetto", folder, "-o", tmp_path / "t.json"), "cannot be read")
    assert [path.name for path in tmp_path.iterdir()] == ["m"]
