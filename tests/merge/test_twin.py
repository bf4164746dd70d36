"""The twin pair: a real ResNet50 DDP rank, every link checked against an independent reading of both files."""

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from commands import refused, run
from handed import DATA, expected_breakdown, load_json, require
from oracle import ON_CPU, DeviceFile, Row, self_times, union_length

PAIR = DATA / "pairs" / "resnet50_ddp_twin"


@dataclass
class Twin:
    """The product's tables beside the independent reading."""

    folder: Path
    truth: DeviceFile
    host_nodes: list[dict[str, Any]]
    nodes: pl.DataFrame
    edges: pl.DataFrame
    steps: pl.DataFrame
    link: dict[str, Any]
    said: str


@pytest.fixture(scope="module")
def twin(tmp_path_factory: pytest.TempPathFactory) -> Twin:
    require(PAIR)
    out = tmp_path_factory.mktemp("twin")
    done = run("merge", PAIR, "--force", "-o", out)
    assert (done.code, done.err) == (0, "")
    folder = out / "rank=0"
    return Twin(
        out,
        DeviceFile.read(PAIR / "device" / "rank-0.json.gz"),
        load_json(PAIR / "host" / "rank-0.json.gz")["nodes"],
        pl.read_parquet(folder / "nodes.parquet"),
        pl.read_parquet(folder / "edges.parquet"),
        pl.read_parquet(folder / "steps.parquet"),
        json.loads((folder / "link.json").read_text())["windows"][0],
        done.out,
    )


def attrs(node: dict[str, Any]) -> dict[str, Any]:
    return {a["name"]: a["value"] for a in node["attrs"]}


def test_twin_is_refused_by_pid_without_force(tmp_path: Path) -> None:
    require(PAIR)
    done = run("merge", PAIR, "-o", tmp_path)
    refused(done, "different process", "3233936", "2910249", "--force")
    assert not list(tmp_path.rglob("*.parquet"))
    assert "0 of 1 ranks merged" in done.out


def test_force_is_said_on_screen_and_in_link_json(twin: Twin) -> None:
    assert "3233936" in twin.said
    assert "2910249" in twin.said
    assert twin.link["pairing"]["forced"] is True
    assert twin.link["pairing"]["faults"] == [
        "different process: host trace of pid 3233936, device trace of pid 2910249"
    ]


def test_every_host_op_is_linked_with_an_equal_name(twin: Twin) -> None:
    ids = {attrs(n)["rf_id"]: n["name"] for n in twin.host_nodes if attrs(n).get("rf_id")}
    assert len(ids) == 14388
    linked = twin.nodes.filter(pl.col("host_id").is_not_null() & pl.col("ts_ns").is_not_null())
    assert dict(linked.select("record_function_id", "name").iter_rows()) == ids
    assert {n["id"]: n["name"] for n in twin.host_nodes} == dict(
        twin.nodes.filter(pl.col("host_id").is_not_null()).select("host_id", "name").iter_rows()
    )
    assert (twin.link["host"]["num_linked"], twin.link["host"]["num_host_only"]) == (14388, 0)


def test_device_activities_are_all_launched_from_the_right_call(twin: Twin) -> None:
    truth = Counter()
    for row, call in twin.truth.launch_of().items():
        assert call is not None
        truth[row.key, call.key] += 1
    assert Counter(kind for ((kind, *_), _), n in truth.items() for _ in range(n)) == {
        "kernel": 2700,
        "memcpy": 960,
        "memset": 114,
    }
    assert seen_pairs(twin, "launch_id") == truth


def test_device_parent_is_the_innermost_op_or_annotation_on_the_launching_thread(twin: Twin) -> None:
    covering = twin.truth.covering()
    truth = Counter()
    for row, call in twin.truth.launch_of().items():
        assert call is not None
        around = covering.at(call)
        assert len(around) == 1  # no exact ties in nanoseconds
        truth[row.key, around[0].key] += 1
    assert sum(truth.values()) == 3774
    seen = seen_pairs(twin, "parent_id")
    assert seen == truth
    assert not [parent for (_, parent) in seen if parent[1].startswith("ProfilerStep#")]


