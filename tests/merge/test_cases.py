"""Handed cases through the command line, each against the right values of its expect.json."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import polars as pl
from commands import Outcome, refused, run
from handed import CASES, require

KERNELS = pl.col("kind") == "kernel"


class Merged(NamedTuple):
    """What the commands gave for one pair of files."""

    done: Outcome
    shown: Outcome
    summary: dict[str, Any]
    nodes: pl.DataFrame
    steps: pl.DataFrame
    window: dict[str, Any]


def merge(out: Path, *, host: Path | None = None, device: Path | None = None) -> Merged:
    files = [arg for key, path in (("--host", host), ("--device", device)) if path for arg in (key, path)]
    done, shown = run("merge", *files, "-o", out), run("summary", out)
    assert (done.code, done.err, shown.code, shown.err) == (0, "", 0, "")
    (rank,) = (json.loads((out / "rank=0" / "link.json").read_text()),)
    return Merged(
        done,
        shown,
        json.loads(run("summary", out, "--json").out),
        pl.read_parquet(out / "rank=0" / "nodes.parquet"),
        pl.read_parquet(out / "rank=0" / "steps.parquet"),
        rank["windows"][0],
    )


def case(name: str) -> tuple[Path, dict[str, Any]]:
    folder = require(CASES / name)
    return folder, json.loads((folder / "expect.json").read_text())


def said(merged: Merged, text: str) -> bool:
    """Both screens and link.json hold the text; the screen of the summary breaks lines."""
    flat = " ".join(merged.shown.out.split())
    return text in " ".join(merged.window["notes"]) and text in merged.done.out and text in flat


def test_same_stream_overlap(tmp_path: Path) -> None:
    folder, expected = case("014-duration-overflows-next-slice")
    merged = merge(tmp_path, device=folder / "rank-0.json")
    kernels = merged.nodes.filter(KERNELS)
    assert kernels["dur_ns"].sum() / 1000 == expected["raw_kernel_sum_us"]
    assert kernels["self_dur_ns"].sum() / 1000 == expected["clipped_kernel_sum_us"]
    assert kernels["repaired"].sum() == expected["clipped_slices"]
    assert sum(k["total_ns"] for k in merged.summary["kernels"]) / 1000 == expected["clipped_kernel_sum_us"]
    assert merged.summary["ranks"][0]["device"]["busy_ns"] / 1000 == expected["gpu_busy_us_clipped"]
    assert merged.steps["device_busy_ns"].to_list() == [1000 * expected["gpu_busy_us_clipped"]]
    assert said(merged, expected["warning"])
    assert said(merged, "sum to 420000 ns, as recorded 900000 ns")


def test_negative_durations_are_repairs_and_said(tmp_path: Path) -> None:
    folder, expected = case("013-negative-and-zero-dur")
    merged = merge(tmp_path / "out", device=folder / "rank-0.json")
    negative = expected["unfinished_cpu_ops"] + expected["dropped_negative_device"]
    assert merged.window["device"]["num_negative_durations"] == negative
    assert said(merged, "event with a negative duration kept without its time, first 'aten::linear' (2 times)")
    assert merged.window["salvaged"] is merged.summary["ranks"][0]["salvaged"] is True
    assert merged.done.out.splitlines()[0].endswith("salvaged")
    assert "Salvaged   rank 0: cut or repaired input, see the notes below" in merged.shown.out
    assert merged.nodes.filter(pl.col("dur_ns") == 0)["name"].to_list() == expected["zero_dur_kept"]
    assert merged.summary["ranks"][0]["device"]["busy_ns"] / 1000 == expected["gpu_busy_us"]
    strict = run("merge", "--device", folder / "rank-0.json", "-o", tmp_path / "strict", "--strict")
    refused(strict, "a negative duration")


def test_crossing_rows_are_said_and_no_damage(tmp_path: Path) -> None:
    folder, expected = case("028-partially-overlapping-cpu-ops")
    merged = merge(tmp_path, device=folder / "rank-0.json")
    own = dict(merged.nodes.select("name", "self_dur_ns").iter_rows())
    assert {name: own[name] / 1000 for name in expected["self_us"]} == expected["self_us"]
    count = expected["crossing_pairs"]
    assert said(merged, f"rows that reach past the end of the row around them, clipped to it: {count}")
    # Ranges cross in whole traces of torch.profiler too: asynchronous collectives, Python stacks.
    assert merged.window["salvaged"] is False


def test_event_without_a_duration_is_a_repair_and_said(tmp_path: Path) -> None:
    folder, expected = case("011-events-without-args")
    merged = merge(tmp_path, device=folder / "rank-0.json")
    assert merged.window["device"]["num_bad_times"] == expected["skipped_without_dur"]
    assert said(merged, "event with no possible start or duration kept without its time, first 'no_dur'")
    assert merged.window["salvaged"] is True


def test_cut_device_trace_claims_no_busy_or_idle_time(tmp_path: Path) -> None:
    folder, expected = case("001-truncated-kineto-killed")
    for name in ("rank-0.json", "rank-0-cut.json.gz"):
        merged = merge(tmp_path / name, device=folder / name)
        assert merged.window["salvaged"] is True
        assert merged.steps.height == 1
        assert merged.steps.select("device_busy_ns", "device_idle_ns", "num_device_activities").rows() == [(None,) * 3]
        device = merged.summary["ranks"][0]["device"]
        assert {key for key, value in device.items() if value is not None} == {"num_activities"}
        assert "%" not in merged.shown.out.split("Device time")[1].split("Top operators")[0]
        assert said(merged, "truncated")
        note = "the end of the device trace is lost: how long the device was busy or idle is not measured"
        assert note in " ".join(merged.shown.out.split())
    assert merged.window["device"]["file"] == "rank-0-cut.json.gz"
    whole = merge(tmp_path / "out", device=folder / "rank-0.json")
    assert whole.window["device"]["num_events"] == expected["salvage_complete_events"]
    assert whole.nodes.filter(KERNELS).height == expected["salvage_kernels"]


def test_device_trace_of_metadata_alone_is_refused_in_one_sentence(tmp_path: Path) -> None:
    folder, _ = case("011-events-without-args")
    done = run("merge", "--device", folder / "metadata-only.json", "-o", tmp_path)
    refused(done, "metadata-only.json holds no work events: none of its 2 events")
    assert not list(tmp_path.rglob("*.parquet"))


def test_killed_host_trace_has_its_process_root_put_in(tmp_path: Path) -> None:
    folder, expected = case("030-et-truncated-killed")
    merged = merge(tmp_path, host=folder / "et.json", device=folder / "kineto.json")
    roots = merged.nodes.filter(pl.col("kind") == "process")
    assert (roots.height == 1) is expected["synthesised_root"]
    assert roots.select("host_id", "repaired", "parent_id").rows() == [(1, True, None)]
    assert merged.window["host"]["num_nodes"] == expected["salvage_nodes"]
    assert said(merged, "not finalised (no finish_ts)")
    # Ops are written as they end: the step (30) and the optimizer (25) were still open.
    assert said(merged, "parents that are not in the file (1, 25, 30), nodes put under added roots: 5")


def test_nodes_of_missing_parents_hang_under_added_roots(tmp_path: Path) -> None:
    folder, values = case("035-missing-thread-root")
    for name, expected in values.items():
        for device in (None, folder / "kineto.json"):
            merged = merge(tmp_path / name / str(device is None), host=folder / name, device=device)
            host = merged.window["host"]
            assert host["missing_parents"] == expected["missing_parents"]
            assert host["num_dangling_parents"] == expected["nodes_reparented"]
            assert host["num_nodes"] == len(json.loads((folder / name).read_text())["nodes"])
            ids = ", ".join(map(str, expected["missing_parents"]))
            count = expected["nodes_reparented"]
            assert said(merged, f"parents that are not in the file ({ids}), nodes put under added roots: {count}")
            assert merged.window["salvaged"] is True
            added = merged.nodes.filter(pl.col("repaired"))
            assert sorted(added["host_id"]) == expected["missing_parents"]
            assert host["num_roots_added"] == added.height
            assert set(merged.nodes["parent_id"].drop_nulls()) <= set(merged.nodes["node_id"])
            alone = merged.nodes.filter(pl.col("ts_ns").is_null() & pl.col("parent_id").is_null())
            assert set(alone["kind"]) == {"process"}


def test_window_without_a_marked_step_is_one_row_of_steps(tmp_path: Path) -> None:
    folder, expected = case("024-no-profilerstep")
    merged = merge(tmp_path, host=folder / "et.json", device=folder / "rank-0.json")
    assert merged.steps["step"].drop_nulls().len() == len(merged.summary["ranks"][0]["steps"]) == expected["steps"]
    assert merged.steps.height == expected["fallback_windows"]
    (row,) = merged.steps.to_dicts()
    assert row["dur_ns"] / 1000 == expected["window_us"]
    assert row["device_busy_ns"] / 1000 == expected["gpu_busy_us"]
    assert row["num_device_activities"] == expected["kernels"] + 1  # and a copy
    assert (row["node_id"], row["pid"]) == (None, 4242)
    assert said(merged, "no step is marked (ProfilerStep): the table steps has one row for the whole window")
    # The window is no step: nothing shows its length as a step time.
    rank = merged.summary["ranks"][0]
    assert rank["step_time"] is None
    assert [w["dur_ns"] / 1000 for w in rank["unmarked_windows"]] == [expected["window_us"]]
    assert "no step is marked; window 0 of rank 0 from first to last event: 740.00 us" in merged.shown.out
    assert merged.summary["operators"]
    assert merged.window["salvaged"] is False


def test_device_time_of_a_step_that_the_host_trace_lacks_is_said(tmp_path: Path) -> None:
    folder, expected = case("046-kineto-has-more-steps-than-et")
    merged = merge(tmp_path, host=folder / "et.json", device=folder / "kineto.json")
    host, device = merged.window["host"], merged.window["device"]
    assert host["num_linked"] == expected["matched"]
    assert merged.nodes.filter(pl.col("kind").is_in(["host_op", "annotation"])).height == expected["kineto_ops"]
    alone = sorted(set(device["steps"]) - set(host["steps"]))
    assert [f"ProfilerStep#{number}" for number in alone] == expected["unmatched_steps"]
    assert said(merged, "steps that only the device trace holds: 4")
    assert said(
        merged, f"ops of the device trace that have a host op: {expected['matched']} of {expected['kineto_ops']}"
    )
    strict = run("merge", "--strict", "--host", folder / "et.json", "--device", folder / "kineto.json", "-o", tmp_path)
    refused(strict, "do not cover the same steps", "steps that only the device trace holds: 4")
    assert device["device_time_without_host_node_ns"] / 1000 == expected["gpu_time_unattached_us"]
    assert said(merged, "device time of ops that only the device trace holds: 520000 of 1040000 ns")
    # Nothing is cut or repaired: the host trace was stopped a step earlier.
    assert merged.window["salvaged"] is False


def test_sizes_of_collectives_are_elements_times_their_type(tmp_path: Path) -> None:
    folder, expected = case("043-collective-nodes-and-sizes")
    merged = merge(tmp_path, host=folder / "et.json", device=folder / "kineto.json")
    table = pl.read_parquet(tmp_path / "rank=0" / "communication.parquet")
    wanted = expected["comm_nodes"]
    assert table["collective"].str.to_uppercase().to_list() == [node["type"] for node in wanted]
    assert table["comm_bytes"].to_list() == [node["comm_size"] for node in wanted]
    # Both traces call the group 0; 1 is the name it gets where it is exported to a simulator.
    assert (table["process_group"].unique().to_list(), table["group_ranks"].unique().to_list()) == (["0"], [[0, 1]])
    assert table["out_bytes"].to_list()[2] == wanted[2]["out_size"]
    kernels = merged.nodes.filter(KERNELS, pl.col("collective").is_not_null())
    assert kernels["comm_bytes"].to_list() == [node["comm_size"] for node in wanted]
    assert kernels["dur_ns"].sum() / 1000 == expected["comm_time_us"]
    assert set(kernels["node_id"]) == set(table["node_id"])