def seen_pairs(twin: Twin, column: str) -> Counter[Any]:
    activities = twin.nodes.filter(pl.col("kind").is_in(["kernel", "memcpy", "memset"]))
    other = twin.nodes.select(
        pl.col("node_id").alias(column), pl.col("kind", "name", "ts_ns", "dur_ns").name.suffix("_b")
    )
    joined = activities.join(other, on=column, how="left", validate="m:1")
    rows = joined.select("kind", "name", "ts_ns", "dur_ns", "kind_b", "name_b", "ts_ns_b", "dur_ns_b").iter_rows()
    return Counter((row[:4], row[4:]) for row in rows)


def test_cpu_parents_equal_those_of_the_host_trace(twin: Twin) -> None:
    threads = {n["id"] for n in twin.host_nodes if "execution_" in n["name"]}
    recorded = {n["id"]: n["ctrl_deps"] for n in twin.host_nodes if n["id"] not in threads}
    by_id = {row["node_id"]: row for row in twin.nodes.select("node_id", "parent_id", "host_id", "ts_ns").to_dicts()}
    equal = 0
    for row in by_id.values():
        if row["host_id"] not in recorded:
            continue
        parent = None if row["parent_id"] is None else by_id[row["parent_id"]]["host_id"]
        wanted = recorded[row["host_id"]]
        equal += parent == (None if wanted in threads else wanted)
    assert (equal, len(recorded)) == (14388, 14388)
    assert twin.link["host"]["parents"] == {"num_compared": 14388, "num_equal": 14388, "num_different": 0}


def test_step_durations(twin: Twin) -> None:
    steps = twin.steps.select("step", "dur_ns").rows()
    assert steps == [(4, 222442191), (5, 219726905), (6, 224936243)]


def test_step_busy_and_idle_time_sum_to_the_step(twin: Twin) -> None:
    activities = twin.truth.activities
    for row in twin.steps.iter_rows(named=True):
        low, high = row["ts_ns"], row["ts_ns"] + row["dur_ns"]
        inside = [(max(a.ts, low), min(a.end, high)) for a in activities if a.ts < high and a.end > low]
        assert row["device_busy_ns"] == union_length(inside)
        assert row["device_busy_ns"] + row["device_idle_ns"] == row["dur_ns"]
    # answers.md 1.1: step 4 is 222.442 = 38.506 compute + 10.164 exposed comm + 0.769 exposed memory + 173.003 idle
    assert round(twin.steps["device_idle_ns"][0] / 1e6, 3) == 173.003


def test_device_time_equals_the_handed_breakdown(twin: Twin) -> None:
    expected = expected_breakdown()["pairs/resnet50_ddp_twin"]
    shown = json.loads(run("summary", twin.folder, "--json").out)["ranks"][0]["device"]
    assert shown == {
        "num_activities": expected["num_device_activities"],
        "span_ns": expected["span_ns"],
        "busy_ns": expected["busy_ns"],
        "idle_ns": expected["idle_ns"],
        "compute_ns": expected["compute_ns"],
        "communication_ns": expected["comm_ns"],
        "memory_ns": expected["mem_ns"],
        "exposed_communication_ns": expected["exposed_comm_ns"],
        "exposed_memory_ns": expected["exposed_mem_ns"],
    }


def test_times_of_every_row_equal_decimal_arithmetic_on_the_text(twin: Twin) -> None:
    truth = Counter((*row.key, thread_of(row)) for row in twin.truth.rows)
    timed = twin.nodes.filter(pl.col("ts_ns").is_not_null())
    seen = Counter(
        ((kind, name, ts, dur, (pid, tid)))
        for kind, name, ts, dur, pid, tid in timed.select("kind", "name", "ts_ns", "dur_ns", "pid", "tid").iter_rows()
    )
    assert sum(truth.values()) == 26935
    assert seen == truth


def thread_of(row: Row) -> tuple[int | None, int | None]:
    return tuple(value if isinstance(value, int) else None for value in (row.pid, row.tid))  # type: ignore[return-value]


def test_self_times_equal_those_of_a_sweep_over_all_bounds(twin: Twin) -> None:
    cpu = [row for row in twin.truth.rows if row.kind in ON_CPU]
    truth = Counter((*row.key, self_ns) for row, self_ns in self_times(cpu).items())
    seen = Counter(
        twin.nodes.filter(pl.col("kind").is_in(ON_CPU) & pl.col("ts_ns").is_not_null())
        .select("kind", "name", "ts_ns", "dur_ns", "self_dur_ns")
        .iter_rows()
    )
    assert seen == truth


def test_node_ids_are_row_numbers_in_the_stated_order(twin: Twin) -> None:
    assert twin.nodes["node_id"].to_list() == list(range(twin.nodes.height))
    # Rows without a time come first on their thread, as in the sort of numbers with a null.
    keys = [
        tuple(-(1 << 62) if v is None else v for v in (window, pid, tid, ts, None if dur is None else -dur))
        for window, pid, tid, ts, dur in twin.nodes.select("window", "pid", "tid", "ts_ns", "dur_ns").iter_rows()
    ]
    assert keys == sorted(keys)


def test_category_counts_equal_the_file(twin: Twin) -> None:
    truth = Counter(str(event.get("cat") or "") for event in twin.truth.events)
    assert twin.link["device"]["categories"] == dict(truth)
    assert (truth["kernel"], truth["gpu_memcpy"], truth["gpu_memset"], truth["cpu_op"]) == (2700, 960, 114, 14346)
    categories = Counter(json.loads(a)["cat"] for a in twin.nodes["args"] if a and '"cat"' in a)
    kept = Counter(event.get("cat") for event in twin.truth.events if event["ph"] in "XiI")
    assert categories == kept


def test_every_arg_of_every_event_is_in_the_tables(twin: Twin) -> None:
    columns = {
        "External id": "external_id", "Record function id": "record_function_id", "correlation": "correlation_id",
        "Sequence number": "sequence_number",
    }  # fmt: skip
    left_out = {"device", "stream", "Input Dims", "Input type"}
    truth, seen = Counter(), Counter()
    for row in twin.truth.rows:
        rest = {k: v for k, v in row.args.items() if k not in columns and k not in left_out}
        ids = tuple(row.args.get(key) or None for key in columns)
        truth[row.key, ids, json.dumps(rest, sort_keys=True, default=str)] += 1
    for row in twin.nodes.filter(pl.col("ts_ns").is_not_null()).to_dicts():
        args = json.loads(row["args"], parse_float=str)
        args.pop("cat")
        args.pop("host", None)
        ids = tuple(row[name] or None for name in columns.values())
        key = (row["kind"], row["name"], row["ts_ns"], row["dur_ns"])
        seen[key, ids, json.dumps(args, sort_keys=True, default=str)] += 1
    different = seen - truth
    assert not different, list(different)[:3]


def test_edges_point_forward_and_to_rows_that_exist(twin: Twin) -> None:
    assert dict(twin.edges["kind"].value_counts().iter_rows()) == twin.link["edges"]
    timed = twin.nodes.filter(pl.col("ts_ns").is_not_null()).select("node_id", "ts_ns", "dur_ns")
    times = {n: (ts, None if d is None else ts + d) for n, ts, d in timed.iter_rows()}
    sides = {"start": 0, "end": 1}
    for src, src_at, dst, dst_at in twin.edges.select("src", "src_at", "dst", "dst_at").iter_rows():
        assert times[src][sides[src_at]] <= times[dst][sides[dst_at]]
    streams = {(a.args["device"], a.args["stream"]) for a in twin.truth.activities}
    assert twin.link["edges"]["stream_order"] == 3774 - len(streams)
